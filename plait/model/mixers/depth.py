"""Attention residuals (Kimi Team 2026; Kimi-K3): a branch reads a mean of what earlier layers gave."""

from __future__ import annotations

import torch
from torch import Tensor

from plait.checkpoint.weights import Weights
from plait.memory import State
from plait.model.layers.layers import Batch, Norm
from plait.model.layers.streams import Repeat
from plait.model.mixers.registry import INNER, build, describe, divide_inside, mixer
from plait.ops.ranks import sum_ranks
from plait.ops.streams import mix_sources
from plait.spec.branches import DepthSpec
from plait.state.store import StateStore

BLOCKS = "blocks of layers"  # in `Batch.step`


def _words(m: DepthSpec) -> str:
    inner = f"{describe(m.parts[INNER])}, over " if m.parts else ""
    blocks = f"{m.sources} earlier block{'' if m.sources == 1 else 's'}" if m.sources else "this block alone"
    reads = f" by {m.reads} means" if m.reads > 1 else ""
    return f"{inner}{blocks}{reads}{', a new one begins' if m.ends else ''}"


@mixer(DepthSpec, _words, divide_inside)
class DepthBranch:
    """Blocks that have ended are in the step: what they gave, for every token of it.

    `source` [reads, hidden] scores the sources: the weight of their norm times that of a linear layer.
    """

    is_summed = True

    def __init__(self, s: DepthSpec, w: Weights) -> None:
        self.spec, hidden = s, w.target.hidden_size
        self.inner = build(s.parts[INNER], w.scope(INNER)) if s.parts else None
        self.states = self.inner.states if self.inner else dict[str, State]()
        self.norm = self._build_norm(s, w)
        shape = (hidden,) if s.reads == 1 else (s.reads, hidden)
        scores = w.tensor("source", shape, torch.float32) if s.sources else None
        self.queries = None if scores is None else scores.view(s.reads, hidden)
        self._mix = w.bind(mix_sources, sources=s.sources + 1, reads=s.reads, size=hidden)
        self._ranks = (w.target.comm, w.target.dtype)
        self._repeat = Repeat(s.reads, w) if s.reads > 1 and not s.sources else None

    def _build_norm(self, s: DepthSpec, w: Weights) -> Norm | None:
        return Norm(s.norm, w.scope("norm"), s.reads * w.target.hidden_size, s.reads) if s.norm else None

    def __call__(self, x: Tensor, batch: Batch, store: StateStore) -> Tensor:
        """x: [T, hidden], what this block gave so far -> [T, hidden]; `inner` reads [T, reads · hidden]."""
        read = self._mean(x, batch)
        if self.spec.ends:
            batch.step[BLOCKS].append(x)
        read = self.norm(read) if self.norm else read
        if self.inner is None:
            return read
        y = self.inner(read, batch, store)
        return y if getattr(self.inner, "is_summed", False) else sum_ranks(y, *self._ranks)

    def _mean(self, x: Tensor, batch: Batch) -> Tensor:
        """x: [T, hidden] -> [T, reads · hidden]: a mean of each query."""
        ended: list[Tensor] = batch.step.setdefault(BLOCKS, [])
        if self.queries is not None:
            mean: Tensor = self._mix(self.queries, self.spec.eps, self.spec.of_normed, *ended, x)
            return mean
        return self._repeat(x) if self._repeat else x
