"""Attention and Mamba1 side by side in every head (Hymba; Dong et al. 2024), behind learned tokens.

What these tokens leave is the same for all sequences (`model.front`): keys that no window hides, and states.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from plait.checkpoint.weights import Weights
from plait.errors import UnsupportedModel
from plait.memory import PagedState, State, group_name
from plait.model.layers.inner_norm import InnerNorm
from plait.model.layers.layers import Batch, Rope
from plait.model.mixers.attention import describe_attention
from plait.model.mixers.mamba1 import Mamba1, describe_mamba1, divide_mamba1
from plait.model.mixers.registry import mixer
from plait.ops.activation import combine
from plait.ops.front import begin_slots, front_attention
from plait.ops.place import place_heads
from plait.partition import Cut, Division, Rank, join_ranges, scale_range, width
from plait.spec.attention import HybridHeadsSpec
from plait.spec.model import AttentionSpec
from plait.state.store import StateStore

KEYS = "keys"  # the name of the paged state of a mixer
SLOT = ("conv", "ssm")


def _words(m: HybridHeadsSpec) -> str:
    keys = f", keys and values of {m.source}" if m.source else ""
    front = f", behind {m.front} learned tokens" if m.front else ""
    return f"{describe_attention(_attention(m))}{keys} ∥ {describe_mamba1(m)}{front}"


def _attention(m: HybridHeadsSpec) -> AttentionSpec:
    if m.attention is None:
        raise UnsupportedModel("hybrid heads want a spec of their attention")
    return m.attention


def _divide(s: HybridHeadsSpec, rank: Rank, hidden_size: int) -> Division:
    """Heads of attention with the channels of Mamba1 that they are added to; both norms gather."""
    a, part = _attention(s), divide_mamba1(s, rank, hidden_size)
    heads = join_ranges(rank.divide(a.num_heads, "heads"))
    kv = rank.divide_for_heads(a.num_kv_heads, a.num_heads, "key-value heads")
    cuts = {**part.cuts, "q": Cut((scale_range(heads, a.head_dim),))}
    cuts |= {name: Cut((scale_range(kv, size),)) for name, size in (("k", a.head_dim), ("v", s.v_dim))}
    own = replace(a, num_heads=width(heads), num_kv_heads=width(kv))
    assert isinstance(part.spec, HybridHeadsSpec)
    return Division(replace(part.spec, attention=own), cuts, part.sums, gathers=2)


@mixer(HybridHeadsSpec, _words, _divide)
class HybridHeads(Mamba1):
    """`in`, `x`, `dt` and so on are Mamba1's; `out` reads the sum of both."""

    def __init__(self, s: HybridHeadsSpec, w: Weights) -> None:
        super().__init__(s, w)
        self.heads, self._source = _attention(s), s.source or w.prefix
        a, hidden, kept = self.heads, w.target.hidden_size, w.target.kv_dtype
        if kept not in ("model", "float32", "bfloat16"):
            raise UnsupportedModel(
                f"{w.prefix}: keys behind learned tokens are kept as float32 or bfloat16, not as {kept}"
            )
        groups, widths = a.num_kv_heads, (a.head_dim, s.v_dim)
        if a.num_heads * s.v_dim != s.inner_size:
            raise UnsupportedModel(
                f"{w.prefix}: {a.num_heads} heads with values of {s.v_dim} are not as wide as Mamba1's "
                f"{s.inner_size} channels"
            )
        self._sizes = [
            a.num_heads * a.head_dim,
            *((groups * width for width in widths) if not s.source else ()),
        ]
        names = ("q",) if s.source else ("q", "k", "v")
        self.qkv = w.linear(*names, in_size=hidden, out_sizes=tuple(self._sizes))
        self.rope = Rope(a.rope, w) if a.rope else None
        sizes = dict(heads=a.num_heads, kv_heads=groups, dim=a.head_dim, v_dim=s.v_dim, window=a.window)
        self._place, self._attend = w.bind_pair(place_heads, front_attention, **sizes)
        self._begin = w.bind(begin_slots)
        norms = ("heads_norm", "channels_norm")
        self.norms = [InnerNorm(s.head_norm, w.scope(name), s.inner_size, s.v_dim) for name in norms]
        self._combine, self._group = w.bind(combine), group_name(a.window)
        self.front = tuple(torch.zeros(0, groups, width, device=w.target.device) for width in widths)
        self.is_started, self._initial = not s.front, dict[str, Tensor]()
        if not s.source:
            entry = {"k": (groups, a.head_dim), "v": (groups, s.v_dim)}
            paged: dict[str, State] = {f"{w.prefix}.{KEYS}": PagedState(entry, a.window, kept)}
            self.states |= paged

    def __call__(self, x: Tensor, batch: Batch, store: StateStore) -> Tensor:
        """x: [T, hidden] -> [T, hidden]."""
        state, started = store[self.name], batch
        where = (batch.state_slots, batch.has_history, batch.positions)
        for name, initial in self._initial.items():
            history = self._begin(initial, state[name], *where)
            started = replace(batch, has_history=history)
        parts = (self.attend(x, batch, store), self.scan(x, started, store))
        attended, scanned = (norm(part) for norm, part in zip(self.norms, parts, strict=True))
        return self.out(self._combine(attended, scanned, 1.0))

    def attend(self, x: Tensor, batch: Batch, store: StateStore) -> Tensor:
        """x: [T, hidden] -> [T, heads · v_dim], in front of the norm."""
        a, cache = self.heads, store[f"{self._source}.{KEYS}"]
        index = batch.paged[self._group]
        q, *new = self.qkv(x).split(self._sizes, -1)
        q = q.unflatten(-1, (-1, a.head_dim))
        k, v = (part.unflatten(-1, (a.num_kv_heads, -1)) for part in new) if new else (None, None)
        if self._place and k is not None:
            to = (cache["k"], cache["v"], index.slot_mapping, batch.positions)
            q, k, v = self._place(q, k, v, *to, None, self.rope and self.rope.rotation), None, None
        elif self.rope:
            q = self.rope(q, batch.positions)
            k = self.rope(k, batch.positions) if k is not None else None
        where = (index.block_table, index.slot_mapping, batch.query_start, batch.seq_lens)
        kept = (cache["k"], cache["v"], self.front)
        window = a.window if self.is_started else None  # tokens of the front see one another
        out: Tensor = self._attend(q, k, v, *kept, *where, a.scale, window, batch.step)
        return out.flatten(1)

    def keep_front(self, store: StateStore) -> None:
        """See `model.front`. A text begins at position 0: keys of the front are turned back by its length."""
        assert isinstance(self.spec, HybridHeadsSpec)
        count, caches = self.spec.front or 0, store[f"{self._source}.{KEYS}"]
        k, v = (caches[name][1:].flatten(0, 1)[:count].float() for name in "kv")
        self.front = (self._turn_back(k, count).contiguous(), v.contiguous())
        self.is_started = True
        self._initial = {name: store[self.name][name][1].clone() for name in SLOT}

    def _turn_back(self, k: Tensor, count: int) -> Tensor:
        if self.rope is None:
            return k
        angle = count * self.rope.rotation.inv_freq.double()
        cos, sin = angle.cos().float(), angle.sin().float()
        first, second = k.chunk(2, -1)
        return torch.cat([first * cos + second * sin, second * cos - first * sin], -1)
