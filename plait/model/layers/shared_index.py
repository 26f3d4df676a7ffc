"""What layers share of an indexer over entries (DeepSeek-V4.1): keys of one layer, and choices of another."""

from __future__ import annotations

from torch import Tensor

from plait.checkpoint.weights import Weights
from plait.memory import State, group_name
from plait.model.layers.compressor import TurnedHeads, find_entries, find_step, keep_entries
from plait.model.layers.layers import Batch, Norm
from plait.ops.candidates import choose_among_blocks, choose_entry_blocks
from plait.ops.compressed import choose_entries
from plait.spec.sparse import CandidateSpec, CompressorSpec, EntryIndexSpec
from plait.state.store import StateStore

ENTRIES = "{0}.index.entries"  # the state with the index keys of a mixer


class IndexKeys:
    """Index keys that are made of entries, before these are rotated."""

    def __init__(self, s: EntryIndexSpec, c: CompressorSpec, size: int, w: Weights) -> None:
        """size: of entries."""
        self._k = w.linear("k", in_size=size, out_sizes=(s.dim,))
        self._norm, self._turn = Norm(c.norm, w.scope("k_norm"), s.dim), None
        if c.rope:
            self._turn = TurnedHeads(c.rope, s.dim, w, self._norm)
        self.states: dict[str, State] = {
            f"{w.prefix}.entries": keep_entries(s.dim, find_step(c.rate, s.dim, w), w)
        }

    def __call__(self, entries: Tensor, firsts: Tensor) -> Tensor:
        """entries: [T, size], firsts: [T], their positions -> [T, dim]."""
        keys: Tensor = self._k(entries)
        return self._turn(keys[:, None], firsts)[:, 0] if self._turn else self._norm(keys)


class EntryChooser:
    """Scores of entries by small heads over keys that a layer has made, and the best of them.

    With `candidates` it leaves the best blocks for later layers, or takes entries of such blocks alone.
    """

    def __init__(
        self, s: EntryIndexSpec, c: CompressorSpec, candidates: CandidateSpec | None, q_size: int, w: Weights
    ) -> None:
        self.spec, self._rate, self._candidates = s, c.rate, candidates
        self._step, self._user = find_step(c.rate, s.dim, w), w.prefix.rpartition(".")[0]
        most = -(-w.target.max_len // c.rate)
        self.top_k = min(s.top_k, most)
        self._q = w.linear("q", in_size=q_size, out_sizes=(s.num_heads * s.dim,))
        self._weights = w.linear("weights", in_size=w.target.hidden_size, out_sizes=(s.num_heads,))
        self._turn = TurnedHeads(c.rope, s.dim, w) if c.rope else None
        sizes = {"heads": s.num_heads, "index_dim": s.dim, "top_k": self.top_k}
        self._choose = self._choose_blocks = self._among = None
        self._size = min(candidates.size, most) if candidates else most  # the longest text is one block then
        if candidates is None or not candidates.source:
            self._choose = w.bind(choose_entries, **sizes)
        if candidates and candidates.source:
            self._among = w.bind(choose_among_blocks, **sizes)
        elif candidates:
            self._blocks = min(candidates.count, -(-most // self._size))
            self._choose_blocks = w.bind(choose_entry_blocks, **sizes)

    def __call__(
        self, x: Tensor, q: Tensor, keys: Tensor, source: str, batch: Batch, store: StateStore
    ) -> Tensor:
        """x: [T, hidden], q: [T, q_size], keys: [T, dim], those of `source` -> entries [T, top_k] int32."""
        s, index = self.spec, batch.paged[group_name(None)]
        queries = self._q(q).unflatten(-1, (s.num_heads, -1))
        queries = self._turn(queries, batch.positions) if self._turn else queries
        cache, weights = find_entries(store, ENTRIES.format(source), s.dim), self._weights(x)
        given, seqs = (queries, weights, cache, index.block_table), (batch.query_start, batch.seq_lens)
        how, found = (self._rate, self._step), self._candidates
        if self._among and found:
            blocks = batch.step["blocks", found.source]
            among: Tensor = self._among(*given, *seqs, blocks, self.top_k, self._size, *how)
            return among
        assert self._choose
        where = (cache, index.block_table, index.slot_mapping, *seqs)
        chosen: Tensor = self._choose(queries, weights, keys, *where, self.top_k, *how)
        if self._choose_blocks and found:
            blocks = self._choose_blocks(*given, *seqs, self._blocks, self._size, *how)
            batch.step["blocks", self._user] = blocks
        return chosen
