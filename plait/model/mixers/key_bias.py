"""Attention with a bias for each key, which its values decide (dynamic mask attention; Doge).

The bias is computed once, when a token is stored, and lies with its key, as one more column that queries read
with 1. So every kernel of attention and every form of a cache serves as it is:

    key    k  │ bias / scale │ 0 …        query  q │ 1 │ 0 …        value  v │ 0 │ 0 …

In codes (`ops.entry`) columns come in groups of 32 under one scale. Of heads of 64 or 128 numbers the bias
has the last group for itself, and keeps the precision of the scale.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from plait.checkpoint.weights import Weights
from plait.memory import PagedState, State, group_name
from plait.model.layers.head_norm import HeadNorm, SharedHeads
from plait.model.layers.layers import Batch, Rope
from plait.model.mixers.attention import describe_attention, divide_attention
from plait.model.mixers.registry import mixer
from plait.ops.activation import key_bias
from plait.ops.attention import paged_attention
from plait.ops.entry import CODED, KEY_GROUP, head_widths
from plait.ops.rows import join
from plait.partition import Cut, Division, Rank
from plait.spec.attention import KeyBiasSpec
from plait.state.store import StateStore

COLUMNS = 8  # that a wider head is a multiple of, where numbers are no codes


def _words(m: KeyBiasSpec) -> str:
    return f"{describe_attention(m)}, a bias for each key by all heads' values"


def _divide(s: KeyBiasSpec, rank: Rank, hidden_size: int) -> Division:
    """A rank makes the biases of its key heads from the values of all of them, which are gathered."""
    found = divide_attention(s, rank, hidden_size)
    own = Cut((rank.divide_for_heads(s.num_kv_heads, s.num_heads, "key-value heads"),))
    assert isinstance(found.spec, KeyBiasSpec)
    spec = replace(found.spec, value_heads=s.value_heads or s.num_kv_heads)
    cuts = {**found.cuts, "dt": own, "A": own}
    return replace(found, spec=spec, cuts=cuts, gathers=found.gathers + 1)


@mixer(KeyBiasSpec, _words, _divide)
class KeyBias:
    """`dt` [key heads, key heads · d] reads values; `A` [key heads]: how fast a bias grows with it."""

    def __init__(self, s: KeyBiasSpec, w: Weights) -> None:
        self.spec, self.name, hidden, kept = s, w.prefix, w.target.hidden_size, w.target.kv_dtype
        q, kv, heads = s.num_heads * s.head_dim, s.num_kv_heads * s.head_dim, s.value_heads or s.num_kv_heads
        self.qkv = w.linear("q", "k", "v", in_size=hidden, out_sizes=(q, kv, kv))
        self.dt = w.linear("dt", in_size=heads * s.head_dim, out_sizes=(s.num_kv_heads,))
        self.o = w.linear("o", in_size=q, out_sizes=(hidden,))
        self.rate = w.tensor("A", (s.num_kv_heads,), torch.float32)
        self.q_norm = HeadNorm(s.qk_norm, s, w.scope("q_norm"), s.num_heads) if s.qk_norm else None
        self.k_norm = HeadNorm(s.qk_norm, s, w.scope("k_norm"), s.num_kv_heads) if s.qk_norm else None
        self.rope = Rope(s.rope, w) if s.rope else None
        self._shared = SharedHeads(w, s.head_dim, s.num_kv_heads, heads) if heads != s.num_kv_heads else None
        step = KEY_GROUP if kept in CODED else COLUMNS
        self.width = (s.head_dim // step + 1) * step
        sizes: dict[str, object] = dict(heads=s.num_heads, kv_heads=s.num_kv_heads, dim=self.width)
        sizes |= dict(window=s.window, softcap=s.softcap, sinks=False, activations=w.target.activations)
        self._attend = w.bind(paged_attention, **sizes)
        self._join, self._bias = w.bind(join), w.bind(key_bias)
        more, like = self.width - s.head_dim, torch.zeros((), dtype=w.target.dtype, device=w.target.device)
        self._zeros = like.new_zeros(1, s.num_kv_heads, more)
        self._one = like.new_zeros(1, s.num_heads, more)
        self._one[..., 0] = 1.0
        self._parts, self._group = [s.num_heads, s.num_kv_heads, s.num_kv_heads], group_name(s.window)
        widths = zip("kv", head_widths(self.width, kept), strict=True)
        entry = {name: (s.num_kv_heads, width) for name, width in widths}
        self.states: dict[str, State] = {self.name: PagedState(entry, s.window, kept)}

    def __call__(self, x: Tensor, batch: Batch, store: StateStore) -> Tensor:
        """x: [T, hidden] -> [T, hidden]."""
        s, cache, index = self.spec, store[self.name], batch.paged[self._group]
        q, k, v = self.qkv(x).unflatten(-1, (-1, s.head_dim)).split(self._parts, 1)
        bias = self._make_bias(v)
        if self.q_norm and self.k_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rope:
            q, k = self.rope(q, batch.positions), self.rope(k, batch.positions)
        zeros = self._zeros.expand(len(x), -1, -1)
        wide = self._join(q, self._one.expand(len(x), -1, -1)), self._join(k, bias), self._join(v, zeros)
        where = (index.block_table, index.slot_mapping, batch.query_start, batch.seq_lens)
        how = (s.scale, s.window, s.softcap)
        out = self._attend(*wide, cache["k"], cache["v"], *where, *how)
        half = s.head_dim // 2  # joined again, heads lie one behind the other
        return self.o(self._join(out[..., :half], out[..., half : s.head_dim]).flatten(1))

    def _make_bias(self, v: Tensor) -> Tensor:
        """v: [T, key heads, d] -> what is behind keys, [T, key heads, width - d]."""
        steps = self.dt(self._shared.gather(v.flatten(1)) if self._shared else v.flatten(1))
        bias = self._bias(steps, self.rate.expand(len(v), -1), 1.0 / self.spec.scale)
        zeros = self._zeros[..., 1:].expand(len(v), -1, -1)
        behind: Tensor = self._join(bias[..., None], zeros) if zeros.shape[-1] else bias[..., None]
        return behind
