"""Swap space: host memory for the state of preempted sequences and evicted snapshots. Integers only."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping


class HostSpace:
    """Gives out handles while their bytes fit into `nbytes`.

    A handle is *needed* (a sequence resumes from it) or *spare*. The oldest spare ones are evicted when space
    runs out, and `on_evict(handle)` is called.
    """

    def __init__(self, nbytes: int, on_evict: Callable[[int], None]) -> None:
        self.nbytes, self._on_evict = nbytes, on_evict
        self.num_used_bytes = 0
        self._sizes: dict[int, int] = {}
        self._spare: OrderedDict[int, None] = OrderedDict()
        self._last = 0

    @property
    def handles(self) -> set[int]:
        return set(self._sizes)

    def can_take(self, nbytes: int) -> bool:
        """Whether so many bytes fit once spare ones are evicted."""
        spare = sum(self._sizes[handle] for handle in self._spare)
        return self.num_used_bytes - spare + nbytes <= self.nbytes

    def take(self, nbytes: int, *, spare: bool = False) -> int | None:
        """A new handle, or None if it does not fit."""
        if not self.can_take(nbytes):
            return None
        while self.num_used_bytes + nbytes > self.nbytes:
            self._on_evict(next(iter(self._spare)))
        self._last += 1
        self._sizes[self._last] = nbytes
        self.num_used_bytes += nbytes
        if spare:
            self._spare[self._last] = None
        return self._last

    def pin(self, handle: int) -> None:
        """Protect a spare handle from eviction while it is in use."""
        del self._spare[handle]

    def unpin(self, handle: int) -> None:
        """Make a handle spare again, and the last to be evicted."""
        self._spare[handle] = None

    def give(self, handle: int) -> None:
        """Free a handle that is not needed any more."""
        self.num_used_bytes -= self._sizes.pop(handle)
        self._spare.pop(handle, None)

    def rebuild(self, sizes: Mapping[int, int]) -> None:
        """Start again with these handles and their bytes, all of them needed."""
        self._sizes = dict(sizes)
        self._spare.clear()
        self.num_used_bytes = sum(sizes.values())

    def clear(self) -> None:
        self.rebuild({})
