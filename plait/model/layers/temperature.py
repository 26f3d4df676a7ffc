"""Queries that grow with their position, so that attention over long sequences stays sharp (Llama 4)."""

from __future__ import annotations

import torch
from torch import Tensor

from plait.checkpoint.weights import Weights
from plait.model.layers.layers import Batch
from plait.ops.activation import scale_rows
from plait.ops.rows import take_rows
from plait.spec.model import TemperatureSpec


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
