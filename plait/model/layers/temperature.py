"""Queries that grow with their position, so that attention over long sequences stays sharp (Llama 4)."""

from __future__ import annotations

import torch
from torch import Tensor

from plait.checkpoint.weights import Weights
from plait.errors import UnsupportedModel
from plait.model.layers.layers import Batch
from plait.ops.activation import combine, scale_rows
from plait.ops.rows import take_rows
from plait.spec.positions import TemperatureSpec

MOST_POSITIONS = 1 << 24  # of a table with a row for each


def list_positions(w: Weights) -> Tensor:
    """Every position of the longest sequence, [max_len] float64, on the CPU: the same on every processor.

    Of a model without numbers they are on its device. Raises UnsupportedModel for too many.
    """
    count, device = w.target.max_len, w.target.device
    if device.type == "meta":
        return torch.empty(count, dtype=torch.float64, device=device)
    if count > MOST_POSITIONS:
        raise UnsupportedModel(
            f"{w.prefix}: attention needs a number for each of {count} positions, of which at most "
            f"{MOST_POSITIONS} are implemented; --max-model-len {MOST_POSITIONS} serves shorter sequences"
        )
    return torch.arange(count, dtype=torch.float64)


class Temperature:
    """What queries are multiplied by, from a table of all positions that the layers share."""

    def __init__(self, s: TemperatureSpec, w: Weights) -> None:
        def table(_: Weights) -> Tensor:
            at = list_positions(w)
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
            at = list_positions(w)
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
