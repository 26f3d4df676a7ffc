"""The shared status block: what an engine process is doing, in memory that the front can read after its end.

One thread of the child writes it (a second one the signs of life), and the front reads it at any time. Every
value is eight bytes, stored at once. Shared memory outlives any way to die and costs nothing to write.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from array import array
from collections.abc import Collection, Sequence

NUM_STATS = 64
ALIVE, BUSY, ARRIVING, NUM_PLANNED = range(4)
STATS = 4
PLANNED = STATS + NUM_STATS


class Page:
    """Times are seconds on the clock that all processes share (`time.monotonic`).

    `alive_s`: when a thread of the child last ran, 0 before it has begun; in a frozen or dying process it
    does not change. `busy_since_s`: since when the engine's thread is at its present round; 0: it waits for
    work. `arriving`: the key of the request that the engine is taking. `planned`: keys of the requests in
    the last step that began.
    """

    def __init__(self, fd: int, max_planned: int) -> None:
        """Over a file from `new_page`, which is closed."""
        self._max_planned = max_planned
        self._memory = mmap.mmap(fd, nbytes(max_planned))
        os.close(fd)
        self._times = memoryview(self._memory).cast("d")
        self._numbers = memoryview(self._memory).cast("q")

    @property
    def alive_s(self) -> float:
        return self._times[ALIVE]

    def beat(self) -> None:
        """Show that the process runs."""
        self._times[ALIVE] = time.monotonic()

    @property
    def busy_since_s(self) -> float:
        return self._times[BUSY]

    def begin(self) -> None:
        """A round begins: there is work."""
        self._times[BUSY] = time.monotonic()

    def rest(self) -> None:
        """There is no work."""
        self._times[BUSY] = 0.0

    @property
    def arriving(self) -> int:
        return self._numbers[ARRIVING]

    @arriving.setter
    def arriving(self, key: int) -> None:
        self._numbers[ARRIVING] = key

    @property
    def planned(self) -> tuple[int, ...]:
        count = min(max(self._numbers[NUM_PLANNED], 0), self._max_planned)
        return tuple(self._numbers[PLANNED : PLANNED + count])

    @planned.setter
    def planned(self, keys: Collection[int]) -> None:
        # No request is blamed because of a list that is half written.
        self._numbers[NUM_PLANNED] = 0
        self._numbers[PLANNED : PLANNED + len(keys)] = memoryview(array("q", keys))
        self._numbers[NUM_PLANNED] = len(keys)

    def stats(self, count: int) -> tuple[int, ...]:
        """The first `count` numbers of those `put_stats` wrote."""
        return tuple(self._numbers[STATS : STATS + count])

    def put_stats(self, values: Sequence[int]) -> None:
        """At most `NUM_STATS` numbers, in an order that both sides know."""
        for i, value in enumerate(values):
            self._numbers[STATS + i] = value

    def close(self) -> None:
        """Release the memory. May be called twice."""
        self._times.release()
        self._numbers.release()
        self._memory.close()


def nbytes(max_planned: int) -> int:
    """Bytes of a shared status block for steps of at most so many requests."""
    return 8 * (PLANNED + max_planned)


def new_page(max_planned: int) -> int:
    """The descriptor of memory for a `Page`: all zero."""
    fd = new_memory("plait-engine")
    os.truncate(fd, nbytes(max_planned))
    return fd


def new_memory(name: str) -> int:
    """The descriptor of memory that processes can share, empty; gone with its last user. Raises OSError."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
