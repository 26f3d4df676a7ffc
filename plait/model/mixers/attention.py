"""Grouped-query attention: one mixer for every family, windows, softcaps and norms being data."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from plait.checkpoint.weights import Weights
from plait.memory import PagedState, State, group_name
from plait.model.layers.head_gate import HeadGate
from plait.model.layers.head_norm import HeadNorm
from plait.model.layers.inner_norm import InnerNorm
from plait.model.layers.layers import Batch, Norm, Rope, describe_rope
from plait.model.layers.sinks import Sinks
from plait.model.layers.temperature import Temperature
from plait.model.mixers.registry import BetweenLinears, LinearEnds, mixer
from plait.ops.activation import clip, gate
from plait.ops.attention import paged_attention
from plait.ops.entry import head_widths
from plait.ops.full_attention import full_attention
from plait.ops.linear import Linear
from plait.ops.place import HeadNorms, place_heads
from plait.partition import Cut, Division, Rank, join_ranges, scale_range, sum_of, width
from plait.spec.model import AttentionSpec
from plait.state.store import StateStore


def describe_attention(m: AttentionSpec) -> str:
    kind = "attention" if m.num_heads == m.num_kv_heads else "grouped-query attention"
    parts = [f"{kind}, {m.num_heads} heads × {m.head_dim}, {m.num_kv_heads} kv", describe_rope(m.rope)]
    ends = f", up to the end of a chunk of {m.chunk}" if m.chunk else ""
    parts += [f"window {m.window}{ends}"] if m.window else []
    parts += [f"all of {m.canvas} tokens"] if m.canvas else []
    parts += ["all of a canvas"] if m.open_canvas else []
    parts += [f"softcap {m.softcap:g}"] if m.softcap else []
    parts += [f"q and k normed{' last' if m.qk_norm_last else ''}"] if m.qk_norm else []
    parts += [f"both ways{' in prompts' if m.both_ways == 'prompt' else ''}"] if m.both_ways else []
    flags = {"queries that grow": m.temperature, "sinks": m.sinks, "sinks by keys": m.sink_keys}
    parts += [words for words, is_there in {**flags, "ALiBi": m.slopes}.items() if is_there]
    parts += [f"clipped at {m.clip:g}"] if m.clip else []
    parts += ["outputs normed"] if m.out_norm else []
    parts += ["gated"] if m.gate or m.head_gate else []
    return ", ".join(parts)


def divide_attention(s: AttentionSpec, rank: Rank, hidden_size: int) -> Division:
    """A rank's heads: their rows of what gives queries, keys and values, and their columns of the output."""
    heads, dim = join_ranges(rank.divide(s.num_heads, "heads")), s.head_dim
    kv = rank.divide_for_heads(s.num_kv_heads, s.num_heads, "key-value heads")
    q, k = Cut((scale_range(heads, dim),)), Cut((scale_range(kv, dim),))
    cuts = dict.fromkeys(("sinks", "head_gate", "mix"), Cut((heads,))) | {"q": q, "k": k, "v": k, "gate": q}
    cuts |= {"sink_keys": Cut((kv,)), "o": Cut(cols=sum_of(rank.divide(s.num_heads, "heads", dim)))}
    if s.qk_norm_over == "each":
        cuts |= {"q_norm": q, "k_norm": k}
    gathers = 2 * (s.qk_norm_over == "all" and s.qk_norm is not None) + (s.out_norm is not None)
    slopes = s.slopes[slice(*heads)] if s.slopes else None
    part = replace(s, num_heads=width(heads), num_kv_heads=width(kv), slopes=slopes)
    return Division(part, cuts, gathers=gathers)


