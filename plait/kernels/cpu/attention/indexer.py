"""Sparse attention by an indexer: scores of index keys, the best of them, attention over those alone.

    scores   [row][position]    a thread takes splits of 256 keys of each row, every `threads`-th
    best     [row][top_k]       a row's threshold by its digits: four counts of 256, then one pass in order
    attend   row × 16 heads     64 latents at a time become float32, next to one another, for all heads

What is computed of a row depends on that row and its keys alone, in one order: batches, chunks and threads
change no bit.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from plait.errors import ShapeMismatch
from plait.kernels.cpu.attention.attention import check_cache, check_index, why_unstorable
from plait.kernels.cpu.attention.codes import SCRATCH, store_latent_codes
from plait.kernels.cpu.attention.mla import why_unserved
from plait.kernels.cpu.attention.paged_rows import count_seen, find_entry, sequence_of, store_plain
from plait.kernels.cpu.codegen.kernel import inline, kernel
from plait.kernels.cpu.codegen.kinds import Float, Int
from plait.kernels.cpu.codegen.maths import exp
from plait.kernels.cpu.codegen.vec import (
    add,
    div,
    fma,
    get_bf16,
    get_f32,
    get_i32,
    get_i64,
    largest,
    load_bf16,
    load_f32,
    load_i8,
    load_some,
    mul,
    peak,
    put_f32,
    put_i32,
    put_i64,
    spread,
    store_f32,
    store_some,
    sub,
    to_f32,
    total,
    where_below,
    words,
    zero_f32,
)
from plait.kernels.cpu.runtime.executor import Executor
from plait.kernels.cpu.runtime.frame import rows_of, scratch_of
from plait.kernels.cpu.runtime.row_checks import TensorRows, dense
from plait.ops.entry import CODED, LATENT_GROUP, SCALE_NBYTES, latent_codes
from plait.ops.indexer import choose_keys, sparse_latent_attention
from plait.ops.registry import OpFacts

SPLIT = 256  # keys of a row that one thread scores at a time
TILE = 64  # latents that are decoded together
HEADS = 16  # that share them
DIGITS = 256


@inline
def index_product(q: Int, key: Int, d: Int, size: Int) -> float:
    """q · key over d columns; a key of two bytes a number is bfloat16."""
    s = zero_f32()
    if size == 4:
        for c in range(0, d, 16):
            left = np.int32(d - c)
            s = fma(load_some(q + 4 * c, left), load_some(key + 4 * c, left), s)
    else:
        for c in range(0, d, 16):
            s = fma(load_f32(q + 4 * c), load_bf16(key + 2 * c), s)
    return total(s)


@inline
def place_of_entry(table: Int, w: Int, units: Int, every: Int) -> Int:
    """Where entry w lies: blocks have `units` places, of which an entry takes every `every`-th."""
    return find_entry(table, units, w * every + every - 1)


@inline
def score_key(q: Int, q_head: Int, weights: Int, key: Int, heads: Int, d: Int, size: Int) -> Float:
    """Σ_h weights_h · relu(q_h · key)."""
    score: Float = np.float32(0.0)
    for h in range(heads):
        product = index_product(q + h * q_head, key, d, size)
        weight = get_f32(weights + 4 * h)
        if not product < np.float32(0.0):  # what is no number stays none
            score = np.float32(score + np.float32(weight * product))
    return score


@kernel
def score_entries(frame: int, args: int, thread: int, threads: int) -> None:
    """q, its strides, weights, their stride, cache, bytes of a number, table, bytes of its rows, query_start,
    seq_lens, heads, d, places of a block, rate, places to an entry, top_k, scores, numbers of a row of
    scores."""
    q, q_row, q_head, weights, w_row, cached, size, table, table_row, starts, lens = words(args, 2, 13)
    heads, d, units, rate, every, top_k, scores, most = words(args, 13, 21)
    s: Int = 0
    for r in range(rows_of(frame, args)):
        s = sequence_of(starts, s, r)
        n = count_seen(starts, lens, s, r) // rate
        if n <= top_k:  # all are taken
            continue
        begin = (thread + threads - r % threads) % threads * SPLIT
        for at in range(begin, n, threads * SPLIT):
            for w in range(at, min(at + SPLIT, n)):
                key = cached + place_of_entry(table + s * table_row, w, units, every) * d * size
                score = score_key(q + r * q_row, q_head, weights + r * w_row, key, heads, d, size)
                put_f32(scores + 4 * (r * most + w), score)


@inline
def digits_of(score: Int) -> Int:
    """A float's place in the order of floats, 0 to 2^32 - 1. What is no number comes first or last."""
    bits = np.int64(get_i32(score))
    return bits + 2147483648 if bits >= 0 else -1 - bits


