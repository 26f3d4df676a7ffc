"""Entries that are chosen in two steps: the best blocks of entries, and the best entries of such blocks.

    scores   [row][entry]    of all, or of those in a row's blocks, one behind the other; by all threads
    blocks   [row][block]    over the scores: the largest of each
    best     [row][top_k]    as `indexer` takes them

What is computed of a row depends on that row and its keys alone, in one order.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from plait.errors import ShapeMismatch
from plait.kernels.cpu.attention.indexer import (
    DIGITS,
    SPLIT,
    check_columns,
    place_of_entry,
    score_entries,
    score_key,
    why_no_choice,
    write_best,
)
from plait.kernels.cpu.attention.paged_rows import count_seen, sequence_of
from plait.kernels.cpu.codegen.kernel import inline, kernel
from plait.kernels.cpu.codegen.kinds import Float, Int
from plait.kernels.cpu.codegen.vec import get_f32, get_i32, put_f32, put_i32, words
from plait.kernels.cpu.runtime.executor import Executor
from plait.kernels.cpu.runtime.frame import rows_of, scratch_of
from plait.kernels.cpu.runtime.row_checks import TensorRows, dense
from plait.ops.candidates import choose_among_blocks, choose_entry_blocks


@kernel
def take_blocks(frame: int, args: int, thread: int, threads: int) -> None:
    """scores, which become those of blocks, numbers of a row of scores, query_start, seq_lens, rate, size,
    top_k, chosen (dense)."""
    scores, most, starts, lens, rate, size, top_k, chosen = words(args, 2, 10)
    counts = scratch_of(frame, thread)
    s: Int = 0
    for r in range(thread, rows_of(frame, args), threads):
        s = sequence_of(starts, s, r)
        n, own = count_seen(starts, lens, s, r) // rate, scores + 4 * r * most
        blocks = (n + size - 1) // size
        if blocks > top_k:  # else all are taken, and there are no scores
            for b in range(blocks):
                best: Float = get_f32(own + 4 * b * size)
                for w in range(b * size + 1, min(b * size + size, n)):
                    score = get_f32(own + 4 * w)
                    best = score if score > best else best
                put_f32(own + 4 * b, best)
            put_f32(own + 4 * (blocks - 1), np.float32(np.inf))
        write_best(own, blocks, top_k, counts, chosen + 4 * r * top_k)


@choose_entry_blocks.variant("native", on="cpu", when=why_no_choice, native=True)
def _choose_entry_blocks(
    cpu: Executor,
    q: Tensor,
    weights: Tensor,
    cache: Tensor,
    block_table: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    top_k: int,
    size: int,
    rate: int,
    step: int,
) -> Tensor:
    rows = _check(q, weights, cache, rate, step, top_k, size)
    most = -(-block_table.shape[1] * cache.shape[1] * step // rate)
    scores, chosen = cpu.empty(rows.count, most), cpu.empty(rows.count, top_k, dtype=torch.int32)
    cpu.launch(
        *(score_entries, q, *rows.strides, weights, TensorRows.of(weights).row_bytes, cache),
        *(cache.element_size(), block_table, block_table.stride(0) * 8, query_start, seq_lens, rows.heads),
        *(rows.width, cache.shape[1], rate, rate // step, top_k * size, scores, most),
        rows=rows.count,
        seqs=seq_lens.shape[0],
    )
    cpu.launch(
        *(take_blocks, scores, most, query_start, seq_lens, rate, size, top_k, chosen),
        rows=rows.count,
        seqs=seq_lens.shape[0],
        scratch=8 * DIGITS,
    )
    return chosen


def _check(
    q: Tensor, weights: Tensor, cache: Tensor, rate: int, step: int, top_k: int, size: int
) -> TensorRows:
    rows, d = TensorRows.of(q), q.shape[-1]
    fits = q.dim() == 3 and weights.shape == q.shape[:2] and min(top_k, size) > 0 and rate % step == 0
    if not fits or cache.dim() != 3 or cache.shape[2] != d or not cache.is_contiguous():
        raise ShapeMismatch(
            f"{top_k} of blocks of {size}: q {list(q.shape)}, weights {list(weights.shape)} and a cache "
            f"{list(cache.shape)} of {rate} tokens to an entry and {step} to a place do not fit each other"
        )
    check_columns(d, cache)
    return rows


@inline
def count_listed(blocks: Int, count: Int, size: Int, n: Int) -> Int:
    """How many of n entries are in a row's blocks, of which only the last may have fewer than `size`."""
    total: Int = 0
    for b in range(count):
        block = np.int64(get_i32(blocks + 4 * b))
        if block < 0:
            break
        total += min(size, n - block * size)
    return total


