"""Attention over compressed keys: windows of tokens become entries, and a row attends to the best of them.

    compress  sequence × 16 channels   a thread takes its channels through all new tokens, in their order
    scores    row                      of entries, by the small heads of an indexer; every `threads`-th split
    blocks    row                      over the scores: the largest of each block of entries
    listed    row                      scores of the entries in a row's blocks, one behind the other
    attend    row × 16 heads           the window's latents, then entries, 64 at a time as float32

What is computed of a row depends on its sequence alone, in one order: batches, chunks and threads change no
bit.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from plait.errors import ShapeMismatch
from plait.kernels.cpu.attention.attention import check_cache, check_index, why_unstorable
from plait.kernels.cpu.attention.indexer import (
    DIGITS,
    HEADS,
    SPLIT,
    TILE,
    add_tile,
    begin_head,
    check_columns,
    choose_best,
    close_head,
    place_of_entry,
    score_entries,
    score_key,
    unfold_latent,
    why_no_choice,
    write_best,
)
from plait.kernels.cpu.attention.paged_rows import (
    count_seen,
    find_entry,
    sequence_of,
    store_plain,
    store_row,
)
from plait.kernels.cpu.codegen.kernel import inline, kernel
from plait.kernels.cpu.codegen.kinds import Float, Floats, Int
from plait.kernels.cpu.codegen.maths import exp
from plait.kernels.cpu.codegen.vec import (
    add,
    div,
    fma,
    get_f32,
    get_i32,
    get_i64,
    largest,
    load_some,
    mul,
    put_f32,
    put_i32,
    put_i64,
    store_some,
    sub,
    where_less,
    words,
    zero_f32,
)
from plait.kernels.cpu.runtime.executor import Executor
from plait.kernels.cpu.runtime.frame import rows_of, scratch_of, take_sequence
from plait.kernels.cpu.runtime.row_checks import Sequences, TensorRows, dense, float32_rows
from plait.ops.candidates import choose_among_blocks, choose_entry_blocks
from plait.ops.compressed import (
    FOLDED,
    add_open_block,
    choose_entries,
    compress_tokens,
    entry_attention,
    spread_windows,
)
from plait.ops.entry import CODED
from plait.ops.registry import OpFacts


@inline
def fold(state: Int, step: Int, logit: Floats, sums: Floats, weighted: Floats, left: np.int32) -> None:
    """A softmax of sixteen channels moves on by another: [largest, sum, weighted sum], `step` bytes apart."""
    top, whole = load_some(state, left), load_some(state + step, left)
    most = where_less(zero_f32(), whole, largest(top, logit), logit)
    old = where_less(zero_f32(), whole, exp(sub(top, most)), zero_f32())
    new = exp(sub(logit, most))
    store_some(state, most, left)
    store_some(state + step, fma(whole, old, mul(sums, new)), left)
    total = fma(load_some(state + 2 * step, left), old, mul(weighted, new))
    store_some(state + 2 * step, total, left)


@inline
def copy_folded(source: Int, apart: Int, to: Int, step: Int, left: np.int32) -> None:
    """apart, step: bytes between the three numbers, where they are and where they go."""
    for i in range(3):
        store_some(to + i * step, load_some(source + i * apart, left), left)


@inline
def clear_folded(to: Int, step: Int, left: np.int32) -> None:
    for i in range(3):
        store_some(to + i * step, zero_f32(), left)


@kernel
def compress_channels(frame: int, args: int, thread: int, threads: int) -> None:
    """kv, its row stride, gate, its row stride, bias (dense), state, its slot stride, slots, query_start,
    has_history, positions, rate, parts, d, entries (dense), starts."""
    kv, kv_row, gate, gate_row, bias, state, slot_bytes, slots, starts, history = words(args, 2, 12)
    positions, rate, parts, d, entries, firsts = words(args, 12, 18)
    step, each, merged = 4 * d, 12 * d, scratch_of(frame, thread)
    while True:
        part, slot, past, first, count = take_sequence(frame, args, (d + 15) // 16, (slots, starts, history))
        if part < 0:
            break
        left = np.int32(d - 16 * part)
        home = state + slot * slot_bytes + 64 * part
        if past == 0:
            for i in range(2 * parts - 1):
                clear_folded(home + i * each, step, left)
        for t in range(first, first + count):
            phase = get_i64(positions + 8 * t) % rate
            if phase == 0:
                if parts == 2:
                    copy_folded(home, step, home + 2 * each, step, left)
                for i in range(parts):
                    clear_folded(home + i * each, step, left)
            for i in range(parts):
                column = 4 * i * d + 64 * part
                logit = add(
                    load_some(gate + t * gate_row + column, left),
                    load_some(bias + 4 * phase * parts * d + column, left),
                )
                x = load_some(kv + t * kv_row + column, left)
                one = exp(zero_f32())
                fold(home + i * each, step, logit, one, x, left)
            to = entries + 4 * t * d + 64 * part
            if phase == rate - 1:
                source = home
                if parts == 2:
                    source = merged
                    copy_folded(home + 2 * each, step, merged, 64, left)
                    last = home + each
                    logit, sums = load_some(last, left), load_some(last + step, left)
                    fold(merged, 64, logit, sums, load_some(last + 2 * step, left), left)
                apart = 64 if parts == 2 else step
                whole = div(load_some(source + 2 * apart, left), load_some(source + apart, left))
                store_some(to, whole, left)
            else:
                store_some(to, zero_f32(), left)
            if part == 0:
                put_i64(firsts + 8 * t, get_i64(positions + 8 * t) - phase)


@compress_tokens.variant("native", on="cpu", when=float32_rows, native=True)
def _compress_tokens(
    cpu: Executor,
    kv: Tensor,
    gate: Tensor,
    bias: Tensor,
    state: Tensor,
    slots: Tensor,
    query_start: Tensor,
    has_history: Tensor,
    positions: Tensor,
    rate: int,
) -> tuple[Tensor, Tensor]:
    rows, gates, where = TensorRows.of(kv), TensorRows.of(gate), Sequences.of(slots, query_start, has_history)
    d = state.shape[-1]
    parts = rows.width // d
    dense("positions", positions, rows.count, dtype=torch.int64)
    dense("bias", bias, rate, rows.width)
    dense("a slot's state", state[0], 2 * parts - 1, FOLDED, d)
    if kv.dim() != 2 or kv.shape != gate.shape or parts not in (1, 2) or rows.width != parts * d:
        raise ShapeMismatch(f"kv {list(kv.shape)} and gate {list(gate.shape)} do not fit entries of {d}")
    entries = cpu.empty(rows.count, d)
    firsts = cpu.empty(rows.count, dtype=torch.int64)
    cpu.launch(
        *(compress_channels, kv, rows.row_bytes, gate, gates.row_bytes, bias, state, 4 * state.stride(0)),
        *(*where.words, positions, rate, parts, d, entries, firsts),
        rows=rows.count,
        seqs=len(slots),
        scratch=192,
    )
    return entries, firsts


@kernel
def store_ended(frame: int, args: int, thread: int, threads: int) -> None:
    """entries, their row stride, cache, slots, query_start, seq_lens, d, bytes of a number, rate, step."""
    entries, row_bytes, cached, slots, starts, lens, d, size, rate, step = words(args, 2, 12)
    s: Int = 0
    for r in range(thread, rows_of(frame, args), threads):
        s = sequence_of(starts, s, r)
        if count_seen(starts, lens, s, r) % rate != 0:
            continue
        x, to = entries + r * row_bytes, cached + get_i64(slots + 8 * r) // step * d * size
        store_row(x, to, d, size)


@choose_entries.variant("native", on="cpu", when=why_no_choice, native=True)
def _choose_entries(
    cpu: Executor,
    q: Tensor,
    weights: Tensor,
    entries: Tensor,
    cache: Tensor,
    block_table: Tensor,
    slot_mapping: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    top_k: int,
    rate: int,
    step: int,
) -> Tensor:
    rows, d = TensorRows.of(q), q.shape[-1]
    check_index(block_table, slot_mapping, query_start, seq_lens)
    if q.dim() != 3 or weights.shape != q.shape[:2] or entries.shape != (rows.count, d) or top_k < 1:
        raise ShapeMismatch(
            f"an indexer of {top_k} entries: q {list(q.shape)}, weights {list(weights.shape)} and entries "
            f"{list(entries.shape)} do not fit each other"
        )
    check_columns(d, cache)
    _store(cpu, entries, cache, slot_mapping, query_start, seq_lens, rate, step)
    return choose_best(cpu, q, weights, cache, block_table, query_start, seq_lens, top_k, rate, step)


def _store(
    cpu: Executor,
    entries: Tensor,
    cache: Tensor,
    slots: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    rate: int,
    step: int,
) -> None:
    """Entries of tokens that end a window, in the reference's layout."""
    new, d, item = TensorRows.of(entries), cache.shape[-1], cache.element_size()
    if new.width != d or cache.dim() != 3 or not cache.is_contiguous() or rate % step or item not in (2, 4):
        raise ShapeMismatch(
            f"entries {list(entries.shape)} do not fit a cache {list(cache.shape)} of {cache.dtype}, {rate} "
            f"tokens to an entry and {step} to a place"
        )
    cpu.launch(
        *(store_ended, entries, new.row_bytes, cache, slots, query_start, seq_lens, d, item, rate, step),
        rows=new.count,
        seqs=seq_lens.shape[0],
    )


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
    rows = _check_scored(q, weights, cache, rate, step, top_k, size)
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


