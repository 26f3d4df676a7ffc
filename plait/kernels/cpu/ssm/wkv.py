"""RWKV's recurrences. RWKV-4: sixteen channels at a time; RWKV-6, 7: a thread takes one head of one sequence.

state of RWKV-6, 7   [key column][value column]   sixteen value columns at a time pass over all key columns
keys of RWKV-7       [token][head] of key, unit key, its share, decay: made first, once for all value columns
keys of RWKV-6       [token][head] of query, key, decay, and a number that the token's own value is read by
"""

from __future__ import annotations

import math

import numpy as np
from torch import Tensor

from plait.errors import ShapeMismatch
from plait.kernels.cpu.codegen.kernel import inline, kernel
from plait.kernels.cpu.codegen.kinds import Floats, Int
from plait.kernels.cpu.codegen.maths import exp, one_minus_exp, sigmoid
from plait.kernels.cpu.codegen.vec import (
    add,
    div,
    fma,
    get_f32,
    load_some,
    mul,
    put_f32,
    spread,
    store_some,
    sub,
    total,
    where_less,
    words,
    zero_f32,
)
from plait.kernels.cpu.pointwise.elementwise import native
from plait.kernels.cpu.runtime.executor import Executor
from plait.kernels.cpu.runtime.frame import rows_of, take_sequence
from plait.kernels.cpu.runtime.row_checks import Sequences, TensorRows, dense, float32_rows
from plait.ops.wkv import LEAST, RATE, UNIT_EPS, mix_shift, wkv4_scan, wkv6_scan, wkv7_scan

CHANNELS = 64  # that one thread takes at a time


@native(mix_shift)
def _mix_shift(x: Floats, change: Floats, share: Floats) -> Floats:
    return fma(change, share, x)


@inline
def _power(x: Floats) -> Floats:
    """e^x; exp makes a number of a NaN, so what is none goes in by a product with 0."""
    return fma(x, zero_f32(), exp(x))


@kernel
def wkv4_channels(frame: int, args: int, thread: int, threads: int) -> None:
    """n; k, v, each with its row stride; decay, first; sums, weights, largest, each with its slot stride;
    slots, query_start, has_history; out (dense)."""
    n, ks, k_bytes, vs, v_bytes, decay, first_at = words(args, 2, 9)
    sums, sum_slot, weights, weight_slot, tops, top_slot = words(args, 9, 15)
    slots, starts, history, outs = words(args, 15, 19)
    parts = (n + CHANNELS - 1) // CHANNELS
    while True:
        i, slot, past, first, tokens = take_sequence(frame, args, parts, (slots, starts, history))
        if i < 0:
            return
        for c in range(i * CHANNELS, min((i + 1) * CHANNELS, np.int64(n)), 16):
            at, left = 4 * c, np.int32(min(n - c, 16))
            a_at, b_at = sums + slot * sum_slot + at, weights + slot * weight_slot + at
            m_at = tops + slot * top_slot + at
            a = load_some(a_at, left) if past else zero_f32()
            b = load_some(b_at, left) if past else zero_f32()
            m = load_some(m_at, left) if past else spread(np.float32(LEAST))
            slower, bonus = load_some(decay + at, left), load_some(first_at + at, left)
            for t in range(first, first + tokens):
                k, v = load_some(ks + t * k_bytes + at, left), load_some(vs + t * v_bytes + at, left)
                own = add(k, bonus)
                top = where_less(m, own, own, m)
                old, new = _power(sub(m, top)), _power(sub(own, top))
                y = div(fma(old, a, mul(new, v)), fma(old, b, new))
                store_some(outs + 4 * n * t + at, y, left)
                kept = add(m, slower)
                m = where_less(kept, k, k, kept)
                old, new = _power(sub(kept, m)), _power(sub(k, m))
                a, b = fma(old, a, mul(new, v)), fma(old, b, new)
            store_some(a_at, a, left)
            store_some(b_at, b, left)
            store_some(m_at, m, left)


