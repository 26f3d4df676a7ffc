"""Grouped-query attention: one mixer for every family, windows, softcaps and norms being data."""

from __future__ import annotations

from torch import Tensor

from plait import spec
from plait.checkpoint.weights import Weights
from plait.memory import PagedState, State, group_name
from plait.model.batch import Batch
from plait.model.norm import Norm
from plait.model.rope import Rope
from plait.ops.attention import paged_attention
from plait.state.store import StateStore


class Attention:
    def __init__(self, s: spec.Attention, w: Weights) -> None:
        self.spec, self.name = s, w.prefix
        hidden, q, kv = w.target.hidden_size, s.num_heads * s.head_dim, s.num_kv_heads * s.head_dim
        self.qkv = w.linear("q", "k", "v", in_size=hidden, out_sizes=(q, kv, kv), split="out")
        self.o = w.linear("o", in_size=q, out_sizes=(hidden,), split="in")
        self.q_norm = Norm(s.qk_norm, w.scope("q_norm"), s.head_dim) if s.qk_norm else None
        self.k_norm = Norm(s.qk_norm, w.scope("k_norm"), s.head_dim) if s.qk_norm else None
        self.rope = Rope(s.rope, w) if s.rope else None
        sizes = {"heads": s.num_heads, "kv_heads": s.num_kv_heads, "dim": s.head_dim}
        self._attend = w.bind(paged_attention, **sizes, window=s.window, softcap=s.softcap)
        entry, dtype = (s.num_kv_heads, s.head_dim), w.target.kv_dtype
        self.states: dict[str, State] = {self.name: PagedState({"k": entry, "v": entry}, s.window, dtype)}
        self._group = group_name(s.window)

    def __call__(self, x: Tensor, batch: Batch, store: StateStore) -> Tensor:
        """x: [T, hidden] -> [T, hidden]."""
        s = self.spec
        heads = self.qkv(x).unflatten(-1, (-1, s.head_dim))  # [T, heads + 2 kv_heads, d]
        q, k, v = heads.split([s.num_heads, s.num_kv_heads, s.num_kv_heads], 1)
        if self.q_norm and self.k_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rope:
            q, k = self.rope(q, batch.positions), self.rope(k, batch.positions)
        cache, index = store[self.name], batch.paged[self._group]
        where = (index.block_table, index.slot_mapping, batch.query_start, batch.seq_lens)
        out = self._attend(q, k, v, cache["k"], cache["v"], *where, s.scale, s.window, s.softcap)
        return self.o(out.flatten(1))