@mixer(AttentionSpec, describe_attention, divide_attention)
class Attention(BetweenLinears):
    """One product gives queries, keys and values. The latter two go to the cache, where queries attend."""

    def __init__(self, s: AttentionSpec, w: Weights) -> None:
        self.spec, self.name = s, w.prefix
        q, kv = s.num_heads * s.head_dim, s.num_kv_heads * s.head_dim
        parts = {"q": q, "k": kv, "v": kv, **({"gate": q} if s.gate else {})}
        self.qkv = self._bind_qkv(w, parts)
        self.o = self._bind_o(w, q)
        self.q_norm = HeadNorm(s.qk_norm, s, w.scope("q_norm"), s.num_heads) if s.qk_norm else None
        self.k_norm = HeadNorm(s.qk_norm, s, w.scope("k_norm"), s.num_kv_heads) if s.qk_norm else None
        self.v_norm = Norm(s.v_norm, w.scope("v_norm"), s.head_dim) if s.v_norm else None
        self.sinks = Sinks(s, w) if s.sinks or s.sink_keys else None
        self.rope = Rope(s.rope, w) if s.rope else None
        weights = (self.q_norm.weights, self.k_norm.weights) if self.q_norm and self.k_norm else None
        self._norms = HeadNorms(*weights, s.qk_norm_over) if weights else None
        sizes: dict[str, object] = dict(heads=s.num_heads, kv_heads=s.num_kv_heads, dim=s.head_dim)
        sizes |= dict(window=s.window, softcap=s.softcap, sinks=self.sinks is not None)
        self.slopes = torch.tensor(s.slopes, device=w.target.device) if s.slopes else None
        self._more: dict[str, object] = {"chunk": s.chunk} if s.chunk else {}
        self._more |= {"canvas": s.canvas} if s.canvas else {}
        sizes |= {"open_canvas": True} if s.open_canvas else {}
        sizes |= {"activations": w.target.activations, **self._more, **({"alibi": True} if s.slopes else {})}
        self._more |= {"slopes": self.slopes} if s.slopes else {}
        attends = (None, w.bind(full_attention)) if s.both_ways else None
        self._place, self._attend = attends or w.bind_pair(place_heads, paged_attention, **sizes)
        if s.qk_norm_last or (self.q_norm and self.q_norm.is_gathered):
            self._place = None  # what places heads norms them first, and reaches no other rank
        self.temperature = Temperature(s.temperature, w) if s.temperature else None
        self._gate = w.bind(gate) if s.gate else None
        self._clip = w.bind(clip) if s.clip else None
        self.out_norm = InnerNorm(s.out_norm, w.scope("out_norm"), q, s.head_dim) if s.out_norm else None
        self.head_gate = HeadGate(s.head_gate, w, s.num_heads) if s.head_gate else None
        self._parts = [size // s.head_dim for size in parts.values()]
        widths = zip("kv", head_widths(s.head_dim, w.target.kv_dtype), strict=True)
        entry = {name: (s.num_kv_heads, width) for name, width in widths}
        states: dict[str, State] = {self.name: PagedState(entry, s.window, w.target.kv_dtype)}
        self.states = {} if s.both_ways else states  # no later step reads them
        self._group = group_name(s.window)

    def _bind_qkv(self, w: Weights, parts: dict[str, int]) -> Linear:
        return w.linear(*parts, in_size=w.target.hidden_size, out_sizes=tuple(parts.values()))

    def _bind_o(self, w: Weights, width: int) -> Linear | None:
        """None: what is made of heads is not this class's."""
        return w.linear("o", in_size=width, out_sizes=(w.target.hidden_size,))

    def __call__(self, x: Tensor, batch: Batch, store: StateStore) -> Tensor:
        """x: [T, hidden] -> [T, hidden]."""
        return self.attend(self.qkv(x), x, batch, store)

    def ends(self) -> LinearEnds:
        """A gate for each head reads x, too."""
        return LinearEnds(None, "", None) if self.head_gate else LinearEnds(self.qkv, "", self.o)

    def middle(self, first: Tensor, batch: Batch, store: StateStore) -> Tensor:
        """From x's projections, one head behind the other, to what the last linear layer is given."""
        return self._merge(*self.attend_heads(first, batch, store))

    def attend(self, projected: Tensor, x: Tensor, batch: Batch, store: StateStore) -> Tensor:
        """The same, of x's projections, one head behind the other."""
        out, closing = self.attend_heads(projected, batch, store)
        return self._close(out, x, closing)

    def attend_heads(self, projected: Tensor, batch: Batch, store: StateStore) -> tuple[Tensor, list[Tensor]]:
        """(what heads give, [T, heads, d], and the projections behind those of values: a gate's, if any)."""
        s = self.spec
        projected = projected if self._clip is None else self._clip(projected, s.clip)
        heads = projected.unflatten(-1, (-1, s.head_dim))  # [T, heads + 2 kv_heads (+ heads), d]
        q, k, v, *closing = heads.split(self._parts, 1)
        v = self.v_norm(v) if self.v_norm else v
        if s.both_ways:
            rotated, starts = self._norm_and_rotate(heads, q, k, batch), batch.query_start
            prompts = batch.count_prompts() if s.both_ways == "prompt" else None
            return self._attend(*rotated, v, starts, s.scale, s.window, s.softcap, prompts), closing
        cache, index = store[self.name], batch.paged[self._group]
        caches = cache["k"], cache["v"]
        where = (index.block_table, index.slot_mapping, batch.query_start, batch.seq_lens)
        how, more = (s.scale, s.window, s.softcap), self._more
        if batch.canvas and s.open_canvas:
            more = {**more, "canvas_start": batch.canvas.start}
        if self._place:
            to = (*caches, index.slot_mapping, batch.positions)
            q = self._place(q, k, v, *to, self._norms, self.rope.rotation if self.rope else None)
            k, v, more = None, None, {**more, "step": batch.step}
        else:
            q, k = self._norm_and_rotate(heads, q, k, batch)
        q = self.temperature(q, batch) if self.temperature else q
        sinks = self.sinks(q) if self.sinks else None
        return self._attend(q, k, v, *caches, *where, *how, sinks, **more), closing

    def _close(self, out: Tensor, x: Tensor, closing: list[Tensor]) -> Tensor:
        assert self.o is not None
        return self.o(self._merge(self.head_gate(out, x) if self.head_gate else out, closing))

    def _merge(self, out: Tensor, closing: list[Tensor]) -> Tensor:
        """What heads give side by side, normed and gated."""
        out = out.flatten(1)
        out = self.out_norm(out) if self.out_norm else out
        return self._gate(out, closing[0].flatten(1)) if self._gate else out

    def _norm_and_rotate(self, heads: Tensor, q: Tensor, k: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Queries and keys, normed and rotated. heads: both, and what is behind them."""
        if self.q_norm and self.k_norm and not self.spec.qk_norm_last:
            q, k = self.q_norm(q), self.k_norm(k)
            return (self.rope(q, batch.positions), self.rope(k, batch.positions)) if self.rope else (q, k)
        if self.rope:  # both at once, as they lie
            q, k = self.rope(heads[:, : sum(self._parts[:2])], batch.positions).split(self._parts[:2], 1)
        return (self.q_norm(q), self.k_norm(k)) if self.q_norm and self.k_norm else (q, k)
