"""Block-sparse attention: scores of blocks of keys, the best of them, attention over those alone.

    scores   [row][head][block]   a thread takes blocks of each row's heads, every `threads`-th
    best     [row][head][top_k]   as the indexer's: a threshold by digits, then one pass in order
    attend   row × kv head        64 keys and values at a time lie side by side, for all heads of a group

Caches lie as the references have them: [block][token][kv head][column]. What is computed of a row depends on
that row and its keys alone, in one order: batches, chunks and threads change no bit.
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
    TILE,
    add_tile,
    begin_head,
    check_columns,
    close_head,
    index_product,
    unfold_latent,
    why_no_choice,
    write_best,
)
from plait.kernels.cpu.attention.paged_rows import count_seen, find_entry, sequence_of, store_plain
from plait.kernels.cpu.codegen.kernel import kernel
from plait.kernels.cpu.codegen.kinds import Float, Int
from plait.kernels.cpu.codegen.vec import get_f32, get_i32, put_f32, words
from plait.kernels.cpu.runtime.executor import Executor
from plait.kernels.cpu.runtime.frame import rows_of, scratch_of
from plait.kernels.cpu.runtime.row_checks import TensorRows, dense
from plait.ops.block_sparse import block_sparse_attention, choose_blocks
from plait.ops.entry import CODED
from plait.ops.registry import OpFacts


@kernel
def score_blocks(frame: int, args: int, thread: int, threads: int) -> None:
    """q, its strides, cache, bytes of a number, table, bytes of its rows, query_start, seq_lens, heads, d,
    block, size, top_k, scores, how many a head of a row has."""
    q, q_row, q_head, cached, item, table, table_row, starts, lens = words(args, 2, 11)
    heads, d, block, size, top_k, scores, most = words(args, 11, 18)
    s: Int = 0
    for r in range(rows_of(frame, args)):
        s = sequence_of(starts, s, r)
        n = count_seen(starts, lens, s, r)
        count = (n + size - 1) // size
        if count <= top_k:  # all are taken
            continue
        for b in range((thread + threads - r % threads) % threads, count, threads):
            for h in range(heads):
                best: Float = np.float32(-np.inf)
                for t in range(b * size, min(b * size + size, n)):
                    place = find_entry(table + s * table_row, block, t)
                    x = index_product(q + r * q_row + h * q_head, cached + place * d * item, d, item)
                    if best == best and not x <= best:  # what is no number stays none
                        best = np.float32(x)
                put_f32(scores + 4 * ((r * heads + h) * most + b), best)


@kernel
def take_blocks(frame: int, args: int, thread: int, threads: int) -> None:
    """scores, how many a head of a row has, query_start, seq_lens, heads, size, top_k, local, chosen
    (dense)."""
    scores, most, starts, lens, heads, size, top_k, local, chosen = words(args, 2, 11)
    counts = scratch_of(frame, thread)
    s: Int = 0
    for item in range(thread, rows_of(frame, args) * heads, threads):
        r = item // heads
        s = sequence_of(starts, s, r)
        n = count_seen(starts, lens, s, r)
        count = (n + size - 1) // size
        row = scores + 4 * item * most
        if count > top_k:
            for b in range(max(count - local, 0), count):
                put_f32(row + 4 * b, np.float32(np.inf))
        write_best(row, count, top_k, counts, chosen + 4 * item * top_k)


@choose_blocks.variant("native", on="cpu", when=why_no_choice, native=True)
def _choose_blocks(
    cpu: Executor,
    q: Tensor,
    k: Tensor,
    cache: Tensor,
    block_table: Tensor,
    slot_mapping: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    size: int,
    top_k: int,
    local: int,
) -> Tensor:
    rows = TensorRows.of(q)
    block, d, item = cache.shape[1], rows.width, cache.element_size()
    check_cache("index cache", cache, (block, d), cache.dtype)
    check_index(block_table, slot_mapping, query_start, seq_lens)
    if q.dim() != 3 or k.shape != (rows.count, d) or item == 1 or min(size, top_k) < 1:
        raise ShapeMismatch(
            f"an indexer of {top_k} blocks of {size} keys: q {list(q.shape)} and k {list(k.shape)} do not "
            f"fit each other, or the cache is {cache.dtype}"
        )
    check_columns(d, cache)
    store_plain(cpu, k, cache, slot_mapping)
    most = -(-block_table.shape[1] * block // size)
    scores = cpu.empty(rows.count, rows.heads * most)
    cpu.launch(
        *(score_blocks, q, *rows.strides, cache, item, block_table, block_table.stride(0) * 8, query_start),
        *(seq_lens, rows.heads, d, block, size, top_k, scores, most),
        rows=rows.count,
        seqs=seq_lens.shape[0],
    )
    chosen = cpu.empty(rows.count, rows.heads, top_k, dtype=torch.int32)
    cpu.launch(
        *(take_blocks, scores, most, query_start, seq_lens, rows.heads, size, top_k, local, chosen),
        rows=rows.count,
        seqs=seq_lens.shape[0],
        scratch=8 * DIGITS,
    )
    return chosen


@kernel
def attend_blocks(frame: int, args: int, thread: int, threads: int) -> None:
    """q, its strides, out (dense), k_cache, v_cache, bytes of a number, chosen, top_k, table, bytes of its
    rows, query_start, seq_lens, block, heads, kv_heads, d, size, scale, bytes of a head's state."""
    q, q_row, q_head, out, keys, values, item, chosen, top_k, table, table_row = words(args, 2, 13)
    starts, lens, block, heads, kv_heads, d, size, _, state_bytes = words(args, 13, 22)
    scale, tile = get_f32(args + 8 * 20), scratch_of(frame, thread)
    wide, group = 4 * d, heads // kv_heads
    weights = tile + 2 * TILE * wide
    states, parts = weights + 4 * TILE, (group + HEADS - 1) // HEADS
    s: Int = 0
    for unit in range(thread, rows_of(frame, args) * kv_heads * parts, threads):
        r, kv = unit // (kv_heads * parts), unit // parts % kv_heads
        first = kv * group + unit % parts * HEADS
        end = min(first + HEADS, (kv + 1) * group)
        s = sequence_of(starts, s, r)
        seen = count_seen(starts, lens, s, r)
        for h in range(end - first):
            begin_head(states + h * state_bytes, state_bytes, np.int64(0))
        for i in range(top_k):
            b: Int = np.int64(get_i32(chosen + 4 * ((r * kv_heads + kv) * top_k + i)))
            if b < 0:
                break
            last: Int = min(b * size + size, seen)
            for at in range(b * size, last, TILE):
                n = min(last - at, TILE)
                for j in range(n):
                    t = at + j
                    place = find_entry(table + s * table_row, block, t)
                    source = (place * kv_heads + kv) * d * item
                    unfold_latent(keys + source, tile + j * wide, d, d, item)
                    unfold_latent(values + source, tile + (TILE + j) * wide, d, d, item)
                for h in range(first, end):
                    state, x = states + (h - first) * state_bytes, q + r * q_row + h * q_head
                    add_tile(x, tile, tile + TILE * wide, n, d, d, d, scale, state, weights)
        for h in range(first, end):
            close_head(states + (h - first) * state_bytes, out + wide * (r * heads + h), d)


