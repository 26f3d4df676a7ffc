"""The block formats of GGUF: rows of small blocks, each with its own scale.

A `Gguf` keeps the file's bytes as they are, often a view of the mapped file, and decodes the requested
rows, a bounded number of elements at a time. A new format is one entry of `BLOCK_TYPES`: its ids, its sizes
and how n blocks of bytes become n rows of float32. Layouts: the ggml tensor library. Fields are little
endian, `d` and `m` are float16, and the low nibbles of a run of bytes come before its high nibbles.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from plait.errors import ShapeMismatch
from plait.quant import gguf_iq, gguf_parts
from plait.quant.bits import bits, half, nibbles
from plait.quant.fp4 import Fp4
from plait.quant.gguf_k import iq4_nl, iq4_xs, q2_k, q3_k, q4_k, q5_k, q6_k
from plait.quant.gguf_parts import BlockParts, nvfp4
from plait.quant.weight import BlockWeight, check_range


@dataclass(frozen=True, slots=True)
class BlockType:
    """A block format: `elements` numbers in `nbytes` bytes."""

    name: str
    type_id: int  # ggml's number for it, as in a GGUF file
    elements: int
    nbytes: int
    decode: Callable[[Tensor], Tensor]  # uint8 [n, nbytes] -> float32 [n, elements]
    scales_at: tuple[int, ...] = (0,)  # where a block's float16 fields are
    table: tuple[int, ...] = ()  # what codes stand for, in a format that has parts
    parts: Callable[[Tensor], BlockParts] | None = None  # uint8 [n, nbytes] -> codes, levels, units


@dataclass(frozen=True, slots=True, eq=False)
class Gguf(BlockWeight):
    """A weight matrix [out, in] in one of GGUF's block formats. `data`: uint8 [out, bytes of a row]."""

    data: Tensor
    kind: BlockType

    def __post_init__(self) -> None:
        if self.data.dtype != torch.uint8 or self.data.dim() != 2 or self.data.shape[1] % self.kind.nbytes:
            raise ShapeMismatch(
                f"{self.kind.name} wants uint8 [rows, a multiple of {self.kind.nbytes} bytes], "
                f"got {self.data.dtype} {list(self.data.shape)}"
            )

    @property
    def shape(self) -> tuple[int, int]:
        rows, row_bytes = self.data.shape
        return rows, row_bytes // self.kind.nbytes * self.kind.elements

    @property
    def format(self) -> str:
        return self.kind.name

    def _decode(self, start: int, stop: int) -> Tensor:
        blocks = self.data[start:stop].reshape(-1, self.kind.nbytes)
        return self.kind.decode(blocks).view(stop - start, self.shape[1])

    def _take(self, index: Tensor | slice) -> Gguf:
        return Gguf(self.data[index], self.kind)

    def cols(self, start: int, stop: int) -> Gguf:
        """Columns start..stop, a view. Raises ShapeMismatch outside the matrix or inside a block."""
        check_range("columns", start, stop, self.shape[1], self)
        size, nbytes = self.kind.elements, self.kind.nbytes
        if start % size or stop % size:
            raise ShapeMismatch(
                f"columns {start}..{stop} would cut a block of {self.kind.name}: "
                f"both must be multiples of {size}"
            )
        return Gguf(self.data[:, start // size * nbytes : stop // size * nbytes], self.kind)

    @classmethod
    def cat(cls, parts: Sequence[Gguf]) -> Gguf:
        """Row-wise concatenation. Raises ShapeMismatch unless all parts have one format and width."""
        if len({(part.kind.name, part.shape[1]) for part in parts}) != 1:
            shown = [f"{part.format} {list(part.shape)}" for part in parts]
            raise ShapeMismatch(f"cannot stack the rows of {shown}: one format and one width are needed")
        return cls(torch.cat([part.data for part in parts]), parts[0].kind)


def _q4(blocks: Tensor, at: int) -> Tensor:
    """The 32 four-bit numbers at byte `at`, [n, 32] uint8."""
    return nibbles(blocks[:, None, at : at + 16]).flatten(1)


def _q5(blocks: Tensor, at: int) -> Tensor:
    """32 five-bit numbers, [n, 32] uint8: their high bits are at byte `at`, and their nibbles follow."""
    return _q4(blocks, at + 4) | (bits(blocks[:, at : at + 4]) << 4)


def _q4_0(blocks: Tensor) -> Tensor:
    return half(blocks, 0) * (_q4(blocks, 2).float() - 8)


def _q4_1(blocks: Tensor) -> Tensor:
    return half(blocks, 0) * _q4(blocks, 4).float() + half(blocks, 2)


def _q5_0(blocks: Tensor) -> Tensor:
    return half(blocks, 0) * (_q5(blocks, 2).float() - 16)


def _q5_1(blocks: Tensor) -> Tensor:
    return half(blocks, 0) * _q5(blocks, 4).float() + half(blocks, 2)


def _q8_0(blocks: Tensor) -> Tensor:
    return half(blocks, 0) * blocks[:, 2:].contiguous().view(torch.int8).float()


def _q8_1(blocks: Tensor) -> Tensor:
    """As Q8_0; the sum of the numbers, behind the scale, is for products and not needed here."""
    return half(blocks, 0) * blocks[:, 4:].contiguous().view(torch.int8).float()


def _q8_k(blocks: Tensor) -> Tensor:
    """A float32 scale, 256 signed bytes, and sums of sixteen that are not needed here."""
    scale = blocks[:, :4].clone(memory_format=torch.contiguous_format).view(torch.float32)
    return scale * blocks[:, 4:260].contiguous().view(torch.int8).float()


@dataclass(frozen=True, slots=True)
class _FromParts:
    """How blocks that have parts become numbers."""

    parts: Callable[[Tensor], BlockParts]
    table: tuple[int, ...]

    def __call__(self, blocks: Tensor) -> Tensor:
        return self.parts(blocks).numbers(self.table)


def _make_codes(
    name: str,
    sizes: tuple[int, int, int],
    parts: Callable[[Tensor], BlockParts],
    table: tuple[int, ...],
    scales_at: tuple[int, ...] = (0,),
) -> BlockType:
    """sizes: ggml's number, elements, bytes."""
    return BlockType(name, *sizes, _FromParts(parts, table), scales_at, table, parts)


BLOCK_TYPES: Mapping[int, BlockType] = MappingProxyType(
    {
        kind.type_id: kind
        for kind in (
            BlockType("Q4_0", 2, 32, 18, _q4_0),
            BlockType("Q4_1", 3, 32, 20, _q4_1, (0, 2)),
            BlockType("Q5_0", 6, 32, 22, _q5_0),
            BlockType("Q5_1", 7, 32, 24, _q5_1, (0, 2)),
            BlockType("Q8_0", 8, 32, 34, _q8_0),
            BlockType("Q2_K", 10, 256, 84, q2_k, (80, 82)),
            BlockType("Q3_K", 11, 256, 110, q3_k, (108,)),
            BlockType("Q4_K", 12, 256, 144, q4_k, (0, 2)),
            BlockType("Q5_K", 13, 256, 176, q5_k, (0, 2)),
            BlockType("Q6_K", 14, 256, 210, q6_k, (208,)),
            BlockType("IQ4_NL", 20, 32, 18, iq4_nl),
            BlockType("IQ4_XS", 23, 256, 136, iq4_xs),
            BlockType("Q8_1", 9, 32, 36, _q8_1),
            BlockType("Q8_K", 15, 256, 292, _q8_k, ()),
            _make_codes("IQ2_XXS", (16, 256, 66), gguf_iq.iq2_xxs, gguf_iq.IQ2_VALUES),
            _make_codes("IQ2_XS", (17, 256, 74), gguf_iq.iq2_xs, gguf_iq.IQ2_VALUES),
            _make_codes("IQ3_XXS", (18, 256, 98), gguf_iq.iq3_xxs, gguf_iq.IQ3_XXS_VALUES),
            _make_codes("IQ1_S", (19, 256, 50), gguf_iq.iq1_s, gguf_iq.IQ1_VALUES),
            _make_codes("IQ3_S", (21, 256, 110), gguf_iq.iq3_s, gguf_iq.IQ3_S_VALUES),
            _make_codes("IQ2_S", (22, 256, 82), gguf_iq.iq2_s, gguf_iq.IQ2_VALUES),
            _make_codes("IQ1_M", (29, 256, 56), gguf_iq.iq1_m, gguf_iq.IQ1_VALUES, ()),
            _make_codes("TQ1_0", (34, 256, 54), gguf_parts.tq1_0, gguf_parts.TERNARY, (52,)),
            _make_codes("TQ2_0", (35, 256, 66), gguf_parts.tq2_0, gguf_parts.TERNARY, (64,)),
            _make_codes("MXFP4", (39, 32, 17), gguf_parts.mxfp4, gguf_parts.E2M1_TWICE, ()),
            _make_codes("NVFP4", (40, 64, 36), gguf_parts.nvfp4, gguf_parts.E2M1_TWICE, ()),
            _make_codes("Q1_0", (41, 128, 18), gguf_parts.q1_0, gguf_parts.TERNARY),
            _make_codes("Q2_0", (42, 64, 18), gguf_parts.q2_0, gguf_parts.TERNARY),
        )
    }
)
"""ggml's type id -> how its blocks are decoded."""


def block_type(name: str) -> BlockType:
    """The format of that name, like 'Q4_K'. Raises KeyError."""
    return {kind.name: kind for kind in BLOCK_TYPES.values()}[name]


def scale_nvfp4(weight: Gguf, factor: Tensor) -> Fp4:
    """The matrix times `factor`: one number, or one for each of equal parts of the rows (stacked experts).

    Raises ShapeMismatch if it is no NVFP4, or the rows are no such parts.
    """
    rows, cols = weight.shape
    by = factor.float().reshape(-1)
    if weight.format != "NVFP4" or not len(by) or rows % len(by):
        raise ShapeMismatch(f"{len(by)} factors of a {weight.format} weight of {[rows, cols]}")
    blocks = weight.data.reshape(-1, weight.kind.nbytes)
    codes = torch.empty(rows, cols // 2, dtype=torch.uint8)
    step = max(1, (1 << 20) // cols)
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        some = nvfp4(weight.data[start:stop].reshape(-1, weight.kind.nbytes)).codes.view(stop - start, -1)
        codes[start:stop] = some[:, ::2] | some[:, 1::2] << 4
    scales = blocks[:, :4] & 0x7F
    scales = torch.where(blocks[:, :4] == 0x7F, 0, scales.clamp(max=0x7E))  # what is no number is 0 there
    each = by if len(by) == 1 else by.repeat_interleave(rows // len(by))
    return Fp4(codes, scales.view(rows, -1).view(torch.float8_e4m3fn), each)
