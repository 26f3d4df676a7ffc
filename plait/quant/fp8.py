"""Eight-bit floats (E4M3) under float32 scales: one for the whole matrix, for each row or block of it.

How the bytes lie: `codes` are the plain matrix, a byte for each number. It has a sign, four bits of exponent
(bias 7) and three of mantissa. There is no infinity, and NaN is at 0x7f and 0xff (Micikevicius 2022, FP8
formats for deep learning).

    w[o, c] = codes[o, c] * scale[o // block[0], c // block[1]]

Blocks at the lower and right edge may be cut short. DeepSeek-V3 has blocks of (128, 128); a scale for each
row is (1, in); one for all is (out, in). Taking rows apart can make blocks of one row of any of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from plait.errors import ShapeMismatch
from plait.quant.weight import BlockWeight, check_range


@dataclass(frozen=True, slots=True, eq=False)
class Fp8(BlockWeight):
    """A weight matrix [out, in] of E4M3 numbers.

    codes: float8_e4m3fn [out, in]; scale: float32 [ceil(out / block[0]), ceil(in / block[1])], it multiplies;
    block: the rows and columns that share a scale, (1, in) or more for a scale for each row.
    """

    codes: Tensor
    scale: Tensor
    block: tuple[int, int]

    def __post_init__(self) -> None:
        if self.codes.dtype != torch.float8_e4m3fn or self.codes.dim() != 2 or min(self.block) < 1:
            raise ShapeMismatch(
                f"fp8 wants float8_e4m3fn [rows, columns] in blocks of 1 or more, got {self.codes.dtype} "
                f"{list(self.codes.shape)} in blocks of {self.block}"
            )
        wanted = [-(-n // b) for n, b in zip(self.codes.shape, self.block, strict=True)]
        if self.scale.dtype != torch.float32 or list(self.scale.shape) != wanted:
            raise ShapeMismatch(
                f"fp8 of {list(self.codes.shape)} in blocks of {self.block} wants scales float32 {wanted}, "
                f"got {self.scale.dtype} {list(self.scale.shape)}"
            )

    @property
    def shape(self) -> tuple[int, int]:
        rows, cols = self.codes.shape
        return rows, cols

    @property
    def format(self) -> str:
        """'fp8' with at most a scale for each row; like 'fp8_b128' where columns come in blocks."""
        return "fp8" if self.block[1] >= self.codes.shape[1] else f"fp8_b{self.block[1]}"

    def _decode(self, start: int, stop: int) -> Tensor:
        of = torch.arange(self.shape[1], device=self.codes.device) // self.block[1]
        numbers = self.codes[start:stop].float()
        numbers *= self._row_scales(slice(start, stop))[:, of]
        return numbers

    def _row_scales(self, index: Tensor | slice) -> Tensor:
        """The scales of some rows, [n, blocks of columns]."""
        every = torch.arange(self.shape[0], device=self.codes.device)
        return self.scale[every[index] // self.block[0]]

    def _take(self, index: Tensor | slice) -> Fp8:
        """Some rows, each with scales of its own."""
        codes = self.codes.view(torch.uint8)[index].view(torch.float8_e4m3fn)
        return Fp8(codes, self._row_scales(index), (1, self.block[1]))

    def rows(self, start: int, stop: int) -> Fp8:
        """Rows start..stop, the codes a view. Inside a block of rows, each row gets scales of its own."""
        check_range("rows", start, stop, self.shape[0], self)
        size = self.block[0]
        if start % size or (stop % size and stop != self.shape[0]):
            return self._take(slice(start, stop))
        scale = self.scale[start // size : -(-stop // size)]
        return Fp8(self.codes[start:stop], scale, self.block)

    def cols(self, start: int, stop: int) -> Fp8:
        """Columns start..stop, views. Raises ShapeMismatch outside the matrix or within a block."""
        cols, size = self.shape[1], self.block[1]
        check_range("columns", start, stop, cols, self)
        if size >= cols:
            return Fp8(self.codes[:, start:stop], self.scale[:, : int(stop > start)], self.block)
        if start % size or (stop % size and stop != cols):
            raise ShapeMismatch(
                f"columns {start}..{stop} would cut a block of {self.format}: both must be multiples "
                f"of {size}"
            )
        return Fp8(self.codes[:, start:stop], self.scale[:, start // size : -(-stop // size)], self.block)

    @classmethod
    def cat(cls, parts: Sequence[Fp8]) -> Fp8:
        """Row-wise concatenation. Raises ShapeMismatch unless all parts have one format and width."""
        if len({(part.format, part.shape[1]) for part in parts}) != 1:
            shown = [f"{part.format} {list(part.shape)}" for part in parts]
            raise ShapeMismatch(f"cannot stack the rows of {shown}: one format and one width are needed")
        size = parts[0].block[0]
        if any(part.block[0] != size for part in parts) or any(p.shape[0] % size for p in parts[:-1]):
            parts = [part._take(slice(None)) for part in parts]
        codes = torch.cat([part.codes.view(torch.uint8) for part in parts]).view(torch.float8_e4m3fn)
        return replace(parts[0], codes=codes, scale=torch.cat([part.scale for part in parts]))

    def times(self, factor: Tensor) -> Fp8:
        """The matrix times a number, or one number for each row."""
        by = factor.to(self.scale.device, torch.float32)
        whole = self if by.numel() == 1 or self.block[0] == 1 else self._take(slice(None))
        return replace(whole, scale=whole.scale * by.reshape(-1, 1))
