"""A residual branch with learned vectors: what stays and what is added are each scaled and shifted (ZAYA)."""

from __future__ import annotations

import torch
from torch import Tensor

from plait.checkpoint.weights import Weights
from plait.memory import State
from plait.model.layers.layers import Batch, Norm
from plait.model.mixers.registry import INNER, build, describe, divide_inside, mixer
from plait.ops.activation import combine
from plait.ops.ranks import sum_ranks
from plait.ops.wkv import mix_shift
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
        self.states: dict[str, State] = self.inner.states if self.inner else {}
        names = ("stays", "added") if self.inner else ("stays",)
        self._vectors = [
            [w.scope(name).tensor(x, (hidden,), torch.float32) for x in ("scale", "shift")] for name in names
        ]
        self._affine, self._combine = w.bind(mix_shift), w.bind(combine)
        self._ranks = (w.target.comm, w.target.dtype)

    def __call__(self, x: Tensor, batch: Batch, store: StateStore) -> Tensor:
        """x: [T, hidden] -> [T, hidden]."""
        total = self._scale(0, x)
        if self.inner:
            y = self.inner(self.norm(x) if self.norm else x, batch, store)
            y = y if getattr(self.inner, "is_summed", False) else sum_ranks(y, *self._ranks)
            total = self._combine(total, self._scale(1, y), 1.0)
        change: Tensor = self._combine(total, x, -1.0)
        return change

    def _scale(self, which: int, x: Tensor) -> Tensor:
        scale, shift = (vector.expand(len(x), -1) for vector in self._vectors[which])
        out: Tensor = self._affine(shift, x, scale)
        return out
