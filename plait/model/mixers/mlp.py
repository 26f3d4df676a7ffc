"""Feed-forward layers: gated (SwiGLU, GeGLU; Shazeer 2020) or plain."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from plait.checkpoint.weights import Weights
from plait.memory import State
from plait.model.layers.inner_norm import InnerNorm
from plait.model.layers.layers import Batch
from plait.model.mixers.registry import BetweenLinears, LinearEnds, mixer
from plait.ops.activation import activate, xielu
from plait.ops.altup import activate_largest
from plait.ops.glu import glu
from plait.partition import Cut, Division, Rank, join_ranges, sum_of, width
from plait.spec.model import MlpSpec
from plait.state.store import StateStore


def _words(m: MlpSpec) -> str:
    return f"{'gated ' if m.gated else ''}MLP {m.size}, {m.activation}"


def divide_mlp(s: MlpSpec, rank: Rank) -> tuple[MlpSpec, dict[str, Cut]]:
    """A part of its inner features: rows of gate and up, columns of down."""
    ranges = rank.divide_blocks(s.size, "inner features")
    own = join_ranges(ranges)
    cuts = {"gate": Cut((own,)), "up": Cut((own,)), "down": Cut(cols=sum_of(ranges))}
    return replace(s, size=width(own)), cuts


def _divide(s: MlpSpec, rank: Rank, hidden_size: int) -> Division:
    if s.cutoff is not None:  # mean and deviation are of all features: each rank computes the whole
        return Division(s, {}, sums=-1)
    return Division(*divide_mlp(s, rank), gathers=int(s.norm is not None))


@mixer(MlpSpec, _words, _divide)
class Mlp(BetweenLinears):
    def __init__(self, s: MlpSpec, w: Weights, hidden_size: int | None = None) -> None:
        self.spec, self.states = s, dict[str, State]()
        hidden = hidden_size or w.target.hidden_size
        names = ("gate", "up") if s.gated else ("up",)
        self.up = w.linear(*names, in_size=hidden, out_sizes=(s.size,) * len(names))
        self.down = w.linear("down", in_size=s.size, out_sizes=(hidden,))
        self._norm = InnerNorm(s.norm, w.scope("inner_norm"), s.size) if s.norm else None
        self._curve = w.tensor("curve", (4,), torch.float32) if s.activation == "xielu" else None
        self._activate = (
            w.bind(activate, kind=s.activation, gated=s.gated and s.cutoff is None)
            if self._curve is None
            else w.bind(xielu)
        )
        sizes = {"kind": s.activation, "up": self.up, "stored": self.up.storages}
        self._glu = w.bind(glu, **sizes) if s.gated and s.cutoff is None else None
        self.is_summed, largest = s.cutoff is not None, {"size": s.size, "kind": s.activation}
        self._keep = w.bind(activate_largest, **largest) if self.is_summed else None

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., hidden] -> [..., hidden]."""
        return self.down(self._activate_up(self.begin(x)))

    def ends(self) -> LinearEnds:
        return LinearEnds(self.up, self.spec.activation if self._glu else "", self.down)

    def begin(self, x: Tensor) -> Tensor:
        """Gate and up, or up: with a gate's activation where that is one op."""
        return self._glu(x, self.up, self.spec.activation, self._activate) if self._glu else self.up(x)

    def middle(self, first: Tensor, batch: Batch, store: StateStore) -> Tensor:
        """From what `begin` gives to what the last linear layer is given."""
        return self._activate_up(first)

    def _activate_up(self, h: Tensor) -> Tensor:
        """What `begin` gives, with what is left of its activation, and normed."""
        kind = self.spec.activation
        if self._keep:
            h = self._keep(h, self.spec.cutoff, kind)
        elif self._curve is not None:
            h = self._activate(h, self._curve)
        elif not self._glu:
            h = self._activate(h, kind, False)
        return self._norm(h) if self._norm else h
