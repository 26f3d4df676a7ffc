"""DeepSeek-V4's attention: one key that is the value, too, a window of them, and compressed earlier ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from plait.checkpoint.weights import Weights
from plait.memory import PagedState, State, group_name
from plait.model.layers.compressor import Compressor, EntryIndexer, TurnedHeads, find_step
from plait.model.layers.layers import Batch, Norm, describe_rope
from plait.model.mixers.registry import mixer
from plait.ops.attention import paged_latent_attention
from plait.ops.compressed import entry_attention
from plait.ops.entry import CODED, latent_width
from plait.ops.heads import HeadRows, bind_heads
from plait.ops.place import place_compressed
from plait.partition import Cut, Division, Rank, join_ranges, scale_range, sum_of, width
from plait.spec.model import NormSpec
from plait.spec.sparse import CompressedSpec
from plait.state.store import StateStore

Made = tuple[Tensor, Tensor]  # entries before norm and rotation, and their positions


def _words(m: CompressedSpec) -> str:
    text = f"attention with one key, {m.num_heads} heads × {m.head_dim}, {describe_rope(m.rope)}"
    text += f", window {m.window}, sinks"
    if (c := m.compressor) is None:
        return text
    best = f", the best {m.indexer.top_k} by {m.indexer.num_heads} heads" if m.indexer else ""
    return f"{text}, an entry for {c.rate} tokens{best}"


def divide_compressed(s: CompressedSpec, rank: Rank, hidden_size: int) -> Division:
    """Heads, by the groups in which outputs are mapped; the key, entries and an indexer are whole."""
    what = "groups of heads"
    groups = join_ranges(rank.divide(s.groups, what))
    heads = scale_range(groups, s.num_heads // s.groups)
    cuts = {
        "q_b": Cut((scale_range(heads, s.head_dim),)),
        "sinks": Cut((heads,)),
        "o_a": Cut((scale_range(groups, s.out_rank),)),
        "o_b": Cut(cols=sum_of(rank.divide(s.groups, what, s.out_rank))),
    }
    return Division(replace(s, num_heads=width(heads), groups=width(groups)), cuts)


@mixer(CompressedSpec, _words, divide_compressed)
class CompressedAttention:
    """`o_a` maps each group of heads to `out_rank` numbers, `o_b` all of these to the hidden size."""

    def __init__(self, s: CompressedSpec, w: Weights) -> None:
        self.spec, self.name, hidden = s, w.prefix, w.target.hidden_size
        heads, d = s.num_heads, s.head_dim
        self.q_a = w.linear("q_a", in_size=hidden, out_sizes=(s.q_rank,))
        self.q_a_norm = Norm(s.norm, w.scope("q_a_norm"), s.q_rank)
        self.q_b = w.linear("q_b", in_size=s.q_rank, out_sizes=(heads * d,))
        self.q_norm = self._norm_heads(w)
        self.kv = w.linear("kv", in_size=hidden, out_sizes=(d,))
        self.kv_norm = Norm(s.norm, w.scope("kv_norm"), d)
        self.turn_q, self.turn_kv = (TurnedHeads(s.rope, d, w, norm) for norm in (self.q_norm, self.kv_norm))
        self.turn_back = TurnedHeads(s.rope, d, w, back=True)
        wide = heads * d // s.groups
        rows = w.stored("o_a.weight", (s.groups * s.out_rank, wide))
        first: Tensor | HeadRows
        if isinstance(rows, Tensor):
            first = rows.view(s.groups, s.out_rank, wide)
        else:
            first = HeadRows(rows, s.groups, 0, s.out_rank)
        self._map, self.o_a = bind_heads(w.bind, first)
        self._step = find_step(s.compressor.rate, d, w) if s.compressor else 1
        self.o_b = w.linear("o_b", in_size=s.groups * s.out_rank, out_sizes=(hidden,))
        self.sinks = w.tensor("sinks", (heads,), torch.float32)
        self.compressor, parts = self._build_parts(w)
        kept = w.target.kv_dtype
        if s.compressor and kept in CODED:
            kept = "bfloat16"
        op = entry_attention if s.compressor else paged_latent_attention
        sizes: dict[str, object] = {"heads": heads, "kv_rank": d, "rope_dim": 0, "window": s.window}
        sizes |= {"kv_dtype": kept, "norm": s.norm.kind}
        self._place, self._attend = w.bind_pair(place_compressed, op, **sizes, sinks=True)
        norms = (self.q_norm, self.kv_norm, self.compressor.norm if self.compressor else self.kv_norm)
        self._norms = tuple(norm and norm.weights for norm in norms)
        self.states: dict[str, State] = {
            self.name: PagedState({"latent": (latent_width(d, 0, kept),)}, s.window, kept)
        }
        for states in parts:
            self.states |= states

    def _norm_heads(self, w: Weights) -> Norm | None:
        return Norm(NormSpec(self.spec.norm.eps, weight=False), w.scope("q_norm"), self.spec.head_dim)

    def _build_parts(self, w: Weights) -> tuple[Compressor | None, list[Mapping[str, State]]]:
        """What makes entries here, if anything does, and the states of all parts."""
        s, self._indexer = self.spec, None
        if s.compressor is None:
            return None, []
        made = Compressor(s.compressor, s.head_dim, w.scope("compressor"))
        if s.indexer:
            self._indexer = EntryIndexer(s.indexer, s.compressor, s.q_rank, w.scope("index"))
        return made, [made.states, *([self._indexer.states] if self._indexer else [])]

    def __call__(self, x: Tensor, batch: Batch, store: StateStore) -> Tensor:
        """x: [T, hidden] -> [T, hidden]."""
        s = self.spec
        raw = self.q_a_norm(self.q_a(x))
        q = self.q_b(raw).unflatten(-1, (s.num_heads, s.head_dim))
        out = self._read(x, raw, q, self.kv(x), batch, store)
        grouped = self.turn_back(out, batch.positions).flatten(1).unflatten(-1, (s.groups, -1))
        return self.o_b(self._map(grouped, self.o_a).flatten(1))

    def _read(
        self, x: Tensor, raw: Tensor, q: Tensor, latent: Tensor, batch: Batch, store: StateStore
    ) -> Tensor:
        """What the heads find, [T, heads, d]; q, latent: before norms and rotation."""
        s, cache = self.spec, store[self.name]["latent"]
        near, seqs = batch.paged[group_name(s.window)], (batch.query_start, batch.seq_lens)
        made = self.compressor.make(x, batch, store) if self.compressor else None
        chosen = self._choose(x, raw, made, batch, store)
        q, new, entries = self._finish(q, latent, made, batch, store)
        if s.compressor is None:
            where = (near.block_table, near.slot_mapping, *seqs)
            how = (s.scale, s.head_dim, batch.step)
            out: Tensor = self._attend(q, new, cache, *where, *how, window=s.window, sinks=self.sinks)
            return out
        far, packed = batch.paged[group_name(None)], self._find_packed(store)
        tables = [(index.block_table, index.slot_mapping) for index in (near, far)]
        more = (s.scale, s.window, self.sinks, s.compressor.rate, self._step, batch.step)
        found: Tensor = self._attend(q, new, entries, cache, packed, chosen, *tables, *seqs, *more)
        return found

    def _choose(
        self, x: Tensor, raw: Tensor, made: Made | None, batch: Batch, store: StateStore
    ) -> Tensor | None:
        """The entries that each token reads; None: all. made: what the compressor gives."""
        return self._indexer(x, raw, batch, store) if self._indexer else None

    def _find_packed(self, store: StateStore) -> Tensor:
        """Where the entries lie that are read."""
        assert self.compressor
        return self.compressor.cache(store)

    def _finish(
        self, q: Tensor, latent: Tensor, made: Made | None, batch: Batch, store: StateStore
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Queries, and the latents and entries that attention stores: None if they are in memory already."""
        s, at, c = self.spec, batch.positions, self.compressor
        if self._place is None:
            entries = c.finish(*made) if c and made else None
            return self.turn_q(q, at), self.turn_kv(latent[:, None], at)[:, 0], entries
        new, firsts = made or (None, None)
        caches = store[self.name]["latent"], c.cache(store) if c else None
        slots = tuple(batch.paged[group_name(w)].slot_mapping for w in (s.window, None if c else s.window))
        rate, step = (c.spec.rate, c.step) if c else (0, 1)
        how = (self._norms, self.turn_q.rotation, rate, step)
        return self._place(q, latent, new, *caches, slots, at, firsts, *how), None, None
