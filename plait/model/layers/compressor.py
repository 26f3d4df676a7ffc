"""The compressor of DeepSeek-V4: a window of tokens becomes one entry; and what chooses among entries."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from plait.checkpoint.weights import Weights
from plait.memory import PagedState, SlotState, State, group_name
from plait.model.layers.layers import Batch, Norm, make_rotation
from plait.ops.compressed import FOLDED, add_open_block, choose_entries, compress_tokens, spread_windows
from plait.ops.entry import CODED
from plait.ops.place import turn_heads
from plait.spec.model import IndexerSpec
from plait.spec.positions import RopeSpec
from plait.spec.sparse import CompressorSpec, EntryIndexSpec, MeanIndexSpec
from plait.state.store import StateStore


class TurnedHeads:
    """A norm of heads, then rotary positions of their last or first numbers; `back`: the other way round."""

    def __init__(
        self, s: RopeSpec, size: int, w: Weights, norm: Norm | None = None, *, is_last: bool = True,
        back: bool = False,
    ) -> None:  # fmt: skip
        self.norm, self._is_last = norm, is_last
        rotation = make_rotation(s, w)
        self.rotation = replace(rotation, inv_freq=-rotation.inv_freq) if back else rotation
        self._turn = w.bind(turn_heads, size=size, dim=s.dim, interleaved=s.interleaved)

    def __call__(self, x: Tensor, positions: Tensor) -> Tensor:
        """x: [T, heads, size] -> its like."""
        norm = self.norm.weights if self.norm else None
        return self._turn(x, positions, norm, self.rotation, self._is_last)  # type: ignore[no-any-return]


def find_step(rate: int, size: int, w: Weights) -> int:
    """How many tokens of a block share a place of entries."""
    return math.gcd(rate, size, 4, w.target.block_size or 4)


def keep_entries(size: int, step: int, w: Weights) -> PagedState:
    """The memory of entries of `size` numbers, kept like keys."""
    kept = "bfloat16" if w.target.kv_dtype in CODED else w.target.kv_dtype
    return PagedState({"entry": (size // step,)}, dtype=kept)


def find_entries(store: StateStore, name: str, size: int) -> Tensor:
    """Where the entries of that state lie, [blocks, block_size / step, size]."""
    cache = store[name]["entry"]
    return cache.view(cache.shape[0], -1, size)


class Compressor:
    """Entries of `size` numbers, one for `rate` tokens; with two `parts` each is over two windows.

    Of an entry in the making it keeps a softmax so far for each channel; entries are kept like keys. A
    mean is a softmax of equal logits.
    """

    def __init__(self, s: CompressorSpec, size: int, w: Weights) -> None:
        self.spec, self.size, self.name = s, size, w.prefix
        wide, names = s.parts * size, ("kv",) if s.is_mean or s.rate == 1 else ("kv", "gate")
        self._into = w.linear(*names, in_size=w.target.hidden_size, out_sizes=(wide,) * len(names))
        if s.is_mean or not s.has_bias:
            self._bias = torch.zeros(s.rate, wide, device=w.target.device)
            self._even = torch.zeros(1, wide, dtype=w.target.dtype, device=w.target.device)
        else:
            self._bias = w.tensor("bias", (s.rate, wide), torch.float32)
        self.norm = Norm(s.norm, w.scope("norm"), size)
        self._turn = None
        if s.rope:
            norm = None if s.norms_tokens else self.norm
            self._turn = TurnedHeads(s.rope, size, w, norm, is_last=not s.is_mean)
        self._compress = w.bind(compress_tokens, size=size) if s.rate > 1 else None
        self.step = find_step(s.rate, size, w)
        self._entries, self.states = f"{self.name}.entries", dict[str, State]()
        if self._compress:
            tensors = {"folded": ((2 * s.parts - 1, FOLDED, size), "float32")}
            self.states[self.name] = SlotState(tensors)
        self.states[self._entries] = keep_entries(size, self.step, w)

    def __call__(self, x: Tensor, batch: Batch, store: StateStore) -> Tensor:
        """x: [T, hidden] -> [T, size]: entries in the rows of tokens that end a window."""
        return self.finish(*self.make(x, batch, store))

    def finish(self, made: Tensor, first: Tensor) -> Tensor:
        """What `make` gives, normed and rotated."""
        if self._turn:
            return self._turn(made[:, None], first)[:, 0]
        return made if self.spec.norms_tokens else self.norm(made)

    def make(self, x: Tensor, batch: Batch, store: StateStore) -> tuple[Tensor, Tensor]:
        """Entries [T, size] before norm and rotation, and their positions [T]."""
        if self._compress is None:
            return self._into(x), batch.positions
        kv, gate = self._read(x)
        where = (batch.state_slots, batch.query_start, batch.has_history, batch.positions)
        made, first = self._compress(kv, gate, self._bias, store[self.name]["folded"], *where, self.spec.rate)
        return made, first

    def _read(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Numbers of every token, and their logits."""
        if self.spec.is_mean:
            return self._into(x), self._even.expand(len(x), -1)
        kv, logits = self._into(x).chunk(2, -1)
        return self.norm(kv) if self.spec.norms_tokens else kv, logits

    def cache(self, store: StateStore) -> Tensor:
        """Where entries lie, [blocks, block_size / step, size]."""
        return find_entries(store, self._entries, self.size)


