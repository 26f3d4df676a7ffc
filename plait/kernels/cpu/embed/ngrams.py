"""Features of n-grams: which rows of hashed tables tokens have, and values gated by how well keys match.

hash   sequence          a thread takes all new tokens of one, then keeps the last ids for its next step
gate   row × stream      one thread sums a product, in one order, and writes the gated value
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from plait.errors import ShapeMismatch
from plait.kernels.cpu.attention.indexer import index_product
from plait.kernels.cpu.codegen.kernel import inline, kernel
from plait.kernels.cpu.codegen.kinds import Int
from plait.kernels.cpu.codegen.vec import (
    get_f32,
    get_i64,
    load_some,
    mul,
    put_f32,
    put_i64,
    spread,
    store_some,
    word,
    words,
)
from plait.kernels.cpu.runtime.executor import Executor
from plait.kernels.cpu.runtime.frame import rows_of, take_sequence
from plait.kernels.cpu.runtime.row_checks import Sequences, TensorRows, dense, float32_rows
from plait.ops.ngrams import LEAST, gate_by_match, hash_ngrams, sum_ngrams


@inline
def read_id(ids: Int, merged: Int, t: Int) -> Int:
    """The id of token t of a step; `merged`: the table of what is read for it, or 0."""
    own = get_i64(ids + 8 * t)
    return get_i64(merged + 8 * own) if merged != 0 else own


@inline
def token_at(ids: Int, merged: Int, known: Int, past: Int, first: Int, t: Int, end: Int) -> Int:
    """Token t of a step, of the sequence that begins at token `first`; `known`: the `past` ids before it, or
    0: there are none."""
    if t >= first:
        return read_id(ids, merged, t)
    return np.int64(get_f32(known + 4 * (past - first + t))) if known != 0 else end


@inline
def keep_last(
    ids: Int, merged: Int, home: Int, known: Int, past: Int, first: Int, count: Int, end: Int
) -> None:
    """The ids before the next step's token, oldest first, so that none is overwritten before it moves."""
    for k in range(past):
        token = token_at(ids, merged, known, past, first, first + count - past + k, end)
        put_f32(home + 4 * k, np.float32(token))


@kernel
def hash_tokens(frame: int, args: int, thread: int, threads: int) -> None:
    """ids, before, its slot stride, slots, query_start, has_history, factors, sizes, starts, n - 1, heads of
    each size of n-gram, end, out (dense), the table of merged ids or 0."""
    ids, before, slot_bytes, slots, begins, history, factors, sizes = words(args, 2, 10)
    starts, past, heads, end, out, merged = words(args, 10, 16)
    while True:
        part, slot, has_past, first, count = take_sequence(frame, args, 1, (slots, begins, history))
        if part < 0:
            break
        home = before + slot * slot_bytes
        known = home if has_past != 0 else np.int64(0)
        for t in range(first, first + count):
            number: Int = read_id(ids, merged, t) * get_i64(factors)
            ended = False
            for k in range(1, past + 1):
                token: Int = end if ended else token_at(ids, merged, known, past, first, t - k, end)
                ended = ended or (token == end and merged == 0)
                number ^= token * get_i64(factors + 8 * k)
                for head in range((k - 1) * heads, k * heads):
                    row = number % get_i64(sizes + 8 * head) + get_i64(starts + 8 * head)
                    put_i64(out + 8 * (t * past * heads + head), row)
        keep_last(ids, merged, home, known, past, first, count, end)


@kernel
def sum_tokens(frame: int, args: int, thread: int, threads: int) -> None:
    """ids, before, its slot stride, slots, query_start, has_history, factors, sizes, starts, n - 1, heads,
    end, out (dense)."""
    ids, before, slot_bytes, slots, begins, history, factors, sizes = words(args, 2, 10)
    starts, past, heads, end, out = words(args, 10, 15)
    while True:
        part, slot, has_past, first, count = take_sequence(frame, args, 1, (slots, begins, history))
        if part < 0:
            break
        home = before + slot * slot_bytes
        known = home if has_past != 0 else np.int64(0)
        for t in range(first, first + count):
            to = out + 8 * t * heads
            for head in range(heads):
                put_i64(to + 8 * head, get_i64(ids + 8 * t) * get_i64(factors + 8 * head))
            for k in range(1, past + 1):
                token: Int = token_at(ids, np.int64(0), known, past, first, t - k, end)
                if token == end:
                    break
                for head in range(heads):
                    at = to + 8 * head
                    put_i64(at, get_i64(at) + token * get_i64(factors + 8 * (k * heads + head)))
            for head in range(heads):
                at = to + 8 * head
                put_i64(at, get_i64(at) % get_i64(sizes + 8 * head) + get_i64(starts + 8 * head))
        keep_last(ids, np.int64(0), home, known, past, first, count, end)


