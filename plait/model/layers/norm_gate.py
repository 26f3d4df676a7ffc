"""The gate of a norm, of low rank, made of what it has normed (GigaChat 3.5)."""

from __future__ import annotations

from torch import Tensor

from plait.checkpoint.weights import Weights
from plait.ops.activation import gate
from plait.ops.streams import activate_scaled
from plait.spec.branches import GatedNormSpec


class NormGate:
    """`narrow` [rank, size], `widen` [size, rank]. What is normed has the scale in it, and `narrow` is of
    what has not."""

    def __init__(self, s: GatedNormSpec, w: Weights, size: int) -> None:
        self._unscale = 1.0 / s.scale
        self._narrow = w.linear("narrow", in_size=size, out_sizes=(s.rank,))
        self._widen = w.linear("widen", in_size=s.rank, out_sizes=(size,))
        self._activate, self._gate = w.bind(activate_scaled, kind="silu"), w.bind(gate)

    def __call__(self, h: Tensor) -> Tensor:
        """h: [T, size] -> its like."""
        narrow = self._activate(self._narrow(h), self._unscale, "silu", 1.0)
        gated: Tensor = self._gate(h, self._widen(narrow))
        return gated
