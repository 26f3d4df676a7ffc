"""How a tensor is written: plain numbers, GGUF's blocks, or the packed forms of safetensors checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from typing import BinaryIO, Protocol

import torch
from torch import Tensor

from plait.convert.plan.block_kinds import BLOCK, as_blocks, nibbles_of
from plait.convert.plan.source import Numbers
from plait.convert.plan.tensor_plan import Made, matrices, pieces, row_pieces
from plait.errors import BadFile
from plait.quant.encode import Encoder
from plait.quant.gguf import BlockType, Gguf, block_type
from plait.quant.weight import Dense

Advance = Callable[[int], None]  # so many bytes more are written
Sink = Callable[[Tensor], None]  # takes what comes next in the file, as a contiguous tensor of any dtype
FP8_BLOCK = 128
FP8_MAX = 448.0  # of float8_e4m3fn
_CLIPS = (1.0, 0.95, 0.9, 0.85, 0.8)  # how much of the largest number an int4 scale reaches


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of the file: `kind` is a dtype or a block format, `shape` in numbers."""

    name: str
    shape: tuple[int, ...]
    kind: torch.dtype | BlockType

    @property
    def nbytes(self) -> int:
        if isinstance(self.kind, BlockType):
            return prod(self.shape) // self.kind.elements * self.kind.nbytes
        return prod(self.shape) * self.kind.itemsize


class StorageForm(Protocol):
    """One `Made` in the form it is written in; some forms need several tensors."""

    @property
    def made(self) -> Made: ...
    @property
    def entries(self) -> tuple[TensorEntry, ...]: ...
    def write(self, model: Numbers, sink: Sink) -> None:
        """All bytes of the entries, in their order."""
        ...


@dataclass(frozen=True, slots=True)
class Plain:
    """Numbers of one dtype."""

    made: Made
    dtype: torch.dtype

    @property
    def entries(self) -> tuple[TensorEntry, ...]:
        return (TensorEntry(self.made.name, self.made.shape, self.dtype),)

    def write(self, model: Numbers, sink: Sink) -> None:
        for numbers in _numbers(model, self.made, self.dtype):
            found = numbers.to(self.dtype)
            if self.dtype is torch.float16 and not bool(torch.isfinite(found).all()):
                raise BadFile(f"{self.made.name}: has numbers beyond float16; choose --quantize bf16 or f32")
            sink(found)


@dataclass(frozen=True, slots=True)
class BlockStorage:
    """One of GGUF's block formats. `encoder` None: the parts are in it, or in one with the same numbers."""

    made: Made
    kind: BlockType
    encoder: Encoder | None
    threads: int

    @property
    def entries(self) -> tuple[TensorEntry, ...]:
        return (TensorEntry(self.made.name, self.made.shape, self.kind),)

    def write(self, model: Numbers, sink: Sink) -> None:
        if self.encoder is None:
            for weight, _ in matrices(model, self.made):
                for piece in row_pieces(weight):
                    sink(as_blocks(piece, self.kind).data)
            return
        for numbers in _numbers(model, self.made):
            sink(self.encoder(numbers, self.made.name, self.threads).data)


@dataclass(frozen=True, slots=True)
class Factors:
    """A tensor of factors of NVFP4's blocks: one number, or one for each matrix of a stack."""

    made: Made
    values: Tensor  # float32 [n]

    @property
    def entries(self) -> tuple[TensorEntry, ...]:
        return (TensorEntry(self.made.name, tuple(self.values.shape), torch.float32),)

    def write(self, model: Numbers, sink: Sink) -> None:
        sink(self.values)


