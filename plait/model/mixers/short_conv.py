"""LFM2's gated short convolution: two products around a depthwise convolution of a few tokens."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from plait.checkpoint.weights import Weights
from plait.memory import SlotState, State
from plait.model.layers.layers import Batch
from plait.model.mixers.mamba2 import DepthwiseConv, stack_ranges
from plait.model.mixers.registry import BetweenLinears, LinearEnds, mixer
from plait.ops.activation import multiply
from plait.partition import Cut, Division, Rank, join_ranges, sum_of, width
from plait.spec.recurrent import ShortConvSpec
from plait.state.store import StateStore


def _words(m: ShortConvSpec) -> str:
    return f"gated short convolution, width {m.kernel}"


def _divide(s: ShortConvSpec, rank: Rank, hidden_size: int) -> Division:
    channels = s.channels or hidden_size
    ranges = rank.divide(channels, "channels")
    own = join_ranges(ranges)
    cuts = {"in": Cut(stack_ranges([channels] * 3, [own] * 3)), "conv": Cut((own,))}
    cuts["out"] = Cut(cols=sum_of(ranges))
    return Division(replace(s, channels=width(own)), cuts)


@mixer(ShortConvSpec, _words, _divide)
class ShortConv(BetweenLinears):
    """out(C · conv(B · x)), where [B, C, x] are the three parts of `in`; the tail is of B · x."""

    def __init__(self, s: ShortConvSpec, w: Weights) -> None:
        self.name, hidden = w.prefix, w.target.hidden_size
        channels = s.channels or hidden
        self.in_proj = w.linear("in", in_size=hidden, out_sizes=(3 * channels,))
        self.conv = DepthwiseConv(w, channels, s.kernel, activation=None)
        self.out = w.linear("out", in_size=channels, out_sizes=(hidden,))
        self._multiply = w.bind(multiply, size=channels)
        self.states: dict[str, State] = {self.name: SlotState({"conv": (self.conv.tail_shape, "model")})}

    def ends(self) -> LinearEnds:
        return LinearEnds(self.in_proj, "", self.out)

    def middle(self, first: Tensor, batch: Batch, store: StateStore) -> Tensor:
        """From x's projections to what the last linear layer is given."""
        before, after, h = first.chunk(3, -1)
        h = self.conv(self._multiply(before, h), batch, store[self.name]["conv"])
        opened: Tensor = self._multiply(after, h)
        return opened
