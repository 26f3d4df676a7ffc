"""Griffin's recurrent block (De et al. 2024): convolution and gated recurrence, times a second branch."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from plait.checkpoint.weights import Weights
from plait.memory import SlotState, State
from plait.model.layers.kept_state import float_state_dtype
from plait.model.layers.layers import Batch
from plait.model.mixers.mamba2 import DepthwiseConv
from plait.model.mixers.registry import BetweenLinears, LinearEnds, mixer
from plait.ops.activation import activate, multiply
from plait.ops.heads import map_heads
from plait.ops.rg_lru import rg_lru
from plait.partition import Cut, Division, Rank, join_ranges, sum_of, width
from plait.spec.recurrent import RgLruSpec
from plait.state.store import StateStore


def _words(m: RgLruSpec) -> str:
    return f"RG-LRU, width {m.width}, {m.num_heads} heads"


def _divide(s: RgLruSpec, rank: Rank, hidden_size: int) -> Division:
    ranges = rank.divide(s.num_heads, "heads", s.width // s.num_heads)
    heads, own = join_ranges(rank.divide(s.num_heads, "heads")), join_ranges(ranges)
    cuts = {name: Cut((own,)) for name in ("x", "y", "conv", "rate")}
    cuts |= {"gates": Cut((heads,)), "out": Cut(cols=sum_of(ranges))}
    return Division(replace(s, width=width(own), num_heads=width(heads)), cuts)


@mixer(RgLruSpec, _words, _divide)
class RgLru(BetweenLinears):
    """`gates` maps each head's channels to what opens its input, then to what opens its recurrence."""

    def __init__(self, s: RgLruSpec, w: Weights) -> None:
        self.spec, self.name = s, w.prefix
        hidden, dim = w.target.hidden_size, s.width // s.num_heads
        self.into = w.linear("x", "y", in_size=hidden, out_sizes=(s.width, s.width))
        self.out = w.linear("out", in_size=s.width, out_sizes=(hidden,))
        self.conv = DepthwiseConv(w, s.width, s.conv_kernel, None)
        self.gates = w.tensor("gates.weight", (s.num_heads, 2 * dim, dim))
        self.bias = w.tensor("gates.bias", (s.num_heads, 2 * dim), torch.float32)
        self.rate = w.tensor("rate", (s.width,), torch.float32)
        self._map = w.bind(map_heads, heads=s.num_heads)
        self._scan = w.bind(rg_lru, heads=s.num_heads, dim=dim)
        self._activate, self._multiply = w.bind(activate, kind=s.activation, gated=False), w.bind(multiply)
        kept = {
            "conv": (self.conv.tail_shape, "model"),
            "ssm": ((s.width,), float_state_dtype(w.target, "an RG-LRU")),
        }
        self.states: dict[str, State] = {self.name: SlotState(kept)}

    def ends(self) -> LinearEnds:
        return LinearEnds(self.into, "", self.out)

    def middle(self, first: Tensor, batch: Batch, store: StateStore) -> Tensor:
        """From x's projections to what the last linear layer is given."""
        s, state = self.spec, store[self.name]
        u, second = first.chunk(2, -1)
        u = self.conv(u, batch, state["conv"])
        gates = self._map(u.unflatten(-1, (s.num_heads, -1)), self.gates)
        where = (batch.state_slots, batch.query_start, batch.has_history, batch.num_decodes)
        h = self._scan(u, gates, self.bias, self.rate, state["ssm"], *where, batch.positions)
        opened: Tensor = self._multiply(h, self._activate(second, s.activation, False))
        return opened
