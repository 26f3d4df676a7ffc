"""Features of n-grams of tokens: rows of hashed tables, gated by how well they match a stream (Qwen4-Exp)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from plait.ops.case import Case, RecurrentCase
from plait.ops.conv import ragged_case
from plait.ops.registry import Arguments, op

VOCABULARY = 1000  # token ids of the cases
LARGEST_ID = 1 << 24  # token ids are kept as float32, which has all integers up to here

HASHED: list[RecurrentCase] = [
    dict(seqs=[(1, True)], longest=3, heads=2),
    dict(seqs=[(1, True), (1, False), (40, False), (3, True), (2, True)], longest=3, heads=3),
    dict(seqs=[(9, False), (1, True), (20, True), (2, False)], longest=5, heads=1),
    dict(seqs=[(4, True), (1, False)], longest=2, heads=4),
    dict(seqs=[(1, True), (1, False), (40, False), (3, True), (2, True)], longest=3, heads=2, merges=True),
]


@op(cases=HASHED)
def hash_ngrams(
    ids: Tensor,
    before: Tensor,
    slots: Tensor,
    query_start: Tensor,
    has_history: Tensor,
    factors: Tensor,
    sizes: Tensor,
    starts: Tensor,
    end: int,
    merged: Tensor | None = None,
) -> Tensor:
    """Which rows of a table each token's n-grams have: those of 2 tokens, then of 3, up to `n`.

    An n-gram's number is the exclusive or of its tokens' ids, each times a factor; a head has that modulo its
    size, plus its first row. In front of the sequence, and in front of a token `end`, all tokens are `end`.
    ids: [T] int64, before: [num_slots, n - 1] float32 (the ids in front of the next token, oldest first;
    updated in place), factors: [n] int64, the token's own first, sizes, starts: [(n - 1) · heads] int64 ->
    [T, (n - 1) · heads] int64. A factor times an id is less than 2^63.

    merged: [vocabulary] int64, ids that are hashed and kept in place of `ids`; n-grams reach over `end` then.
    """
    ids, past = ids if merged is None else merged[ids], len(factors) - 1
    padded, at = _join_past(ids, before, slots, query_start, has_history, end)
    numbers, ended, found = ids * factors[0], torch.zeros_like(ids, dtype=torch.bool), []
    heads = sizes.unflatten(0, (past, -1))
    for k in range(1, past + 1):
        token = padded[at - k]
        ended = ended | (token == end) if merged is None else ended
        numbers = numbers ^ (torch.where(ended, end, token) * factors[k])
        found.append(numbers[:, None] % heads[k - 1])
    return torch.cat(found, -1) + starts


@op(cases=HASHED)
def sum_ngrams(
    ids: Tensor,
    before: Tensor,
    slots: Tensor,
    query_start: Tensor,
    has_history: Tensor,
    factors: Tensor,
    sizes: Tensor,
    starts: Tensor,
    end: int,
) -> Tensor:
    """Which rows of a table each token's n-grams have, by sums (LongCat-Flash-Lite).

    A head's number is the sum of its tokens' ids, each times a factor; modulo the head's size it is a row
    behind the head's first. What lies in front of the sequence, a token `end` before this one, and all that
    is before that, are left out. factors: [n, H] int64, the token's own first, 0 beyond a head's n-gram,
    each less than 2^31; sizes, starts: [H] int64; the rest as `hash_ngrams` -> [T, H] int64.
    """
    padded, at = _join_past(ids, before, slots, query_start, has_history, end)
    numbers, ended = ids[:, None] * factors[0], torch.zeros_like(ids, dtype=torch.bool)
    for k in range(1, len(factors)):
        token = padded[at - k]
        ended = ended | (token == end)
        numbers = numbers + torch.where(ended, 0, token)[:, None] * factors[k]
    return numbers % sizes + starts


def _join_past(
    ids: Tensor, before: Tensor, slots: Tensor, query_start: Tensor, has_history: Tensor, end: int
) -> tuple[Tensor, Tensor]:
    """(Each sequence's tokens behind those before them, where its new ones are); `before` moves on."""
    past, seqs = before.shape[1], len(slots)
    owner = torch.repeat_interleave(
        torch.arange(seqs, device=ids.device), query_start.diff(), output_size=len(ids)
    )
    at = torch.arange(len(ids), device=ids.device) + past * (owner + 1)
    reach, gaps = torch.arange(past, device=ids.device), past * torch.arange(seqs, device=ids.device)
    padded = ids.new_full((len(ids) + past * seqs,), end)
    known = torch.where(has_history[:, None], before[slots], torch.full_like(before[:1], end))
    padded[(query_start[:-1] + gaps)[:, None] + reach] = known.long()
    padded[at] = ids
    before[slots] = padded[(query_start[1:] + gaps)[:, None] + reach].to(before.dtype)
    return padded, at


@hash_ngrams.inputs
def _hash_inputs(case: RecurrentCase, dtype: torch.dtype, device: str) -> Arguments:
    slots, query_start, has_history, num_slots = ragged_case(case["seqs"], device)
    total, end, past = int(query_start[-1]), 7, case["longest"] - 1
    ids = torch.randint(0, VOCABULARY, (total,), device=device)
    ids[torch.rand(total, device=device) < 0.2] = end
    before = torch.randint(0, VOCABULARY, (num_slots, past), device=device).float()
    before[torch.rand(num_slots, past, device=device) < 0.2] = end
    factors = torch.randint(1, (1 << 63) // VOCABULARY, (past + 1,), device=device)
    sizes = torch.randint(11, 5000, (past * case["heads"],), device=device)
    merged = torch.randint(0, VOCABULARY, (VOCABULARY,), device=device) if case.get("merges") else None
    given = (ids, before, slots, query_start, has_history, factors, sizes, sizes.cumsum(0) - sizes, end)
    return (*given, merged), {}


@sum_ngrams.inputs
def _sum_inputs(case: RecurrentCase, dtype: torch.dtype, device: str) -> Arguments:
    (*given, factors, sizes, starts, end, _), _ = _hash_inputs({**case, "merges": False}, dtype, device)
    reach = torch.arange(len(factors), device=device)[:, None]
    longest = torch.arange(len(sizes), device=device) // case["heads"] + 1
    factors = torch.randint(1, 1 << 31, (len(factors), len(sizes)), device=device)
    return (*given, torch.where(reach > longest, 0, factors), sizes, starts, end), {}


LEAST = 1e-6  # what a root is taken of, at least
MATCHED: list[Case] = [
    dict(tokens=1, streams=4, size=64),
    dict(tokens=33, streams=3, size=100),
    dict(tokens=5, streams=2, size=23),
]


@op(cases=MATCHED)
def gate_by_match(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """A value for each of a token's streams: sigmoid(± √|query_k · key_k / √n|) value.

    query, key: [T, K, n], value: [T, n], rows may lie apart -> [T, K, n], dense. A product below `LEAST` has
    the root of that, with its own sign; 0 has none.
    """
    match = (query.float() * key.float()).sum(-1, keepdim=True) / math.sqrt(query.shape[-1])
    by = match.abs().clamp(min=LEAST).sqrt() * match.sign()
    return (by.sigmoid() * value.float()[:, None]).to(value.dtype)


@gate_by_match.inputs
def _match_inputs(case: Case, dtype: torch.dtype, device: str) -> Arguments:
    shape = (case["tokens"], case["streams"], case["size"])
    query, key = (torch.randn(shape, dtype=dtype, device=device) for _ in range(2))
    wide = torch.randn(case["tokens"], 2 * case["size"], dtype=dtype, device=device)
    return (query, key, wide.chunk(2, -1)[0]), {}
