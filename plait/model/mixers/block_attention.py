"""Attention of a drafted block: its keys lie behind those of the text, which are made of a model's states.

DFlash (Chen et al. 2026, arXiv 2602.06036). Each row of a block is a sequence of its own for kernels, with
the tables of its text. So a length says what a row sees, and a block that sees ahead needs no other
kernel.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from plait.checkpoint.weights import Weights
from plait.model.layers.layers import Batch
from plait.model.mixers.attention import Attention, describe_attention
from plait.model.mixers.registry import mixer
from plait.ops.attention import paged_attention
from plait.ops.place import HeadNorms, place_heads
from plait.spec.attention import BlockAttentionSpec
from plait.state.store import StateStore


def _words(m: BlockAttentionSpec) -> str:
    return f"{describe_attention(m)}, {'all of a block' if m.sees_ahead else 'a block'} at once"


@mixer(BlockAttentionSpec, _words)
class BlockAttention(Attention):
    """`keep` stores keys and values of a text; calls attend, one row of a block being one sequence."""

    spec: BlockAttentionSpec

    def __init__(self, s: BlockAttentionSpec, w: Weights) -> None:
        super().__init__(s, w)
        kv = s.num_kv_heads * s.head_dim
        self.kv = w.linear("k", "v", in_size=w.target.hidden_size, out_sizes=(kv, kv))
        sizes = dict(heads=s.num_kv_heads, kv_heads=s.num_kv_heads, dim=s.head_dim, window=1, softcap=None)
        more = dict(sinks=False, activations=w.target.activations)
        # A kernel that stores keys and does not attend is there on GPUs alone. Attention to the key in the
        # same place costs next to nothing, and stores keys as the kernel that reads them expects.
        self._place_keys, self._store_keys = w.bind_pair(place_heads, paged_attention, **sizes, **more)
        norms = self.k_norm.weights if self.k_norm else None
        self._key_norms = HeadNorms(norms, norms, s.qk_norm_over) if norms else None

    def keep(self, context: Tensor, batch: Batch, store: StateStore) -> None:
        """Store the keys and values of context, [T, hidden]."""
        s, cache, index = self.spec, store[self.name], batch.paged[self._group]
        k, v = self.kv(context).unflatten(-1, (-1, s.head_dim)).split(s.num_kv_heads, 1)
        caches = cache["k"], cache["v"]
        if self._place_keys:
            rotation = self.rope.rotation if self.rope else None
            self._place_keys(k, k, v, *caches, index.slot_mapping, batch.positions, self._key_norms, rotation)
            return
        k = self.k_norm(k) if self.k_norm else k
        k = self.rope(k, batch.positions) if self.rope else k
        where = (index.block_table, index.slot_mapping, batch.query_start, batch.seq_lens)
        self._store_keys(k, k, v, *caches, *where, s.scale, 1, None, None)

    def __call__(self, x: Tensor, batch: Batch, store: StateStore) -> Tensor:
        """x: [T, hidden] -> [T, hidden]. A row sees as many keys as its slot in `batch.state_slots` says, or
        those up to its own: a head has no recurrent state."""
        if self.spec.sees_ahead:
            batch = replace(batch, seq_lens=batch.state_slots)
        return super().__call__(x, batch, store)
