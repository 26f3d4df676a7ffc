"""The gated delta rule: every state is read and written once per call, and stays in the first cache between.

A thread takes 32 columns of a head's state, turned into a dense tile. A token passes over the tile once: what
the last token adds is written on the way, while this one's decay, its error and its output are computed. So
the numbers, and the order in which they are added, are the same wherever a prompt is cut.
"""

from __future__ import annotations

import math

import numpy as np
from torch import Tensor

from plait.errors import ShapeMismatch
from plait.kernels.cpu.codegen.kernel import inline, kernel
from plait.kernels.cpu.codegen.kinds import Float, Floats, Int
from plait.kernels.cpu.codegen.maths import exp
from plait.kernels.cpu.codegen.vec import (
    atomic_add,
    fma,
    get_f32,
    get_i64,
    get_u8,
    load_f32,
    load_some,
    mul,
    spread,
    spread_f32,
    store_f32,
    store_some,
    sub,
    total,
    zero_f32,
)
from plait.kernels.cpu.runtime.executor import LINE, Executor
from plait.kernels.cpu.runtime.frame import SEQS, scratch_of, word
from plait.kernels.cpu.runtime.row_checks import TensorRows, float32_rows
from plait.kernels.cpu.ssm.conv import Sequences, dense
from plait.ops.delta import EPS, gated_delta_scan

COLUMNS = 32  # of a head's state that one thread takes at a time: two vectors


@inline
def _load(a: Int, left: Int) -> Floats:
    """Sixteen floats, or the `left` that there are; without a mask where all are there."""
    if left >= 16:
        return load_f32(a)
    return load_some(a, np.int32(max(left, 0)))


@inline
def _store(a: Int, x: Floats, left: Int) -> None:
    if left >= 16:
        store_f32(a, x)
    elif left > 0:
        store_some(a, x, np.int32(left))


@inline
def _unit(x: Int, n: Int, scale: Float, to: Int) -> None:
    """n floats made a vector of that length, zeros behind them."""
    squares = zero_f32()
    for i in range(0, n, 16):
        h = _load(x + 4 * i, n - i)
        squares = fma(h, h, squares)
    factor = spread(np.float32(scale / math.sqrt(np.float64(total(squares)) + EPS)))
    for i in range(0, n, 16):
        store_f32(to + 4 * i, mul(_load(x + 4 * i, n - i), factor))


@inline
def _decays(step: Int, n: Int, rate: Float, one: Int, to: Int) -> None:
    """exp(rate · step) of each row: one step for all, or each its own."""
    if one:
        for i in range(0, n, 16):
            store_f32(to + 4 * i, exp(spread(get_f32(step) * rate)))
    else:
        for i in range(0, n, 16):
            store_f32(to + 4 * i, exp(mul(_load(step + 4 * i, n - i), spread(rate))))


@inline
def _dot(a: Int, b: Int, n: Int) -> float:
    """Of two rows with zeros behind them."""
    sums = zero_f32()
    for i in range(0, n, 16):
        sums = fma(load_f32(a + 4 * i), load_f32(b + 4 * i), sums)
    return total(sums)


@inline
def _enter(state: Int, row_bytes: Int, left: Int, tile: Int, n: Int) -> None:
    """32 columns of a state as a tile; zeros where there are fewer, or no history (state 0)."""
    for r in range(n):
        a, b = zero_f32(), zero_f32()
        if state != 0:
            a, b = _load(state + r * row_bytes, left), _load(state + r * row_bytes + 64, left - 16)
        store_f32(tile + 128 * r, a)
        store_f32(tile + 128 * r + 64, b)


@inline
def _leave(state: Int, row_bytes: Int, left: Int, tile: Int, n: Int, k: Int, a: Floats, b: Floats) -> None:
    """The tile and what the last token adds to it, back to the state."""
    for r in range(n):
        weight = spread_f32(k + 4 * r)
        _store(state + r * row_bytes, fma(weight, a, load_f32(tile + 128 * r)), left)
        _store(state + r * row_bytes + 64, fma(weight, b, load_f32(tile + 128 * r + 64)), left - 16)


