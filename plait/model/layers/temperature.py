"""Queries that grow with their position, so that attention over long sequences stays sharp (Llama 4)."""

from __future__ import annotations

import torch
from torch import Tensor

from plait.checkpoint.weights import Weights
from plait.model.layers.layers import Batch
from plait.ops.activation import combine, scale_rows
from plait.ops.rows import take_rows
from plait.spec.positions import TemperatureSpec


class Temperature:
    """What queries are multiplied by, from a table of all positions that the layers share."""

    def __init__(self, s: TemperatureSpec, w: Weights) -> None:
        def table(_: Weights) -> Tensor:
            at = torch.arange(w.target.max_len, dtype=torch.float64)  # rounded, the same on every processor
            far = (at + s.first) / s.length
            logs = far.clamp(min=1.0).log() if s.late else torch.log1p(far.floor())
            grown = (1 + far) ** s.growth if s.power else 1 + s.growth * logs
            return grown[:, None].float().to(w.target.device)

        self.table: Tensor = w.shared(f"temperature of {s}", table)
        self._take, self._scale = w.bind(take_rows), w.bind(scale_rows)

    def __call__(self, q: Tensor, batch: Batch) -> Tensor:
        """q: [T, heads, d] -> its like."""
        out: Tensor = self._scale(q, self._take(self.table, batch.positions))
        return out


class HeadGrowth(Temperature):
    """What queries of a head are multiplied by at position p: `scale` · ln(p + 1) + `bias`, both [heads]."""

    def __init__(self, w: Weights, heads: int) -> None:
        def table(_: Weights) -> Tensor:
            at = torch.arange(w.target.max_len, dtype=torch.float64)
            return at.log1p()[:, None].float().to(w.target.device)

        self.table = w.shared("logarithms of positions", table)
        self.factor, self.bias = (w.tensor(name, (heads,), torch.float32) for name in ("scale", "bias"))
        self._take, self._scale, self._combine = w.bind(take_rows), w.bind(scale_rows), w.bind(combine)

    def __call__(self, q: Tensor, batch: Batch) -> Tensor:
        """q: [T, heads, d] -> its like."""
        logs, shape = self._take(self.table, batch.positions), q.shape[:2]
        grown = self._combine(self._scale(self.factor.expand(shape), logs), self.bias.expand(shape), 1.0)
        out: Tensor = self._scale(q, grown)
        return out
