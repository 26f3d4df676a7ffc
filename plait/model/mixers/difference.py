"""Differential attention (Ye et al. 2024): what two softmaxes agree on is taken away.

Both read the same values, twice as wide as a head. So queries and keys are there twice, once for each half
of the values, and one attention with twice as many heads computes all.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from plait.checkpoint.weights import Weights
from plait.errors import CannotDivide, UnsupportedModel
from plait.memory import PagedState, State, group_name
from plait.model.layers.layers import Batch, Norm, Rope
from plait.model.mixers.attention import describe_attention
from plait.model.mixers.mamba2 import stack_ranges
from plait.model.mixers.registry import mixer
from plait.ops.activation import combine, rescale
from plait.ops.attention import paged_attention
from plait.ops.entry import head_widths
from plait.ops.place import place_heads
from plait.ops.rows import join
from plait.partition import Cut, Division, Rank, join_ranges, scale_range, sum_of, width
from plait.spec.attention import DifferenceSpec, SharedDifferenceSpec
from plait.state.store import StateStore


def _words(m: DifferenceSpec) -> str:
    return f"{describe_attention(m)}, the difference of two"


def _divide(s: DifferenceSpec, rank: Rank, hidden_size: int) -> Division:
    """Heads that are subtracted stay together, with both halves of the keys and values that they read."""
    pairs, kv_pairs, dim = s.num_heads // 2, s.num_kv_heads // 2, s.head_dim
    if s.num_kv_heads % 2:
        raise CannotDivide(f"{s.num_kv_heads} key-value heads are no pairs, so they are on one rank")
    ranges = rank.divide(pairs, "pairs of heads", 2 * dim)
    own = join_ranges(rank.divide(pairs, "pairs of heads"))
    kept = rank.divide_for_heads(kv_pairs, pairs, "pairs of key-value heads")
    queries, keys = (
        Cut(stack_ranges([count * dim] * 2, [scale_range(some, dim)] * 2))
        for count, some in ((pairs, own), (kv_pairs, kept))
    )
    cuts = {"q": queries, "k": keys, "v": keys, "o": Cut(cols=sum_of(ranges))}
    return Division(replace(s, num_heads=2 * width(own), num_kv_heads=2 * width(kept)), cuts)


@mixer(DifferenceSpec, _words, _divide)
class DifferenceAttention:
    """`lambda_q1` and so on are vectors of a head's width."""

    def __init__(self, s: DifferenceSpec, w: Weights) -> None:
        self.spec, self.name, hidden = s, w.prefix, w.target.hidden_size
        q = s.num_heads * s.head_dim
        self._bind_inputs(w, q, s.num_kv_heads * s.head_dim)
        self.o = w.linear("o", in_size=q, out_sizes=(hidden,))
        self.share = _read_share(s, w)
        self.norm = Norm(s.norm, w.scope("inner_norm"), 2 * s.head_dim)
        self._join, self._combine, self._rescale = w.bind(join), w.bind(combine), w.bind(rescale)
        self._group = group_name(s.window)

    def _bind_inputs(self, w: Weights, q: int, kv: int) -> None:
        s = self.spec
        self._sizes = [q, kv, kv // 2, kv // 2]
        self.qkv = w.linear("q", "k", "v", in_size=w.target.hidden_size, out_sizes=(q, kv, kv))
        self.rope = Rope(s.rope, w) if s.rope else None
        self._place, self._attend = w.bind_pair(place_heads, paged_attention, **_sizes(s, w))
        widths = zip("kv", head_widths(s.head_dim, w.target.kv_dtype), strict=True)
        entry = {name: (2 * s.num_kv_heads, width) for name, width in widths}
        self.states: dict[str, State] = {self.name: PagedState(entry, s.window, w.target.kv_dtype)}

    def __call__(self, x: Tensor, batch: Batch, store: StateStore) -> Tensor:
        """x: [T, hidden] -> [T, hidden]."""
        q, k, first, second = self.qkv(x).split(self._sizes, -1)
        values = self._join(self._join(first, first), self._join(second, second))
        parts = (self._join(q, q), self._join(k, k), values)
        q, k, v = (part.unflatten(-1, (-1, self.spec.head_dim)) for part in parts)
        return self._subtract(self._attend_twice(q, k, v, batch, store))

    def _attend_twice(self, q: Tensor, k: Tensor, v: Tensor, batch: Batch, store: StateStore) -> Tensor:
        caches, where, how = self._memory(self.name, batch, store)
        if self._place:
            to = (*caches, batch.paged[self._group].slot_mapping, batch.positions)
            q = self._place(q, k, v, *to, None, self.rope.rotation if self.rope else None)
            out: Tensor = self._attend(q, None, None, *caches, *where, *how, batch.step)
        else:
            if self.rope:
                q, k = self.rope(q, batch.positions), self.rope(k, batch.positions)
            out = self._attend(q, k, v, *caches, *where, *how)
        return out

    def _memory(
        self, name: str, batch: Batch, store: StateStore
    ) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, ...], tuple[object, ...]]:
        """(the caches of a mixer, where its entries are, how they are weighed), as the op takes them."""
        s, cache, index = self.spec, store[name], batch.paged[self._group]
        where = (index.block_table, index.slot_mapping, batch.query_start, batch.seq_lens)
        return (cache["k"], cache["v"]), where, (s.scale, s.window, None, None)

    def _subtract(self, out: Tensor) -> Tensor:
        """out: [T, 2 heads, d], over either half of the values -> [T, hidden]."""
        s = self.spec
        wide = self._join(*out.chunk(2, 1))  # [T, heads, 2 d]
        minuend, other = (half.flatten(1) for half in wide.chunk(2, 1))
        y = self._combine(minuend, other, -self.share).unflatten(-1, (-1, 2 * s.head_dim))
        return self.o(self._rescale(self.norm(y).flatten(1), 1.0 - s.balance, None))


