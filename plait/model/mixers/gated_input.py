"""A mixer that reads its input through a gate of low rank, which that input makes (A.X K2)."""

from __future__ import annotations

from torch import Tensor

from plait.checkpoint.weights import Weights
from plait.model.layers.layers import Batch
from plait.model.mixers.registry import INNER, build, describe, divide_inside, mixer
from plait.ops.activation import activate, gate
from plait.spec.branches import GatedInputSpec
from plait.state.store import StateStore


def _words(m: GatedInputSpec) -> str:
    return f"{describe(m.parts[INNER])}, its input gated by rank {m.rank}"


@mixer(GatedInputSpec, _words, divide_inside)
class GatedInput:
    """narrow: [rank, hidden], widen: [hidden, rank]."""

    def __init__(self, s: GatedInputSpec, w: Weights) -> None:
        hidden = w.target.hidden_size
        self.inner = build(s.parts[INNER], w.scope(INNER))
        self.is_summed = getattr(self.inner, "is_summed", False)
        self.states = self.inner.states
        self._narrow = w.linear("narrow", in_size=hidden, out_sizes=(s.rank,))
        self._widen = w.linear("widen", in_size=s.rank, out_sizes=(hidden,))
        self._activate, self._gate = w.bind(activate, kind="silu", gated=False), w.bind(gate)

    def __call__(self, x: Tensor, batch: Batch, store: StateStore) -> Tensor:
        """x: [T, hidden] -> [T, hidden]."""
        opened = self._widen(self._activate(self._narrow(x), "silu", False))
        return self.inner(self._gate(x, opened), batch, store)