@inline
def find_listed(blocks: Int, size: Int, i: Int) -> Int:
    """Which entry is the i-th of a row's blocks."""
    return np.int64(get_i32(blocks + 4 * (i // size))) * size + i % size


@kernel
def score_listed(frame: int, args: int, thread: int, threads: int) -> None:
    """q, its strides, weights, their stride, cache, bytes of a number, table, bytes of its rows, query_start,
    seq_lens, heads, d, places of a block, rate, places to an entry, top_k, scores, blocks (dense), how many,
    their size."""
    q, q_row, q_head, weights, w_row, cached, item, table, table_row, starts, lens = words(args, 2, 13)
    heads, d, units, rate, every, top_k, scores, blocks, count, size = words(args, 13, 23)
    s: Int = 0
    for r in range(rows_of(frame, args)):
        s, own = sequence_of(starts, s, r), blocks + 4 * r * count
        n = count_listed(own, count, size, count_seen(starts, lens, s, r) // rate)
        if n <= top_k:  # all are taken
            continue
        begin = (thread + threads - r % threads) % threads * SPLIT
        for at in range(begin, n, threads * SPLIT):
            for i in range(at, min(at + SPLIT, n)):
                w = find_listed(own, size, i)
                key = cached + place_of_entry(table + s * table_row, w, units, every) * d * item
                score = score_key(q + r * q_row, q_head, weights + r * w_row, key, heads, d, item)
                put_f32(scores + 4 * (r * count * size + i), score)


@kernel
def take_listed(frame: int, args: int, thread: int, threads: int) -> None:
    """scores, query_start, seq_lens, rate, top_k, blocks (dense), how many, their size, chosen (dense)."""
    scores, starts, lens, rate, top_k, blocks, count, size, chosen = words(args, 2, 11)
    counts = scratch_of(frame, thread)
    s: Int = 0
    for r in range(thread, rows_of(frame, args), threads):
        s, own, to = sequence_of(starts, s, r), blocks + 4 * r * count, chosen + 4 * r * top_k
        n = count_listed(own, count, size, count_seen(starts, lens, s, r) // rate)
        write_best(scores + 4 * r * count * size, n, top_k, counts, to)
        for k in range(min(n, top_k)):
            put_i32(to + 4 * k, np.int32(find_listed(own, size, np.int64(get_i32(to + 4 * k)))))


@choose_among_blocks.variant("native", on="cpu", when=why_no_choice, native=True)
def _choose_among_blocks(
    cpu: Executor,
    q: Tensor,
    weights: Tensor,
    cache: Tensor,
    block_table: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    blocks: Tensor,
    top_k: int,
    size: int,
    rate: int,
    step: int,
) -> Tensor:
    rows, count = _check(q, weights, cache, rate, step, top_k, size), blocks.shape[-1]
    dense("blocks", blocks, rows.count, count, dtype=torch.int32)
    scores, chosen = cpu.empty(rows.count, count * size), cpu.empty(rows.count, top_k, dtype=torch.int32)
    cpu.launch(
        *(score_listed, q, *rows.strides, weights, TensorRows.of(weights).row_bytes, cache),
        *(cache.element_size(), block_table, block_table.stride(0) * 8, query_start, seq_lens, rows.heads),
        *(rows.width, cache.shape[1], rate, rate // step, top_k, scores, blocks, count, size),
        rows=rows.count,
        seqs=seq_lens.shape[0],
    )
    cpu.launch(
        *(take_listed, scores, query_start, seq_lens, rate, top_k, blocks, count, size, chosen),
        rows=rows.count,
        seqs=seq_lens.shape[0],
        scratch=8 * DIGITS,
    )
    return chosen
