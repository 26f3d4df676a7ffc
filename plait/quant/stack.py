"""Weights of one make as one: each of their tensors with one more dimension in front, [count, ...].

For experts, which a kernel chooses by a number that only the device knows. A stack is filled item by item, so
that no more than one item is in memory twice.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from plait.errors import ShapeMismatch


class TensorStack:
    """`count` items: tensors, or data classes that hold tensors, in any depth."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._tensors: list[Tensor] = []  # [count, ...]
        self._template: Any = None
        self._make: Hashable = None

    def fits(self, item: object) -> bool:
        """Whether an item is of the make of those before: the same type, shapes, dtypes and settings."""
        return self._template is None or _make_of(item) == self._make

    def put(self, at: int, item: Any) -> None:
        """Copy an item to its place. Raises ShapeMismatch if it is of another make than the first."""
        found = list(_tensors_in(item))
        if not self.fits(item):
            shown = [f"{getattr(one, 'format', 'plain')} {list(one.shape)}" for one in (item, self._template)]
            raise ShapeMismatch(f"item {at} of a stack is of another make: {shown[0]}, not {shown[1]}")
        if self._template is None:
            self._tensors = [torch.empty(self.count, *t.shape, dtype=t.dtype, device=t.device) for t in found]
            self._make = _make_of(item)
        for whole, tensor in zip(self._tensors, found, strict=True):
            whole[at].copy_(tensor)
        if self._template is None:
            self._template = _rebuild(item, iter([whole[at] for whole in self._tensors]))

    def __getitem__(self, at: int) -> object:
        """One item; its tensors are views."""
        return _rebuild(self._template, iter([whole[at] for whole in self._tensors]))

    def pick(self, at: Tensor) -> Any:
        """The item with a number that only the device knows: at [1], of integers. A copy."""
        return _rebuild(self._template, iter([_select(whole, at) for whole in self._tensors]))

    @property
    def template(self) -> Any:
        """One item: what all of them share."""
        return self._template

    @property
    def tensors(self) -> list[Tensor]:
        """Each [count, ...], in the order of an item's fields."""
        return self._tensors

    @property
    def nbytes(self) -> int:
        return sum(whole.numel() * whole.element_size() for whole in self._tensors)


def _select(whole: Tensor, at: Tensor) -> Tensor:
    if whole.is_floating_point() and whole.element_size() == 1:  # eight-bit floats have no such operator
        return whole.view(torch.uint8).index_select(0, at)[0].view(whole.dtype)
    return whole.index_select(0, at)[0]


def _tensors_in(item: object) -> Iterator[Tensor]:
    if isinstance(item, Tensor):
        yield item
    elif is_dataclass(item) and not isinstance(item, type):
        for field in fields(item):
            yield from _tensors_in(getattr(item, field.name))


def _make_of(item: object) -> Hashable:
    if isinstance(item, Tensor):
        return item.dtype, tuple(item.shape)
    if is_dataclass(item) and not isinstance(item, type) and any(True for _ in _tensors_in(item)):
        return type(item).__name__, *(_make_of(getattr(item, field.name)) for field in fields(item))
    return repr(item)


def _rebuild(item: object, tensors: Iterator[Tensor]) -> Any:
    """The item with other tensors, taken in order."""
    if isinstance(item, Tensor):
        return next(tensors)
    if is_dataclass(item) and not isinstance(item, type) and any(True for _ in _tensors_in(item)):
        changed = {f.name: _rebuild(getattr(item, f.name), tensors) for f in fields(item) if f.init}
        return replace(item, **changed)
    return item
