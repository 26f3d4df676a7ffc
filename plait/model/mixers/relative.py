"""Attention with a bias for each token and distance (Inkling); keys and values are convolved first."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from plait.checkpoint.weights import Weights
from plait.memory import PagedState, SlotState, State, group_name
from plait.model.layers.head_norm import HeadNorm
from plait.model.layers.layers import Batch, Norm
from plait.model.layers.temperature import Temperature
from plait.model.mixers.attention import describe_attention, divide_attention
from plait.model.mixers.mamba2 import WITH_INPUT, DepthwiseConv
from plait.model.mixers.registry import mixer
from plait.ops.activation import gate
from plait.ops.dynamic_conv import head_conv
from plait.ops.entry import CODED
from plait.ops.norm import limit_length
from plait.ops.relative import relative_attention
from plait.ops.rows import join
from plait.partition import Cut, Division, Rank, join_ranges, scale_range, shift_range
from plait.spec.attention import RelativeSpec
from plait.state.store import StateStore


def _words(m: RelativeSpec) -> str:
    parts = [describe_attention(m), f"a bias for each of {m.extent} distances by {m.rank} profiles"]
    parts += ["lengths limited"] if m.lengths else []
    parts += ["sinks of each token"] if m.token_sinks else []
    parts += ["taps of each token"] if m.apart else []
    parts += ["inputs of their own for queries, keys and values"] if m.split else []
    return ", ".join(parts)


def _divide(s: RelativeSpec, rank: Rank, hidden_size: int) -> Division:
    """What a head mixes goes with it, and channels and taps of convolutions with their key-value heads."""
    found = divide_attention(s, rank, hidden_size)
    heads = join_ranges(rank.divide(s.num_heads, "heads"))
    each = rank.divide_for_heads(s.num_kv_heads, s.num_heads, "key-value heads")
    kv, mixed = scale_range(each, s.head_dim), Cut((scale_range(heads, s.rank),))
    cuts = {**found.cuts, "mix": mixed, "conv": Cut((kv, shift_range(kv, s.num_kv_heads * s.head_dim)))}
    cuts |= {"sink": Cut((heads,)), "q_scale": Cut((heads,)), "mix_scale": Cut((heads,))}
    cuts |= {f"{x}_taps": Cut((scale_range(each, s.taps),)) for x in "kv"}
    cuts |= {f"{x}_fixed": Cut((kv,)) for x in "kv"}
    return replace(found, cuts=cuts)


@dataclass(frozen=True, slots=True)
class Projected:
    """What x became: queries' own, then keys and values, convolved.

    q: [T, heads · d], mixed: [T, heads · rank], closing: [T, heads · d] or None, sinks: [T, heads] or None;
    k, v: [T, kv_heads, d].
    """

    q: Tensor
    mixed: Tensor
    closing: Tensor | None
    sinks: Tensor | None
    k: Tensor
    v: Tensor


class JoinedInputs:
    """One linear layer for all of them; `conv` has keys' channels, then values'."""

    def __init__(self, s: RelativeSpec, w: Weights) -> None:
        q, kv, self.dim = s.num_heads * s.head_dim, s.num_kv_heads * s.head_dim, s.head_dim
        more = own_parts(s)
        parts = {"q": q, "k": kv, "v": kv, **more}
        self.into = w.linear(*parts, in_size=w.target.hidden_size, out_sizes=tuple(parts.values()))
        self._sizes, self._more = [q, 2 * kv, *more.values()], list(more)
        self.conv = DepthwiseConv(w, 2 * kv, s.taps, None, WITH_INPUT)
        self.tails = {"conv": (self.conv.tail_shape, "model")}

    def __call__(self, x: Tensor, batch: Batch, tails: dict[str, Tensor]) -> Projected:
        """x: [T, hidden]."""
        q, kv, *more = self.into(x).split(self._sizes, -1)
        own = dict(zip(self._more, more, strict=True))
        k, v = self.conv(kv, batch, tails["conv"]).unflatten(-1, (-1, self.dim)).chunk(2, 1)
        return Projected(q, own["mix"], own.get("gate"), own.get("sink"), k, v)


class ApartInputs:
    """Queries, keys and values of three parts of x; each token makes taps for heads of the latter two.

    `k_fixed`, `v_fixed` [channels, taps]: what is added to these, the input's own 1 included.
    """

    def __init__(self, s: RelativeSpec, w: Weights) -> None:
        q, kv, self.dim = s.num_heads * s.head_dim, s.num_kv_heads * s.head_dim, s.head_dim
        hidden, more = w.target.hidden_size, own_parts(s)
        own, kv_sizes = {"q": q, **more}, (kv, s.num_kv_heads * s.taps)
        self.into = w.linear(*own, in_size=hidden, out_sizes=tuple(own.values()))
        self._hidden, self._sizes, self._more, self._kv_sizes = hidden, [*own.values()], [*more], [*kv_sizes]
        self.kv = {x: w.linear(x, f"{x}_taps", in_size=hidden, out_sizes=kv_sizes) for x in "kv"}
        self.fixed = {x: w.tensor(f"{x}_fixed", (kv, s.taps), torch.float32).T.contiguous() for x in "kv"}
        self._conv, self._scale = w.bind(head_conv, channels=kv, kernel=s.taps), (2 * s.taps + 1) ** -0.5
        self.tails = {f"{x}_conv": ((s.taps - 1, kv), "model") for x in "kv"}

    def __call__(self, x: Tensor, batch: Batch, tails: dict[str, Tensor]) -> Projected:
        """x: [T, 3 hidden]."""
        q, *more = self.into(x[:, : self._hidden]).split(self._sizes, -1)
        own, found = dict(zip(self._more, more, strict=True)), []
        where = (batch.state_slots, batch.query_start, batch.has_history)
        for n, name in enumerate("kv", 1):
            read = x[:, n * self._hidden : (n + 1) * self._hidden]
            y, taps = self.kv[name](read).split(self._kv_sizes, -1)
            y = self._conv(y, taps, self.fixed[name], tails[f"{name}_conv"], *where, self._scale)
            found.append(y.unflatten(-1, (-1, self.dim)))
        return Projected(q, own["mix"], own.get("gate"), own.get("sink"), *found)


class SplitInputs:
    """Queries, keys and values of three parts of x, or of all of it; `conv` as that of `JoinedInputs`."""

    def __init__(self, s: RelativeSpec, w: Weights) -> None:
        q, kv, self.dim = s.num_heads * s.head_dim, s.num_kv_heads * s.head_dim, s.head_dim
        self._hidden, more = w.target.hidden_size, own_parts(s)
        own = {"q": q, **more}
        self.into = w.linear(*own, in_size=self._hidden, out_sizes=tuple(own.values()))
        self._sizes, self._more = [*own.values()], [*more]
        self.kv = [w.linear(x, in_size=self._hidden, out_sizes=(kv,)) for x in "kv"]
        self._join, self.conv = w.bind(join), DepthwiseConv(w, 2 * kv, s.taps, None, WITH_INPUT)
        self.tails = {"conv": (self.conv.tail_shape, "model")}

    def __call__(self, x: Tensor, batch: Batch, tails: dict[str, Tensor]) -> Projected:
        """x: [T, hidden] or [T, 3 hidden]."""
        first, *others = x.split(self._hidden, -1)
        q, *more = self.into(first).split(self._sizes, -1)
        own = dict(zip(self._more, more, strict=True))
        kv = self._join(*(linear(read) for linear, read in zip(self.kv, others or (x, x), strict=True)))
        k, v = self.conv(kv, batch, tails["conv"]).unflatten(-1, (-1, self.dim)).chunk(2, 1)
        return Projected(q, own["mix"], own.get("gate"), own.get("sink"), k, v)


def own_parts(s: RelativeSpec) -> dict[str, int]:
    """What is made of the part that queries read, besides these, and how many numbers it has."""
    parts = {"mix": s.num_heads * s.rank}
    parts |= {"gate": s.num_heads * s.head_dim} if s.gate else {}
    return parts | ({"sink": s.num_heads} if s.token_sinks else {})


@mixer(RelativeSpec, _words, _divide)
class RelativeAttention:
    """`profiles` [distances, rank]; `q_scale` and `mix_scale`: learned numbers of each head."""

    def __init__(self, s: RelativeSpec, w: Weights) -> None:
        self.spec, self.name = s, w.prefix
        q = s.num_heads * s.head_dim
        self.inputs = (ApartInputs if s.apart else SplitInputs if s.split else JoinedInputs)(s, w)
        self.o = w.linear("o", in_size=q, out_sizes=(w.target.hidden_size,))
        self.q_norm = HeadNorm(s.qk_norm, s, w.scope("q_norm"), s.num_heads) if s.qk_norm else None
        self.k_norm = HeadNorm(s.qk_norm, s, w.scope("k_norm"), s.num_kv_heads) if s.qk_norm else None
        self.v_norm = Norm(s.v_norm, w.scope("v_norm"), s.head_dim) if s.v_norm else None
        self._limit = w.bind(limit_length, size=s.head_dim) if s.lengths else None
        if s.lengths:
            self.q_scale = w.tensor("q_scale", (s.num_heads, s.head_dim), torch.float32)
            self.mix_scale = w.tensor("mix_scale", (s.num_heads, s.rank), torch.float32)
        self.profiles = w.tensor("profiles", (s.extent, s.rank), torch.float32)
        self.temperature = Temperature(s.temperature, w) if s.temperature else None
        self._gate = w.bind(gate) if s.gate else None
        # Its kernel reads no codes, and without it a reply's bits would depend on how its prompt was cut.
        kept = "bfloat16" if w.target.kv_dtype in CODED else w.target.kv_dtype
        sizes = {"heads": s.num_heads, "kv_heads": s.num_kv_heads, "dim": s.head_dim, "kv_dtype": kept}
        self._attend, self._keys = w.bind(relative_attention, **sizes, window=s.window), f"{self.name}.keys"
        entry = dict.fromkeys("kv", (s.num_kv_heads, s.head_dim))
        self.states: dict[str, State] = {
            self.name: SlotState(self.inputs.tails),
            self._keys: PagedState(entry, s.window, kept),
        }

    def __call__(self, x: Tensor, batch: Batch, store: StateStore) -> Tensor:
        """x: [T, hidden], or [T, 3 hidden] where queries, keys and values read apart -> [T, hidden]."""
        s, cache, index = self.spec, store[self._keys], batch.paged[group_name(self.spec.window)]
        made = self.inputs(x, batch, store[self.name])
        q, k, v, mixed = self._turn_heads(made, batch)
        where = (index.block_table, index.slot_mapping, batch.query_start, batch.seq_lens)
        caches = (cache["k"], cache["v"])
        out = self._attend(q, k, v, mixed, self.profiles, *caches, *where, s.scale, s.window, made.sinks)
        out = out.flatten(1)
        return self.o(self._gate(out, made.closing) if self._gate else out)

    def _turn_heads(self, made: Projected, batch: Batch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, k, v and what is mixed, normed or limited, and grown with the position: [T, heads, n] each."""
        heads = self.spec.num_heads
        q, mixed = (x.unflatten(-1, (heads, -1)) for x in (made.q, made.mixed))
        k, v = made.k, self.v_norm(made.v) if self.v_norm else made.v
        if self.q_norm and self.k_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        if self._limit and self.spec.lengths:
            most, most_mixed = self.spec.lengths
            q, k = self._limit(q, self.q_scale, most), self._limit(k, None, most)
            mixed = self._limit(mixed, self.mix_scale, most_mixed)
        if self.temperature:
            q, mixed = self.temperature(q, batch), self.temperature(mixed, batch)
        return q, k, v, mixed
