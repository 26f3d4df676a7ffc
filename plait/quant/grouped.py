"""Integers in groups that share a scale: what GPTQ, AWQ, compressed-tensors and int8 files hold.

How the bytes lie: row o of `codes` is one stream of unsigned integers of `bits` bits, from the lowest bit of
its first byte on, column after column. With four bits, column c is the low nibble of byte c // 2 if c is
even, the high one if odd. Columns c with the same c // group share `scales[o, c // group]` and a zero point:

    w[o, order[c]] = scales[o, c // group] * (code[o, c] - zero[o, c // group])

`order` is there for files with columns quantized by importance (act-order): columns are kept sorted by
group, and `order[c]` is the input that column c belongs to. Without it, column c belongs to input c.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from plait.errors import ShapeMismatch
from plait.quant.bits import unpack
from plait.quant.weight import BlockWeight, check_range

_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True, slots=True, eq=False)
class Grouped(BlockWeight):
    """A weight matrix [out, in] of unsigned integers of 2 to 8 bits.

    codes: uint8 [out, in * bits / 8]; scales: [out, ceil(in / group)], a float as it was stored; zeros: uint8
    of the same shape, or None, which stands for 2**(bits - 1) everywhere; group: columns of a group, the last
    may have fewer; order: int32 [in], a permutation, or None. `in` is a multiple of 8 unless bits are 8.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    bits: int
    group: int
    order: Tensor | None = None

    def __post_init__(self) -> None:
        if not 2 <= self.bits <= 8 or self.group < 1:
            raise ShapeMismatch(
                f"{self.bits} bits in groups of {self.group}; bits are 2 to 8, groups 1 or more"
            )
        if self.codes.dtype != torch.uint8 or self.codes.dim() != 2 or self.codes.shape[1] * 8 % self.bits:
            raise ShapeMismatch(f"codes of {self.bits} bits: {self.codes.dtype} {list(self.codes.shape)}")
        rows, cols = self.shape
        wanted = (rows, -(-cols // self.group))
        zeros = wanted if self.zeros is None else tuple(self.zeros.shape)
        order = (cols,) if self.order is None else tuple(self.order.shape)
        if tuple(self.scales.shape) != wanted or zeros != wanted or order != (cols,):
            raise ShapeMismatch(
                f"{self.format} of {[rows, cols]} wants scales and zeros of {list(wanted)} and an order of "
                f"[{cols}], got {list(self.scales.shape)}, {list(zeros)} and {list(order)}"
            )
        if self.scales.dtype not in _FLOATS:
            raise ShapeMismatch(
                f"{self.format}: scales are {self.scales.dtype}; expected float16, 32 or bfloat16"
            )

    @property
    def shape(self) -> tuple[int, int]:
        rows, row_bytes = self.codes.shape
        return rows, row_bytes * 8 // self.bits

    @property
    def format(self) -> str:
        """Like 'int4_g128'; 'int8' where a row is one group."""
        cols = self.codes.shape[1] * 8 // self.bits
        return f"int{self.bits}" + (f"_g{self.group}" if self.group < cols else "")

    @property
    def stack_key(self) -> Hashable:
        """Rows can only be stacked if their columns are in one order."""
        return self.format, None if self.order is None else hash(self.order.cpu().numpy().tobytes())

    def _decode(self, start: int, stop: int) -> Tensor:
        cols = self.shape[1]
        of = torch.arange(cols, device=self.codes.device) // self.group
        numbers = unpack(self.codes[start:stop], self.bits, cols).float()
        numbers -= 1 << (self.bits - 1) if self.zeros is None else self.zeros[start:stop].float()[:, of]
        numbers *= self.scales[start:stop].float()[:, of]
        if self.order is None:
            return numbers
        back = torch.empty_like(numbers)
        back[:, self.order.long()] = numbers
        return back

    def _take(self, index: Tensor | slice) -> Grouped:
        zeros = None if self.zeros is None else self.zeros[index]
        return replace(self, codes=self.codes[index], scales=self.scales[index], zeros=zeros)

    def cols(self, start: int, stop: int) -> Grouped:
        """Columns start..stop, a view. Raises ShapeMismatch outside the matrix or inside a group.

        Where a row is one group, a part of it is one, too.
        """
        rows, cols = self.shape
        check_range("columns", start, stop, cols, self)
        if (start, stop) == (0, cols):
            return self
        is_one = self.group >= cols
        whole = is_one or (start % self.group == 0 and (stop % self.group == 0 or stop == cols))
        if self.order is not None or not whole or start * self.bits % 8 or stop * self.bits % 8:
            why = "its columns are in another order" if self.order is not None else "it would cut a group"
            raise ShapeMismatch(
                f"columns {start}..{stop} of a {self.format} weight of {[rows, cols]} cannot be had: {why}"
            )
        groups = slice(None) if is_one else slice(start // self.group, -(-stop // self.group))
        return replace(
            self,
            group=max(1, stop - start) if is_one else self.group,
            codes=self.codes[:, start * self.bits // 8 : stop * self.bits // 8],
            scales=self.scales[:, groups],
            zeros=None if self.zeros is None else self.zeros[:, groups],
        )

    @classmethod
    def cat(cls, parts: Sequence[Grouped]) -> Grouped:
        """Row-wise concatenation. Raises ShapeMismatch unless format, width and order of columns are one."""
        if len({(part.stack_key, part.group, part.shape[1]) for part in parts}) != 1:
            shown = [f"{part.format} {list(part.shape)}" for part in parts]
            raise ShapeMismatch(f"cannot stack the rows of {shown}: one format, width and order are needed")
        dtype = parts[0].scales.dtype
        for part in parts:
            dtype = torch.promote_types(dtype, part.scales.dtype)
        shifted = any(part.zeros is not None for part in parts)
        return replace(
            parts[0],
            codes=torch.cat([part.codes for part in parts]),
            scales=torch.cat([part.scales.to(dtype) for part in parts]),
            zeros=torch.cat([part._all_zeros() for part in parts]) if shifted else None,
        )

    def _all_zeros(self) -> Tensor:
        if self.zeros is not None:
            return self.zeros
        return torch.full_like(self.scales, 1 << (self.bits - 1), dtype=torch.uint8)

    def times(self, factor: Tensor) -> Grouped:
        """The matrix times a number, or one number for each row; the scales become float32."""
        by = factor.to(self.scales.device, torch.float32).reshape(-1, 1)
        return replace(self, scales=self.scales.float() * by)