@inline
def find_threshold(scores: Int, n: Int, top_k: Int, counts: Int) -> tuple[Int, Int]:
    """The digits of the `top_k`-th best of n scores, and how many equal to it are taken. counts: scratch."""
    prefix, wanted = np.int64(0), np.int64(top_k)
    for shift in range(24, -8, -8):
        for i in range(DIGITS):
            put_i64(counts + 8 * i, 0)
        for t in range(n):
            x = digits_of(scores + 4 * t)
            if x >> (shift + 8) == prefix:
                at = counts + 8 * ((x >> shift) & 255)
                put_i64(at, get_i64(at) + 1)
        digit = np.int64(DIGITS - 1)
        while get_i64(counts + 8 * digit) < wanted:
            wanted -= get_i64(counts + 8 * digit)
            digit -= 1
        prefix = prefix * DIGITS + digit
    return prefix, wanted


@inline
def write_best(scores: Int, n: Int, top_k: Int, counts: Int, to: Int) -> None:
    """The places of the `top_k` best of n scores, rising, then -1; of equals the earlier. counts: scratch."""
    if n <= top_k:
        for t in range(top_k):
            put_i32(to + 4 * t, np.int32(t if t < n else -1))
        return
    least, equal = find_threshold(scores, n, top_k, counts)
    count = 0
    for t in range(n):
        x = digits_of(scores + 4 * t)
        if x > least or (x == least and equal > 0):
            if x == least:
                equal -= 1
            put_i32(to + 4 * count, np.int32(t))
            count += 1


@kernel
def take_entries(frame: int, args: int, thread: int, threads: int) -> None:
    """scores, numbers of a row of scores, query_start, seq_lens, rate, top_k, chosen (dense)."""
    scores, most, starts, lens, rate, top_k, chosen = words(args, 2, 9)
    counts = scratch_of(frame, thread)
    s: Int = 0
    for r in range(thread, rows_of(frame, args), threads):
        s = sequence_of(starts, s, r)
        n = count_seen(starts, lens, s, r) // rate
        write_best(scores + 4 * r * most, n, top_k, counts, chosen + 4 * r * top_k)


