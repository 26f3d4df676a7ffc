"""The compressor of DeepSeek-V4: a window of tokens becomes one entry; and what chooses among entries."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from plait import spec
from plait.checkpoint.weights import Weights
from plait.memory import PagedState, SlotState, State, group_name
from plait.model.layers.layers import Batch, Norm, Rope
from plait.ops.compressed import FOLDED, choose_entries, compress_tokens
from plait.ops.entry import CODED
from plait.ops.rows import join
from plait.rare_specs import CompressorSpec, EntryIndexSpec
from plait.state.store import StateStore


class LastRope:
    """Rotary positions of the last numbers of a head; `back`: in the other direction."""

    def __init__(self, s: spec.RopeSpec, size: int, w: Weights, *, back: bool = False) -> None:
        self._parts, self._rope, self._join = [size - s.dim, s.dim], Rope(s, w), w.bind(join)
        if back:
            turned = self._rope.rotation
            self._rope.rotation = replace(turned, inv_freq=-turned.inv_freq)

    def __call__(self, x: Tensor, positions: Tensor) -> Tensor:
        """x: [T, heads, size] -> its like."""
        still, turned = x.split(self._parts, -1)
        out: Tensor = self._join(still, self._rope(turned, positions))
        return out


class Compressor:
    """Entries of `size` numbers, one for `rate` tokens; with two `parts` each is over two windows.

    Of an entry in the making it keeps a softmax so far for each channel; entries are kept like keys.
    """

    def __init__(self, s: CompressorSpec, size: int, w: Weights) -> None:
        self.spec, self.size, self.name = s, size, w.prefix
        wide = s.parts * size
        self._into = w.linear("kv", "gate", in_size=w.target.hidden_size, out_sizes=(wide, wide))
        self._bias = w.tensor("bias", (s.rate, wide), torch.float32)
        self._norm, self._rope = Norm(s.norm, w.scope("norm"), size), LastRope(s.rope, size, w)
        self._compress = w.bind(compress_tokens, size=size)
        self.step = math.gcd(s.rate, size, 4, w.target.block_size or 4)
        kept = "bfloat16" if w.target.kv_dtype in CODED else w.target.kv_dtype
        self._entries = f"{self.name}.entries"
        self.states: dict[str, State] = {
            self.name: SlotState({"folded": ((2 * s.parts - 1, FOLDED, size), "float32")}),
            self._entries: PagedState({"entry": (size // self.step,)}, dtype=kept),
        }

    def __call__(self, x: Tensor, batch: Batch, store: StateStore) -> Tensor:
        """x: [T, hidden] -> [T, size]: entries in the rows of tokens that end a window."""
        kv, gate = self._into(x).chunk(2, -1)
        where = (batch.state_slots, batch.query_start, batch.has_history, batch.positions)
        made, first = self._compress(kv, gate, self._bias, store[self.name]["folded"], *where, self.spec.rate)
        return self._rope(self._norm(made)[:, None], first)[:, 0]

    def cache(self, store: StateStore) -> Tensor:
        """Where entries lie, [blocks, block_size / step, size]."""
        cache = store[self._entries]["entry"]
        return cache.view(cache.shape[0], -1, self.size)


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
        self._rope = LastRope(c.rope, s.dim, w)
        self._choose = w.bind(choose_entries, heads=s.num_heads, index_dim=s.dim, top_k=self.top_k)

    def __call__(self, x: Tensor, q: Tensor, batch: Batch, store: StateStore) -> Tensor:
        """x: [T, hidden], q: [T, q_size] -> entries [T, top_k] int32 (`ops.compressed.choose_entries`)."""
        queries = self._rope(self._q(q).unflatten(-1, (self.spec.num_heads, -1)), batch.positions)
        index = batch.paged[group_name(None)]
        where = (index.block_table, index.slot_mapping, batch.query_start, batch.seq_lens)
        made, cache = self.compressor(x, batch, store), self.compressor.cache(store)
        how = (self.top_k, self._rate, self.compressor.step)
        chosen: Tensor = self._choose(queries, self._weights(x), made, cache, *where, *how)
        return chosen
