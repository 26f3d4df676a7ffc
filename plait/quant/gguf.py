"""The block formats of GGUF: rows of small blocks, each with its own scale.

A `Gguf` keeps the file's bytes as they are, often a view of the mapped file, and decodes what is asked for in
pieces of bounded size. Adding a format is one entry of `BLOCK_TYPES`: its ids, its sizes and how n blocks of
bytes become n rows of float32. Layouts: the ggml tensor library; fields are little endian, `d` and `m` are
float16, and the low nibbles of a run of bytes come before its high nibbles.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from plait.errors import ShapeMismatch
from plait.quant.weight import checked_rows

_PIECE = 1 << 20  # elements decoded at a time: 4 MiB of float32, so the peak does not follow the matrix
_IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


@dataclass(frozen=True, slots=True)
class BlockType:
    """A block format: `elements` numbers in `nbytes` bytes."""

    name: str
    type_id: int  # ggml's number for it, as in a GGUF file
    elements: int
    nbytes: int
    decode: Callable[[Tensor], Tensor]  # uint8 [n, nbytes] -> float32 [n, elements]
    scales_at: tuple[int, ...] = (0,)  # where a block's float16 fields are


@dataclass(frozen=True, slots=True, eq=False)
class Gguf:
    """A linear map [out, in] in one of GGUF's block formats. `data`: uint8 [out, bytes of a row]."""

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
    def nbytes(self) -> int:
        return self.data.numel()

    @property
    def format(self) -> str:
        return self.kind.name

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """The whole map as numbers, [out, in]: decoded in float32, a few rows at a time, then cast."""
        rows, cols = self.shape
        out = torch.empty(rows, cols, dtype=dtype, device=self.data.device)
        step = max(1, _PIECE // max(1, cols))
        for start in range(0, rows, step):
            piece = self.data[start : start + step]
            out[start : start + step] = self.kind.decode(piece.reshape(-1, self.kind.nbytes)).view(-1, cols)
        return out

    def gather(self, index: Tensor, dtype: torch.dtype) -> Tensor:
        """index [n] -> [n, in]; only those rows are read and decoded."""
        return Gguf(self.data[index], self.kind).dequantize(dtype)

    def rows(self, start: int, stop: int) -> Gguf:
        """Rows start..stop, a view. Raises ShapeMismatch outside the map."""
        self._check_range("rows", start, stop, self.shape[0])
        return Gguf(self.data[start:stop], self.kind)

    def cols(self, start: int, stop: int) -> Gguf:
        """Columns start..stop, a view. Raises ShapeMismatch outside the map or inside a block."""
        self._check_range("columns", start, stop, self.shape[1])
        size, nbytes = self.kind.elements, self.kind.nbytes
        if start % size or stop % size:
            raise ShapeMismatch(
                f"columns {start}..{stop} would cut a block of {self.kind.name}: "
                f"both must be multiples of {size}"
            )
        return Gguf(self.data[:, start // size * nbytes : stop // size * nbytes], self.kind)

    def pick(self, index: Tensor) -> Gguf:
        """Some rows, copied. Raises ShapeMismatch for a row that is not there."""
        return Gguf(self.data[checked_rows(index, self)], self.kind)

    @classmethod
    def cat(cls, parts: Sequence[Gguf]) -> Gguf:
        """Row-wise concatenation. Raises ShapeMismatch unless all parts have one format and width."""
        if len({(part.kind.name, part.shape[1]) for part in parts}) != 1:
            shown = [f"{part.format} {list(part.shape)}" for part in parts]
            raise ShapeMismatch(f"cannot stack the rows of {shown}: one format and one width are needed")
        return cls(torch.cat([part.data for part in parts]), parts[0].kind)

    def to(self, device: torch.device) -> Gguf:
        return Gguf(self.data.to(device), self.kind)

    def _check_range(self, what: str, start: int, stop: int, size: int) -> None:
        if not 0 <= start <= stop <= size:
            raise ShapeMismatch(f"{what} {start}..{stop} of a {self.format} weight of {list(self.shape)}")


def _half(blocks: Tensor, at: int) -> Tensor:
    """The float16 at a byte of every block, [n, 1] float32."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: Tensor) -> Tensor:
    """[n, runs, bytes] -> [n, runs * 2, bytes]: of each run the low nibbles, then the high ones."""
    return torch.stack((packed & 15, packed >> 4), 2).flatten(1, 2)


def _fields(packed: Tensor, bits: int) -> Tensor:
    """[n, runs, bytes] -> [n, runs * 8/bits, bytes]: of each run its lowest `bits`, then the next, …"""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device).view(1, 1, -1, 1)
    return ((packed.unsqueeze(2) >> shifts) & ((1 << bits) - 1)).flatten(1, 2)


def _bits(packed: Tensor) -> Tensor:
    """[n, bytes] -> [n, bytes * 8], the lowest bit of a byte first."""
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return ((packed.unsqueeze(-1) >> shifts) & 1).flatten(1)


def _q4(blocks: Tensor, at: int) -> Tensor:
    """The 32 four-bit numbers at byte `at`, [n, 32] uint8."""
    return _nibbles(blocks[:, None, at : at + 16]).flatten(1)


def _q5(blocks: Tensor, at: int) -> Tensor:
    """The 32 five-bit numbers whose high bits are at byte `at` and whose nibbles follow, [n, 32] uint8."""
    return _q4(blocks, at + 4) | (_bits(blocks[:, at : at + 4]) << 4)


def _q4_0(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * (_q4(blocks, 2).float() - 8)


def _q4_1(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * _q4(blocks, 4).float() + _half(blocks, 2)


def _q5_0(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * (_q5(blocks, 2).float() - 16)


def _q5_1(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * _q5(blocks, 4).float() + _half(blocks, 2)


def _q8_0(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * blocks[:, 2:].contiguous().view(torch.int8).float()


def _q2_k(blocks: Tensor) -> Tensor:
    """16 groups of 16; a byte per group: the scale in its low nibble, the minimum in the high one."""
    scale = _half(blocks, 80) * (blocks[:, :16] & 15).float()  # [n, 16]
    minimum = _half(blocks, 82) * (blocks[:, :16] >> 4).float()
    q = _fields(blocks[:, 16:80].reshape(-1, 2, 32), 2).reshape(-1, 16, 16).float()
    return (scale.unsqueeze(-1) * q - minimum.unsqueeze(-1)).flatten(1)


def _q3_k(blocks: Tensor) -> Tensor:
    """16 groups of 16 with six-bit scales; the third bits are in a mask, where clear means minus 4."""
    low = _nibbles(blocks[:, None, 96:104]).flatten(1)  # [n, 16]
    high = _fields(blocks[:, None, 104:108], 2).flatten(1)
    scale = _half(blocks, 108) * ((low | (high << 4)).float() - 32)
    q = _fields(blocks[:, 32:96].reshape(-1, 2, 32), 2).flatten(1).float()
    mask = _fields(blocks[:, None, :32], 1).flatten(1).float()
    return (scale.unsqueeze(-1) * (q - 4 * (1 - mask)).view(-1, 16, 16)).flatten(1)


def _k_scales(packed: Tensor) -> tuple[Tensor, Tensor]:
    """[n, 12] -> the six-bit scales and minima of 8 groups, [n, 8, 1] float32 each.

    Groups 0..3 have theirs in the low six bits of bytes 0..3 and 4..7; groups 4..7 have the low four bits in
    a nibble of bytes 8..11 and the high two in the top of bytes 0..3 and 4..7.
    """
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scale = torch.cat((first & 63, (third & 15) | ((first >> 6) << 4)), 1)
    minimum = torch.cat((second & 63, (third >> 4) | ((second >> 6) << 4)), 1)
    return scale.float().unsqueeze(-1), minimum.float().unsqueeze(-1)


def _k_groups(blocks: Tensor, q: Tensor) -> Tensor:
    """q: [n, 8, 32] under the two-level scales that Q4_K and Q5_K share."""
    scale, minimum = _k_scales(blocks[:, 4:16])
    d, dmin = _half(blocks, 0).unsqueeze(-1), _half(blocks, 2).unsqueeze(-1)
    return ((d * scale) * q.float() - dmin * minimum).flatten(1)


def _q4_k(blocks: Tensor) -> Tensor:
    return _k_groups(blocks, _nibbles(blocks[:, 16:].reshape(-1, 4, 32)))


def _q5_k(blocks: Tensor) -> Tensor:
    """Bit g of the 32 high-bit bytes belongs to group g."""
    q = _nibbles(blocks[:, 48:].reshape(-1, 4, 32)) | (_fields(blocks[:, None, 16:48], 1) << 4)
    return _k_groups(blocks, q)


def _q6_k(blocks: Tensor) -> Tensor:
    """Two halves of 128: runs of 32 made of nibbles and two-bit fields; 16 int8 scales."""
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 8, 32)
    high = _fields(blocks[:, 128:192].reshape(-1, 2, 32), 2)
    scale = _half(blocks, 208) * blocks[:, 192:208].contiguous().view(torch.int8).float()
    q = (low | (high << 4)).float() - 32
    return (scale.unsqueeze(-1) * q.view(-1, 16, 16)).flatten(1)


def _iq4(q: Tensor) -> Tensor:
    table = torch.tensor(_IQ4_VALUES, dtype=torch.float32, device=q.device)
    return table[q.int()]


def _iq4_nl(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * _iq4(_q4(blocks, 2))


def _iq4_xs(blocks: Tensor) -> Tensor:
    """8 groups of 32; six-bit scales: nibbles at byte 4, two high bits each at byte 2."""
    packed = blocks[:, 4:8]
    low = torch.stack((packed & 15, packed >> 4), 2).flatten(1)  # [n, 8], neighbours share a byte
    pairs = blocks[:, 2:4]
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=blocks.device)
    high = ((pairs.unsqueeze(-1) >> shifts) & 3).flatten(1)
    scale = _half(blocks, 0) * ((low | (high << 4)).float() - 32)
    return (
        scale.unsqueeze(-1) * _iq4(_nibbles(blocks[:, 8:].reshape(-1, 8, 16)).reshape(-1, 8, 32))
    ).flatten(1)


BLOCK_TYPES: Mapping[int, BlockType] = MappingProxyType(
    {
        kind.type_id: kind
        for kind in (
            BlockType("Q4_0", 2, 32, 18, _q4_0),
            BlockType("Q4_1", 3, 32, 20, _q4_1, (0, 2)),
            BlockType("Q5_0", 6, 32, 22, _q5_0),
            BlockType("Q5_1", 7, 32, 24, _q5_1, (0, 2)),
            BlockType("Q8_0", 8, 32, 34, _q8_0),
            BlockType("Q2_K", 10, 256, 84, _q2_k, (80, 82)),
            BlockType("Q3_K", 11, 256, 110, _q3_k, (108,)),
            BlockType("Q4_K", 12, 256, 144, _q4_k, (0, 2)),
            BlockType("Q5_K", 13, 256, 176, _q5_k, (0, 2)),
            BlockType("Q6_K", 14, 256, 210, _q6_k, (208,)),
            BlockType("IQ4_NL", 20, 32, 18, _iq4_nl),
            BlockType("IQ4_XS", 23, 256, 136, _iq4_xs),
        )
    }
)
"""ggml's type id -> how its blocks are decoded."""


def block_type(name: str) -> BlockType:
    """The format of that name, like 'Q4_K'. Raises KeyError."""
    return {kind.name: kind for kind in BLOCK_TYPES.values()}[name]
