"""A layer's own input: its part of what the model computed of the token at the start of the step, gated."""

from __future__ import annotations

from torch import Tensor

from plait.checkpoint.weights import Weights
from plait.memory import State
from plait.model.layers.layer_inputs import NAME
from plait.model.layers.layers import Batch
from plait.model.mixers.registry import mixer
from plait.ops.activation import activate, multiply
from plait.partition import Division, Rank
from plait.spec.branches import LayerInputSpec
from plait.state.store import StateStore


def _words(s: LayerInputSpec) -> str:
    return f"input of its own, {s.size}, {s.activation}"


def _divide(s: LayerInputSpec, rank: Rank, hidden_size: int) -> Division:
    """It is small, so every rank has all of it, and nothing is summed."""
    return Division(s, {}, sums=-1)


@mixer(LayerInputSpec, _words, _divide)
class LayerInput:
    is_summed = True  # each rank computes the whole

    def __init__(self, s: LayerInputSpec, w: Weights) -> None:
        self.spec, self.states = s, dict[str, State]()
        hidden = w.target.hidden_size
        self.gate = w.linear("gate", in_size=hidden, out_sizes=(s.size,))
        self.out = w.linear("out", in_size=s.size, out_sizes=(hidden,))
        self._activate = w.bind(activate, kind=s.activation, gated=False)
        self._multiply = w.bind(multiply)

    def __call__(self, x: Tensor, batch: Batch, store: StateStore) -> Tensor:
        """x: [T, hidden] -> [T, hidden]."""
        s = self.spec
        own = batch.step[NAME][:, s.index * s.size : (s.index + 1) * s.size]
        return self.out(self._multiply(self._activate(self.gate(x), s.activation, False), own))