@wkv4_scan.variant("native", on="cpu", when=float32_rows, native=True)
def _wkv4_scan(
    cpu: Executor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    first: Tensor,
    sums: Tensor,
    weights: Tensor,
    largest: Tensor,
    slots: Tensor,
    query_start: Tensor,
    has_history: Tensor,
    num_decodes: int,
) -> Tensor:
    """`num_decodes` changes from step to step, and nothing here depends on it."""
    rows, (count, n) = [TensorRows.of(x) for x in (k, v)], k.shape
    if v.shape != k.shape:
        raise ShapeMismatch(f"WKV: keys {list(k.shape)} and values {list(v.shape)} do not fit")
    dense("decay", decay, n)
    dense("first", first, n)
    states = (("sums", sums), ("weights", weights), ("exponents", largest))
    for name, x in states:
        dense(f"a slot's {name}", x[0], n)
    held = [word for _, x in states for word in (x, 4 * x.stride(0))]
    where, out = Sequences.of(slots, query_start, has_history), cpu.empty(count, n)
    given = [word for x, r in zip((k, v), rows, strict=True) for word in (x, r.row_bytes)]
    words = (n, *given, decay, first, *held, *where.words, out)
    cpu.launch(wkv4_channels, *words, rows=count, seqs=len(slots))
    return out


@inline
def _between(x: Floats) -> Floats:
    """x within ends that decays of 0 and 1 lie beyond: 0 times an infinity is NaN. A NaN stays one."""
    low, high = spread(np.float32(-100.0)), spread(np.float32(88.0))
    x = where_less(x, low, low, x)
    return where_less(high, x, high, x)


