"""Attention with a bias for each distance: a key is its numbers, then the profiles of its distance.

    store   row × kv head     keys and values as they are, in float32 or bfloat16
    attend  row × kv head × 16 query heads    64 keys at a time, as float32

    tile    key 0  [d numbers][m profiles of its distance]      query  [q · scale][what it mixes of profiles]
            key 1  [d numbers][m profiles of its distance]

So a score is one product. What is computed of a row depends on its sequence alone, in one order.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from plait.errors import ShapeMismatch
from plait.kernels.cpu.attention.attention import check_cache, check_index, check_sinks
from plait.kernels.cpu.attention.blocks import why_no_blocks
from plait.kernels.cpu.attention.indexer import HEADS, TILE, add_tile, begin_head, close_head, unfold_latent
from plait.kernels.cpu.attention.paged_rows import count_seen, find_entry, sequence_of, store_plain
from plait.kernels.cpu.codegen.kernel import kernel
from plait.kernels.cpu.codegen.kinds import Int
from plait.kernels.cpu.codegen.vec import get_f32, get_i64, put_f32, words
from plait.kernels.cpu.runtime.executor import Executor
from plait.kernels.cpu.runtime.frame import rows_of, scratch_of
from plait.kernels.cpu.runtime.row_checks import TensorRows, dense
from plait.ops.relative import relative_attention


@kernel
def attend_relative(frame: int, args: int, thread: int, threads: int) -> None:
    """q, its strides, mixed, its strides, profiles (dense), how many, m, out (dense), k_cache, v_cache, bytes
    of a number, table, bytes of its rows, query_start, seq_lens, block, window or 0, heads, kv_heads, d,
    scale, bytes of a head's state, sinks or 0, bytes of a row of them."""
    q, q_row, q_head, mixed, m_row, m_head, profiles, most, m, out, keys, values = words(args, 2, 14)
    item, table, table_row, starts, lens, block, window, heads, kv_heads, d = words(args, 14, 24)
    scale, state_bytes, tile = get_f32(args + 8 * 24), get_i64(args + 8 * 25), scratch_of(frame, thread)
    (sinks, sink_row), width, group = words(args, 26, 28), d + m, heads // kv_heads
    wide = 4 * width
    queries = tile + 2 * TILE * wide
    weights = queries + HEADS * wide
    states, parts = weights + 4 * TILE, (group + HEADS - 1) // HEADS
    s: Int = 0
    for unit in range(thread, rows_of(frame, args) * kv_heads * parts, threads):
        r, kv = unit // (kv_heads * parts), unit // parts % kv_heads
        first = kv * group + unit % parts * HEADS
        end = min(first + HEADS, (kv + 1) * group)
        s = sequence_of(starts, s, r)
        seen = count_seen(starts, lens, s, r)
        low = max(seen - window, 0) if window > 0 else np.int64(0)
        for h in range(first, end):
            sink = sinks + r * sink_row + 4 * h if sinks != 0 else np.int64(0)
            begin_head(states + (h - first) * state_bytes, state_bytes, sink)
            to = queries + (h - first) * wide
            for c in range(d):
                put_f32(to + 4 * c, np.float32(get_f32(q + r * q_row + h * q_head + 4 * c) * scale))
            for c in range(m):
                put_f32(to + 4 * (d + c), get_f32(mixed + r * m_row + h * m_head + 4 * c))
        for at in range(low, seen, TILE):
            n = min(seen - at, TILE)
            for j in range(n):
                t = at + j
                place = find_entry(table + s * table_row, block, t)
                source = (place * kv_heads + kv) * d * item
                unfold_latent(keys + source, tile + j * wide, d, d, item)
                unfold_latent(values + source, tile + (TILE + j) * wide, d, d, item)
                behind = seen - 1 - t
                for c in range(m):
                    x = get_f32(profiles + 4 * (behind * m + c)) if behind < most else np.float32(0.0)
                    put_f32(tile + j * wide + 4 * (d + c), x)
            for h in range(first, end):
                state, x_at = states + (h - first) * state_bytes, queries + (h - first) * wide
                one = np.float32(1.0)
                add_tile(x_at, tile, tile + TILE * wide, n, width, width, d, one, state, weights)
        for h in range(first, end):
            close_head(states + (h - first) * state_bytes, out + 4 * d * (r * heads + h), d)


@relative_attention.variant("native", on="cpu", when=why_no_blocks, native=True)
def _relative_attention(
    cpu: Executor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mixed: Tensor,
    profiles: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    slot_mapping: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    scale: float,
    window: int | None,
    sinks: Tensor | None,
) -> Tensor:
    rows, parts, (most, m) = TensorRows.of(q), TensorRows.of(mixed), profiles.shape
    (block, kv_heads), d = k_cache.shape[1:3], rows.width
    for name, cached in (("k_cache", k_cache), ("v_cache", v_cache)):
        check_cache(name, cached, (block, kv_heads, d), k_cache.dtype)
    check_index(block_table, slot_mapping, query_start, seq_lens)
    dense("profiles", profiles, most, m)
    if q.dim() != 3 or rows.heads % kv_heads or {k.shape, v.shape} != {(rows.count, kv_heads, d)}:
        raise ShapeMismatch(
            f"q {list(q.shape)}, k {list(k.shape)} and v {list(v.shape)} do not fit caches of {kv_heads} kv "
            f"heads of {d}"
        )
    if mixed.shape != (rows.count, rows.heads, m) or most < 1 or (window is not None and window < 1):
        raise ShapeMismatch(
            f"what is mixed {list(mixed.shape)} does not fit {m} profiles of {most} distances, or a window "
            f"of {window} has no key"
        )
    sink_row = check_sinks(sinks, rows)
    item, state, wide = k_cache.element_size(), 64 + -(-d // 16) * 64, 4 * (d + m)
    store_plain(cpu, k, k_cache, slot_mapping)
    store_plain(cpu, v, v_cache, slot_mapping)
    out = cpu.empty(*q.shape)
    cpu.launch(
        *(attend_relative, q, *rows.strides, mixed, *parts.strides, profiles, most, m, out),
        *(k_cache, v_cache, item, block_table, block_table.stride(0) * 8, query_start, seq_lens, block),
        *(window or 0, rows.heads, kv_heads, d, float(scale), state),
        *(sinks, sink_row),
        rows=rows.count,
        seqs=seq_lens.shape[0],
        scratch=(2 * TILE + HEADS) * wide + 4 * TILE + HEADS * state,
    )
    return out
