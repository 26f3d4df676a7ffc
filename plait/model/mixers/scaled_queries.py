"""Attention with a learned factor for each number of a rotated query, and a norm of gated outputs (Dory)."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from plait.checkpoint.weights import Weights
from plait.model.layers.layers import Batch
from plait.model.layers.temperature import Temperature
from plait.model.mixers.attention import Attention, describe_attention, divide_attention
from plait.model.mixers.registry import mixer
from plait.ops.activation import multiply
from plait.partition import Division, Rank
from plait.spec.attention import ScaledQueriesSpec


def _words(m: ScaledQueriesSpec) -> str:
    return f"{describe_attention(m)}, queries scaled"


def _divide(s: ScaledQueriesSpec, rank: Rank, hidden_size: int) -> Division:
    """As attention; the factors go with their heads."""
    found = divide_attention(s, rank, hidden_size)
    return replace(found, cuts={**found.cuts, "q_scale": found.cuts["q"]})


class QueryScale(Temperature):
    """`q_scale` [heads · d]: what queries are multiplied by, the same at every position."""

    def __init__(self, w: Weights, width: int) -> None:
        self.factors = w.tensor("q_scale", (width,), torch.float32)
        self._multiply = w.bind(multiply)

    def __call__(self, q: Tensor, batch: Batch) -> Tensor:
        """q: [T, heads, d] -> its like."""
        wide = q.flatten(1)
        scaled: Tensor = self._multiply(wide, self.factors.expand(wide.shape))
        return scaled.view(q.shape)


@mixer(ScaledQueriesSpec, _words, _divide)
class ScaledQueries(Attention):
    """Queries are scaled where others grow with their position."""

    def __init__(self, s: ScaledQueriesSpec, w: Weights) -> None:
        super().__init__(s, w)
        self.temperature = QueryScale(w, s.num_heads * s.head_dim)

    def _close(self, out: Tensor, x: Tensor, closing: list[Tensor]) -> Tensor:
        assert self.o is not None
        out = out.flatten(1)
        out = self._gate(out, closing[0].flatten(1)) if self._gate else out
        return self.o(self.out_norm(out) if self.out_norm else out)
