"""A mixer with outputs that a short convolution mixes over time (Inkling)."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from plait.checkpoint.weights import Weights
from plait.memory import SlotState, State
from plait.model.layers.layers import Batch
from plait.model.mixers.mamba2 import WITH_INPUT, DepthwiseConv
from plait.model.mixers.registry import build, describe, divide, mixer
from plait.ops.ranks import sum_ranks
from plait.partition import Division, Rank
from plait.rare_specs import ConvolvedSpec
from plait.state.store import StateStore

INNER = "inner"


def _words(m: ConvolvedSpec) -> str:
    return f"{describe(m.parts[INNER])}, convolved over {m.taps} tokens"


def _divide(s: ConvolvedSpec, rank: Rank, hidden_size: int) -> Division:
    """What is inside is divided, and summed before it is convolved: each rank does that with all of it."""
    inner = divide(s.parts[INNER], rank, hidden_size)
    cuts = {f"{INNER}.{key}": cut for key, cut in inner.cuts.items()}
    return Division(replace(s, parts={INNER: inner.spec}), cuts, inner.sums, inner.gathers)


@mixer(ConvolvedSpec, _words, _divide)
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