def choose_best(
    cpu: Executor,
    q: Tensor,
    weights: Tensor,
    cache: Tensor,
    block_table: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    top_k: int,
    rate: int = 1,
    step: int = 1,
) -> Tensor:
    """The entries that small heads choose for each row: [T, top_k] int32.

    An entry is of `rate` tokens; a place of the cache, [blocks, places, d], is of `step` tokens.
    """
    rows, units = TensorRows.of(q), cache.shape[1]
    most = -(-block_table.shape[1] * units * step // rate)
    scores, chosen = cpu.empty(rows.count, most), cpu.empty(rows.count, top_k, dtype=torch.int32)
    cpu.launch(
        *(score_entries, q, *rows.strides, weights, TensorRows.of(weights).row_bytes, cache),
        *(cache.element_size(), block_table, block_table.stride(0) * 8, query_start, seq_lens, rows.heads),
        *(rows.width, units, rate, rate // step, top_k, scores, most),
        rows=rows.count,
        seqs=seq_lens.shape[0],
    )
    cpu.launch(
        *(take_entries, scores, most, query_start, seq_lens, rate, top_k, chosen),
        rows=rows.count,
        seqs=seq_lens.shape[0],
        scratch=8 * DIGITS,
    )
    return chosen


def check_columns(d: int, cache: Tensor) -> None:
    """Raises ShapeMismatch for index keys that are not read in whole vectors."""
    if cache.element_size() == 2 and d % 16:
        raise ShapeMismatch(f"index keys in bfloat16 want a multiple of 16 columns, not {d}")


def why_no_choice(facts: OpFacts) -> str | None:
    """Why the native kernels cannot serve an indexer of these facts, if so."""
    if facts.sizes.get("kv_dtype", "model") in ("bfloat16", *CODED) and facts.sizes.get("index_dim", 16) % 16:
        return f"it wants index keys of a multiple of 16 in bfloat16, not of {facts['index_dim']}"
    return why_unstorable(facts)


@choose_keys.variant("native", on="cpu", when=why_no_choice, native=True)
def _choose_keys(
    cpu: Executor,
    q: Tensor,
    weights: Tensor,
    k: Tensor,
    cache: Tensor,
    block_table: Tensor,
    slot_mapping: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    top_k: int,
) -> Tensor:
    rows, d, item = TensorRows.of(q), q.shape[-1], cache.element_size()
    check_cache("index cache", cache, (cache.shape[1], d), cache.dtype)
    check_index(block_table, slot_mapping, query_start, seq_lens)
    if q.dim() != 3 or weights.shape != q.shape[:2] or k.shape != (rows.count, d) or item == 1 or top_k < 1:
        raise ShapeMismatch(
            f"an indexer of {top_k} keys: q {list(q.shape)}, weights {list(weights.shape)} and k "
            f"{list(k.shape)} do not fit each other, or the cache is {cache.dtype}"
        )
    check_columns(d, cache)
    store_plain(cpu, k, cache, slot_mapping)
    return choose_best(cpu, q, weights, cache, block_table, query_start, seq_lens, top_k)


@inline
def unfold_latent(source: Int, to: Int, width: Int, rank: Int, size: Int) -> None:
    """One cached latent as float32."""
    if size == 4:
        for c in range(0, width, 16):
            left = np.int32(width - c)
            store_some(to + 4 * c, load_some(source + 4 * c, left), left)
        return
    at: Int = source
    first: Int = 0
    if size == 1:
        for c in range(0, rank, 16):
            scale = spread(get_bf16(source + rank + c // LATENT_GROUP * SCALE_NBYTES))
            store_some(to + 4 * c, mul(to_f32(load_i8(source + c)), scale), np.int32(rank - c))
        at = source + rank + (rank + LATENT_GROUP - 1) // LATENT_GROUP * SCALE_NBYTES - 2 * rank
        first = rank
    full = first + (width - first) // 16 * 16
    for c in range(first, full, 16):
        store_f32(to + 4 * c, load_bf16(at + 2 * c))
    for c in range(full, width):
        put_f32(to + 4 * c, get_bf16(at + 2 * c))


@inline
def add_tile(
    q: Int,
    keys: Int,
    values: Int,
    n: Int,
    step: Int,
    width: Int,
    rank: Int,
    scale: Float,
    state: Int,
    weights: Int,
) -> None:
    """A head's softmax moves on by n keys of `width` numbers with values of `rank`, `step` numbers apart.

    state: [largest, sum] and 56 bytes, then the weighted sum.
    """
    for j in range(n):
        s, key = zero_f32(), keys + 4 * j * step
        for c in range(0, width, 16):
            left = np.int32(width - c)
            s = fma(load_some(q + 4 * c, left), load_some(key + 4 * c, left), s)
        put_f32(weights + 4 * j, np.float32(total(s) * scale))
    top = spread(get_f32(state))
    for j in range(0, n, 16):
        left = np.int32(n - j)
        top = largest(top, where_below(left, load_some(weights + 4 * j, left), top))
    highest, sums = spread(peak(top)), zero_f32()
    for j in range(0, n, 16):
        left = np.int32(n - j)
        x = sub(load_some(weights + 4 * j, left), highest)
        e = where_below(left, fma(x, zero_f32(), exp(x)), zero_f32())  # what is no number stays none
        store_some(weights + 4 * j, e, left)
        sums = add(sums, e)
    shrink = exp(sub(spread(get_f32(state)), highest))
    store_some(state, highest, np.int32(1))
    store_some(state + 4, fma(shrink, spread(get_f32(state + 4)), spread(total(sums))), np.int32(1))
    for c in range(0, rank, 16):
        left = np.int32(rank - c)
        acc = mul(shrink, load_some(state + 64 + 4 * c, left))
        for j in range(n):
            acc = fma(spread(get_f32(weights + 4 * j)), load_some(values + 4 * (j * step + c), left), acc)
        store_some(state + 64 + 4 * c, acc, left)


@inline
def begin_head(state: Int, state_bytes: Int, sink: Int) -> None:
    """A head's state before its first key; sink: the address of a score of a key with the value 0, or 0."""
    for c in range(4, state_bytes, 4):
        put_f32(state + c, np.float32(0.0))
    if sink != 0:
        put_f32(state, get_f32(sink))
        put_f32(state + 4, np.float32(1.0))
    else:
        put_f32(state, np.float32(-np.inf))


@inline
def close_head(state: Int, to: Int, rank: Int) -> None:
    """The output of a head, of its state behind the last key."""
    whole = spread(get_f32(state + 4))
    for c in range(0, rank, 16):
        left = np.int32(rank - c)
        store_some(to + 4 * c, div(load_some(state + 64 + 4 * c, left), whole), left)


@kernel
def attend_chosen(frame: int, args: int, thread: int, threads: int) -> None:
    """q, its strides, out (dense), cache, bytes of a number, of an entry, chosen, top_k, table, bytes of its
    rows, query_start, block, heads, width, rank, scale, bytes of a head's state, sinks or 0."""
    q, q_row, q_head, out, cached, size, entry, chosen, top_k, table, table_row = words(args, 2, 13)
    starts, block, heads, width, rank, _, state_bytes, sinks = words(args, 13, 21)
    scale, tile = get_f32(args + 8 * 18), scratch_of(frame, thread)
    weights = tile + 4 * TILE * width
    states = weights + 4 * TILE
    parts = (heads + HEADS - 1) // HEADS
    s: Int = 0
    for item in range(thread, rows_of(frame, args) * parts, threads):
        r, first = item // parts, item % parts * HEADS
        end = min(first + HEADS, heads)
        s = sequence_of(starts, s, r)
        for h in range(end - first):
            sink = sinks + 4 * (first + h) if sinks != 0 else np.int64(0)
            begin_head(states + h * state_bytes, state_bytes, sink)
        for at in range(0, top_k, TILE):
            n = 0
            while n < min(TILE, top_k - at):
                t = np.int64(get_i32(chosen + 4 * (r * top_k + at + n)))
                if t < 0:
                    break
                place = find_entry(table + s * table_row, block, t)
                unfold_latent(cached + place * entry, tile + 4 * n * width, width, rank, size)
                n += 1
            if n == 0:
                break
            for h in range(first, end):
                x = q + r * q_row + h * q_head
                state = states + (h - first) * state_bytes
                add_tile(x, tile, tile, n, width, width, rank, scale, state, weights)
        for h in range(first, end):
            close_head(states + (h - first) * state_bytes, out + 4 * rank * (r * heads + h), rank)


def why_no_sparse(facts: OpFacts) -> str | None:
    """Why the native kernel cannot serve these facts, if so."""
    if (kept := facts.sizes.get("kv_dtype")) in ("int7", "int4"):
        return f"it reads latents in float32, bfloat16 or int8, not in {kept}"
    return why_unserved(facts)


@sparse_latent_attention.variant("native", on="cpu", when=why_no_sparse, native=True)
def _sparse_latent_attention(
    cpu: Executor,
    q: Tensor,
    latent: Tensor | None,
    cache: Tensor,
    chosen: Tensor,
    block_table: Tensor,
    slot_mapping: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    scale: float,
    kv_rank: int,
    sinks: Tensor | None = None,
) -> Tensor:
    rows = TensorRows.of(q)
    if sinks is not None:
        dense("sinks", sinks, rows.heads)
    size, width, rest = cache.shape[1], rows.width, rows.width - kv_rank
    form = latent_codes(kv_rank, rest) if cache.dtype == torch.int8 else None
    check_cache("cache", cache, (size, form.width if form else width), cache.dtype)
    check_index(block_table, slot_mapping, query_start, seq_lens)
    top_k = chosen.shape[-1]
    dense("chosen", chosen, rows.count, top_k, dtype=torch.int32)
    same = latent is None or tuple(latent.shape) == (rows.count, width)
    if not same or q.dim() != 3 or not 0 < kv_rank <= width:
        sizes = "none" if latent is None else list(latent.shape)
        raise ShapeMismatch(
            f"q {list(q.shape)} and latent {sizes} do not fit each other with a kv_rank of {kv_rank}"
        )
    if latent is not None and form:
        new = TensorRows.of(latent)
        given = (latent, new.row_bytes, cache, slot_mapping)
        parts = (kv_rank, form.group, form.rest_at, rest, form.width)
        cpu.launch(store_latent_codes, *given, *parts, rows=new.count, scratch=SCRATCH)
    elif latent is not None:
        store_plain(cpu, latent, cache, slot_mapping)
    out, state = cpu.empty(rows.count, rows.heads, kv_rank), 64 + -(-kv_rank // 16) * 64
    entry = cache.shape[-1] * cache.element_size()
    cpu.launch(
        *(attend_chosen, q, *rows.strides, out, cache, cache.element_size(), entry, chosen, top_k),
        *(block_table, block_table.stride(0) * 8, query_start, size, rows.heads, width, kv_rank),
        *(float(scale), state, sinks),
        rows=rows.count,
        seqs=seq_lens.shape[0],
        scratch=4 * TILE * width + 4 * TILE + HEADS * state,
    )
    return out