@inline
def _walk(
    own: Int,
    row_bytes: Int,
    left: Int,
    past: Int,
    n: Int,
    q: Int,
    q_bytes: Int,
    k: Int,
    k_bytes: Int,
    v: Int,
    v_bytes: Int,
    step: Int,
    step_bytes: Int,
    one: Int,
    rate: Float,
    beta: Int,
    beta_bytes: Int,
    beta_scale: Float,
    out: Int,
    out_bytes: Int,
    tokens: Int,
    scratch: Int,
    row: Int,
) -> None:
    """All tokens of a sequence over 32 columns of one head."""
    tile, decays, unit_q = scratch, scratch + 128 * n, scratch + 128 * n + row
    now, before = unit_q + row, unit_q + 2 * row
    for i in range(0, n, 16):
        store_f32(before + 4 * i, zero_f32())
    _enter(own if past else np.int64(0), row_bytes, left, tile, n)
    # Nothing was added yet: minus 0, because x + -0 is x, also where x is -0.
    a, b, length = spread(np.float32(-0.0)), spread(np.float32(-0.0)), 1.0 / math.sqrt(np.float64(n))
    for t in range(tokens):
        _unit(q + t * q_bytes, n, length, unit_q)
        _unit(k + t * k_bytes, n, 1.0, now)
        _decays(step + t * step_bytes, n, rate, one, decays)
        seen_a, seen_b, y_a, y_b = zero_f32(), zero_f32(), zero_f32(), zero_f32()
        for r in range(n):
            last, decay, at = spread_f32(before + 4 * r), spread_f32(decays + 4 * r), tile + 128 * r
            h_a = mul(fma(last, a, load_f32(at)), decay)
            h_b = mul(fma(last, b, load_f32(at + 64)), decay)
            store_f32(at, h_a)
            store_f32(at + 64, h_b)
            key, query = spread_f32(now + 4 * r), spread_f32(unit_q + 4 * r)
            seen_a, seen_b = fma(key, h_a, seen_a), fma(key, h_b, seen_b)
            y_a, y_b = fma(query, h_a, y_a), fma(query, h_b, y_b)
        share = spread(get_f32(beta + t * beta_bytes) * beta_scale)
        a = mul(share, sub(_load(v + t * v_bytes, left), seen_a))
        b = mul(share, sub(_load(v + t * v_bytes + 64, left - 16), seen_b))
        both = spread(_dot(unit_q, now, n))
        _store(out + t * out_bytes, fma(both, a, y_a), left)
        _store(out + t * out_bytes + 64, fma(both, b, y_b), left - 16)
        now, before = before, now
    _leave(own, row_bytes, left, tile, n, before, a, b)


@kernel
def delta_columns(frame: int, args: int, thread: int, threads: int) -> None:
    """heads, heads of a key head, key heads, tiled, n of a key, columns; q, k, v and step with two strides
    each, step's is one per head; A; beta and its stride, its scale; state and its slot stride; slots,
    query_start, has_history; out (dense)."""
    heads, ratio, keys, tiled = word(args, 2), word(args, 3), word(args, 4), word(args, 5) != 0
    n, dim = word(args, 6), word(args, 7)
    q, q_bytes, q_head = word(args, 8), word(args, 9), word(args, 10)
    k, k_bytes, k_head = word(args, 11), word(args, 12), word(args, 13)
    v, v_bytes, v_head = word(args, 14), word(args, 15), word(args, 16)
    step, step_bytes, step_head, one = word(args, 17), word(args, 18), word(args, 19), word(args, 20) != 0
    rate, beta, beta_bytes, beta_scale = word(args, 21), word(args, 22), word(args, 23), get_f32(args + 192)
    state, slot_bytes, slots, starts = word(args, 25), word(args, 26), word(args, 27), word(args, 28)
    history, out, counter = word(args, 29), word(args, 30), word(args, 1)
    parts, scratch, row = (dim + COLUMNS - 1) // COLUMNS, scratch_of(frame, thread), (4 * n + 63) // 64 * 64
    items = get_i64(frame + 8 * SEQS) * heads * parts
    while True:
        # The last sequences come first: prompts, the long work, are behind the decodes.
        i = items - 1 - np.int64(atomic_add(counter, np.int32(1)))
        if i < 0:
            return
        s, h, c = i // (heads * parts), i // parts % heads, i % parts * COLUMNS
        t = get_i64(starts + 8 * s)
        tokens = get_i64(starts + 8 * s + 8) - t
        if tokens < 1:
            continue
        g = h % keys if tiled else h // ratio
        _walk(
            state + get_i64(slots + 8 * s) * slot_bytes + 4 * (h * n * dim + c),
            4 * dim,
            dim - c,
            get_u8(history + s) != 0,
            n,
            q + t * q_bytes + g * q_head,
            q_bytes,
            k + t * k_bytes + g * k_head,
            k_bytes,
            v + t * v_bytes + h * v_head + 4 * c,
            v_bytes,
            step + t * step_bytes + h * step_head,
            step_bytes,
            one,
            get_f32(rate + 4 * h),
            beta + t * beta_bytes + 4 * h,
            beta_bytes,
            beta_scale,
            out + 4 * (t * heads * dim + h * dim + c),
            4 * heads * dim,
            tokens,
            scratch,
            row,
        )


@gated_delta_scan.variant("native", on="cpu", when=float32_rows, native=True)
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
) -> Tensor:
    """`num_decodes` changes from step to step, and nothing here depends on it."""
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
    dense("a slot's state", state[0], heads, n, dim)
    where, steps = Sequences.of(slots, query_start, has_history), TensorRows.of(step)
    step_head = steps.head_bytes if each else 4
    strided = [word for m in (q, k, v) for word in (m, *TensorRows.of(m).strides)]
    row = -(-4 * n // LINE) * LINE
    out = cpu.empty(count, heads, dim)
    cpu.launch(
        delta_columns,
        *(heads, heads // keys, keys, tiled, n, dim, *strided),
        *(
            step,
            steps.row_bytes,
            step_head,
            not each,
            A,
            beta,
            TensorRows.of(beta).row_bytes,
            float(beta_scale),
        ),
        *(state, 4 * state.stride(0), *where.words, out),
        rows=count,
        seqs=len(slots),
        scratch=4 * COLUMNS * n + 4 * row + LINE,
    )
    return out
