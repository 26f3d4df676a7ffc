"""Four-bit floats (E2M1) in small groups under eight-bit scales: MXFP4 and NVFP4.

How the bytes lie: byte b of a row of `codes` holds column 2b in its low nibble and column 2b + 1 in its
high one. A nibble is a sign and an index into 0, 0.5, 1, 1.5, 2, 3, 4, 6. Each group of columns has a byte
of scale:

    MXFP4 (OCP Microscaling 1.0)   32 columns, the byte s stands for 2**(s - 127), 255 for NaN
    NVFP4                          16 columns, the byte is an E4M3 number; `factor` multiplies it

    w[o, c] = value(code[o, c]) * scales[o, c // group] * factor[o]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from plait.errors import ShapeMismatch
from plait.quant.bits import constants, unpack
from plait.quant.weight import BlockWeight, check_range

VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_GROUPS = {torch.uint8: ("mxfp4", 32), torch.float8_e4m3fn: ("nvfp4", 16)}


@dataclass(frozen=True, slots=True, eq=False)
class Fp4(BlockWeight):
    """A weight matrix [out, in] of E2M1 numbers.

    codes: uint8 [out, in / 2]; scales: [out, in / group], uint8 (exponents, group 32) or float8_e4m3fn (group
    16); factor: float32, one for all rows [1] or one for each [out], or None for 1.
    """

    codes: Tensor
    scales: Tensor
    factor: Tensor | None = None

    def __post_init__(self) -> None:
        if self.scales.dtype not in _GROUPS:
            raise ShapeMismatch(f"fp4: scales are {self.scales.dtype}; expected uint8 or float8_e4m3fn")
        if self.codes.dtype != torch.uint8 or self.codes.dim() != 2:
            raise ShapeMismatch(f"{self.format}: codes are {self.codes.dtype} {list(self.codes.shape)}")
        rows, cols = self.shape
        if cols % self.group or list(self.scales.shape) != [rows, cols // self.group]:
            raise ShapeMismatch(
                f"{self.format} of {[rows, cols]} wants a scale for {self.group} columns of each row, got "
                f"{list(self.scales.shape)}"
            )
        factor = self.factor
        if factor is not None and (factor.dtype != torch.float32 or list(factor.shape) not in ([1], [rows])):
            raise ShapeMismatch(
                f"{self.format} of {[rows, cols]} wants a factor float32 [1] or [{rows}], got {factor.dtype} "
                f"{list(factor.shape)}"
            )

    @property
    def shape(self) -> tuple[int, int]:
        rows, row_bytes = self.codes.shape
        return rows, row_bytes * 2

    @property
    def format(self) -> str:
        """'mxfp4' or 'nvfp4'."""
        return _GROUPS[self.scales.dtype][0]

    @property
    def group(self) -> int:
        """Columns that share a scale."""
        return _GROUPS[self.scales.dtype][1]

    def _decode(self, start: int, stop: int) -> Tensor:
        table = constants(VALUES, torch.float32, self.codes.device)
        numbers = table[unpack(self.codes[start:stop], 4, self.shape[1]).int()]
        scales = self.scales[start:stop]
        if scales.dtype == torch.uint8:
            scales = scales.view(torch.float8_e8m0fnu)
        by = scales.float()
        if self.factor is not None:
            by = by * (self.factor if len(self.factor) == 1 else self.factor[start:stop, None])
        decoded: Tensor = (numbers.unflatten(1, (-1, self.group)) * by.unsqueeze(-1)).flatten(1)
        return decoded

    def _take(self, index: Tensor | slice) -> Fp4:
        shared = self.factor is None or len(self.factor) == 1
        scales = self.scales.view(torch.uint8)[index].view(self.scales.dtype)
        return Fp4(self.codes[index], scales, self.factor if shared else self.factor[index])  # type: ignore[index]

    def cols(self, start: int, stop: int) -> Fp4:
        """Columns start..stop, a view. Raises ShapeMismatch outside the matrix or inside a group."""
        check_range("columns", start, stop, self.shape[1], self)
        if start % self.group or stop % self.group:
            raise ShapeMismatch(
                f"columns {start}..{stop} would cut a group of {self.format}: both must be multiples of "
                f"{self.group}"
            )
        scales = self.scales[:, start // self.group : stop // self.group]
        return Fp4(self.codes[:, start // 2 : stop // 2], scales, self.factor)

    @classmethod
    def cat(cls, parts: Sequence[Fp4]) -> Fp4:
        """Row-wise concatenation. Raises ShapeMismatch unless all parts have one format and width."""
        if len({(part.format, part.shape[1]) for part in parts}) != 1:
            shown = [f"{part.format} {list(part.shape)}" for part in parts]
            raise ShapeMismatch(f"cannot stack the rows of {shown}: one format and one width are needed")
        dtype = parts[0].scales.dtype
        scales = torch.cat([part.scales.view(torch.uint8) for part in parts]).view(dtype)
        plain = all(part.factor is None for part in parts)
        factor = None if plain else torch.cat([part._row_factors() for part in parts])
        return Fp4(torch.cat([part.codes for part in parts]), scales, factor)

    def _row_factors(self) -> Tensor:
        if self.factor is None:
            return torch.ones(self.shape[0], device=self.codes.device)
        return self.factor.expand(self.shape[0])

    def times(self, factor: Tensor) -> Fp4:
        """The matrix times a number, or one number for each row."""
        by = factor.to(self.codes.device, torch.float32).reshape(-1)
        return replace(self, factor=by if self.factor is None else self.factor * by)