def _sizes(s: DifferenceSpec, w: Weights) -> dict[str, object]:
    sizes: dict[str, object] = dict(heads=2 * s.num_heads, kv_heads=2 * s.num_kv_heads, dim=s.head_dim)
    return sizes | dict(window=s.window, softcap=None, sinks=False, activations=w.target.activations)


def _read_share(s: DifferenceSpec, w: Weights) -> float:
    """λ. Of weights without numbers, as `plait info` has them, it is what λ is learned around."""
    q1, k1, q2, k2 = (w.tensor(f"lambda_{x}", (s.head_dim,), torch.float64) for x in ("q1", "k1", "q2", "k2"))
    if q1.is_meta:
        return s.balance
    return float((q1 * k1).sum().exp() - (q2 * k2).sum().exp()) + s.balance


def _shared_words(m: SharedDifferenceSpec) -> str:
    return f"{_words(m)}, keys and values of {m.source}"


@mixer(SharedDifferenceSpec, _shared_words, _divide)
class SharedDifference(DifferenceAttention):
    """It projects queries alone, and has no state: the step's keys are in its source's before it runs."""

    def _bind_inputs(self, w: Weights, q: int, kv: int) -> None:
        if self.spec.rope:
            raise UnsupportedModel("a difference of attentions over shared keys has no positions")
        self.q = w.linear("q", in_size=w.target.hidden_size, out_sizes=(q,))
        self._attend = w.bind(paged_attention, **_sizes(self.spec, w))
        self.states = {}

    def __call__(self, x: Tensor, batch: Batch, store: StateStore) -> Tensor:
        """x: [T, hidden] -> [T, hidden]."""
        assert isinstance(self.spec, SharedDifferenceSpec)
        q = self.q(x)
        both = self._join(q, q).unflatten(-1, (-1, self.spec.head_dim))
        caches, where, how = self._memory(self.spec.source, batch, store)
        return self._subtract(self._attend(both, None, None, *caches, *where, *how))