def why_no_blocks(facts: OpFacts) -> str | None:
    """Why the native kernel cannot serve these facts, if so."""
    if (kept := facts.sizes.get("kv_dtype", "model")) in CODED:
        return f"it reads keys in float32 or bfloat16, not in {kept}"
    return why_unstorable(facts)


@block_sparse_attention.variant("native", on="cpu", when=why_no_blocks, native=True)
def _block_sparse_attention(
    cpu: Executor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    chosen: Tensor,
    block_table: Tensor,
    slot_mapping: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    scale: float,
    size: int,
) -> Tensor:
    rows = TensorRows.of(q)
    (block, kv_heads), d, top_k = k_cache.shape[1:3], rows.width, chosen.shape[-1]
    for name, cached in (("k_cache", k_cache), ("v_cache", v_cache)):
        check_cache(name, cached, (block, kv_heads, d), k_cache.dtype)
    check_index(block_table, slot_mapping, query_start, seq_lens)
    dense("chosen", chosen, rows.count, kv_heads, top_k, dtype=torch.int32)
    if q.dim() != 3 or rows.heads % kv_heads or {k.shape, v.shape} != {(rows.count, kv_heads, d)} or size < 1:
        raise ShapeMismatch(
            f"q {list(q.shape)}, k {list(k.shape)} and v {list(v.shape)} do not fit caches of {kv_heads} kv "
            f"heads of {d}, in blocks of {size}"
        )
    item, state = k_cache.element_size(), 64 + -(-d // 16) * 64
    store_plain(cpu, k, k_cache, slot_mapping)
    store_plain(cpu, v, v_cache, slot_mapping)
    out = cpu.empty(*q.shape)
    cpu.launch(
        *(attend_blocks, q, *rows.strides, out, k_cache, v_cache, item, chosen, top_k, block_table),
        *(block_table.stride(0) * 8, query_start, seq_lens, block, rows.heads, kv_heads, d, size),
        *(float(scale), state),
        rows=rows.count,
        seqs=seq_lens.shape[0],
        scratch=8 * TILE * d + 4 * TILE + HEADS * state,
    )
    return out
