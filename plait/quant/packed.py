"""A packed weight matrix from the packed-weight cache, in place of the weight it was packed from."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class CachedWeight:
    """What a variant of `linear` made of a weight (out, in) in an earlier run, and would make of it again.

    `format`: of the weight; `rounding`: what its inputs are rounded to; `layout`: the fields of the
    variant's own description of its tiles; `tiles`: uint8, at a multiple of 64 bytes; `order`: int32 [in] or
    None, which input a column belongs to.
    """

    format: str
    shape: tuple[int, int]
    rounding: Any
    layout: tuple[Any, ...]
    tiles: Tensor
    order: Tensor | None = None

    @property
    def nbytes(self) -> int:
        return self.tiles.numel()

    @property
    def stack_key(self) -> Hashable:
        """No two of them are stacked: what could be, was so when it was packed."""
        return id(self)
