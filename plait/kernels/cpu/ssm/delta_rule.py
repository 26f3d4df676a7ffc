"""The gated delta rule: every state is read and written once per call, and stays in the first cache between.

A thread takes 32 columns of a head's state, turned into a dense tile. A token passes over the tile once: what
the last token adds is written on the way, while this one's decay, its error and its output are computed. So
the numbers, and the order in which they are added, are the same wherever a prompt is cut. A bfloat16 state is
rounded in the tile, as the next token passes, by the position of the last.
"""

from __future__ import annotations

import math

import numpy as np
from torch import Tensor

from plait.errors import ShapeMismatch
from plait.kernels.cpu.codegen.kernel import inline, kernel
from plait.kernels.cpu.codegen.kinds import Float, Floats, Int
from plait.kernels.cpu.codegen.maths import exp, load_left, store_left
from plait.kernels.cpu.codegen.vec import (
    fma,
    get_f32,
    get_i64,
    load_bf16,
    load_f32,
    mul,
    prefetch_l2,
    spread,
    spread_f32,
    store_f32,
    sub,
    total,
    words,
    zero_f32,
)
from plait.kernels.cpu.runtime.executor import Executor
from plait.kernels.cpu.runtime.frame import rows_of, scratch_of, take_sequence
from plait.kernels.cpu.runtime.frame_words import LINE, SEQS
from plait.kernels.cpu.runtime.row_checks import Sequences, TensorRows, dense
from plait.kernels.cpu.ssm.rounding import (
    check_state,
    column_thresholds,
    is_rounded,
    round_state,
    rounds_columns,
    seed_at,
    store_rounded,
)
from plait.ops.delta import EPS, gated_delta_scan
from plait.ops.state_rounding import ROW_STEP

COLUMNS = 32  # of a head's state that are a tile: two vectors
RUNS = 4  # of heads that a thread takes of one token of each sequence, or a few more
Rows = tuple[Int, Int]  # an address, and the bytes from row to row


@inline
def _unit(x: Int, n: Int, scale: Float, to: Int) -> None:
    """n floats made a vector of that length, zeros behind them."""
    squares = zero_f32()
    for i in range(0, n, 16):
        h = load_left(x + 4 * i, n - i)
        squares = fma(h, h, squares)
    factor = spread(np.float32(scale / math.sqrt(np.float64(total(squares)) + EPS)))
    for i in range(0, n, 16):
        store_f32(to + 4 * i, mul(load_left(x + 4 * i, n - i), factor))


@inline
def _decays(step: Int, n: Int, rate: Float, one: Int, to: Int) -> None:
    """exp(rate · step) of each row: one step for all, or each its own."""
    decay = exp(spread(get_f32(step) * rate))
    for i in range(0, n, 16):
        if not one:
            decay = exp(mul(load_left(step + 4 * i, n - i), spread(rate)))
        store_f32(to + 4 * i, decay)


@inline
def _dot(a: Int, b: Int, n: Int) -> float:
    """Of two rows with zeros behind them."""
    sums = zero_f32()
    for i in range(0, n, 16):
        sums = fma(load_f32(a + 4 * i), load_f32(b + 4 * i), sums)
    return total(sums)


@inline
def _fetch(rows: Rows, r: Int) -> None:
    at, row_bytes = rows
    prefetch_l2(at + r * row_bytes)
    prefetch_l2(at + r * row_bytes + 64)