def _check_scored(
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
    rows, count = _check_scored(q, weights, cache, rate, step, top_k, size), blocks.shape[-1]
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


@kernel
def append_open(frame: int, args: int, thread: int, threads: int) -> None:
    """chosen (dense), positions, rate, heads, k, out (dense)."""
    chosen, positions, rate, heads, k, out = words(args, 2, 8)
    rows = rows_of(frame, args)
    for r in range(rows * thread // threads, rows * (thread + 1) // threads):
        at = get_i64(positions + 8 * r)
        for h in range(heads):
            to, n = out + 4 * (r * heads + h) * (k + 1), np.int64(0)
            while n < k and get_i32(chosen + 4 * (r * k + n)) >= 0:
                put_i32(to + 4 * n, get_i32(chosen + 4 * (r * k + n)))
                n += 1
            if (at + 1) % rate != 0:
                put_i32(to + 4 * n, np.int32(at // rate))
                n += 1
            for i in range(n, k + 1):
                put_i32(to + 4 * i, np.int32(-1))


@add_open_block.variant("native", on="cpu", native=True)
def _add_open_block(cpu: Executor, chosen: Tensor, positions: Tensor, rate: int, heads: int) -> Tensor:
    count, k = chosen.shape
    dense("chosen", chosen, count, k, dtype=torch.int32)
    dense("positions", positions, count, dtype=torch.int64)
    out = cpu.empty(count, heads, k + 1, dtype=torch.int32)
    cpu.launch(append_open, chosen, positions, rate, heads, k, out, rows=count)
    return out


@kernel
def spread_chosen(frame: int, args: int, thread: int, threads: int) -> None:
    """chosen (dense), positions, rate, k, out (dense)."""
    chosen, positions, rate, k, out = words(args, 2, 7)
    rows, wide = rows_of(frame, args), (k + 1) * rate - 1
    for r in range(rows * thread // threads, rows * (thread + 1) // threads):
        to, n = out + 4 * r * wide, np.int64(0)
        for i in range(k):
            first = np.int64(get_i32(chosen + 4 * (r * k + i))) * rate
            if first >= 0:
                for t in range(first, first + rate):
                    put_i32(to + 4 * n, np.int32(t))
                    n += 1
        end = get_i64(positions + 8 * r) + 1
        for t in range(end // rate * rate, end):
            put_i32(to + 4 * n, np.int32(t))
            n += 1
        for i in range(n, wide):
            put_i32(to + 4 * i, np.int32(-1))


@spread_windows.variant("native", on="cpu", native=True)
def _spread_windows(cpu: Executor, chosen: Tensor, positions: Tensor, rate: int) -> Tensor:
    count, k = chosen.shape
    dense("chosen", chosen, count, k, dtype=torch.int32)
    dense("positions", positions, count, dtype=torch.int64)
    out = cpu.empty(count, (k + 1) * rate - 1, dtype=torch.int32)
    cpu.launch(spread_chosen, chosen, positions, rate, k, out, rows=count)
    return out


@kernel
def attend_compressed(frame: int, args: int, thread: int, threads: int) -> None:
    """q, its strides, out (dense), latents, entries, bytes of a number, chosen or 0, top_k, tables of both
    and bytes of their rows, query_start, seq_lens, block, places of a block of entries, rate, places to an
    entry, window, heads, d, sinks, scale, bytes of a head's state."""
    q, q_row, q_head, out, latents, entries, item, chosen, top_k, near, near_row, far = words(args, 2, 14)
    far_row, starts, lens, block, units, rate, every, window, heads, d, sinks = words(args, 14, 25)
    scale, state_bytes, tile = get_f32(args + 8 * 25), get_i64(args + 8 * 26), scratch_of(frame, thread)
    weights = tile + 4 * TILE * d
    states, parts = weights + 4 * TILE, (heads + HEADS - 1) // HEADS
    s: Int = 0
    for unit in range(thread, rows_of(frame, args) * parts, threads):
        r, first = unit // parts, unit % parts * HEADS
        end = min(first + HEADS, heads)
        s = sequence_of(starts, s, r)
        seen = count_seen(starts, lens, s, r)
        low = max(seen - window, 0)
        count = top_k if chosen != 0 else seen // rate
        for h in range(end - first):
            begin_head(states + h * state_bytes, state_bytes, sinks + 4 * (first + h))
        at: Int = 0
        while at < seen - low + count:
            n: Int = 0
            while n < TILE and at < seen - low + count:
                if at < seen - low:
                    t = low + at
                    place = find_entry(near + s * near_row, block, t)
                    source = latents + place * d * item
                else:
                    w = at - (seen - low)
                    if chosen != 0:
                        w = np.int64(get_i32(chosen + 4 * (r * top_k + w)))
                        if w < 0:
                            at = seen - low + count
                            break
                    source = entries + place_of_entry(far + s * far_row, w, units, every) * d * item
                unfold_latent(source, tile + 4 * n * d, d, d, item)
                n += 1
                at += 1
            if n > 0:
                for h in range(first, end):
                    state, x = states + (h - first) * state_bytes, q + r * q_row + h * q_head
                    add_tile(x, tile, tile, n, d, d, d, scale, state, weights)
        for h in range(first, end):
            close_head(states + (h - first) * state_bytes, out + 4 * d * (r * heads + h), d)


def why_no_entries(facts: OpFacts) -> str | None:
    """Why the native kernel cannot serve these facts, if so."""
    if (kept := facts.sizes.get("kv_dtype", "model")) in CODED:
        return f"it reads latents in float32 or bfloat16, not in {kept}"
    return why_unstorable(facts)


@entry_attention.variant("native", on="cpu", when=why_no_entries, native=True)
def _entry_attention(
    cpu: Executor,
    q: Tensor,
    latent: Tensor,
    entries: Tensor,
    cache: Tensor,
    packed: Tensor,
    chosen: Tensor | None,
    near: tuple[Tensor, Tensor],
    far: tuple[Tensor, Tensor],
    query_start: Tensor,
    seq_lens: Tensor,
    scale: float,
    window: int,
    sinks: Tensor,
    rate: int,
    step: int,
    work: dict[object, object] | None = None,
) -> Tensor:
    rows, d = TensorRows.of(q), q.shape[-1]
    check_cache("cache", cache, (cache.shape[1], d), cache.dtype)
    for table, slots in (near, far):
        check_index(table, slots, query_start, seq_lens)
    dense("sinks", sinks, rows.heads)
    top_k = 0 if chosen is None else chosen.shape[-1]
    if chosen is not None:
        dense("chosen", chosen, rows.count, top_k, dtype=torch.int32)
    if q.dim() != 3 or latent.shape != (rows.count, d) or window < 1 or packed.dtype != cache.dtype:
        raise ShapeMismatch(
            f"q {list(q.shape)} and latent {list(latent.shape)} do not fit each other with a window of "
            f"{window}, or entries are kept in {packed.dtype} and latents in {cache.dtype}"
        )
    item, state = cache.element_size(), 64 + -(-d // 16) * 64
    store_plain(cpu, latent, cache, near[1])
    _store(cpu, entries, packed, far[1], query_start, seq_lens, rate, step)
    out = cpu.empty(*q.shape)
    cpu.launch(
        *(attend_compressed, q, *rows.strides, out, cache, packed, item, chosen, top_k, near[0]),
        *(near[0].stride(0) * 8, far[0], far[0].stride(0) * 8, query_start, seq_lens, cache.shape[1]),
        *(packed.shape[1], rate, rate // step, window, rows.heads, d, sinks, float(scale), state),
        rows=rows.count,
        seqs=seq_lens.shape[0],
        scratch=4 * TILE * d + 4 * TILE + HEADS * state,
    )
    return out