@dataclass(frozen=True, slots=True)
class Fp8Blocks:
    """float8_e4m3fn under a float32 scale per 128 x 128 numbers, as DeepSeek-V3's checkpoints have it."""

    made: Made

    @property
    def entries(self) -> tuple[TensorEntry, ...]:
        rows, cols = self.made.shape
        scales = (-(-rows // FP8_BLOCK), -(-cols // FP8_BLOCK))
        return (
            TensorEntry(self.made.name, self.made.shape, torch.float8_e4m3fn),
            TensorEntry(f"{self.made.name}_scale_inv", scales, torch.float32),
        )

    def write(self, model: Numbers, sink: Sink) -> None:
        scales = []
        for numbers in _rows_of(FP8_BLOCK, _numbers(model, self.made)):
            rows, cols = numbers.shape
            width = -cols % FP8_BLOCK
            tall = -rows % FP8_BLOCK
            padded = torch.nn.functional.pad(numbers, (0, width, 0, tall))
            blocks = padded.unflatten(0, (-1, FP8_BLOCK)).unflatten(2, (-1, FP8_BLOCK))
            scale = blocks.abs().amax((1, 3)) / FP8_MAX  # [row blocks, column blocks]
            scale = torch.where(scale > 0, scale, 1.0)
            codes = (blocks / scale[:, None, :, None]).flatten(2).flatten(0, 1)[:rows, :cols]
            sink(codes.to(torch.float8_e4m3fn))
            scales.append(scale)
        sink(torch.cat(scales))


@dataclass(frozen=True, slots=True)
class Int4Groups:
    """Four-bit integers in groups along a row: compressed-tensors' pack-quantized form, symmetric.

    is_copied: the parts are in Q4_0, or in one with the same numbers, and keep their codes and scales.
    """

    made: Made
    group: int
    scale_dtype: torch.dtype
    is_copied: bool = False

    @property
    def entries(self) -> tuple[TensorEntry, ...]:
        rows, cols = self.made.shape
        stem = self.made.name.removesuffix("weight")
        return (
            TensorEntry(f"{stem}weight_packed", (rows, cols // 8), torch.int32),
            TensorEntry(f"{stem}weight_scale", (rows, cols // self.group), self.scale_dtype),
            TensorEntry(f"{stem}weight_shape", (2,), torch.int64),
        )

    def write(self, model: Numbers, sink: Sink) -> None:
        scales = self._copy(model, sink) if self.is_copied else self._round(model, sink)
        sink(torch.cat(scales))
        sink(torch.tensor(self.made.shape, dtype=torch.int64))

    def _copy(self, model: Numbers, sink: Sink) -> list[Tensor]:
        scales = []
        for weight, _ in matrices(model, self.made):
            for piece in row_pieces(weight):
                codes, scale = nibbles_of(as_blocks(piece, block_type("Q4_0")), 2)
                sink(codes)
                scales.append(scale.view(torch.float16).squeeze(2))
        return scales

    def _round(self, model: Numbers, sink: Sink) -> list[Tensor]:
        scales = []
        shifts = torch.arange(0, 32, 4, dtype=torch.int32)
        for numbers in _numbers(model, self.made):
            groups = numbers.unflatten(1, (-1, self.group))
            scale = _int4_scale(groups).to(self.scale_dtype)
            codes = _int4_codes(groups, scale.float()).flatten(1)
            nibbles = (codes.to(torch.int32) + 8).unflatten(1, (-1, 8))
            sink((nibbles << shifts).sum(2, dtype=torch.int32))
            scales.append(scale)
        return scales


@dataclass(frozen=True, slots=True)
class Mxfp4Stack:
    """Experts as gpt-oss was published: four-bit floats, out of GGUF's MXFP4; rows as the parts' alternate.

    `made` is the plain stack, in which matrices lie turned.
    """

    made: Made

    @property
    def entries(self) -> tuple[TensorEntry, ...]:
        count, cols, rows = self.made.shape
        return (
            TensorEntry(f"{self.made.name}_blocks", (count, rows, cols // BLOCK, BLOCK // 2), torch.uint8),
            TensorEntry(f"{self.made.name}_scales", (count, rows, cols // BLOCK), torch.uint8),
        )

    def write(self, model: Numbers, sink: Sink) -> None:
        scales, together = [], self.made.joined
        for at in range(0, len(self.made.parts), together):
            found = []
            for part in self.made.parts[at : at + together]:
                blocks = model.read(part.ours)
                assert isinstance(blocks, Gguf)
                found.append(nibbles_of(blocks, 1))
            codes, exponents = (torch.stack(each, 1).flatten(0, 1) for each in zip(*found, strict=True))
            sink(codes)
            scales.append(exponents)
        sink(torch.cat(scales))


def _int4_scale(groups: Tensor) -> Tensor:
    """[rows, groups, group] -> the scale of least squared error among a few, [rows, groups]."""
    widest = (groups.abs().amax(2) / 7.5).clamp(min=1e-8)
    best, error = widest, torch.full_like(widest, torch.inf)
    for clip in _CLIPS:
        scale = widest * clip
        missed = (groups - _int4_codes(groups, scale) * scale.unsqueeze(2)).square().sum(2)
        best, error = torch.where(missed < error, scale, best), torch.minimum(missed, error)
    return best


def _int4_codes(groups: Tensor, scale: Tensor) -> Tensor:
    return (groups / scale.unsqueeze(2)).round().clamp(-8, 7)


def _numbers(model: Numbers, made: Made, dtype: torch.dtype = torch.float32) -> Iterator[Tensor]:
    """Its rows in float32, some at a time; a vector is one row. What has `dtype` and stays is not cast."""
    for matrix, scale in matrices(model, made):
        same = scale == 1.0 and isinstance(matrix, Dense) and matrix.tensor.dtype == dtype
        yield from pieces(matrix, scale, dtype if same else torch.float32)


def _rows_of(multiple: int, found: Iterator[Tensor]) -> Iterator[Tensor]:
    """The same rows in chunks of a multiple of so many rows; the last takes what is left."""
    held: list[Tensor] = []
    count = 0
    for piece in found:
        held.append(piece)
        count += len(piece)
        if count >= multiple:
            rows = torch.cat(held)
            whole = count // multiple * multiple
            yield rows[:whole]
            held, count = [rows[whole:]], count - whole
    if count:
        yield torch.cat(held)


def append_tensor(one: StorageForm, model: Numbers, file: BinaryIO, advance: Advance) -> int:
    """Write a tensor where the file ends. Returns its bytes."""
    start, wanted = file.tell(), sum(entry.nbytes for entry in one.entries)
    one.write(model, lambda piece: advance(file.write(raw_bytes(piece))))
    written = file.tell() - start
    assert written == wanted, f"{one.made.name}: {written} bytes instead of {wanted}"
    return written


def raw_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a tensor of any dtype."""
    flat = tensor.detach().contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]
