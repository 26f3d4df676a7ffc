"""Attention with a bias for each token and distance (Inkling); keys and values are convolved first."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from plait.checkpoint.weights import Weights
from plait.memory import PagedState, SlotState, State, group_name
from plait.model.layers.head_norm import HeadNorm
from plait.model.layers.layers import Batch
from plait.model.layers.temperature import Temperature
from plait.model.mixers.attention import describe_attention, divide_attention
from plait.model.mixers.mamba2 import WITH_INPUT, DepthwiseConv
from plait.model.mixers.registry import mixer
from plait.ops.entry import CODED
from plait.ops.relative import relative_attention
from plait.partition import Cut, Division, Rank, join_ranges, scale_range, shift_range
from plait.spec.attention import RelativeSpec
from plait.state.store import StateStore


def _words(m: RelativeSpec) -> str:
    return f"{describe_attention(m)}, a bias for each of {m.extent} distances by {m.rank} profiles"


def _divide(s: RelativeSpec, rank: Rank, hidden_size: int) -> Division:
    """What a head mixes goes with it, and channels of the convolution with their key-value heads."""
    found = divide_attention(s, rank, hidden_size)
    heads = join_ranges(rank.divide(s.num_heads, "heads"))
    kv = scale_range(rank.divide_for_heads(s.num_kv_heads, s.num_heads, "key-value heads"), s.head_dim)
    conv = Cut((kv, shift_range(kv, s.num_kv_heads * s.head_dim)))
    return replace(found, cuts={**found.cuts, "mix": Cut((scale_range(heads, s.rank),)), "conv": conv})


@mixer(RelativeSpec, _words, _divide)
class RelativeAttention:
    """`profiles` [distances, rank]; `conv` has keys' channels, then values'."""

    def __init__(self, s: RelativeSpec, w: Weights) -> None:
        self.spec, self.name, hidden = s, w.prefix, w.target.hidden_size
        q, kv = s.num_heads * s.head_dim, s.num_kv_heads * s.head_dim
        parts = {"q": q, "k": kv, "v": kv, "mix": s.num_heads * s.rank}
        self._parts = [q, 2 * kv, s.num_heads * s.rank]
        self.into = w.linear(*parts, in_size=hidden, out_sizes=tuple(parts.values()))
        self.o = w.linear("o", in_size=q, out_sizes=(hidden,))
        self.conv = DepthwiseConv(w, 2 * kv, s.taps, None, WITH_INPUT)
        self.q_norm = HeadNorm(s.qk_norm, s, w.scope("q_norm"), s.num_heads) if s.qk_norm else None
        self.k_norm = HeadNorm(s.qk_norm, s, w.scope("k_norm"), s.num_kv_heads) if s.qk_norm else None
        self.profiles = w.tensor("profiles", (s.extent, s.rank), torch.float32)
        self.temperature = Temperature(s.temperature, w) if s.temperature else None
        # Its kernel reads no codes, and without it a reply's bits would depend on how its prompt was cut.
        kept = "bfloat16" if w.target.kv_dtype in CODED else w.target.kv_dtype
        sizes = {"heads": s.num_heads, "kv_heads": s.num_kv_heads, "dim": s.head_dim, "kv_dtype": kept}
        self._attend, self._keys = w.bind(relative_attention, **sizes, window=s.window), f"{self.name}.keys"
        entry = dict.fromkeys("kv", (s.num_kv_heads, s.head_dim))
        self.states: dict[str, State] = {
            self.name: SlotState({"conv": (self.conv.tail_shape, "model")}),
            self._keys: PagedState(entry, s.window, kept),
        }

    def __call__(self, x: Tensor, batch: Batch, store: StateStore) -> Tensor:
        """x: [T, hidden] -> [T, hidden]."""
        s, cache, index = self.spec, store[self._keys], batch.paged[group_name(self.spec.window)]
        q, kv, mixed = self.into(x).split(self._parts, -1)
        kv = self.conv(kv, batch, store[self.name]["conv"]).unflatten(-1, (-1, s.head_dim))
        q, (k, v) = q.unflatten(-1, (s.num_heads, -1)), kv.chunk(2, 1)
        mixed = mixed.unflatten(-1, (s.num_heads, -1))
        if self.q_norm and self.k_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.temperature:
            q, mixed = self.temperature(q, batch), self.temperature(mixed, batch)
        where = (index.block_table, index.slot_mapping, batch.query_start, batch.seq_lens)
        caches = (cache["k"], cache["v"])
        out = self._attend(q, k, v, mixed, self.profiles, *caches, *where, s.scale, s.window)
        return self.o(out.flatten(1))
