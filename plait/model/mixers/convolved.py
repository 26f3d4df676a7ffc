"""A mixer with outputs that a short convolution mixes over time (Inkling)."""

from __future__ import annotations

from torch import Tensor

from plait.checkpoint.weights import Weights
from plait.memory import SlotState, State
from plait.model.layers.layers import Batch
from plait.model.mixers.mamba2 import WITH_INPUT, DepthwiseConv
from plait.model.mixers.registry import INNER, build, describe, divide_inside, mixer
from plait.ops.ranks import sum_ranks
from plait.spec.branches import ConvolvedSpec
from plait.state.store import StateStore


def _words(m: ConvolvedSpec) -> str:
    return f"{describe(m.parts[INNER])}, convolved over {m.taps} tokens"


@mixer(ConvolvedSpec, _words, divide_inside)
class Convolved:
    is_summed = True

    def __init__(self, s: ConvolvedSpec, w: Weights) -> None:
        self.name, self.inner = w.prefix, build(s.parts[INNER], w.scope(INNER))
        self.conv = DepthwiseConv(w, w.target.hidden_size, s.taps, None, WITH_INPUT)
        tail = SlotState({"conv": (self.conv.tail_shape, "model")})
        self.states: dict[str, State] = {self.name: tail, **self.inner.states}
        self._ranks = (w.target.comm, w.target.dtype)

    def __call__(self, x: Tensor, batch: Batch, store: StateStore) -> Tensor:
        """x: [T, hidden] -> [T, hidden]."""
        y = self.inner(x, batch, store)
        y = y if getattr(self.inner, "is_summed", False) else sum_ranks(y, *self._ranks)
        return self.conv(y, batch, store[self.name]["conv"])
