"""A layer over several streams (AltUp): it predicts all, computes the first one, and corrects the others."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from plait.checkpoint.weights import Weights
from plait.memory import State
from plait.model.layers.layers import Batch, Norm
from plait.model.mixers.registry import MixerModule, build, describe, divide, mixer
from plait.ops.activation import combine, rescale
from plait.ops.altup import add_streams, add_three, correct_streams, predict_streams
from plait.ops.ranks import sum_ranks
from plait.partition import Division, Rank
from plait.spec.branches import AltUpSpec
from plait.state.store import StateStore

HALF = 0.5**0.5


def _words(m: AltUpSpec) -> str:
    parts = "; ".join(f"{name}: {describe(part)}" for name, part in m.parts.items())
    return f"{m.streams} streams ({parts})"


def _divide(s: AltUpSpec, rank: Rank, hidden_size: int) -> Division:
    """Attention and feed-forward are divided, and each summed by itself; the rest is whole on every rank."""
    parts = {name: divide(part, rank, hidden_size) for name, part in s.parts.items()}
    cuts = {f"{name}.{key}": cut for name, part in parts.items() for key, cut in part.cuts.items()}
    gathers, sums = (sum(getattr(part, name) for part in parts.values()) for name in ("gathers", "sums"))
    return Division(replace(s, parts={n: p.spec for n, p in parts.items()}), cuts, sums + 2, gathers)


@mixer(AltUpSpec, _words, _divide)
class AltUpLayer:
    """What it gives is added to all streams: [T, streams * hidden]."""

    is_summed = True

    def __init__(self, s: AltUpSpec, w: Weights) -> None:
        self.count, self.size = s.streams, w.target.hidden_size
        self.parts = {name: build(part, w.scope(name)) for name, part in s.parts.items()}
        self.norms = {name: Norm(s.norm, w.scope(name), self.size) for name in s.NORMS}
        whole, count = self.size, self.count
        self.router = w.linear("router", in_size=whole, out_sizes=(count,))
        self.predict = w.linear("predict", in_size=count, out_sizes=(count * count,))
        self.correct = w.linear("correct", in_size=count, out_sizes=(count,))
        self.left = w.linear("laurel.left", in_size=whole, out_sizes=(s.rank,))
        self.right = w.linear("laurel.right", in_size=s.rank, out_sizes=(whole,))
        self.others = torch.tensor([[0.0] + [1.0] * (count - 1)], device=w.target.device)
        self._combine, self._rescale, self._add_three = w.bind(combine), w.bind(rescale), w.bind(add_three)
        self._predict, self._correct = w.bind(predict_streams), w.bind(correct_streams)
        self._add = w.bind(add_streams)
        self._ranks = (w.target.comm, w.target.dtype)
        self.states: dict[str, State] = {
            name: state for part in self.parts.values() for name, state in part.states.items()
        }

    def __call__(self, x: Tensor, batch: Batch, store: StateStore) -> Tensor:
        """x: [T, streams * hidden] -> its like."""
        streams = x.unflatten(-1, (self.count, self.size))
        moved, active = self._predict(streams, self.predict(self._route(x[:, : self.size])))
        found = self._compute(active, batch, store)
        spread, first = self._correct(active, found, self.correct(self._route(found)))
        own = self.norms["own.post_norm"](self.parts["own"](first, batch, store))
        delta: Tensor = self._add(moved, spread, own, self.others).flatten(1)
        return delta

    def _route(self, x: Tensor) -> Tensor:
        """What both maps of the streams are made from, [T, streams]: within ±1."""
        found: Tensor = self._rescale(self.router(self.norms["router_norm"](x)), 1.0, 1.0)
        return found

    def _compute(self, x: Tensor, batch: Batch, store: StateStore) -> Tensor:
        """The layer itself, with a path of low rank around attention (LAuReL). [T, hidden]."""
        norms = self.norms
        h = norms["attn.norm"](x)
        around = self._combine(h, norms["laurel.norm"](self.right(self.left(h))), 1.0)
        attended = norms["attn.post_norm"](self._part("attn", h, batch, store))
        total = self._add_three(x, attended, around, HALF)
        fed = norms["ffn.post_norm"](self._part("ffn", norms["ffn.norm"](total), batch, store))
        out: Tensor = self._combine(total, fed, 1.0)
        return out

    def _part(self, name: str, x: Tensor, batch: Batch, store: StateStore) -> Tensor:
        part: MixerModule = self.parts[name]
        y = part(x, batch, store)
        return y if getattr(part, "is_summed", False) else sum_ranks(y, *self._ranks)
