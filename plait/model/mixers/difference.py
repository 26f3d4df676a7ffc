"""Differential attention (Ye et al. 2024): what two softmaxes agree on is taken away.

Both read the same values, twice as wide as a head. So queries and keys are there twice, once for each half
of the values, and one attention with twice as many heads computes all.
"""

from __future__ import annotations

import torch
from torch import Tensor

from plait.checkpoint.weights import Weights
from plait.errors import CannotDivide
from plait.memory import PagedState, State, group_name
from plait.model.layers.layers import Batch, Norm, Rope
from plait.model.mixers.attention import describe_attention
from plait.model.mixers.registry import mixer
from plait.ops.activation import combine, rescale
from plait.ops.attention import paged_attention
from plait.ops.entry import head_widths
from plait.ops.place import place_heads
from plait.ops.rows import join
from plait.partition import Division, Rank
from plait.rare_specs import DifferenceSpec
from plait.state.store import StateStore


def _words(m: DifferenceSpec) -> str:
    return f"{describe_attention(m)}, the difference of two"


def _divide(s: DifferenceSpec, rank: Rank, hidden_size: int) -> Division:
    raise CannotDivide("pairs of heads that are far apart are not divided among ranks")


@mixer(DifferenceSpec, _words, _divide)
class DifferenceAttention:
    """`lambda_q1` and so on are vectors of a head's width."""

    def __init__(self, s: DifferenceSpec, w: Weights) -> None:
        self.spec, self.name, hidden = s, w.prefix, w.target.hidden_size
        q, kv = s.num_heads * s.head_dim, s.num_kv_heads * s.head_dim
        self._sizes = [q, kv, kv // 2, kv // 2]
        self.qkv = w.linear("q", "k", "v", in_size=hidden, out_sizes=(q, kv, kv))
        self.o = w.linear("o", in_size=q, out_sizes=(hidden,))
        self.rope = Rope(s.rope, w) if s.rope else None
        sizes: dict[str, object] = dict(heads=2 * s.num_heads, kv_heads=2 * s.num_kv_heads, dim=s.head_dim)
        sizes |= dict(window=s.window, softcap=None, sinks=False, activations=w.target.activations)
        self._place, self._attend = w.bind_pair(place_heads, paged_attention, **sizes)
        vectors = (w.tensor(f"lambda_{x}", (s.head_dim,), torch.float32) for x in ("q1", "k1", "q2", "k2"))
        q1, k1, q2, k2 = vectors
        self.share = float((q1 * k1).sum().exp() - (q2 * k2).sum().exp()) + s.balance
        self.norm = Norm(s.norm, w.scope("norm"), 2 * s.head_dim)
        self._join, self._combine, self._rescale = w.bind(join), w.bind(combine), w.bind(rescale)
        widths = zip("kv", head_widths(s.head_dim, w.target.kv_dtype), strict=True)
        entry = {name: (2 * s.num_kv_heads, width) for name, width in widths}
        self.states: dict[str, State] = {self.name: PagedState(entry, s.window, w.target.kv_dtype)}
        self._group = group_name(s.window)

    def __call__(self, x: Tensor, batch: Batch, store: StateStore) -> Tensor:
        """x: [T, hidden] -> [T, hidden]."""
        s = self.spec
        q, k, first, second = self.qkv(x).split(self._sizes, -1)
        values = self._join(self._join(first, first), self._join(second, second))
        parts = (self._join(q, q), self._join(k, k), values)
        q, k, v = (part.unflatten(-1, (-1, s.head_dim)) for part in parts)
        out = self._attend_twice(q, k, v, batch, store)
        wide = self._join(*out.chunk(2, 1))  # [T, heads, 2 d]
        minuend, other = (half.flatten(1) for half in wide.chunk(2, 1))
        y = self._combine(minuend, other, -self.share).unflatten(-1, (-1, 2 * s.head_dim))
        return self.o(self._rescale(self.norm(y).flatten(1), 1.0 - s.balance, None))

    def _attend_twice(self, q: Tensor, k: Tensor, v: Tensor, batch: Batch, store: StateStore) -> Tensor:
        s, cache, index = self.spec, store[self.name], batch.paged[self._group]
        caches = cache["k"], cache["v"]
        where = (index.block_table, index.slot_mapping, batch.query_start, batch.seq_lens)
        how = (s.scale, s.window, None, None)
        if self._place:
            to = (*caches, index.slot_mapping, batch.positions)
            q = self._place(q, k, v, *to, None, self.rope.rotation if self.rope else None)
            out: Tensor = self._attend(q, None, None, *caches, *where, *how, batch.step)
        else:
            if self.rope:
                q, k = self.rope(q, batch.positions), self.rope(k, batch.positions)
            out = self._attend(q, k, v, *caches, *where, *how)
        return out
