"""Shared memory of a block: how many stages a loop over weights may have on a GPU.

A loop of S stages keeps what S - 1 of its steps load, copied ahead. Operands of products pass through the
same memory on their way to the units that multiply. Stages decide when loads happen, never the order of
sums: with fewer of them a result has the same bits.

    stage 1        stage 2        operands
    codes │ x      codes │ x      numbers │ x        bytes of a block, for S = 3

Tiles and stages are the same on all GPUs with 99 KiB or more, so that few forms are compiled. A GPU with less
(sm_75 has 64 KiB) gets the most stages that it holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from plait.ops.chip import read_chip
from plait.quant.planes import LANES, PlaneLayout

HALF = 2  # bytes of a number of bfloat16 or float16
LEAST_SHARED = 99 << 10  # bytes for a block on sm_86, sm_89 and sm_120; others but sm_75 have more


@cache
def shared_limit(device: torch.device) -> int:
    """Bytes of shared memory that a block may have; the interpreter has as much as it likes."""
    chip = read_chip(device)
    return LEAST_SHARED if chip is None else chip.shared_nbytes


@dataclass(frozen=True, slots=True)
class LoopMemory:
    """Bytes of a block. step: what one step of the loop loads; operands: what passes on to a product."""

    step: int
    operands: int = 0

    def nbytes(self, stages: int) -> int:
        """What a loop of so many stages takes, at most."""
        return (stages - 1) * self.step + self.operands

    def fit_stages(self, wanted: int, limit: int) -> int:
        """`wanted` stages, or the most that `limit` bytes hold; 1 at least."""
        most = min(limit, LEAST_SHARED)
        return next((s for s in range(wanted, 1, -1) if self.nbytes(s) <= most), 1)


def plane_memory(layout: PlaneLayout, units: int, outputs: int, rows: int) -> LoopMemory:
    """Of a loop over planes, by steps of `units` units, `outputs` rows of the weight and `rows` rows of x in
    bfloat16 or float16. Scales of 4 bytes are copied ahead, too."""
    codes = units * outputs * layout.unit * (layout.bits + layout.high) // 8
    scales = 4 * units * outputs * max(1, layout.unit // min(layout.group, layout.unit))
    operands = units * LANES * (outputs + rows) * HALF
    return LoopMemory(codes + scales + units * layout.unit * rows * HALF, operands)


def dense_memory(columns: int, outputs: int, rows: int, dtype: torch.dtype) -> LoopMemory:
    """Of a loop over plain numbers, by steps of `columns` columns, `outputs` rows of the weight and `rows` of
    x."""
    return LoopMemory(columns * (outputs + rows) * dtype.itemsize)