@kernel
def wkv6_keys(frame: int, args: int, thread: int, threads: int) -> None:
    """heads, heads of keys, size; r, decay, k, each with row and head strides; bonus, or 0; made (dense: of
    each head query, key, decay); own (dense)."""
    heads, groups, n, rs, r_row, r_head, zs, z_row, z_head = words(args, 2, 11)
    ks, k_row, k_head, bonus, made, own = words(args, 11, 17)
    items, scale = rows_of(frame, args) * heads, spread(np.float32(n**-0.5))
    for i in range(items * thread // threads, items * (thread + 1) // threads):
        t, h = i // heads, i % heads
        r, z, k = rs + t * r_row + h * r_head, zs + t * z_row + h * z_head, ks + t * k_row
        k, out, added = k + h // (heads // groups) * k_head, made + 12 * i * n, zero_f32()
        for c in range(0, 4 * n, 64):
            left = np.int32(n - c // 4)
            query, key = load_some(r + c, left), load_some(k + c, left)
            speed = sub(zero_f32(), _power(_between(load_some(z + c, left))))
            kept = _power(speed)
            if bonus == 0:  # the new state is read: what the last one leaves in it, and the token itself
                key, query = mul(key, one_minus_exp(speed)), mul(query, scale)
                added = fma(query, key, added)
                query = mul(query, kept)
            else:
                added = fma(mul(query, load_some(bonus + 4 * h * n + c, left)), key, added)
            store_some(out + c, query, left)
            store_some(out + 4 * n + c, key, left)
            store_some(out + 8 * n + c, kept, left)
        put_f32(own + 4 * i, total(added))


@kernel
def wkv6_heads(frame: int, args: int, thread: int, threads: int) -> None:
    """heads, heads of keys, size of keys, of values; v, its row and head stride; made; own; state, its slot
    stride; slots, query_start, has_history; out (dense)."""
    heads, groups, n, size, vs, v_row, v_head, made, own = words(args, 2, 11)
    state, slot_bytes, slots, starts, history, outs = words(args, 11, 17)
    while True:
        h, slot, past, first, tokens = take_sequence(frame, args, heads, (slots, starts, history))
        if h < 0:
            return
        s = state + slot * slot_bytes + 4 * h * n * size
        if past == 0:
            for c in range(0, n * size, 16):
                store_some(s + 4 * c, zero_f32(), np.int32(n * size - c))
        for t in range(first, first + tokens):
            v, i = vs + t * v_row + h // (heads // groups) * v_head, t * heads + h
            key = made + 12 * i * n
            for c in range(0, size, 16):
                left = np.int32(size - c)
                value = load_some(v + 4 * c, left)
                y = mul(spread(get_f32(own + 4 * i)), value)
                for j in range(n):
                    at = s + 4 * (j * size + c)
                    last = load_some(at, left)
                    y = fma(spread(get_f32(key + 4 * j)), last, y)
                    new = mul(spread(get_f32(key + 4 * (n + j))), value)
                    store_some(at, fma(spread(get_f32(key + 4 * (2 * n + j))), last, new), left)
                store_some(outs + 4 * (i * size + c), y, left)


@wkv6_scan.variant("native", on="cpu", when=float32_rows, native=True)
def _wkv6_scan(
    cpu: Executor,
    r: Tensor,
    decay: Tensor,
    k: Tensor,
    v: Tensor,
    bonus: Tensor | None,
    state: Tensor,
    slots: Tensor,
    query_start: Tensor,
    has_history: Tensor,
    num_decodes: int,
) -> Tensor:
    """`num_decodes` changes from step to step, and nothing here depends on it."""
    (count, heads, n), (_, groups, size) = r.shape, v.shape
    if decay.shape != r.shape or k.shape != (count, groups, n) or len(v) != count or heads % groups:
        raise ShapeMismatch(f"WKV: {[list(x.shape) for x in (r, decay, k, v)]} do not fit")
    if bonus is not None:
        dense("bonus", bonus, heads, n)
    dense("a slot's state", state[0], heads, n, size)
    made, own, out = (cpu.empty(count, heads, *shape) for shape in ((3, n), (), (size,)))
    given = [word for x in (r, decay, k) for word in (x, *TensorRows.of(x).strides)]
    cpu.launch(wkv6_keys, heads, groups, n, *given, 0 if bonus is None else bonus, made, own, rows=count)
    where = Sequences.of(slots, query_start, has_history)
    moved = (v, *TensorRows.of(v).strides, made, own, state, 4 * state.stride(0))
    cpu.launch(wkv6_heads, heads, groups, n, size, *moved, *where.words, out, rows=count, seqs=len(slots))
    return out


@kernel
def wkv7_keys(frame: int, args: int, thread: int, threads: int) -> None:
    """heads, size; r, decay, k, rate, each with row and head strides; scales; made (dense: of each head key,
    unit key, share, decay); bonus (dense)."""
    heads, n, rs, r_row, r_head, zs, z_row, z_head, ks, k_row, k_head = words(args, 2, 13)
    rates, a_row, a_head, scales, made, bonus = words(args, 13, 19)
    items, whole = rows_of(frame, args) * heads, 4 * heads * n
    for i in range(items * thread // threads, items * (thread + 1) // threads):
        t, h = i // heads, i % heads
        r, z, k = rs + t * r_row + h * r_head, zs + t * z_row + h * z_head, ks + t * k_row + h * k_head
        rate, own, out = rates + t * a_row + h * a_head, scales + 4 * h * n, made + 16 * i * n
        squares, added = zero_f32(), zero_f32()
        for c in range(0, 4 * n, 64):
            left = np.int32(n - c // 4)
            key, a = load_some(k + c, left), sigmoid(load_some(rate + c, left))
            long = mul(key, load_some(own + c, left))
            squares = fma(long, long, squares)
            change = mul(sub(a, spread(np.float32(1.0))), load_some(own + whole + c, left))
            key = fma(key, change, key)
            store_some(out + c, key, left)
            added = fma(mul(load_some(r + c, left), key), load_some(own + 2 * whole + c, left), added)
            fast = mul(sigmoid(load_some(z + c, left)), spread(np.float32(-RATE)))
            store_some(out + 12 * n + c, exp(fast), left)
        length = max(math.sqrt(np.float64(total(squares))), UNIT_EPS)
        per_unit = spread(np.float32(1.0 / length))
        for c in range(0, 4 * n, 64):
            left = np.int32(n - c // 4)
            unit = mul(mul(load_some(k + c, left), load_some(own + c, left)), per_unit)
            store_some(out + 4 * n + c, unit, left)
            store_some(out + 8 * n + c, mul(sigmoid(load_some(rate + c, left)), unit), left)
        put_f32(bonus + 4 * i, total(added))


@inline
def _move(s: Int, made: Int, r: Int, value: Floats, n: Int, left: Int) -> Floats:
    """Sixteen value columns of a state at `s` move on by one token; what r reads of them."""
    row, seen, y = 4 * n, zero_f32(), zero_f32()
    for j in range(n):
        seen = fma(spread(get_f32(made + row + 4 * j)), load_some(s + row * j, left), seen)
    for j in range(n):
        kept = mul(spread(get_f32(made + 3 * row + 4 * j)), load_some(s + row * j, left))
        kept = sub(kept, mul(spread(get_f32(made + 2 * row + 4 * j)), seen))
        kept = fma(spread(get_f32(made + 4 * j)), value, kept)
        store_some(s + row * j, kept, left)
        y = fma(spread(get_f32(r + 4 * j)), kept, y)
    return y


@kernel
def wkv7_heads(frame: int, args: int, thread: int, threads: int) -> None:
    """heads, size; r, v, each with row and head strides; made; state, its slot stride; slots, query_start,
    has_history; out (dense)."""
    heads, n, rs, r_row, r_head, vs, v_row, v_head, made = words(args, 2, 11)
    state, slot_bytes, slots, starts, history, outs = words(args, 11, 17)
    while True:
        h, slot, past, first, tokens = take_sequence(frame, args, heads, (slots, starts, history))
        if h < 0:
            return
        own = state + slot * slot_bytes + 4 * h * n * n
        if past == 0:
            for c in range(0, n * n, 16):
                store_some(own + 4 * c, zero_f32(), np.int32(n * n - c))
        for t in range(first, first + tokens):
            r, v, i = rs + t * r_row + h * r_head, vs + t * v_row + h * v_head, t * heads + h
            for c in range(0, n, 16):
                left = np.int32(n - c)
                y = _move(own + 4 * c, made + 16 * i * n, r, load_some(v + 4 * c, left), n, left)
                store_some(outs + 4 * (i * n + c), y, left)


@wkv7_scan.variant("native", on="cpu", when=float32_rows, native=True)
def _wkv7_scan(
    cpu: Executor,
    r: Tensor,
    decay: Tensor,
    k: Tensor,
    v: Tensor,
    rate: Tensor,
    scales: Tensor,
    state: Tensor,
    slots: Tensor,
    query_start: Tensor,
    has_history: Tensor,
    num_decodes: int,
) -> tuple[Tensor, Tensor]:
    """`num_decodes` changes from step to step, and nothing here depends on it."""
    count, heads, n = r.shape
    if any(x.shape != r.shape for x in (decay, k, v, rate)):
        raise ShapeMismatch(f"WKV: {[list(x.shape) for x in (r, decay, k, v, rate)]} do not fit")
    dense("scales", scales, 3, heads, n)
    dense("a slot's state", state[0], heads, n, n)
    strides = {
        name: TensorRows.of(x).strides for name, x in zip("rzkva", (r, decay, k, v, rate), strict=True)
    }
    made, bonus, out = cpu.empty(count, heads, 4, n), cpu.empty(count, heads), cpu.empty(count, heads, n)
    keys = (r, *strides["r"], decay, *strides["z"], k, *strides["k"], rate, *strides["a"])
    cpu.launch(wkv7_keys, heads, n, *keys, scales, made, bonus, rows=count)
    where = Sequences.of(slots, query_start, has_history)
    moved = (r, *strides["r"], v, *strides["v"], made, state, 4 * state.stride(0))
    cpu.launch(wkv7_heads, heads, n, *moved, *where.words, out, rows=count, seqs=len(slots))
    return out, bonus
