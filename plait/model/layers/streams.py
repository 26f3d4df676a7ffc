"""Several residual streams of a token side by side: how they begin, and how they become one again."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Protocol

import torch
from torch import Tensor

from plait.checkpoint.weights import Weights
from plait.model.layers.layers import Norm
from plait.ops.activation import combine, rescale
from plait.ops.linear import Linear
from plait.ops.rows import join
from plait.ops.streams import activate_scaled, match_size, mix_gated, mix_streams, weigh_streams
from plait.spec.model import HyperSpec, ModelSpec

Step = dict[object, object]  # `Batch.step`
LEAST = 1e-5  # mean square of what is made as large as the first stream


class Streams(Protocol):
    is_normed: bool  # what `join` gives: the model's last norm is in it

    @property
    def spread(self) -> Callable[[Tensor], Tensor]:
        """Embeddings [T, hidden] -> [T, streams * hidden]."""

    def join(self, x: Tensor, delta: Tensor | None, step: Step) -> Tensor:
        """[T, streams * hidden], and what is to be added -> [T, hidden]. `step`: of the batch."""


def build_streams(s: ModelSpec, weights: Weights) -> Streams | None:
    """What a model has before its first layer and behind its last; None if it has one stream."""
    if s.hyper:
        return GatedStreams(s.hyper, weights) if s.hyper.rank else HyperStreams(s.hyper, weights)
    return AltUpStreams(s, weights) if s.streams else None


def build_last_norm(s: ModelSpec, streams: Streams | None, weights: Weights) -> Norm | None:
    """The model's last norm; None if it is in what `streams` joins."""
    is_normed = streams is not None and streams.is_normed
    return None if is_normed else Norm(s.norm, weights.scope("norm"), s.hidden_size)


class AltUpStreams:
    """AltUp (Baykal et al. 2023; Gemma 3n): `spread.1`, `join.1` and on are linear layers."""

    is_normed = False

    def __init__(self, s: ModelSpec, weights: Weights) -> None:
        assert s.streams is not None
        self.count, self.size, w = s.streams, s.hidden_size, weights.scope("streams")

        def linears(name: str) -> list[Linear]:
            numbers = range(1, self.count)
            return [w.linear(f"{name}.{k}", in_size=self.size, out_sizes=(self.size,)) for k in numbers]

        self._spread, self._join = linears("spread"), linears("join")
        self._match, self._pair = w.bind(match_size), w.bind(join)
        self._combine, self._rescale = w.bind(combine), w.bind(rescale)

    def spread(self, x: Tensor) -> Tensor:
        """Projections as large as the embedding itself, behind it."""
        made = (self._match(linear(x), x, LEAST) for linear in self._spread)
        wide: Tensor = reduce(self._pair, made, x)
        return wide

    def join(self, x: Tensor, delta: Tensor | None, step: Step) -> Tensor:
        """Their mean, turned back."""
        x = x if delta is None else self._combine(x, delta, 1.0)
        first, *others = x.split(self.size, -1)
        total = first
        for linear, other in zip(self._join, others, strict=True):
            total = self._combine(total, self._match(linear(other), first, LEAST), 1.0)
        found: Tensor = self._rescale(total, 1.0 / self.count, None)
        return found


class StreamWeights:
    """The weights by which a token's streams are read, written and mixed: `weights`, a linear layer."""

    def __init__(self, s: HyperSpec, w: Weights, size: int) -> None:
        """size: of the linear layer, `count` numbers for each of the three."""
        self.spec, wide = s, s.count * w.target.hidden_size
        self._norm = Norm(s.norm, w.scope("weights_norm"), wide)
        self._linear = w.linear("weights", in_size=wide, out_sizes=(size,))
        self._weigh = w.bind(weigh_streams, streams=s.count)

    def __call__(self, x: Tensor) -> Tensor:
        """x: [T, streams * hidden] -> [T, size] float32."""
        s = self.spec
        found: Tensor = self._weigh(
            self._linear(self._norm(x)), s.count, s.eps, s.magnitude, s.added, s.rounds or 0
        )
        return found


def take_read(step: Step, new: Tensor | None) -> Tensor | None:
    """The weights by which streams are read where these are delayed: those that the last branch left here,
    None in front of the first. `new`: what this one leaves, None: nothing."""
    last = step.get("read by")
    step["read by"] = new
    return last if isinstance(last, Tensor) else None


class Repeat:
    """Each row several times side by side: [T, hidden] -> [T, count * hidden]."""

    def __init__(self, count: int, w: Weights) -> None:
        self._same, self._mix = torch.ones(1, count, device=w.target.device), w.bind(mix_streams)

    def __call__(self, x: Tensor) -> Tensor:
        wide: Tensor = self._mix(x[:, None], self._same).flatten(1)
        return wide


class HyperStreams:
    """Hyper-connections (Zhu et al. 2024): all streams begin as the embedding, and end as one sum."""

    is_normed = False

    def __init__(self, s: HyperSpec, weights: Weights) -> None:
        w = weights.scope("streams")
        self.count, self.size = s.count, w.target.hidden_size
        self._weights = None if s.ends_even or s.is_delayed else StreamWeights(s, w, s.count)
        self._is_delayed = s.is_delayed
        self._even = torch.full((1, s.count), 1.0 / s.count, device=w.target.device)
        self.spread = Repeat(s.count, w)
        self._mix, self._combine = w.bind(mix_streams), w.bind(combine)

    def join(self, x: Tensor, delta: Tensor | None, step: Step) -> Tensor:
        """Their sum, by weights of a token's own or of the last branch, or their mean."""
        x = x if delta is None else self._combine(x, delta, 1.0)
        last = take_read(step, None) if self._is_delayed else None
        by = self._weights(x) if self._weights else self._even if last is None else last
        one: Tensor = self._mix(x.unflatten(-1, (self.count, self.size)), by).flatten(1)
        return one


class GatedRead:
    """One mean of a token's streams, each normed, each number times a gate made of them all (Qwen4-Exp)."""

    def __init__(self, s: HyperSpec, w: Weights) -> None:
        """`norm` [streams * hidden], `down` and `up`: the two linear layers of the gates."""
        assert s.rank is not None
        self.count, self.size = s.count, w.target.hidden_size
        wide = self.count * self.size
        self._norm = Norm(s.norm, w.scope("norm"), wide, groups=s.count)
        self._down = w.linear("down", in_size=wide, out_sizes=(s.rank,))
        self._up = w.linear("up", in_size=s.rank, out_sizes=(wide,))
        self._even = torch.full((1, s.count), 1.0 / s.count, device=w.target.device)
        self._activate, self._mix = w.bind(activate_scaled, kind="silu"), w.bind(mix_gated)

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x: [T, streams * hidden] -> (its streams, normed, and the mean [T, hidden])."""
        h = self._norm(x)
        narrow = self._activate(self._down(h), 1.0 / self.count, "silu", 1.0)
        return h, self._mix(h, self._up(narrow), self._even)


class GatedStreams:
    """All streams begin as the embedding, and end as one gated mean of them, normed."""

    is_normed = True

    def __init__(self, s: HyperSpec, weights: Weights) -> None:
        w = weights.scope("streams")
        self.spread, self._read, self._combine = Repeat(s.count, w), GatedRead(s, w), w.bind(combine)

    def join(self, x: Tensor, delta: Tensor | None, step: Step) -> Tensor:
        return self._read(x if delta is None else self._combine(x, delta, 1.0))[1]
