"""How the kernels that sample are launched: over tensors of a model, or over arrays of a startup image.

The memory is the caller's, and nothing here needs torch or Numba. `kernels.cpu.pointwise.sample` has the
kernels.
"""

from __future__ import annotations

from typing import Any

from plait.kernels.cpu.runtime.frame_words import LINE
from plait.kernels.cpu.runtime.threads import Launchable, Threads


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
    scratch = -(-16 * width // LINE) * LINE + 1024  # whole cache lines, and the counts of a sort
    cpu.launch(kernel, logits, row_bytes, width, *settings, out, rows=rows, scratch=scratch)
