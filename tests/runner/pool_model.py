"""A model of the pool of memory that a GPU's graphs share, and a backend that captures into it on a CPU.

It allocates as torch does for captures: the smallest free block that is large enough, which is split; else a
new segment. Nothing is given back. Blocks are freed when a step lets their tensors go.
"""

from __future__ import annotations

import weakref
from bisect import insort
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from plait.ops.chip import Chip
from plait.ops.launch import capture_launches
from plait.runner.device.graph_backends import CaptureRefusals, GraphBackend, Step
from plait.runner.steps.replay import find_tensors

ALIGNED = 512  # bytes


@dataclass
class Pool:
    """Segments, each divided into (begin, size, whether it is free). `nbytes`: of all segments."""

    nbytes: int = 0
    segments: list[list[tuple[int, int, bool]]] = field(default_factory=list)

    def allocate(self, nbytes: int) -> tuple[int, int]:
        """The place of a block: its segment, and where it begins there."""
        size = -(-nbytes // ALIGNED) * ALIGNED
        fitting = [
            (has, s, begin)
            for s, blocks in enumerate(self.segments)
            for begin, has, is_free in blocks
            if is_free and has >= size
        ]
        if not fitting:
            self.nbytes += size
            self.segments.append([(0, size, False)])
            return len(self.segments) - 1, 0
        has, s, begin = min(fitting)
        blocks = self.segments[s]
        blocks.remove((begin, has, True))
        insort(blocks, (begin, size, False))
        if has > size:
            insort(blocks, (begin + size, has - size, True))
        return s, begin

    def free(self, place: tuple[int, int]) -> None:
        """Give a block back, and join it with its free neighbours."""
        s, begin = place
        joined: list[tuple[int, int, bool]] = []
        for at, size, is_free in self.segments[s]:
            here = is_free or at == begin
            if joined and here and joined[-1][2]:
                joined[-1] = (joined[-1][0], joined[-1][1] + size, True)
            else:
                joined.append((at, size, here))
        self.segments[s] = joined


class _Allocations(TorchDispatchMode):
    """Takes memory that operators make from a pool, for as long as a tensor of it lives."""

    def __init__(self, pool: Pool, inputs: Sequence[Tensor]) -> None:
        """`inputs`: has memory of its own."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._pool, self._given = pool, {t.untyped_storage().data_ptr() for t in inputs}
        self._places: dict[int, tuple[int, int]] = {}
        self._tensors = Counter[int]()

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
        out = func(*args, **(kwargs or {}))
        for t in find_tensors(out):
            at = t.untyped_storage().data_ptr()
            if not t.numel() or at in self._given:
                continue
            if at not in self._places:
                self._places[at] = self._pool.allocate(t.untyped_storage().nbytes())
            self._tensors[at] += 1
            weakref.finalize(t, self._forget, at)
        return out

    def _forget(self, at: int) -> None:
        self._tensors[at] -= 1
        if not self._tensors[at]:
            self._pool.free(self._places.pop(at))


@dataclass
class PoolGraph:
    """What a capture holds."""

    result: Tensor
    launches: Sequence[str] = ()

    def replay(self) -> None:
        raise AssertionError("it has memory, and no launches")


class PoolGraphs(GraphBackend):
    """Captures steps into one pool. `sizes`: what the pool had after each capture.

    `most`: bytes that the pool may have; a capture that needs more raises OutOfMemoryError.
    """

    captures_at_start = True

    def __init__(self, most: int = 1 << 60) -> None:
        self.device, self.chip, self.pool = torch.device("cpu"), None, Pool()
        self.sizes: list[int] = []
        self.refusals = CaptureRefusals()
        self.most = most

    chip: Chip | None

    def select(self) -> AbstractContextManager[object]:
        return nullcontext()

    def capture(self, step: Step, inputs: Sequence[Tensor]) -> PoolGraph:
        with torch.inference_mode(), capture_launches(), _Allocations(self.pool, inputs):
            result = step()
        if self.pool.nbytes > self.most:
            self.pool = Pool()
            raise torch.OutOfMemoryError("CUDA out of memory")
        self.sizes.append(self.pool.nbytes)
        return PoolGraph(result)

    def read(self, found: Tensor) -> Callable[[], Tensor]:
        return found.clone

    def free_nbytes(self) -> int:
        return (1 << 40) - self.pool.nbytes
