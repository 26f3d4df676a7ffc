"""A norm between two linear layers, over features of which each rank has a part (BitNet)."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from plait.checkpoint.weights import Weights
from plait.model.layers.layers import Norm
from plait.ops.ranks import gather_columns
from plait.partition import join_ranges, width
from plait.spec.model import NormSpec


class InnerNorm:
    """`size` features of this rank, `unit` of which stay together. Each rank norms those of all."""

    def __init__(self, s: NormSpec, w: Weights, size: int, unit: int | None = None) -> None:
        self._comm, rank = w.target.comm, w.target.comm.rank
        self._widths, self._start = [size], 0
        if rank.size > 1:
            total = w.read("weight").shape[0]
            each = [replace(rank, index=index) for index in range(rank.size)]
            if unit:
                self._widths = [size] * rank.size
            else:
                self._widths = [width(join_ranges(r.divide_blocks(total, "inner features"))) for r in each]
            self._start = sum(self._widths[: rank.index])
        self._norm = Norm(s, w, sum(self._widths))

    def __call__(self, x: Tensor) -> Tensor:
        """x: [T, size] -> its like."""
        if len(self._widths) == 1:
            return self._norm(x)
        whole = self._norm(gather_columns(self._comm, x, self._widths))
        return whole[..., self._start : self._start + x.shape[-1]].contiguous()
