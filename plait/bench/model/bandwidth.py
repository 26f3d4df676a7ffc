"""The measured roofs of a machine: how fast it reads memory, and how fast it multiplies."""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from typing import Any

import numpy as np

SECONDS = 0.06  # of each reading: long enough for several passes over a model of 100 MB
HUGE = 2 << 20
MATRIX = 1024  # rows and columns of the product that stands for arithmetic


class Probe:
    """Reads a buffer of `nbytes` with any number of threads up to `threads`. `close()` lets it go."""

    def __init__(self, nbytes: int, threads: int) -> None:
        self.nbytes, self.threads = max(nbytes, 1 << 20) // (HUGE) * HUGE or HUGE, threads
        private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
        self._memory = mmap.mmap(-1, self.nbytes, **private)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        self._words = np.frombuffer(self._memory, np.int64)
        self._words[:] = 1
        self._sum = reader()
        self._pool = ThreadPoolExecutor(threads)
        self._sum(self._words[:1024], 1)

    def read(self, threads: int | None = None) -> float:
        """GB/s (1e9 bytes) of reading the whole buffer again and again."""
        count = min(threads or self.threads, self.threads)
        parts = np.array_split(self._words, count)
        passes, total = 1, 0.0
        while True:
            started = time.perf_counter()
            sums = list(self._pool.map(self._sum, parts, [passes] * count))
            total = time.perf_counter() - started
            if sum(sums) != passes * len(self._words):
                raise ArithmeticError("a probe of memory read something that was never written")
            if total >= SECONDS:
                return passes * self.nbytes / total / 1e9
            passes *= 2 if total <= SECONDS / 4 else 1 + int(SECONDS / total)

    def close(self) -> None:
        self._pool.shutdown()
        self._words = np.empty(0, np.int64)


def reader() -> Callable[[Any, int], int]:
    """(int64 words, passes) -> their sum over all passes, without the GIL; NumPy's where Numba is not."""
    try:
        from numba import njit
    except ImportError:
        return lambda words, passes: sum(int(words.sum()) for _ in range(passes))

    def read(words, passes):  # type: ignore[no-untyped-def]
        total = 0
        quarter = len(words) // 4  # four streams at a time: one alone leaves memory waiting
        for again in range(passes):
            a, b, c, d = 0, 0, 0, 0
            for i in range(quarter):
                a += words[i]
                b += words[quarter + i]
                c += words[2 * quarter + i]
                d += words[3 * quarter + i]
            for i in range(4 * quarter, len(words)):
                a += words[i]
            total += a + b + c + d + again - again
        return total

    compiled = njit("int64(int64[::1], int64)", nogil=True, boundscheck=False)(read)
    found: Callable[[object, int], int] = compiled
    return found


def bandwidth(nbytes: int, threads: int, repeats: int = 5) -> dict[str, float]:
    """Medians of reading `nbytes` on one and on all threads, GB/s."""
    probe = Probe(nbytes, threads)
    try:
        one = median(probe.read(1) for _ in range(repeats))
        every = median(probe.read() for _ in range(repeats))
    finally:
        probe.close()
    return {
        "nbytes": probe.nbytes,
        "threads": threads,
        "one_gb_s": round(one, 1),
        "all_gb_s": round(every, 1),
    }


def arithmetic(threads: int, repeats: int = 5) -> float:
    """TFLOP/s of a float32 matrix product of torch: what the machine's usual arithmetic reaches."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        a, b = (torch.ones(MATRIX, MATRIX) for _ in range(2))
        out = torch.empty(MATRIX, MATRIX)
        times = []
        for _ in range(repeats + 1):
            started = time.perf_counter()
            torch.mm(a, b, out=out)
            times.append(time.perf_counter() - started)
    finally:
        torch.set_num_threads(before)
    return round(2 * MATRIX**3 / min(times[1:]) / 1e12, 3)
