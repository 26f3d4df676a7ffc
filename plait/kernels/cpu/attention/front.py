"""Attention over keys before every text and a sequence's own past, one row of a head at a time.

Scores of a row lie in a thread's scratch memory: first those of `front`, then those of the window, in order.
So a row's bits depend on its sequence alone. Keys and values lie as they are given.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from plait.errors import ShapeMismatch
from plait.kernels.cpu.attention.attention import check_index
from plait.kernels.cpu.attention.paged_rows import count_seen, find_entry, sequence_of, store_plain
from plait.kernels.cpu.codegen.kernel import inline, kernel
from plait.kernels.cpu.codegen.kinds import Floats, Int
from plait.kernels.cpu.codegen.maths import exp
from plait.kernels.cpu.codegen.vec import (
    add,
    div,
    fma,
    get_f32,
    get_i32,
    get_i64,
    get_u8,
    largest,
    load_bf16,
    load_some,
    peak,
    put_f32,
    put_i32,
    put_u8,
    spread,
    store_some,
    sub,
    total,
    where_below,
    words,
    zero_f32,
)
from plait.kernels.cpu.runtime.executor import Executor
from plait.kernels.cpu.runtime.frame import rows_of, scratch_of
from plait.kernels.cpu.runtime.frame_words import SEQS
from plait.kernels.cpu.runtime.row_checks import TensorRows, dense, float32_rows
from plait.ops.front import begin_slots, front_attention
from plait.ops.registry import OpFacts

SCALE = 19  # the word of it


@inline
def read(at: Int, i: Int, n: Int, size: Int) -> Floats:
    """Sixteen numbers of n from the i-th on; bfloat16 come in whole sixteens."""
    if size == 2:
        return load_bf16(at + 2 * i)
    return load_some(at + 4 * i, np.int32(n - i))


@inline
def soften(scores: Int, count: Int) -> float:
    """Scores become exponentials, in place, and their sum is given. What is no number stays none."""
    top = spread(get_f32(scores))
    for j in range(0, count, 16):
        left = np.int32(count - j)
        top = largest(top, where_below(left, load_some(scores + 4 * j, left), top))
    top, sums = spread(peak(top)), zero_f32()
    for j in range(0, count, 16):
        left = np.int32(count - j)
        x = sub(load_some(scores + 4 * j, left), top)
        e = where_below(left, fma(x, zero_f32(), exp(x)), zero_f32())
        sums = add(sums, e)
        store_some(scores + 4 * j, e, left)
    return total(sums)


@kernel
def attend_rows(frame: int, args: int, thread: int, threads: int) -> None:
    """q, its strides; out (dense); keys, values, block_table, its row stride; query_start, seq_lens; heads,
    kv_heads, d, e, tokens of a block, window or 0, bytes of a cached number; scale; keys and values of the
    front (float32), how many."""
    q, row_bytes, head_bytes, outs, keys, values, tables, table_bytes, starts, lens = words(args, 2, 12)
    heads, kv_heads, d, e, block, window, size = words(args, 12, 19)
    front_keys, front_values, front = words(args, 20, 23)
    scale, scores = get_f32(args + 8 * SCALE), scratch_of(frame, thread)
    items = rows_of(frame, args) * heads
    s: Int = np.int64(0)
    for item in range(items * thread // threads, items * (thread + 1) // threads):
        row, head = item // heads, item % heads
        s = sequence_of(starts, s, row)
        end = count_seen(starts, lens, s, row)
        first = max(end - window, 0) if window > 0 else end - end
        kv, table = head // (heads // kv_heads), tables + s * table_bytes
        count, x = front + end - first, q + row * row_bytes + head * head_bytes
        for j in range(count):
            at, wide = front_keys + (j * kv_heads + kv) * d * 4, end - end + 4
            if j >= front:
                entry = find_entry(table, block, first + j - front)
                at, wide = keys + (entry * kv_heads + kv) * d * size, end - end + size
            products = zero_f32()
            for i in range(0, d, 16):
                products = fma(load_some(x + 4 * i, np.int32(d - i)), read(at, i, d, wide), products)
            put_f32(scores + 4 * j, total(products) * scale)
        whole = spread(soften(scores, count))
        for i in range(0, e, 16):
            y = zero_f32()
            for j in range(count):
                at, wide = front_values + (j * kv_heads + kv) * e * 4, end - end + 4
                if j >= front:
                    entry = find_entry(table, block, first + j - front)
                    at, wide = values + (entry * kv_heads + kv) * e * size, end - end + size
                y = fma(spread(get_f32(scores + 4 * j)), read(at, i, e, wide), y)
            store_some(outs + (item * e + i) * 4, div(y, whole), np.int32(e - i))


def why_unserved(facts: OpFacts) -> str | None:
    """Why the native kernel cannot serve these facts, if so."""
    if reason := float32_rows(facts):
        return reason
    kept = facts.sizes.get("kv_dtype", "model")
    if kept not in ("model", "float32", "bfloat16"):
        return f"it keeps float32 or bfloat16, not {kept}"
    if kept == "bfloat16" and (facts.sizes.get("dim", 16) % 16 or facts.sizes.get("v_dim", 16) % 16):
        return f"it keeps bfloat16 for heads of a multiple of 16, not of {facts['dim']} and {facts['v_dim']}"
    return None


@front_attention.variant("native", on="cpu", when=why_unserved, native=True)
def _front_attention(
    cpu: Executor,
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    front: tuple[Tensor, Tensor],
    block_table: Tensor,
    slot_mapping: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    scale: float,
    window: int | None = None,
    step: dict[object, object] | None = None,
) -> Tensor:
    rows, (_, block, kv_heads, d), e = TensorRows.of(q), k_cache.shape, v_cache.shape[-1]
    size, count = k_cache.element_size(), len(front[0])
    kinds = (torch.float32, torch.bfloat16)
    odd = size == 2 and (d % 16 or e % 16)
    if q.shape[-1] != d or rows.heads % kv_heads or k_cache.dtype not in kinds or odd:
        raise ShapeMismatch(
            f"q {list(q.shape)} does not fit {k_cache.dtype} caches of {kv_heads} kv heads of {d} and {e}: "
            "heads must be a multiple of kv heads, and sizes of bfloat16 of 16"
        )
    for name, cache, before, width in zip("kv", (k_cache, v_cache), front, (d, e), strict=True):
        dense(f"{name}_cache", cache, len(k_cache), block, kv_heads, width, dtype=k_cache.dtype)
        dense(f"the front's {name}", before, count, kv_heads, width)
    check_index(block_table, slot_mapping, query_start, seq_lens)
    for x, cache in ((k, k_cache), (v, v_cache)):
        if x is not None:
            new = TensorRows.of(x)
            if (new.count, new.heads, new.width) != (rows.count, kv_heads, cache.shape[-1]):
                raise ShapeMismatch(f"new entries {list(x.shape)} do not fit a cache {list(cache.shape)}")
            store_plain(cpu, x, cache, slot_mapping)
    out, longest = cpu.empty(rows.count, rows.heads, e), block_table.shape[1] * block
    cpu.launch(
        *(attend_rows, q, *rows.strides, out, k_cache, v_cache, block_table, 8 * block_table.stride(0)),
        *(query_start, seq_lens, rows.heads, kv_heads, d, e, block, window or 0, size, float(scale)),
        *(*front, count),
        rows=rows.count,
        seqs=len(seq_lens),
        scratch=4 * (count + longest) + 64,
    )
    return out


@kernel
def begin_sequences(frame: int, args: int, thread: int, threads: int) -> None:
    """initial, its words of four bytes; state, its slot stride; slots, has_history; out, a byte for each."""
    initial, n, state, slot_bytes, slots, history, outs = words(args, 2, 9)
    seqs = get_i64(frame + 8 * SEQS)
    for s in range(seqs * thread // threads, seqs * (thread + 1) // threads):
        if get_u8(history + s) == 0:
            to = state + get_i64(slots + 8 * s) * slot_bytes
            for i in range(n):
                put_i32(to + 4 * i, get_i32(initial + 4 * i))
        put_u8(outs + s, np.int32(1))


@begin_slots.variant("native", on="cpu", native=True)
def _begin_slots(
    cpu: Executor, initial: Tensor, state: Tensor, slots: Tensor, has_history: Tensor, positions: Tensor
) -> Tensor:
    nbytes = initial.numel() * initial.element_size()
    dense("a slot's state", state[0], *initial.shape, dtype=initial.dtype)
    dense("what a slot begins with", initial, *initial.shape, dtype=initial.dtype)
    dense("slots", slots, len(slots), dtype=torch.int64)
    dense("has_history", has_history, len(slots), dtype=torch.bool)
    if nbytes % 4:
        raise ShapeMismatch(f"a state of {nbytes} bytes is no whole number of words of four")
    out = cpu.empty(len(slots), dtype=torch.bool)
    where = (slots, has_history, out)
    cpu.launch(
        *(begin_sequences, initial, nbytes // 4, state, state.stride(0) * state.element_size(), *where),
        rows=len(positions),
        seqs=len(slots),
    )
    return out
