"""Outputs times a learned number, and the embedding added again and again (Talkie)."""

from __future__ import annotations

import torch
from torch import Tensor

from plait.checkpoint.weights import Weights
from plait.memory import State
from plait.model.layers.layers import EMBEDDINGS, Batch
from plait.model.mixers.registry import INNER, build, describe, divide_inside, mixer
from plait.ops.activation import scale_rows
from plait.ops.ranks import sum_ranks
from plait.spec.branches import GainSpec
from plait.state.store import StateStore


def _words(m: GainSpec) -> str:
    return f"{describe(m.parts[INNER])}, times a gain" if m.parts else "the embedding, times a gain"


@mixer(GainSpec, _words, divide_inside)
class Gain:
    """`gain` [1]: the number."""

    is_summed = True

    def __init__(self, s: GainSpec, w: Weights) -> None:
        self.inner = build(s.parts[INNER], w.scope(INNER)) if s.parts else None
        self.states = self.inner.states if self.inner else dict[str, State]()
        self.reads_embeddings = self.inner is None
        self.gain = w.tensor("gain", (1,), torch.float32)
        self._scale_rows, self._ranks = w.bind(scale_rows), (w.target.comm, w.target.dtype)

    def __call__(self, x: Tensor, batch: Batch, store: StateStore) -> Tensor:
        """x: [T, hidden] -> [T, hidden]."""
        y = self.inner(x, batch, store) if self.inner else batch.step[EMBEDDINGS]
        if self.inner and not getattr(self.inner, "is_summed", False):
            y = sum_ranks(y, *self._ranks)
        scaled: Tensor = self._scale_rows(y, self.gain.expand(len(y), 1))
        return scaled
