"""Multi-head latent attention (DeepSeek-V2): one small latent per token serves all heads.

Decode and prefill both run absorbed: the key up-projection moves into q, the value up-projection behind the
softmax, so that nothing but latents is ever read from memory.
"""

from __future__ import annotations

from torch import Tensor

from plait import spec
from plait.checkpoint.weights import Weights
from plait.memory import PagedState, State, group_name
from plait.model.batch import Batch
from plait.model.norm import Norm
from plait.model.rope import Rope
from plait.ops.attention import paged_latent_attention
from plait.ops.rows import join, map_heads
from plait.state.store import StateStore


class Mla:
    def __init__(self, s: spec.Mla, w: Weights) -> None:
        self.spec, self.name = s, w.prefix
        hidden, heads = w.target.hidden_size, s.num_heads
        q_size = heads * (s.nope_dim + s.rope_dim)
        self.q_a = w.linear("q_a", in_size=hidden, out_sizes=(s.q_rank,)) if s.q_rank else None
        self.q_norm = (
            Norm(s.latent_norm, w.scope("q_a_norm"), s.q_rank) if s.q_rank and s.latent_norm else None
        )
        self.q = w.linear(
            "q_b" if s.q_rank else "q", in_size=s.q_rank or hidden, out_sizes=(q_size,), split="out"
        )
        self.kv_a = w.linear("kv_a", in_size=hidden, out_sizes=(s.kv_rank + s.rope_dim,))
        self.kv_norm = Norm(s.latent_norm, w.scope("kv_a_norm"), s.kv_rank) if s.latent_norm else None
        up = w.tensor("kv_b.weight", (heads * (s.nope_dim + s.v_dim), s.kv_rank))
        k_up, v_up = up.view(heads, -1, s.kv_rank).split([s.nope_dim, s.v_dim], 1)
        self.k_up, self.v_up = k_up.mT.contiguous(), v_up.contiguous()  # [heads, out, in]
        self.o = w.linear("o", in_size=heads * s.v_dim, out_sizes=(hidden,), split="in")
        self.rope = Rope(s.rope, w) if s.rope else None
        sizes = {"heads": heads, "kv_rank": s.kv_rank, "rope_dim": s.rope_dim}
        self._attend = w.bind(paged_latent_attention, **sizes)
        self._join, self._map_heads = w.bind(join), w.bind(map_heads, heads=heads)
        entry = {"latent": (s.kv_rank + s.rope_dim,)}
        self.states: dict[str, State] = {self.name: PagedState(entry, dtype=w.target.kv_dtype)}

    def __call__(self, x: Tensor, batch: Batch, store: StateStore) -> Tensor:
        """x: [T, hidden] -> [T, hidden]."""
        s = self.spec
        q = self.q_a(x) if self.q_a else x
        q = self.q(self.q_norm(q) if self.q_norm else q).unflatten(-1, (s.num_heads, -1))
        q_nope, q_rope = q.split([s.nope_dim, s.rope_dim], -1)
        latent, k_rope = self.kv_a(x).split([s.kv_rank, s.rope_dim], -1)
        latent = self.kv_norm(latent) if self.kv_norm else latent
        if self.rope:
            q_rope = self.rope(q_rope, batch.positions)
            k_rope = self.rope(k_rope[:, None], batch.positions)[:, 0]
        q = self._join(self._map_heads(q_nope, self.k_up), q_rope)
        cache, index = store[self.name]["latent"], batch.paged[group_name(None)]
        where = (index.block_table, index.slot_mapping, batch.query_start, batch.seq_lens)
        out = self._attend(q, self._join(latent, k_rope), cache, *where, s.scale, s.kv_rank)
        return self.o(self._map_heads(out, self.v_up).flatten(1))
