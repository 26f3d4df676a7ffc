"""Attention of which scores fall with the root of a key's distance (Step 1)."""

from __future__ import annotations

import torch
from torch import Tensor

from plait.checkpoint.weights import Weights
from plait.errors import UnsupportedModel
from plait.memory import PagedState, State, group_name
from plait.model.layers.layers import Batch
from plait.model.layers.temperature import list_positions
from plait.model.mixers.attention import describe_attention, divide_attention
from plait.model.mixers.registry import mixer
from plait.ops.entry import CODED
from plait.ops.relative import relative_attention
from plait.spec.attention import RootBiasSpec
from plait.state.store import StateStore


def _words(m: RootBiasSpec) -> str:
    return f"{describe_attention(m)} by roots of distances"


@mixer(RootBiasSpec, _words, divide_attention)
class RootBias:
    """`relative_attention` with one profile, the roots of distances, of which each head mixes its slope."""

    def __init__(self, s: RootBiasSpec, w: Weights) -> None:
        sizes = s.num_heads, s.num_kv_heads, s.head_dim, s.scale
        if not s.slopes or s != RootBiasSpec(*sizes, slopes=s.slopes):
            raise UnsupportedModel(
                f"{w.prefix}: attention by roots of distances has slopes of heads, and no rotation, windows, "
                "norms, sinks or gates"
            )
        self.spec, self.name, device = s, w.prefix, w.target.device
        q, kv, hidden = s.num_heads * s.head_dim, s.num_kv_heads * s.head_dim, w.target.hidden_size
        self.qkv = w.linear("q", "k", "v", in_size=hidden, out_sizes=(q, kv, kv))
        self.o = w.linear("o", in_size=q, out_sizes=(hidden,))
        self.slopes = -torch.tensor(s.slopes, device=device)[None, :, None]
        self.roots = list_positions(w).float().to(device).sqrt()[:, None]
        # Its kernel reads no codes: see `RelativeAttention`.
        kept = "bfloat16" if w.target.kv_dtype in CODED else w.target.kv_dtype
        facts = {"heads": s.num_heads, "kv_heads": s.num_kv_heads, "dim": s.head_dim, "kv_dtype": kept}
        self._attend = w.bind(relative_attention, **facts, window=None)
        self._parts = [s.num_heads, s.num_kv_heads, s.num_kv_heads]
        entry = dict.fromkeys("kv", (s.num_kv_heads, s.head_dim))
        self.states: dict[str, State] = {self.name: PagedState(entry, None, kept)}

    def __call__(self, x: Tensor, batch: Batch, store: StateStore) -> Tensor:
        """x: [T, hidden] -> [T, hidden]."""
        s, cache, index = self.spec, store[self.name], batch.paged[group_name(None)]
        q, k, v = self.qkv(x).unflatten(-1, (-1, s.head_dim)).split(self._parts, 1)
        mixed = self.slopes.expand(len(x), -1, -1)
        where = (index.block_table, index.slot_mapping, batch.query_start, batch.seq_lens)
        out = self._attend(q, k, v, mixed, self.roots, cache["k"], cache["v"], *where, s.scale, None, None)
        return self.o(out.flatten(1))
