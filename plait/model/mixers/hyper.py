"""A residual branch over several streams (hyper-connections; Zhu et al. 2024): it reads one sum of them."""

from __future__ import annotations

from torch import Tensor

from plait.checkpoint.weights import Weights
from plait.model.layers.layers import Batch, Norm
from plait.model.layers.streams import GatedRead, StreamWeights, take_read
from plait.model.mixers.registry import INNER, build, describe, divide_inside, mixer
from plait.ops.ranks import sum_ranks
from plait.ops.streams import activate_scaled, mix_streams, read_streams, write_streams
from plait.spec.branches import GatedBranchSpec, HyperBranchSpec
from plait.state.store import StateStore


def _words(m: HyperBranchSpec) -> str:
    mixed = "" if m.hyper.rounds is None else ", mixed"
    return f"{describe(m.parts[INNER])}, over {m.hyper.count} streams{mixed}"


def _gated_words(m: GatedBranchSpec) -> str:
    return f"{describe(m.parts[INNER])}, over {m.hyper.count} gated streams"


@mixer(HyperBranchSpec, _words, divide_inside)
class HyperBranch:
    """What it gives is added to all streams: [T, streams * hidden]."""

    is_summed = True

    def __init__(self, s: HyperBranchSpec, w: Weights) -> None:
        self.count, self.size = s.hyper.count, w.target.hidden_size
        self.inner = build(s.parts[INNER], w.scope(INNER))
        self.states = self.inner.states
        self.norm = Norm(s.norm, w.scope("norm"), self.size)
        mixed = 0 if s.hyper.rounds is None else self.count * self.count
        self._weights = StreamWeights(s.hyper, w, 2 * self.count + mixed)
        self._parts = [self.count, self.count, *([mixed] if mixed else [])]
        self._mix, self._write = w.bind(mix_streams), w.bind(write_streams)
        self._read = w.bind(read_streams, size=self.size) if s.norm.kind == "rms" else None
        self._ranks, self._is_delayed = (w.target.comm, w.target.dtype), s.hyper.is_delayed

    def __call__(self, x: Tensor, batch: Batch, store: StateStore) -> Tensor:
        """x: [T, streams * hidden] -> its like."""
        read, written, *mixed = self._weights(x).split(self._parts, -1)
        if self._is_delayed:
            read = take_read(batch.step, read)
        streams = x.unflatten(-1, (self.count, self.size))
        y = self.inner(self._read_streams(streams, read), batch, store)
        y = y if getattr(self.inner, "is_summed", False) else sum_ranks(y, *self._ranks)
        delta = self._write(streams, y, written, *mixed) if mixed else self._mix(y[:, None], written)
        added: Tensor = delta.flatten(1)
        return added

    def _read_streams(self, streams: Tensor, by: Tensor | None) -> Tensor:
        """One sum of them, normed; without weights the first, which is then an embedding."""
        if by is None:
            return self.norm(streams[:, 0])
        if self._read is None:
            return self.norm(self._mix(streams, by)[:, 0])
        found: Tensor = self._read(streams, by, self.norm.weight, self.norm.spec.eps)
        return found


@mixer(GatedBranchSpec, _gated_words, divide_inside)
class GatedBranch:
    """What it gives is added to each stream, times a number that all streams make (Qwen4-Exp)."""

    is_summed = True

    def __init__(self, s: GatedBranchSpec, w: Weights) -> None:
        self.inner = build(s.parts[INNER], w.scope(INNER))
        self.states, self._read, self.count = self.inner.states, GatedRead(s.hyper, w), s.hyper.count
        self._written = w.linear(
            "written", in_size=self.count * w.target.hidden_size, out_sizes=(self.count,)
        )
        self._activate, self._mix = w.bind(activate_scaled, kind="sigmoid"), w.bind(mix_streams)
        self._magnitude = s.hyper.magnitude
        self._ranks = (w.target.comm, w.target.dtype)

    def __call__(self, x: Tensor, batch: Batch, store: StateStore) -> Tensor:
        """x: [T, streams * hidden] -> its like."""
        normed, read = self._read(x)
        by = self._activate(self._written(normed), 1.0 / self.count, "sigmoid", self._magnitude)
        y = self.inner(read, batch, store)
        y = y if getattr(self.inner, "is_summed", False) else sum_ranks(y, *self._ranks)
        delta: Tensor = self._mix(y[:, None], by).flatten(1)
        return delta