class EntryIndexer:
    """Scores of entries by small heads over entries of their own, and the best of them."""

    def __init__(self, s: EntryIndexSpec, c: CompressorSpec, q_size: int, w: Weights) -> None:
        """q_size: of the queries' latent, from which index queries are made."""
        self.spec, self._rate = s, c.rate
        self.compressor = Compressor(c, s.dim, w)
        self.states = self.compressor.states
        self.top_k = min(s.top_k, -(-w.target.max_len // c.rate))
        self._q = w.linear("q", in_size=q_size, out_sizes=(s.num_heads * s.dim,))
        self._weights = w.linear("weights", in_size=w.target.hidden_size, out_sizes=(s.num_heads,))
        self._turn = TurnedHeads(c.rope, s.dim, w) if c.rope else None
        self._choose = w.bind(choose_entries, heads=s.num_heads, index_dim=s.dim, top_k=self.top_k)

    def __call__(self, x: Tensor, q: Tensor, batch: Batch, store: StateStore) -> Tensor:
        """x: [T, hidden], q: [T, q_size] -> entries [T, top_k] int32 (`ops.compressed.choose_entries`)."""
        queries = self._q(q).unflatten(-1, (self.spec.num_heads, -1))
        queries = self._turn(queries, batch.positions) if self._turn else queries
        index = batch.paged[group_name(None)]
        where = (index.block_table, index.slot_mapping, batch.query_start, batch.seq_lens)
        made, cache = self.compressor(x, batch, store), self.compressor.cache(store)
        how = (self.top_k, self._rate, self.compressor.step)
        chosen: Tensor = self._choose(queries, self._weights(x), made, cache, *where, *how)
        return chosen


class MeanIndexer:
    """Scores of blocks of keys by small heads over means, and the best of them; the same for all heads.

    Of several ranks each has all of it.
    """

    def __init__(self, s: MeanIndexSpec, kv_heads: int, w: Weights) -> None:
        self.spec, self._kv_heads, c = s, kv_heads, s.compressor
        self.compressor = Compressor(c, s.dim, w.scope("compressor"))
        self.states, self.size = self.compressor.states, c.rate
        self.top_k = min(s.top_k, -(-w.target.max_len // c.rate))
        self._q = w.linear("q", in_size=w.target.hidden_size, out_sizes=(s.num_heads * s.dim,))
        self._norm = Norm(c.norm, w.scope("q_norm"), s.dim)
        self._turn = TurnedHeads(c.rope, s.dim, w, self._norm, is_last=False) if c.rope else None
        self._same = torch.ones(1, s.num_heads, dtype=w.target.dtype, device=w.target.device)
        self._choose = w.bind(choose_entries, heads=s.num_heads, index_dim=s.dim, top_k=self.top_k)
        self._add = w.bind(add_open_block)

    def __call__(self, x: Tensor, batch: Batch, store: StateStore) -> Tensor:
        """x: [T, hidden] -> blocks [T, kv_heads, top_k + 1] int32 (`ops.compressed.add_open_block`)."""
        s = self.spec
        queries = self._q(x).unflatten(-1, (s.num_heads, s.dim))
        queries = self._turn(queries, batch.positions) if self._turn else self._norm(queries)
        index = batch.paged[group_name(None)]
        where = (index.block_table, index.slot_mapping, batch.query_start, batch.seq_lens)
        made, cache = self.compressor(x, batch, store), self.compressor.cache(store)
        weights, how = self._same.expand(len(x), -1), (self.top_k, self.size, self.compressor.step)
        chosen = self._choose(queries, weights, made, cache, *where, *how)
        found: Tensor = self._add(chosen, batch.positions, self.size, self._kv_heads)
        return found


class PoolIndexer:
    """Scores of pools of keys by small heads, all keys of the best and of the open one (GLM-5.3).

    Of several ranks each has all of it.
    """

    def __init__(self, s: IndexerSpec, pool: int, q_size: int, w: Weights) -> None:
        """pool: keys of a pool. q_size: of the queries' latent, from which index queries are made."""
        self.spec, self.size, self._user = s, pool, w.prefix.rpartition(".")[0]
        count = min(s.top_k // pool, -(-w.target.max_len // pool))
        self.top_k = (count + 1) * pool - 1
        self.states: dict[str, State] = {}
        if s.source:
            return
        how = CompressorSpec(pool, 1, s.norm, None, norms_tokens=True)
        self._entries = EntryIndexer(EntryIndexSpec(s.num_heads, s.dim, count), how, q_size, w)
        self.states, self._spread = self._entries.states, w.bind(spread_windows)

    def __call__(self, x: Tensor, q: Tensor, batch: Batch, store: StateStore) -> Tensor:
        """x: [T, hidden], q: [T, q_size] -> positions [T, top_k] int32 (`ops.compressed.spread_windows`)."""
        if self.spec.source:
            return batch.step["chosen", self.spec.source]  # type: ignore[no-any-return]
        chosen = self._spread(self._entries(x, q, batch, store), batch.positions, self.size)
        batch.step["chosen", self._user] = chosen
        return chosen  # type: ignore[no-any-return]
