"""RWKV's channel mixing: a feed-forward that also reads the last token."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from plait.checkpoint.weights import Weights
from plait.memory import SlotState, State
from plait.model.layers.layers import Batch
from plait.model.layers.token_shift import SHIFT, TokenShift
from plait.model.mixers.registry import mixer
from plait.ops.activation import activate, gate
from plait.ops.ranks import sum_ranks
from plait.partition import Cut, Division, Rank, join_ranges, sum_of, width
from plait.spec.recurrent import ChannelMixSpec
from plait.state.store import StateStore


def _words(m: ChannelMixSpec) -> str:
    return f"{'gated ' if m.gated else ''}channel mixing {m.size}, relu²"


def _divide(s: ChannelMixSpec, rank: Rank, hidden_size: int) -> Division:
    """Inner features are divided; the gate is whole, and multiplies their sum."""
    ranges = rank.divide_blocks(s.size, "inner features")
    own = join_ranges(ranges)
    cuts = {"k": Cut((own,)), "v": Cut(cols=sum_of(ranges))}
    return Division(replace(s, size=width(own)), cuts)


@mixer(ChannelMixSpec, _words, _divide)
class ChannelMix:
    """v(relu(k(x'))²), times sigmoid(gate(x'')) if there is a gate: x' and x'' are shifted each by itself."""

    def __init__(self, s: ChannelMixSpec, w: Weights) -> None:
        self.name, hidden = w.prefix, w.target.hidden_size
        self.shift = TokenShift(w, *(("k", "gate") if s.gated else ("k",)))
        self.k = w.linear("k", in_size=hidden, out_sizes=(s.size,))
        self.v = w.linear("v", in_size=s.size, out_sizes=(hidden,))
        self.gate = w.linear("gate", in_size=hidden, out_sizes=(hidden,)) if s.gated else None
        self._activate, self._gate = w.bind(activate, kind="relu2", gated=False), w.bind(gate)
        self._ranks, self.is_summed = (w.target.comm, w.target.dtype), s.gated
        self.states: dict[str, State] = {self.name: SlotState({SHIFT: self.shift.shape})}

    def __call__(self, x: Tensor, batch: Batch, store: StateStore) -> Tensor:
        """x: [T, hidden] -> [T, hidden]."""
        mixed, *closing = self.shift(x, batch, store[self.name])
        y = self.v(self._activate(self.k(mixed), "relu2", False))
        if self.gate is None:
            return y
        gated: Tensor = self._gate(sum_ranks(y, *self._ranks), self.gate(closing[0]))
        return gated
