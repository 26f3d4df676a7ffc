"""Hashed n-grams (Qwen4-Exp, DeepSeek-V4.1): embeddings of the last tokens, added to streams they match."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor

from plait.checkpoint.weights import Weights
from plait.errors import CheckpointError, UnsupportedModel
from plait.memory import SlotState, State
from plait.model.layers.layers import Batch, Norm
from plait.model.mixers.mamba2 import DepthwiseConv
from plait.model.mixers.registry import mixer
from plait.ops.activation import combine
from plait.ops.ngrams import LARGEST_ID, gate_by_match, hash_ngrams
from plait.ops.ranks import gather_columns
from plait.ops.rows import bind_table
from plait.partition import Cut, Division, Range, Rank, width
from plait.spec.recurrent import MergedIdsSpec, NgramSpec
from plait.state.store import StateStore


def _words(s: NgramSpec) -> str:
    heads = len(s.sizes) // (len(s.factors) - 1)
    text = f"n-grams of 2 to {len(s.factors)} tokens, {heads} hashes each × {s.dim}"
    text += f", conv of {s.taps}" if s.taps else ""
    return f"{text}, of {s.merges.count} merged ids" if s.merges else text


def _divide(s: NgramSpec, rank: Rank, hidden_size: int) -> Division:
    """A rank looks up some hashes, and gathers what the others found; all else is whole on every rank."""
    own = own_hashes(len(s.sizes), rank, rank.index)
    if own is None:
        return Division(s, {}, sums=-1)
    starts = [0, *accumulate(s.sizes)]
    rows = starts[own[0]], starts[own[1]]
    part = replace(s, rows=width(rows), own=own)
    return Division(part, {"table": Cut((rows,))}, sums=-1, gathers=1)


def own_hashes(count: int, rank: Rank, index: int) -> Range | None:
    """Those of `count` hashes that a rank looks up; None: all, because there are too few, or one rank."""
    if rank.size == 1 or count < rank.size:
        return None
    return count * index // rank.size, count * (index + 1) // rank.size


@mixer(NgramSpec, _words, _divide)
class Ngrams:
    """`table` [rows, dim], of several ranks each with the rows of some hashes. `key` and `value` read all of
    a token's numbers; `conv` has gaps between its taps.

    Its state is a sequence's last tokens, and the last inputs of the convolution. So a prompt may be cut
    anywhere.
    """

    is_summed = True  # each rank computes the whole

    def __init__(self, s: NgramSpec, w: Weights) -> None:
        self.spec, self.name, hidden, device = s, w.prefix, w.target.hidden_size, w.target.device
        self._dtype, self._shape, wide = w.target.dtype, (s.streams, hidden), s.streams * hidden
        self._embed, self.table = bind_table(w.bind, w.weight("table.weight", (s.rows, s.dim)))
        self._comm, count = w.target.comm, len(s.sizes)
        own, size = s.own or (0, count), count * s.dim
        each = (own_hashes(count, self._comm.rank, index) for index in range(self._comm.rank.size))
        self._widths = [s.dim * width(some or (0, count)) for some in each]
        self._own = slice(*own)
        self._into = w.linear("key", "value", in_size=size, out_sizes=(wide, hidden))
        self._query_norm, self._key_norm = (
            Norm(s.norm, w.scope(f"{x}_norm"), wide, s.streams) for x in ("query", "key")
        )
        self.conv = DepthwiseConv(w, wide, (s.taps - 1) * s.gap + 1) if s.taps else None
        self._conv_norm = Norm(s.norm, w.scope("conv_norm"), wide, s.streams) if s.taps else None
        self._merged: Tensor | None = None
        self._end = s.end
        if s.merges:
            self._merged, self._end = _read_merged(s.merges, w, s.end)
        sizes = torch.tensor(s.sizes, dtype=torch.int64)
        looked_up = int(sizes[self._own].sum())
        if s.end >= LARGEST_ID or looked_up > s.rows:
            raise UnsupportedModel(
                f"n-grams that end at token {s.end} have {looked_up} rows in a table of {s.rows}; "
                f"known: token ids below {LARGEST_ID}, and as many rows as the table has"
            )
        self._factors = torch.tensor(s.factors, dtype=torch.int64, device=device)
        starts = sizes.cumsum(0) - sizes
        self._sizes, self._starts = sizes.to(device), (starts - starts[own[0]]).to(device)
        self._hash, self._match, self._combine = w.bind(hash_ngrams), w.bind(gate_by_match), w.bind(combine)
        tensors: dict[str, tuple[tuple[int, ...], str]] = {"tokens": ((len(s.factors) - 1,), "float32")}
        if self.conv:
            tensors["conv"] = (self.conv.tail_shape, "model")
        self.states: dict[str, State] = {self.name: SlotState(tensors)}

    def __call__(self, x: Tensor, batch: Batch, store: StateStore) -> Tensor:
        """x: [T, streams * hidden] -> its like."""
        state, (streams, hidden) = store[self.name], self._shape
        where = (batch.state_slots, batch.query_start, batch.has_history)
        how = (self._factors, self._sizes, self._starts, self._end, self._merged)
        rows = self._hash(batch.token_ids, state["tokens"], *where, *how)
        if self.spec.own:
            rows = rows[:, self._own].contiguous()
        found = self._embed(rows, self.table, 1.0, self._dtype)
        found = gather_columns(self._comm, found, self._widths) if self.spec.own else found
        key, value = self._into(found).split([streams * hidden, hidden], -1)
        query, key = self._query_norm(x), self._key_norm(key)
        query, key = query.unflatten(-1, self._shape), key.unflatten(-1, self._shape)
        gated: Tensor = self._match(query, key, value).flatten(1)
        if self.conv is None or self._conv_norm is None:
            return gated
        added: Tensor = self._combine(gated, self.conv(self._conv_norm(gated), batch, state["conv"]), 1.0)
        return added


def _read_merged(s: MergedIdsSpec, w: Weights, end: int) -> tuple[Tensor, int]:
    """The table of merged ids, and what it has for the token `end`. Raises CheckpointError."""
    make = w.target.merge_ids
    if "ids" in w or make is None:
        table = w.tensor("ids", (s.tokens,), torch.int64)
    else:
        table = w.shared(f"ids merged to {s.count}", lambda w: make(s).to(w.target.device))
    if table.device.type == "meta":
        return table, 0
    if not (int(table.min()) >= 0 and int(table.max()) < s.count):
        raise CheckpointError(
            f"{w.prefix}.ids has merged ids {int(table.min())} to {int(table.max())}; there are {s.count}, "
            "counted from 0"
        )
    return table, int(table[end])
