"""Multi-head latent attention (DeepSeek-V2): one small latent per token serves all heads.

Decode and prefill both run absorbed: the key up-projection moves into q, the value up-projection behind the
softmax, so that nothing but latents is ever read from memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from plait.checkpoint.weights import Weights
from plait.errors import ShapeMismatch, UnsupportedModel
from plait.memory import PagedState, State, group_name
from plait.model.layers.compressor import PoolIndexer
from plait.model.layers.head_gate import HeadGate
from plait.model.layers.indexer import Indexer
from plait.model.layers.layers import Batch, Norm, Rope, describe_rope
from plait.model.layers.temperature import HeadGrowth, Temperature
from plait.model.mixers.registry import BetweenLinears, LinearEnds, mixer
from plait.ops.activation import gate
from plait.ops.attention import paged_latent_attention
from plait.ops.entry import latent_width
from plait.ops.heads import HeadRows, bind_heads
from plait.ops.indexer import sparse_latent_attention
from plait.ops.place import place_latent
from plait.ops.registry import TensorFn
from plait.ops.rows import join
from plait.partition import Cut, Division, Rank, join_ranges, scale_range, sum_of, width
from plait.quant.halves import Halves
from plait.spec.branches import GatedNormSpec
from plait.spec.model import IndexerSpec, MlaSpec
from plait.spec.sparse import GrownMlaSpec, PooledMlaSpec
from plait.state.store import StateStore


def _source(s: MlaSpec) -> str:
    """The mixer of which latents are read; "": its own."""
    return s.source if isinstance(s, GrownMlaSpec) else ""


def _words(m: MlaSpec) -> str:
    q = "" if m.q_rank is None else f", q rank {m.q_rank}"
    heads = f"{m.num_heads} heads × ({m.nope_dim} + {m.rope_dim})"
    gated = ", gated" if m.gate or m.head_gate or m.out_gate else ""
    gated += ", sinks" if m.sinks else ""
    window = f", window {m.window}" if m.window else ""
    window += ", queries that grow" if m.temperature or isinstance(m, GrownMlaSpec) else ""
    window += f", latents of {source}" if (source := _source(m)) else ""
    text = f"MLA, {heads}, kv rank {m.kv_rank}{q}, {describe_rope(m.rope)}{window}{gated}"
    if (i := m.indexer) is None:
        return text
    chosen = f"as {i.source}" if i.source else f"an indexer of {i.num_heads} heads × {i.dim}"
    pools = f" in pools of {i.pool}" if i.pool else ""
    return f"{text}, the best {i.top_k} keys{pools} by {chosen}"


def _divide(s: MlaSpec, rank: Rank, hidden_size: int) -> Division:
    """Heads are divided; the latents, which serve all of them, are whole on every rank."""
    heads = join_ranges(rank.divide(s.num_heads, "heads"))
    queries = Cut((scale_range(heads, s.nope_dim + s.rope_dim),))
    cuts = {"q_b" if s.q_rank else "q": queries, "kv_b": Cut((scale_range(heads, s.nope_dim + s.v_dim),))}
    cuts |= {"sinks": Cut((heads,))} if s.sinks else {}
    cuts |= {f"growth.{name}": Cut((heads,)) for name in ("scale", "bias") if isinstance(s, GrownMlaSpec)}
    cuts |= {"head_gate": Cut((heads,))} if s.head_gate else {}
    outputs = Cut((scale_range(heads, s.v_dim),))
    cuts |= {name: outputs for name, has in (("gate", s.gate), ("out_gate", s.out_gate)) if has}
    cuts["o"] = Cut(cols=sum_of(rank.divide(s.num_heads, "heads", s.v_dim)))
    return Division(replace(s, num_heads=width(heads)), cuts)


@mixer(MlaSpec, _words, _divide)
@mixer(PooledMlaSpec, _words, _divide)
@mixer(GrownMlaSpec, _words, _divide)
class Mla(BetweenLinears):
    def __init__(self, s: MlaSpec, w: Weights) -> None:
        self.spec, self.name = s, w.prefix
        hidden, heads = w.target.hidden_size, s.num_heads
        q_size = heads * (s.nope_dim + s.rope_dim)
        self.q_a = w.linear("q_a", in_size=hidden, out_sizes=(s.q_rank,)) if s.q_rank else None
        self.q_norm = (
            Norm(s.latent_norm, w.scope("q_a_norm"), s.q_rank) if s.q_rank and s.latent_norm else None
        )
        parts = {"q_b" if s.q_rank else "q": q_size, **({"gate": heads * s.v_dim} if s.gate else {})}
        read = 2 * s.q_rank if s.gate and s.q_rank else s.q_rank or hidden
        self.q, self._parts = (
            w.linear(*parts, in_size=read, out_sizes=tuple(parts.values())),
            [*parts.values()],
        )
        self._gate = w.bind(gate) if s.gate or s.out_gate else None
        outputs = (heads * s.v_dim,)
        self.out_gate = w.linear("out_gate", in_size=hidden, out_sizes=outputs) if s.out_gate else None
        self.sinks = w.tensor("sinks", (heads,), torch.float32) if s.sinks else None
        entry = (s.kv_rank + s.rope_dim,)
        self._source = _source(s)
        self.kv_a = None if self._source else w.linear("kv_a", in_size=hidden, out_sizes=entry)
        self.kv_norm = (
            Norm(s.latent_norm, w.scope("kv_a_norm"), s.kv_rank) if s.latent_norm and self.kv_a else None
        )
        (self._map_q, self.k_up), (self._map_out, self.v_up) = (
            bind_heads(w.bind, up) for up in _halves(s, w)
        )
        self._step, self._sites = None, None
        if adapters := w.target.adapters:
            sizes_up = (heads, s.nope_dim, s.v_dim, s.kv_rank)
            own = w.cuts.factor_part(f"{w.prefix}.kv_b")
            self._step, self._sites = adapters.step, adapters.head_sites(f"{w.prefix}.kv_b", sizes_up, own)
        self._add = w.bind(self._sites.keys.op) if self._sites else None
        self.o = w.linear("o", in_size=heads * s.v_dim, out_sizes=(hidden,))
        self.head_gate = HeadGate("sigmoid", w, heads) if s.head_gate else None
        self.rope = Rope(s.rope, w) if s.rope else None
        self.temperature = _build_growth(s, w)
        self.rope_norm = Norm(s.rope_norm, w.scope("rope_norm"), s.rope_dim) if s.rope_norm else None
        sizes: dict[str, object] = {"heads": heads, "kv_rank": s.kv_rank, "rope_dim": s.rope_dim}
        sizes |= {"window": s.window, "sinks": s.sinks}
        self.indexer = _build_indexer(s.indexer, s.q_rank or hidden, w.scope("index")) if s.indexer else None
        self._place, self._attend = self._bind(w, sizes)
        self._join = w.bind(join)
        kept = w.target.kv_dtype
        self.states: dict[str, State] = {}
        if not self._source:
            entry = (latent_width(s.kv_rank, s.rope_dim, kept),)
            self.states[self.name] = PagedState({"latent": entry}, s.window, kept)
        self.states |= self.indexer.states if self.indexer else {}

    def _bind(self, w: Weights, sizes: Mapping[str, object]) -> tuple[TensorFn | None, TensorFn]:
        """What places latents, if that is one op, and what attends to them."""
        reader = sparse_latent_attention if self.indexer else paged_latent_attention
        sizes = {**sizes, "top_k": self.indexer.top_k} if self.indexer else sizes
        if self._source and not self.indexer:
            raise UnsupportedModel("latents of another layer without an indexer are not implemented")
        # What places latents norms no shared key, and needs one; its norm has no gate.
        is_gated = isinstance(self.spec.latent_norm, GatedNormSpec)
        if self.rope_norm or not self.spec.rope_dim or self._source or is_gated:
            return None, w.bind(reader, **sizes)
        return w.bind_pair(place_latent, reader, **sizes)

    def ends(self) -> LinearEnds:
        """Several layers read x."""
        return LinearEnds(None, "", self.o)

    def middle(self, x: Tensor, batch: Batch, store: StateStore) -> Tensor:
        """x: [T, hidden] -> what heads give side by side, [T, heads · v_dim]."""
        s = self.spec
        raw = self.q_a(x) if self.q_a else x
        q = self.q_norm(raw) if self.q_norm else raw
        chosen = (self.indexer(x, q, batch, store),) if self.indexer else ()
        q, *closing = self.q(self._join(q, raw) if s.gate else q).split(self._parts, -1)
        q = q.unflatten(-1, (s.num_heads, -1))
        q = self.temperature(q, batch) if self.temperature else q
        q_nope, q_rope = q.split([s.nope_dim, s.rope_dim], -1)
        new = self.kv_a(x).split([s.kv_rank, s.rope_dim], -1) if self.kv_a else None
        q_nope = self._add_adapters(self._map_q(q_nope, self.k_up), q_nope, is_keys=True)
        cache, index = store[self._source or self.name]["latent"], batch.paged[group_name(s.window)]
        usual = {} if s.indexer else {"window": s.window, "step": batch.step if self._place else None}
        seen: dict[str, object] = {"sinks": self.sinks, **usual}
        where = (index.block_table, index.slot_mapping, batch.query_start, batch.seq_lens)
        latent = None
        if self._place and new:
            norm, turn = (
                self.kv_norm.weights if self.kv_norm else None,
                self.rope.rotation if self.rope else None,
            )
            to = (cache, index.slot_mapping, batch.positions)
            q = self._place(q_nope, q_rope, *new, *to, norm, turn)
        else:
            latent = self._make_latent(new[0], new[1], batch) if new else None
            q_rope = self.rope(q_rope, batch.positions) if self.rope else q_rope
            q = self._join(q_nope, q_rope) if s.rope_dim else q_nope
        out = self._attend(q, latent, cache, *chosen, *where, s.scale, s.kv_rank, **seen)
        out = self._add_adapters(self._map_out(out, self.v_up), out)
        out = (self.head_gate(out, x) if self.head_gate else out).flatten(1)
        if self._gate:
            out = self._gate(out, self.out_gate(x) if self.out_gate else closing[0])
        return out

    def _make_latent(self, latent: Tensor, k_rope: Tensor, batch: Batch) -> Tensor:
        """latent: [T, kv_rank], k_rope: [T, rope_dim] -> what is stored, [T, kv_rank + rope_dim]."""
        latent = self.kv_norm(latent) if self.kv_norm else latent
        if not self.spec.rope_dim:
            return latent
        k_rope = self.rope_norm(k_rope) if self.rope_norm else k_rope
        k_rope = self.rope(k_rope[:, None], batch.positions)[:, 0] if self.rope else k_rope
        joined: Tensor = self._join(latent, k_rope)
        return joined

    def _add_adapters(self, y: Tensor, x: Tensor, *, is_keys: bool = False) -> Tensor:
        """y: [T, heads, out] of one half of the up-projection, and its x: what adapters make of it."""
        rows = self._step.current if self._step else None
        if self._add is None or self._sites is None or rows is None:
            return y
        added: Tensor = self._add(y, x, self._sites.keys if is_keys else self._sites.values, rows)
        return added


def _build_indexer(s: IndexerSpec, q_size: int, w: Weights) -> Indexer | PoolIndexer:
    return PoolIndexer(s, s.pool, q_size, w) if s.pool else Indexer(s, w, q_size)


def _build_growth(s: MlaSpec, w: Weights) -> Temperature | None:
    if isinstance(s, GrownMlaSpec):
        return HeadGrowth(w.scope("growth"), s.num_heads)
    return Temperature(s.temperature, w) if s.temperature else None


def _halves(s: MlaSpec, w: Weights) -> tuple[Tensor | HeadRows, Tensor | HeadRows]:
    """Of the up-projection: what takes q to the latent, and the latent to values. Quantized, it stays so."""
    heads, each = s.num_heads, s.nope_dim + s.v_dim
    up = w.stored("kv_b.weight", (heads * each, s.kv_rank))
    if isinstance(up, Halves) and up.index is not None:  # in another order they are halves no more
        up = up.dequantize(w.target.dtype)
    if isinstance(up, Tensor):
        k_up, v_up = up.view(heads, each, s.kv_rank).split([s.nope_dim, s.v_dim], 1)
        return k_up.mT.contiguous(), v_up.contiguous()  # [heads, out, in]
    if not isinstance(up, Halves):
        return (
            HeadRows(up, heads, 0, s.nope_dim, turned=True),
            HeadRows(up, heads, s.nope_dim, s.v_dim),
        )
    keys, turned = up.keys, up.turned
    k_rows = HeadRows(keys, heads, 0, s.kv_rank if turned else s.nope_dim, turned=not turned)
    if k_rows.widths != (s.nope_dim, s.kv_rank) or up.values.shape[0] != heads * s.v_dim:
        raise ShapeMismatch(
            f"{w.prefix}.kv_b: the file has keys {list(keys.shape)} and values {list(up.values.shape)}, the "
            f"model wants {s.nope_dim} and {s.v_dim} of {s.kv_rank} for each of {heads} heads"
        )
    return k_rows, HeadRows(up.values, heads, 0, s.v_dim)
