"""Embeddings of n-grams that are added to those of tokens (LongCat-Flash-Lite)."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor

from plait.checkpoint.weights import Weights
from plait.errors import UnsupportedModel
from plait.memory import SlotState, State
from plait.model.layers.layers import Batch
from plait.model.mixers.ngrams import own_hashes
from plait.model.mixers.registry import mixer
from plait.ops.ngrams import LARGEST_ID, sum_ngrams
from plait.ops.ranks import gather_columns
from plait.ops.rows import bind_table
from plait.partition import Cut, Division, Rank, width
from plait.spec.recurrent import NgramSumSpec
from plait.state.store import StateStore


def _words(s: NgramSumSpec) -> str:
    return f"n-grams of up to {max(s.lengths)} tokens in {len(s.sizes)} tables × {s.dim}"


def _divide(s: NgramSumSpec, rank: Rank, hidden_size: int) -> Division:
    """A rank looks up some heads, and gathers what the others found; the linear layer is whole."""
    own = own_hashes(len(s.sizes), rank, rank.index)
    if own is None:
        return Division(s, {}, sums=-1)
    starts = [0, *accumulate(s.sizes)]
    rows = starts[own[0]], starts[own[1]]
    return Division(replace(s, own=own), {"table": Cut((rows,))}, sums=-1, gathers=1)


@mixer(NgramSumSpec, _words, _divide)
class NgramSum:
    """`table` has the rows of all heads, one head behind the other; `value` reads all of a token's numbers.

    Its state is a sequence's last tokens, so a prompt may be cut anywhere.
    """

    is_summed = True  # each rank computes the whole

    def __init__(self, s: NgramSumSpec, w: Weights) -> None:
        self.spec, self.name, device = s, w.prefix, w.target.device
        self._dtype, self._comm, count = w.target.dtype, w.target.comm, len(s.sizes)
        own = s.own or (0, count)
        each = (own_hashes(count, self._comm.rank, index) for index in range(self._comm.rank.size))
        self._widths, self._own = [s.dim * width(some or (0, count)) for some in each], slice(*own)
        longest = max(s.lengths)
        if s.end >= LARGEST_ID or s.base > LARGEST_ID or longest < 2:
            raise UnsupportedModel(
                f"n-grams of {longest} tokens that end at token {s.end} of {s.base}; known: two tokens or "
                f"more, and ids below {LARGEST_ID}"
            )
        shape = (sum(s.sizes[self._own]), s.dim)
        self._embed, self.table = bind_table(w.bind, w.weight("table.weight", shape))
        self.value = w.linear("value", in_size=count * s.dim, out_sizes=(w.target.hidden_size,))
        heads = [*zip(s.sizes, s.lengths, strict=True)][self._own]
        powers = [
            [pow(s.base, k, size) if k < length else 0 for size, length in heads] for k in range(longest)
        ]
        self._factors = torch.tensor(powers, dtype=torch.int64, device=device)
        sizes = torch.tensor(s.sizes[self._own], dtype=torch.int64)
        self._sizes, self._starts = sizes.to(device), (sizes.cumsum(0) - sizes).to(device)
        self._sum = w.bind(sum_ngrams)
        self.states: dict[str, State] = {self.name: SlotState({"tokens": ((longest - 1,), "float32")})}

    def __call__(self, x: Tensor, batch: Batch, store: StateStore) -> Tensor:
        """x: [T, hidden] -> its like, which does not depend on it."""
        where = (batch.state_slots, batch.query_start, batch.has_history)
        how = (self._factors, self._sizes, self._starts, self.spec.end)
        rows = self._sum(batch.token_ids, store[self.name]["tokens"], *where, *how)
        found = self._embed(rows, self.table, 1.0, self._dtype)
        found = gather_columns(self._comm, found, self._widths) if self.spec.own else found
        value: Tensor = self.value(found)
        return value
