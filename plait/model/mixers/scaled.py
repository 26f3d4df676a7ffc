"""A residual branch with learned vectors: what stays and what is added are each scaled and shifted (ZAYA)."""

from __future__ import annotations

import torch
from torch import Tensor

from plait.checkpoint.weights import Weights
from plait.memory import State
from plait.model.layers.layers import Batch, Norm
from plait.model.mixers.registry import INNER, build, describe, divide_inside, mixer
from plait.ops.ranks import sum_ranks
from plait.ops.streams import write_scaled
from plait.spec.branches import ScaledSpec
from plait.state.store import StateStore


def _words(m: ScaledSpec) -> str:
    return f"{describe(m.parts[INNER])}, scaled" if INNER in m.parts else "channels scaled"


@mixer(ScaledSpec, _words, divide_inside)
class Scaled:
    """What it gives is added to x. `stays` and `added` have a `scale` and a `shift` each, [hidden]."""

    is_summed = True

    def __init__(self, s: ScaledSpec, w: Weights) -> None:
        self.inner = build(s.parts[INNER], w.scope(INNER)) if INNER in s.parts else None
        hidden = w.target.hidden_size
        self.norm = Norm(s.norm, w.scope("norm"), hidden) if s.norm else None
        self.post_norm = Norm(s.post_norm, w.scope("post_norm"), hidden) if s.post_norm else None
        self.states: dict[str, State] = self.inner.states if self.inner else {}
        names = ("stays", "added") if self.inner else ("stays",)
        self._vectors = [
            [w.scope(name).tensor(x, (hidden,), torch.float32) for x in ("scale", "shift")] for name in names
        ]
        self._write = w.bind(write_scaled)
        self._ranks = (w.target.comm, w.target.dtype)

    def __call__(self, x: Tensor, batch: Batch, store: StateStore) -> Tensor:
        """x: [T, hidden] -> [T, hidden]."""
        y = None
        if self.inner:
            y = self.inner(self.norm(x) if self.norm else x, batch, store)
            y = y if getattr(self.inner, "is_summed", False) else sum_ranks(y, *self._ranks)
            y = self.post_norm(y) if self.post_norm else y
        change: Tensor = self._write(x, *self._vectors[0], y, *self._vectors[-1])
        return change
