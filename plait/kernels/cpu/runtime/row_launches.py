"""How the kernels of `kernels.cpu.pointwise.sample` are launched, without torch or Numba in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from plait.kernels.cpu.runtime.frame_words import LINE
from plait.kernels.cpu.runtime.threads import Launchable, Threads

Floats = npt.NDArray[np.float32]
Longs = npt.NDArray[np.int64]
FindLargest = Callable[[Floats], tuple[Longs, Floats]]
DrawFromRows = Callable[[Floats, tuple[object, ...]], Longs]


def launch_largest(
    cpu: Threads, kernel: Launchable, logits: Any, row_bytes: int, ids: object, values: object
) -> None:
    """logits: [rows, width] float32, rows so far apart -> ids (int64) and values (float32) of the largest."""
    rows, width = logits.shape
    cpu.launch(kernel, logits, row_bytes, width, ids, values, rows=rows, shared=16 * rows * cpu.threads)


def launch_draw(
    cpu: Threads, kernel: Launchable, logits: Any, row_bytes: int, settings: tuple[object, ...], out: object
) -> None:
    """logits: [rows, width] float32, rows so far apart -> ids (int64) that are drawn from them.

    settings: temperature, top_k (int64), top_p, min_p, uniform, each [rows], float64 but for top_k.
    """
    rows, width = logits.shape
    args = logits, row_bytes, width, *settings, out
    cpu.launch(kernel, *args, rows=rows, scratch=draw_scratch(width))


def draw_scratch(width: int) -> int:
    """Bytes of scratch that a draw from rows of that width needs."""
    return -(-16 * width // LINE) * LINE + 1024  # whole cache lines, and the counts of a sort


def find_largest(cpu: Threads, kernel: Launchable, logits: Floats) -> tuple[Longs, Floats]:
    """`launch_largest` over an array: ids and values."""
    ids, values = np.empty(len(logits), np.int64), np.empty(len(logits), np.float32)
    launch_largest(cpu, kernel, logits, logits.strides[0], ids, values)
    return ids, values


def draw(cpu: Threads, kernel: Launchable, logits: Floats, settings: tuple[object, ...]) -> Longs:
    """`launch_draw` over an array: ids."""
    out = np.empty(len(logits), np.int64)
    launch_draw(cpu, kernel, logits, logits.strides[0], settings, out)
    return out
