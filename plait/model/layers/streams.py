"""Several residual streams of a token side by side, as AltUp has them (Baykal et al. 2023; Gemma 3n)."""

from __future__ import annotations

from functools import reduce

from torch import Tensor

from plait import spec
from plait.checkpoint.weights import Weights
from plait.ops.activation import combine, rescale
from plait.ops.linear import Linear
from plait.ops.rows import join
from plait.ops.streams import match_size

LEAST = 1e-5  # mean square of what is made as large as the first stream


class Streams:
    """How the streams begin, and how they become one again: `spread.1`, `join.1` and on are linear layers."""

    def __init__(self, s: spec.ModelSpec, weights: Weights) -> None:
        assert s.streams is not None
        self.count, self.size, w = s.streams, s.hidden_size, weights.scope("streams")

        def linears(name: str) -> list[Linear]:
            numbers = range(1, self.count)
            return [w.linear(f"{name}.{k}", in_size=self.size, out_sizes=(self.size,)) for k in numbers]

        self._spread, self._join = linears("spread"), linears("join")
        self._match, self._pair = w.bind(match_size), w.bind(join)
        self._combine, self._rescale = w.bind(combine), w.bind(rescale)

    def spread(self, x: Tensor) -> Tensor:
        """Embeddings [T, hidden] -> [T, streams * hidden]: projections as large as the embedding itself."""
        made = (self._match(linear(x), x, LEAST) for linear in self._spread)
        wide: Tensor = reduce(self._pair, made, x)
        return wide

    def join(self, x: Tensor, delta: Tensor | None) -> Tensor:
        """[T, streams * hidden], and what is to be added -> [T, hidden]: their mean, turned back."""
        x = x if delta is None else self._combine(x, delta, 1.0)
        first, *others = x.split(self.size, -1)
        total = first
        for linear, other in zip(self._join, others, strict=True):
            total = self._combine(total, self._match(linear(other), first, LEAST), 1.0)
        found: Tensor = self._rescale(total, 1.0 / self.count, None)
        return found