@hash_ngrams.variant("native", on="cpu", native=True)
def _hash_ngrams(
    cpu: Executor,
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
    past, heads, where = len(factors) - 1, len(sizes), Sequences.of(slots, query_start, has_history)
    _check_ngrams(ids, before, past, sizes, starts, of=past)
    dense("factors", factors, past + 1, dtype=torch.int64)
    if merged is not None:
        dense("merged", merged, len(merged), dtype=torch.int64)
    out = cpu.empty(len(ids), heads, dtype=torch.int64)
    cpu.launch(
        *(hash_tokens, ids, before, 4 * before.stride(0), *where.words, factors, sizes, starts),
        *(past, heads // past, end, out, merged),
        rows=len(ids),
        seqs=len(slots),
    )
    return out


@sum_ngrams.variant("native", on="cpu", native=True)
def _sum_ngrams(
    cpu: Executor,
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
    past, heads, where = len(factors) - 1, len(sizes), Sequences.of(slots, query_start, has_history)
    _check_ngrams(ids, before, past, sizes, starts)
    dense("factors", factors, past + 1, heads, dtype=torch.int64)
    out = cpu.empty(len(ids), heads, dtype=torch.int64)
    cpu.launch(
        *(sum_tokens, ids, before, 4 * before.stride(0), *where.words, factors, sizes, starts),
        *(past, heads, end, out),
        rows=len(ids),
        seqs=len(slots),
    )
    return out


def _check_ngrams(ids: Tensor, before: Tensor, past: int, sizes: Tensor, starts: Tensor, of: int = 1) -> None:
    heads = len(sizes)
    if ids.dim() != 1 or past < 1 or heads % of or before.shape[1:] != (past,):
        raise ShapeMismatch(
            f"{heads} heads of n-grams up to {past + 1} tokens do not fit ids {list(ids.shape)} and ids "
            f"before {list(before.shape)}"
        )
    dense("ids", ids, len(ids), dtype=torch.int64)
    for name, numbers in (("sizes", sizes), ("starts", starts)):
        dense(name, numbers, heads, dtype=torch.int64)
    dense("a slot's ids", before[0], past)


@kernel
def gate_streams(frame: int, args: int, thread: int, threads: int) -> None:
    """query, its strides, key, its strides, value, its row stride, streams, n, the least product, out."""
    query, q_row, q_head, key, k_row, k_head, value, v_row, streams, n = words(args, 2, 12)
    least, out = np.float64(get_f32(args + 8 * 12)), word(args, 13)
    items = rows_of(frame, args) * streams
    for i in range(items * thread // threads, items * (thread + 1) // threads):
        row, k = i // streams, i % streams
        q, x = query + row * q_row + k * q_head, key + row * k_row + k * k_head
        product = index_product(q, x, n, np.int64(4))
        match = np.float64(product) / math.sqrt(np.float64(n))
        root = math.sqrt(max(abs(match), least))
        if match == 0.0:
            root = 0.0
        by = spread(np.float32(1.0 / (1.0 + math.exp(-root if match > 0.0 else root))))
        for c in range(0, n, 16):
            left = np.int32(n - c)
            store_some(out + 4 * (i * n + c), mul(load_some(value + row * v_row + 4 * c, left), by), left)


@gate_by_match.variant("native", on="cpu", when=float32_rows, native=True)
def _gate_by_match(cpu: Executor, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    a, b, rows = TensorRows.of(query), TensorRows.of(key), TensorRows.of(value)
    if query.dim() != 3 or query.shape != key.shape or value.shape != (a.count, a.width):
        raise ShapeMismatch(
            f"query {list(query.shape)}, key {list(key.shape)} and value {list(value.shape)} do not fit"
        )
    out = cpu.empty(*query.shape)
    cpu.launch(
        *(gate_streams, query, *a.strides, key, *b.strides, value, rows.row_bytes, a.heads, a.width),
        *(LEAST, out),
        rows=a.count,
    )
    return out
