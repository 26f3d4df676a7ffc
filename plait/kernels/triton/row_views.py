"""Tensors as rows for kernels: the numbers of a row are next to each other, the rows may lie apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

MOST_DIMS = 3


@dataclass(frozen=True, slots=True)
class RowViews:
    """Tensors of one leading shape. Row r of one with strides (outer, inner) begins at
    r // per_outer * outer + r % per_outer * inner."""

    tensors: tuple[Tensor, ...]
    strides: tuple[int, ...]  # outer and inner of each tensor, one after the other
    per_outer: int
    count: int


def view_rows(*tensors: Tensor) -> RowViews:
    """The rows of tensors [..., n]; the leading dimensions are the same. What cannot be viewed is copied."""
    lead = tensors[0].shape[:-1]
    found = tuple(t if len(lead) < MOST_DIMS and _is_packed(t) else t.contiguous() for t in tensors)
    count = lead.numel()
    if all(_is_even(t) for t in found):
        return RowViews(found, tuple(n for t in found for n in (_row_stride(t), 0)), 1, count)
    strides = tuple(n for t in found for n in (t.stride(0), t.stride(1)))
    return RowViews(found, strides, lead[-1], count)


def pack_rows(t: Tensor) -> Tensor:
    """t, or its copy with the numbers of each row next to each other."""
    return t if _is_packed(t) else t.contiguous()


def _is_packed(t: Tensor) -> bool:
    """Whether the numbers of a row are next to each other."""
    return t.stride(-1) == 1 or t.shape[-1] == 1


def _row_stride(t: Tensor) -> int:
    """Of a tensor with rows at one distance."""
    sizes: Sequence[int] = t.shape[:-1]
    steps = [t.stride(i) for i, size in enumerate(sizes) if size > 1]
    return steps[-1] if steps else t.shape[-1]


def _is_even(t: Tensor) -> bool:
    """Whether all rows have one distance."""
    *lead, _ = t.shape
    step = _row_stride(t)
    for i in reversed(range(len(lead))):
        if lead[i] > 1 and t.stride(i) != step:
            return False
        step *= lead[i]
    return True
