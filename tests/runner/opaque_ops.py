"""Ops as a device's graph sees them, computed by their references: launches that run anew at each replay.

A reference asks for values and walks tokens in Python, so it cannot be captured operator by operator. Here a
call of an op is one launch, as that of a kernel is. So the steps of every family run through captured graphs
in seconds, which shows what is around the kernels: rows, padding, tables, states, and what moves on. Triton's
interpreter takes minutes for the same; it shows the kernels.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from plait.checkpoint.weights import Weights
from plait.ops import launch
from plait.ops.registry import Op
from plait.runner.steps.replay import find_tensors


class _Depth(threading.local):
    inside = 0  # calls of ops that are under way: an op may call others


_here = _Depth()


@contextmanager
def _calling() -> Iterator[None]:
    _here.inside += 1
    try:
        yield
    finally:
        _here.inside -= 1


class OpaqueCall:
    """One call of an op in a captured step. Its results stay where they are, and each run writes them."""

    def __init__(self, fn: Callable[..., Any], args: Any, kwargs: Any) -> None:
        self._fn, self._args, self._kwargs = fn, args, kwargs
        self._given = {t.untyped_storage().data_ptr() for t in find_tensors((args, kwargs))}
        self.results: Any = None
        self._kept: list[Tensor] = []

    def run(self) -> None:
        with _calling():
            self.results = self._fn(*self._args, **self._kwargs)
        for kept, found in zip(self._kept, self._own(self.results), strict=False):
            kept.copy_(found)

    def keep(self) -> Any:
        """The first results, as tensors that the capture knows; what is of an argument stays so."""
        own = list(self._own(self.results))
        # Not by `torch.empty`: tests fill what that gives, and a replay would do so behind the results.
        allocate = torch.ops.aten.empty_strided.default
        self._kept = [allocate(found.shape, found.stride(), dtype=found.dtype) for found in own]
        with torch.utils._python_dispatch._disable_current_modes():
            for kept, found in zip(self._kept, own, strict=True):
                kept.copy_(found)
        moved = {id(found): kept for found, kept in zip(own, self._kept, strict=True)}
        return _replace(self.results, moved)

    def _own(self, results: Any) -> Iterator[Tensor]:
        for found in find_tensors(results):
            if found.untyped_storage().data_ptr() not in self._given or not found.numel():
                yield found


def _replace(value: Any, moved: dict[int, Tensor]) -> Any:
    if isinstance(value, Tensor):
        return moved.get(id(value), value)
    return tuple(_replace(item, moved) for item in value) if isinstance(value, tuple) else value


def make_opaque(name: str, fn: Callable[..., Any]) -> Callable[..., Any]:
    """An op of which each call is a launch while a step is captured."""

    def call(*args: Any, **kwargs: Any) -> Any:
        watchers = launch._here.watchers
        if not watchers or _here.inside:
            return fn(*args, **kwargs)
        made = OpaqueCall(fn, args, kwargs)
        watchers[-1].record_launch(name, made.run, list(find_tensors((args, kwargs))), ())
        return made.keep()

    return call


class OpaqueWeights(Weights):
    """Weights of which every op is bound as one launch."""

    def bind(self, op: Op, **sizes: object) -> Callable[..., Any]:
        return make_opaque(op.name, super().bind(op, **sizes))

    def bind_pair(self, writer: Op, reader: Op, **sizes: object) -> tuple[None, Callable[..., Any]]:
        _, read = super().bind_pair(writer, reader, **sizes)
        return None, make_opaque(reader.name, read)
