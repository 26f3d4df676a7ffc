"""MLA's up-projection in two: what a file keeps apart, often with the keys turned, stays apart and as stored.

Its rows are those of the whole matrix, a head's keys before its values. Code that computes with it takes
`keys` and `values`. The methods of `Weight` decode, and are for reading and converting.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NoReturn

import torch
from torch import Tensor

from plait.errors import ShapeMismatch
from plait.quant.weight import Weight, check_range, check_rows


@dataclass(frozen=True, slots=True, eq=False)
class Halves:
    """A weight matrix [heads * (nope + v), rank] made of two, in any storage each.

    keys: [heads * nope, rank], or `turned` [heads * rank, nope]; values: [heads * v, rank]; index: which
    of the whole matrix's rows these are, int64 [n], or None for all.
    """

    keys: Weight
    values: Weight
    heads: int
    turned: bool
    index: Tensor | None = None

    def __post_init__(self) -> None:
        (k, k_cols), (v, rank) = self.keys.shape, self.values.shape
        if k % self.heads or v % self.heads or rank != (k // self.heads if self.turned else k_cols):
            raise ShapeMismatch(
                f"keys {[k, k_cols]}{' turned' if self.turned else ''} and values {[v, rank]} are no halves "
                f"of one up-projection of {self.heads} heads"
            )

    @property
    def _rows(self) -> int:
        keys = self.heads * self.keys.shape[1] if self.turned else self.keys.shape[0]
        return keys + self.values.shape[0]

    @property
    def shape(self) -> tuple[int, int]:
        return self._rows if self.index is None else len(self.index), self.values.shape[1]

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    @property
    def format(self) -> str:
        """Like 'Q8_0+Q4_K'; one name where both halves are stored in one way."""
        return "+".join(dict.fromkeys((self.keys.format, self.values.format)))

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """All weights as numbers, [out, in]."""
        k, v = (half.dequantize(dtype).unflatten(0, (self.heads, -1)) for half in (self.keys, self.values))
        whole = torch.cat([k.mT if self.turned else k, v], 1).flatten(0, 1)
        return whole if self.index is None else whole[self.index]

    def gather(self, index: Tensor, dtype: torch.dtype) -> Tensor:
        """index [n] -> [n, in]; everything is decoded."""
        return self.dequantize(dtype)[index]

    def rows(self, start: int, stop: int) -> Halves:
        """Rows start..stop. Raises ShapeMismatch outside the matrix."""
        check_range("rows", start, stop, self.shape[0], self)
        return self.pick(torch.arange(start, stop))

    def pick(self, index: Tensor) -> Halves:
        """Some rows, in any order. Raises ShapeMismatch for a row that is not there."""
        index = check_rows(index, self)
        return replace(self, index=index if self.index is None else self.index[index])

    def cols(self, start: int, stop: int) -> Halves:
        """Raises ShapeMismatch unless these are all columns: keys that are turned have none."""
        if (start, stop) != (0, self.shape[1]):
            raise ShapeMismatch(f"columns {start}..{stop} of {list(self.shape)} in two halves cannot be had")
        return self

    @classmethod
    def cat(cls, parts: Sequence[Halves]) -> NoReturn:
        """Raises ShapeMismatch: a matrix in halves cannot be stacked with others."""
        raise ShapeMismatch(f"cannot stack the rows of {[f'{p.format} {list(p.shape)}' for p in parts]}")

    def to(self, device: torch.device) -> Halves:
        return replace(self, keys=self.keys.to(device), values=self.values.to(device))