@inline
def _count_tiles(frame: Int, args: Int, tiles: Int, parts: Int, threads: Int) -> int:
    """Tiles of a sequence that a thread takes at a time: whole heads, if every sequence has one token.

    So a thread reads memory in order, and fetches the next head while it computes one. Prompts take a
    while in each tile: single ones keep threads busy to the end.
    """
    seqs = get_i64(frame + 8 * SEQS)
    if rows_of(frame, args) > seqs:
        return 1
    return max(min(tiles * seqs // (RUNS * threads), tiles) // parts * parts, 1)


@inline
def _enter(state: Int, row_bytes: Int, left: Int, tile: Int, n: Int, soon: Rows) -> None:
    """32 columns of a state as a tile; zeros where there are fewer, or no history (state 0). Meanwhile two
    lines of each of the rows `soon` are fetched."""
    for r in range(n):
        a, b = zero_f32(), zero_f32()
        if state != 0:
            _fetch(soon, r)
            a, b = load_left(state + r * row_bytes, left), load_left(state + r * row_bytes + 64, left - 16)
        store_f32(tile + 128 * r, a)
        store_f32(tile + 128 * r + 64, b)


@inline
def _enter_rounded(state: Int, row_bytes: Int, left: Int, tile: Int, n: Int, soon: Rows) -> None:
    """`_enter` of a bfloat16 state, of 16 or 32 columns."""
    for r in range(n):
        a, b = zero_f32(), zero_f32()
        if state != 0:
            _fetch(soon, r)
            a = load_bf16(state + r * row_bytes)
            if left > 16:
                b = load_bf16(state + r * row_bytes + 32)
        store_f32(tile + 128 * r, a)
        store_f32(tile + 128 * r + 64, b)


@inline
def _enter_and_pass(
    state: Int, row_bytes: Int, tile: Int, n: Int, soon: Rows, decays: Int, key: Int, query: Int
) -> tuple[Floats, Floats, Floats, Floats]:
    """`_enter` of 32 columns of float32 and `_pass` in one: nothing was added to them yet."""
    seen_a, seen_b, y_a, y_b = zero_f32(), zero_f32(), zero_f32(), zero_f32()
    for r in range(n):
        _fetch(soon, r)
        decay = spread_f32(decays + 4 * r)
        h_a = mul(load_f32(state + r * row_bytes), decay)
        h_b = mul(load_f32(state + r * row_bytes + 64), decay)
        store_f32(tile + 128 * r, h_a)
        store_f32(tile + 128 * r + 64, h_b)
        k, q = spread_f32(key + 4 * r), spread_f32(query + 4 * r)
        seen_a, seen_b = fma(k, h_a, seen_a), fma(k, h_b, seen_b)
        y_a, y_b = fma(q, h_a, y_a), fma(q, h_b, y_b)
    return seen_a, seen_b, y_a, y_b


@inline
def _pass(
    tile: Int, n: Int, last: Int, a: Floats, b: Floats, decays: Int, key: Int, query: Int
) -> tuple[Floats, Floats, Floats, Floats]:
    """A token passes by a tile, to which `last` times a and b is added first. What key and query see there."""
    seen_a, seen_b, y_a, y_b = zero_f32(), zero_f32(), zero_f32(), zero_f32()
    for r in range(n):
        weight, decay, at = spread_f32(last + 4 * r), spread_f32(decays + 4 * r), tile + 128 * r
        h_a = mul(fma(weight, a, load_f32(at)), decay)
        h_b = mul(fma(weight, b, load_f32(at + 64)), decay)
        store_f32(at, h_a)
        store_f32(at + 64, h_b)
        k, q = spread_f32(key + 4 * r), spread_f32(query + 4 * r)
        seen_a, seen_b = fma(k, h_a, seen_a), fma(k, h_b, seen_b)
        y_a, y_b = fma(q, h_a, y_a), fma(q, h_b, y_b)
    return seen_a, seen_b, y_a, y_b


@inline
def _leave(state: Int, row_bytes: Int, left: Int, tile: Int, n: Int, k: Int, a: Floats, b: Floats) -> None:
    """The tile and what the last token adds to it, back to the state."""
    for r in range(n):
        weight = spread_f32(k + 4 * r)
        store_left(state + r * row_bytes, fma(weight, a, load_f32(tile + 128 * r)), left)
        store_left(state + r * row_bytes + 64, fma(weight, b, load_f32(tile + 128 * r + 64)), left - 16)


@inline
def _leave_rounded(
    state: Int,
    row_bytes: Int,
    left: Int,
    tile: Int,
    n: Int,
    k: Int,
    a: Floats,
    b: Floats,
    seed: Int,
    column: Int,
) -> None:
    """`_leave` of a bfloat16 state. seed: of the last token and the head's first row."""
    for r in range(n):
        weight, at = spread_f32(k + 4 * r), state + r * row_bytes
        t_a, t_b = column_thresholds(seed, r, column), column_thresholds(seed, r, column + 16)
        store_rounded(at, fma(weight, a, load_f32(tile + 128 * r)), t_a)
        if left > 16:
            store_rounded(at + 32, fma(weight, b, load_f32(tile + 128 * r + 64)), t_b)


@inline
def _round_tile(tile: Int, n: Int, k: Int, a: Floats, b: Floats, seed: Int, column: Int) -> None:
    """Add to the tile what the last token adds, and round it."""
    for r in range(n):
        weight, at = spread_f32(k + 4 * r), tile + 128 * r
        t_a, t_b = column_thresholds(seed, r, column), column_thresholds(seed, r, column + 16)
        store_f32(at, round_state(fma(weight, a, load_f32(at)), t_a))
        store_f32(at + 64, round_state(fma(weight, b, load_f32(at + 64)), t_b))


@kernel
def delta_columns(frame: int, args: int, thread: int, threads: int) -> None:
    """heads, heads of a key head, key heads, tiled, n of a key, columns; q, k, v and step with two strides
    each, step's is one per head; A; beta and its stride, its scale; state and its slot stride; slots,
    query_start, has_history; out (dense); positions where the state is bfloat16, else 0; 0, or where the
    state behind each row is kept, too. All tokens of a sequence over 32 columns of a head, a tile, at a time."""
    heads, ratio, keys, tiled, n, dim, qs, q_bytes, q_head, ks, k_bytes, k_head = words(args, 2, 14)
    vs, v_bytes, v_head, steps, step_bytes, step_head, one, rates, betas, beta_bytes = words(args, 14, 24)
    beta_scale = get_f32(args + 192)
    state, slot_bytes, slots, starts, history, outs, positions, row_slots = words(args, 25, 33)
    size = 4 if positions == 0 else 2
    row, parts = (4 * n + 63) // 64 * 64, (dim + COLUMNS - 1) // COLUMNS
    v_row, out_bytes = size * dim, 4 * heads * dim
    tile = scratch_of(frame, thread)
    decays, unit_q, length = tile + 128 * n, tile + 128 * n + row, 1.0 / math.sqrt(np.float64(n))
    tiles, head_bytes = heads * parts, size * n * dim
    run = _count_tiles(frame, args, tiles, parts, threads)
    while True:
        i, slot, past, first, tokens = take_sequence(
            frame, args, (tiles + run - 1) // run, (slots, starts, history)
        )
        if i < 0:
            return
        begin, end = i * run, min(i * run + run, np.int64(tiles))
        for number in range(begin, end):
            h, c = number // parts, number % parts * COLUMNS
            g, left = h % keys if tiled else h // ratio, dim - c
            own = state + slot * slot_bytes + size * (h * n * dim + c)
            out = outs + first * out_bytes + 4 * (h * dim + c)
            q, k = qs + first * q_bytes + g * q_head, ks + first * k_bytes + g * k_head
            v, step = vs + first * v_bytes + h * v_head + 4 * c, steps + first * step_bytes + h * step_head
            rate, beta = get_f32(rates + 4 * h), betas + first * beta_bytes + 4 * h
            now, before = unit_q + row, unit_q + 2 * row
            for r in range(0, n, 16):
                store_f32(before + 4 * r, zero_f32())
            # What comes next in memory: the same part of the next head, or these rows' next columns.
            soon = own + size * COLUMNS, v_row
            if run >= parts:
                if number == begin and past:
                    for at in range(0, head_bytes, 64):
                        prefetch_l2(own + at)
                soon = own, v_row
                if number - number % parts + parts < end:
                    each = v_row // parts
                    soon = own - size * c + head_bytes + number % parts * n * each, each
            direct = past and positions == 0 and left >= COLUMNS
            if not direct:
                if positions == 0:
                    _enter(own if past else np.int64(0), v_row, left, tile, n, soon)
                else:
                    _enter_rounded(own if past else np.int64(0), v_row, left, tile, n, soon)
            seed = np.int64(0)
            # Nothing was added yet: minus 0, because x + -0 is x, also where x is -0.
            nothing = spread(np.float32(-0.0))
            a, b = nothing, nothing
            for t in range(tokens):
                if tokens > 1 or number == begin or c == 0:  # else they are there, of the head's last tile
                    _unit(q + t * q_bytes, n, length, unit_q)
                    _unit(k + t * k_bytes, n, 1.0, now)
                    _decays(step + t * step_bytes, n, rate, one, decays)
                if positions != 0 and t > 0:
                    _round_tile(tile, n, before, a, b, seed, c)
                    a, b = nothing, nothing
                    for r in range(0, n, 16):
                        store_f32(before + 4 * r, zero_f32())
                if direct and t == 0:
                    seen_a, seen_b, y_a, y_b = _enter_and_pass(own, v_row, tile, n, soon, decays, now, unit_q)
                else:
                    seen_a, seen_b, y_a, y_b = _pass(tile, n, before, a, b, decays, now, unit_q)
                share = spread(get_f32(beta + t * beta_bytes) * beta_scale)
                a = mul(share, sub(load_left(v + t * v_bytes, left), seen_a))
                b = mul(share, sub(load_left(v + t * v_bytes + 64, left - 16), seen_b))
                both = spread(_dot(unit_q, now, n))
                store_left(out + t * out_bytes, fma(both, a, y_a), left)
                store_left(out + t * out_bytes + 64, fma(both, b, y_b), left - 16)
                now, before = before, now
                if positions != 0:
                    seed = np.int64(seed_at(positions, first + t) + h * n * ROW_STEP)
                if row_slots != 0 and t < tokens - 1:
                    kept = get_i64(row_slots + 8 * (first + t))
                    if kept != 0:
                        to = own + (kept - slot) * slot_bytes
                        if positions == 0:
                            _leave(to, v_row, left, tile, n, before, a, b)
                        else:
                            _leave_rounded(to, v_row, left, tile, n, before, a, b, seed, c)
            if positions == 0:
                _leave(own, v_row, left, tile, n, before, a, b)
            else:
                _leave_rounded(own, v_row, left, tile, n, before, a, b, seed, c)


@gated_delta_scan.variant("native", on="cpu", when=rounds_columns("value_dim"), native=True)
def _gated_delta_scan(
    cpu: Executor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    step: Tensor,
    A: Tensor,
    beta: Tensor,
    state: Tensor,
    slots: Tensor,
    query_start: Tensor,
    has_history: Tensor,
    num_decodes: int,
    beta_scale: float = 1.0,
    tiled: bool = False,
    positions: Tensor | None = None,
) -> Tensor:
    """Nothing here depends on `num_decodes`, which changes from step to step."""
    (count, heads, dim), (keys, n), each = v.shape, q.shape[1:], step.dim() == 3
    wanted = (count, heads, n) if each else (count, heads)
    if heads % keys or k.shape != q.shape or len(q) != count or step.shape != wanted:
        raise ShapeMismatch(
            f"a delta scan of v {list(v.shape)} wants q, k [T, G, K], H a multiple of G, and step [T, H] or "
            f"[T, H, K]; got {[list(m.shape) for m in (q, k, step)]}"
        )
    if beta.shape != (count, heads):
        raise ShapeMismatch(f"a delta scan of v {list(v.shape)} wants beta [T, H], got {list(beta.shape)}")
    dense("A", A, heads)
    slot_bytes = check_state(state, positions, count, heads, n, dim)
    where, steps = Sequences.of(slots, query_start, has_history), TensorRows.of(step)
    step_head = steps.head_bytes if each else 4
    strided = [word for m in (q, k, v) for word in (m, *TensorRows.of(m).strides)]
    row = -(-4 * n // LINE) * LINE
    out = cpu.empty(count, heads, dim)
    cpu.launch(
        delta_columns,
        *(heads, heads // keys, keys, tiled, n, dim, *strided),
        *(step, steps.row_bytes, step_head, not each, A, beta, TensorRows.of(beta).row_bytes),
        *(float(beta_scale), state, slot_bytes, *where.words, out),
        positions if is_rounded(state) else None,
        cpu.row_slots_of(state),
        rows=count,
        seqs=len(slots),
        scratch=4 * COLUMNS * n + 4 * row + LINE,
    )
    return out
