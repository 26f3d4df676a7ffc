"""Zamba's shared transformer blocks: weights that several layers use; Zamba2 has adapters for each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from plait.checkpoint.weights import Weights
from plait.memory import PagedState, State, group_name
from plait.model.layers.layers import Batch, Norm, Rope
from plait.ops.activation import activate, combine
from plait.ops.attention import paged_attention
from plait.ops.entry import head_widths
from plait.ops.linear import Linear
from plait.ops.place import place_heads
from plait.ops.ranks import sum_ranks
from plait.ops.rows import join
from plait.partition import Cut, Rank, join_ranges, scale_range, shift_range, sum_of, width
from plait.spec.model import AsideSpec
from plait.state.store import StateStore

UNBOUNDED = group_name(None)


class SharedBlock:
    """The weights that all uses share: `norm q k v o` of width 2 hidden, `ffn_norm gate up down`."""

    def __init__(self, s: AsideSpec, w: Weights) -> None:
        hidden, sizes = w.target.hidden_size, _widths(s)
        self.norm = Norm(s.norm, w.scope("norm"), 2 * hidden)
        self.qkv = w.linear("q", "k", "v", in_size=2 * hidden, out_sizes=sizes)
        self.o = w.linear("o", in_size=sizes[0], out_sizes=(hidden,))
        self.rope = Rope(s.rope, w) if s.rope else None
        self.ffn_norm = Norm(s.norm, w.scope("ffn_norm"), hidden)
        self.up = w.linear("gate", "up", in_size=hidden, out_sizes=(s.size, s.size))
        self.down = w.linear("down", in_size=s.size, out_sizes=(hidden,))


class SharedBlockUse:
    """One use of a block: its own keys and values, its adapters and its `out`."""

    def __init__(self, s: AsideSpec, w: Weights) -> None:
        self.spec, self.name = s, w.prefix
        hidden, self._sizes = w.target.hidden_size, _widths(s)
        self.block: SharedBlock = w.shared(f"shared.{s.block}", lambda shared: SharedBlock(s, shared))
        self.adapters: list[tuple[Linear, Linear]] = []
        if s.rank and s.adapts_attention:
            pairs = zip("qkv", self._sizes, strict=True)
            self.adapters += [_adapter(w, name, s.rank, 2 * hidden, size) for name, size in pairs]
        self.widen = _adapter(w, "gate_up", s.rank, hidden, 2 * s.size) if s.rank else None
        self.out = w.linear("out", in_size=hidden, out_sizes=(hidden,))
        self._join, self._combine = w.bind(join), w.bind(combine)
        self._comm, self._dtype = w.target.comm, w.target.dtype
        self._activate = w.bind(activate, kind=s.activation, gated=True)
        self._place, self._attend = w.bind_pair(
            place_heads,
            paged_attention,
            heads=s.num_heads,
            kv_heads=s.num_kv_heads,
            dim=s.head_dim,
            window=None,
            softcap=None,
            sinks=False,
            activations=w.target.activations,
        )
        dtype = w.target.kv_dtype
        widths = zip("kv", head_widths(s.head_dim, dtype), strict=True)
        entry = {name: (s.num_kv_heads, width) for name, width in widths}
        self.states: dict[str, State] = {self.name: PagedState(entry, None, dtype)}

    def __call__(self, x: Tensor, embeddings: Tensor, batch: Batch, store: StateStore) -> Tensor:
        """x, embeddings: [T, hidden] -> what is added to the input of the branch's norm, [T, hidden]."""
        block = self.block
        h = block.norm(self._join(x, embeddings))
        h = self._sum(block.o(self._attend_heads(h, batch, store)))
        h = block.ffn_norm(h)
        up = block.up(h)
        up = self._combine(up, self.widen[1](self.widen[0](h)), 1.0) if self.widen else up
        return self.out(self._sum(block.down(self._activate(up, self.spec.activation, True))))

    def _sum(self, x: Tensor) -> Tensor:
        return sum_ranks(x, self._comm, self._dtype)

    def _attend_heads(self, h: Tensor, batch: Batch, store: StateStore) -> Tensor:
        """h: [T, 2 hidden] -> [T, heads * d]."""
        s, rope = self.spec, self.block.rope
        parts = self.block.qkv(h).split(list(self._sizes), -1)
        if self.adapters:
            added = (up(down(h)) for down, up in self.adapters)
            parts = tuple(self._combine(p, a, 1.0) for p, a in zip(parts, added, strict=True))
        q, k, v = (part.unflatten(-1, (-1, s.head_dim)) for part in parts)
        cache, index = store[self.name], batch.paged[UNBOUNDED]
        caches = cache["k"], cache["v"]
        where = (index.block_table, index.slot_mapping, batch.query_start, batch.seq_lens)
        if self._place:
            to = (*caches, index.slot_mapping, batch.positions)
            q = self._place(q, k, v, *to, None, rope.rotation if rope else None)
            out: Tensor = self._attend(q, None, None, *caches, *where, s.scale, None, None, None, batch.step)
        else:
            if rope:
                q, k = rope(q, batch.positions), rope(k, batch.positions)
            out = self._attend(q, k, v, *caches, *where, s.scale, None, None, None)
        return out.flatten(1)


def divide_aside(s: AsideSpec, rank: Rank) -> tuple[AsideSpec, Mapping[str, Cut], Mapping[str, Cut]]:
    """A rank's part: its spec, the cuts of what is this use's own, and of what all uses of the block share.

    Heads and inner features are divided, with the second factors of the adapters; `out` is whole.
    """
    heads, dim = join_ranges(rank.divide(s.num_heads, "heads")), s.head_dim
    kv = rank.divide_for_heads(s.num_kv_heads, s.num_heads, "key-value heads")
    queries, kept = Cut((scale_range(heads, dim),)), Cut((scale_range(kv, dim),))
    ranges = rank.divide_blocks(s.size, "inner features")
    own = join_ranges(ranges)
    shared = {"q": queries, "k": kept, "v": kept, "gate": Cut((own,)), "up": Cut((own,))}
    shared |= {
        "o": Cut(cols=sum_of(rank.divide(s.num_heads, "heads", dim))),
        "down": Cut(cols=sum_of(ranges)),
    }
    cuts = {"q_b": queries, "k_b": kept, "v_b": kept, "gate_up_b": Cut((own, shift_range(own, s.size)))}
    part = replace(s, num_heads=width(heads), num_kv_heads=width(kv), size=width(own))
    return part, cuts, shared


def _widths(s: AsideSpec) -> tuple[int, int, int]:
    """Of q, k and v."""
    kv = s.num_kv_heads * s.head_dim
    return s.num_heads * s.head_dim, kv, kv


def _adapter(w: Weights, name: str, rank: int, in_size: int, out_size: int) -> tuple[Linear, Linear]:
    """A low-rank weight matrix, as its two factors: `NAME_a` and then `NAME_b`."""
    first = w.linear(f"{name}_a", in_size=in_size, out_sizes=(rank,))
    return first, w.linear(f"{name}_b", in_size=rank, out_sizes=(out_size,))
