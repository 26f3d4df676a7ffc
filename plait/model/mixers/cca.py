"""Compressed convolutional attention (Figliolia et al. 2025; ZAYA): queries and keys are mixed over time."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from plait.checkpoint.weights import Weights
from plait.memory import SlotState, State
from plait.model.layers.layers import Batch
from plait.model.mixers.attention import Attention, describe_attention, divide_attention
from plait.model.mixers.mamba2 import DepthwiseConv, stack_ranges
from plait.model.mixers.registry import mixer
from plait.ops.activation import combine
from plait.ops.conv import causal_conv
from plait.ops.heads import map_heads
from plait.ops.linear import Linear
from plait.ops.rows import join
from plait.ops.streams import mix_streams
from plait.partition import Cut, Division, Range, Rank, join_ranges, scale_range, shift_range, width
from plait.spec.attention import CcaSpec
from plait.state.store import StateStore


def _words(m: CcaSpec) -> str:
    return f"{describe_attention(m)}, convolved over {m.taps[0]} and {m.taps[1]} tokens"


def _divide(s: CcaSpec, rank: Rank, hidden_size: int) -> Division:
    """Key heads with all queries that they take means of; of the values the part that these heads have."""
    kv, dim = join_ranges(rank.divide(s.num_kv_heads, "key heads")), s.head_dim
    part = divide_attention(s, rank, hidden_size)
    heads = scale_range(kv, s.num_heads // s.num_kv_heads)
    rows = stack_ranges([s.num_heads, s.num_kv_heads], [heads, kv])
    channels = Cut(tuple(scale_range(some, dim) for some in rows))
    values, half = scale_range(kv, dim), s.num_kv_heads * dim // 2
    now, last = _clip(values, 0, half), _clip(values, half, 2 * half)
    cuts = {**part.cuts, "conv": channels, "heads.weight": Cut(rows), "heads.bias": channels}
    for name, piece in (("v", now), ("v_last", shift_range(last, -half))):
        cuts[name] = Cut((piece,)) if width(piece) else Cut(is_dropped=True)
    assert isinstance(part.spec, CcaSpec)
    own = replace(part.spec, value_sizes=(width(now), width(last)))
    return replace(part, spec=own, cuts=cuts)


def _clip(piece: Range, start: int, stop: int) -> Range:
    """The part of a range that is between two numbers; an empty one begins and ends at the nearer of them."""
    first, last = (min(max(edge, start), stop) for edge in piece)
    return first, last


@mixer(CcaSpec, _words, _divide)
class Cca(Attention):
    """`conv` has taps of each channel, without a bias, because `heads.bias` contains what it would add.

    `heads.weight` [heads, d, taps · d] reads the last convolved heads, the oldest first. To its result each
    query adds the mean of itself and its key as projected, each key the mean of its queries' sums.
    """

    def __init__(self, s: CcaSpec, w: Weights) -> None:
        super().__init__(s, w)
        hidden, heads = w.target.hidden_size, s.num_heads + s.num_kv_heads
        now, last = s.value_sizes or (s.num_kv_heads * s.head_dim // 2,) * 2
        self._channels, self._memory = heads * s.head_dim, f"{self.name}.conv"
        self._heads, self._taps = heads, s.taps
        self.v = w.linear("v", in_size=hidden, out_sizes=(now,)) if now else None
        self.v_last = w.linear("v_last", in_size=hidden, out_sizes=(last,)) if last else None
        self.conv = DepthwiseConv(w, self._channels, s.taps[0], None)
        self.weight = w.tensor("heads.weight", (heads, s.head_dim, s.taps[1] * s.head_dim))
        self.bias = w.tensor("heads.bias", (self._channels,))
        self._means = _means(s).to(w.target.device)[None]
        self._shift_x, self._shift_heads = (_Shift(w, size) for size in (hidden, self._channels))
        self._map, self._mix, self._join = w.bind(map_heads, heads=heads), w.bind(mix_streams), w.bind(join)
        self._combine = w.bind(combine)
        kept = {"conv": (self.conv.tail_shape, "model"), "x": ((1, hidden), "model")}
        kept |= {f"heads{n}": ((1, self._channels), "model") for n in range(1, s.taps[1])}
        states: dict[str, State] = {self._memory: SlotState(kept)}
        self.states |= states

    def _bind_qkv(self, w: Weights, parts: dict[str, int]) -> Linear:
        return super()._bind_qkv(w, {name: parts[name] for name in "qk"})

    def __call__(self, x: Tensor, batch: Batch, store: StateStore) -> Tensor:
        """x: [T, hidden] -> [T, hidden]."""
        state, qk, split = store[self._memory], self.qkv(x), (self._heads, -1)
        last = self._shift_x(x, batch, state["x"])
        values = [make(read) for make, read in ((self.v, x), (self.v_last, last)) if make]
        v = values[0] if len(values) == 1 else self._join(*values)
        mixed = self.conv(qk, batch, state["conv"])
        read = mixed.unflatten(-1, split)
        for n in range(1, self._taps[1]):
            mixed = self._shift_heads(mixed, batch, state[f"heads{n}"])
            read = self._join(mixed.unflatten(-1, split), read)
        made = self._combine(self._map(read, self.weight).flatten(1), self.bias.expand(len(x), -1), 1.0)
        means = self._mix(qk.unflatten(-1, split), self._means).flatten(1)
        return self.attend(self._join(self._combine(made, means, 1.0), v), x, batch, store)


class _Shift:
    """What the last token had: [T, n] -> [T, n]."""

    def __init__(self, w: Weights, size: int) -> None:
        self._taps = torch.tensor([1.0, 0.0], dtype=w.target.dtype, device=w.target.device).repeat(size, 1)
        self._conv = w.bind(causal_conv, channels=size, kernel=2)

    def __call__(self, x: Tensor, batch: Batch, tail: Tensor) -> Tensor:
        where = (tail, batch.state_slots, batch.query_start, batch.has_history)
        out: Tensor = self._conv(x, self._taps, None, *where, None)
        return out


def _means(s: CcaSpec) -> Tensor:
    """What each query and key takes of all projected ones, [heads · heads]."""
    heads, group = s.num_heads, s.num_heads // s.num_kv_heads
    both = torch.zeros(heads + s.num_kv_heads, heads + s.num_kv_heads)
    for h in range(heads):
        both[h, h] = both[h, heads + h // group] = 0.5
    both[heads:] = both[:heads].unflatten(0, (s.num_kv_heads, group)).mean(1)
    return both.flatten()
