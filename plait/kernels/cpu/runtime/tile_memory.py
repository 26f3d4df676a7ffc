"""Where packed weights are kept: memory of the system, in large pages if it has them."""

from __future__ import annotations

import mmap
import threading

import torch
from torch import Tensor

from plait.kernels.cpu.runtime.frame_words import LINE

HUGE = 2 << 20  # bytes of a large page
ROOM = 32 << 20  # bytes that small weights share


def map_memory(nbytes: int) -> Tensor:
    """Memory of the system, zeros, uint8; it starts where a large page may."""
    # Private memory: of what could be shared, systems give no large pages unless they are set to.
    private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
    memory = mmap.mmap(-1, nbytes + HUGE, **private)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    raw = torch.frombuffer(memory, dtype=torch.uint8)
    start = -raw.data_ptr() % HUGE
    return raw[start : start + nbytes]


class Rooms:
    """Memory for packed weights, in large pages if the system has them.

    Many weights are smaller than a large page, so they share chunks. A chunk lives as long as one of its
    weights; the last one stays, for the weights that come next.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._chunk, self._used = map_memory(0), 0

    def take(self, nbytes: int) -> Tensor:
        """Bytes that are 0, uint8, at a multiple of LINE."""
        if nbytes > ROOM // 4:
            return map_memory(nbytes)
        with self._lock:
            if self._used + nbytes > self._chunk.numel():
                self._chunk, self._used = map_memory(ROOM), 0
            start = self._used
            self._used += -(-nbytes // LINE) * LINE
            return self._chunk[start : start + nbytes]


_rooms = Rooms()
room = _rooms.take
