"""Softmax over splits where products are of bfloat16 pairs: what `rows` does, in powers of two.

Queries are rounded to bfloat16 times scale / ln 2, so that scores are exponents of two. In place of the
largest score comes the next whole number above it. So exponentials of different splits differ by exact
powers of two, and how one is rounded depends on its own score alone. They are rounded to bfloat16 and summed
as they are rounded, so that the weights of values sum to one. What rounding does to a row is then in
proportion to how far its values lie apart, not to how large they are.
"""

from __future__ import annotations

import numpy as np

from plait.kernels.cpu.attention.rows import (
    CAP,
    HEADS,
    HIDDEN,
    K_DIM,
    KV_HEADS,
    LOWEST,
    Q_HEAD,
    Q_ROW,
    SCALE,
    SINKS,
    START,
    WINDOW,
    Q,
    first_key,
)
from plait.kernels.cpu.codegen.bf16_dot import (
    HARDWARE,
    both_bf16,
    dot_bf16,
    first_of_pairs,
    rounded_bf16,
    second_of_pairs,
    upward,
)
from plait.kernels.cpu.codegen.kernel import inline
from plait.kernels.cpu.codegen.kinds import Floats, Int
from plait.kernels.cpu.codegen.maths import WHOLE, above, tanh
from plait.kernels.cpu.codegen.vec import (
    add,
    add_i32,
    bits_f32,
    bits_i32,
    div,
    fma,
    get_f32,
    get_i64,
    largest,
    left,
    load_f32,
    load_some,
    mul,
    peak,
    put_f32,
    spread,
    spread_int,
    store_f32,
    store_i32,
    store_some,
    sub,
    total,
    where_below,
    word,
    zero_f32,
    zero_i32,
)

LOG2_E = np.float32(1.4426950408889634)
ONE = np.int32(0x3F800000)  # of float32
ONES = np.int32(0x3F803F80)  # two of bfloat16
QUERY = 33 * 64  # bytes from query to query: constant, so that one address leads to all of a tile
WIDEST = 512  # numbers of a query at most


@inline
def power(x: Floats) -> Floats:
    """2**x of x <= 0, to 3e-6 of it, 0 below -127. A number that is none stays so."""
    least, whole = spread(np.float32(-127.0)), spread(WHOLE)
    x = above(least, x)
    at = add(x, whole)
    f = sub(x, sub(at, whole))
    p = spread(np.float32(0.009582843631505966))
    p = fma(p, f, spread(np.float32(0.055906426161527634)))
    p = fma(p, f, spread(np.float32(0.24024099111557007)))
    p = fma(p, f, spread(np.float32(0.6931241750717163)))
    p = fma(p, f, spread(np.float32(1.0)))
    return bits_f32(add_i32(bits_i32(p), left(bits_i32(at), np.int32(23))))


@inline
def whole_power(x: Floats) -> Floats:
    """2**x of whole x <= 0, exactly; 0 below -126."""
    at = add(above(spread(np.float32(-127.0)), x), spread(WHOLE))
    return bits_f32(add_i32(spread_int(ONE), left(bits_i32(at), np.int32(23))))


@inline
def pack(args: Int, s: Int, kv_head: Int, base: Int, count: Int, size: Int, to: Int) -> None:
    """As `rows.pack`, times scale / ln 2, rounded, each row QUERY bytes from the one before.

    They are bfloat16; without the instruction float32 of the same value.
    """
    group, d = word(args, HEADS) // word(args, KV_HEADS), word(args, K_DIM)
    start, scale = get_i64(word(args, START) + 8 * s), spread(get_f32(args + 8 * SCALE) * LOG2_E)
    for r in range(size):
        token, head = (base + r) // group, kv_head * group + (base + r) % group
        q = word(args, Q) + (start + token) * word(args, Q_ROW) + head * word(args, Q_HEAD)
        at = to + QUERY * r
        for i in range(0, d, 32):
            x, y = zero_f32(), zero_f32()
            if r < count:
                x = mul(load_some(q + 4 * i, np.int32(d - i)), scale)
                y = mul(load_some(q + 4 * i + 64, np.int32(d - i - 16)), scale)
            if HARDWARE:
                store_i32(at + 2 * i, both_bf16(x, y))
            else:
                store_f32(at + 4 * i, rounded_bf16(x))
                store_f32(at + 4 * i + 64, rounded_bf16(y))


@inline
def cap(args: Int, scores: Int, first: Int, end: Int) -> None:
    """Scores of groups first..end become cap·tanh(·/cap)."""
    most = spread(get_f32(args + 8 * CAP) * LOG2_E)
    for g in range(first, end):
        at = scores + 64 * g
        store_f32(at, mul(most, tanh(div(load_f32(at), most))))


@inline
def hide(scores: Int, pair: Int, low: Int, high: Int) -> None:
    """Of a pair of groups only tokens low..high stay; what was not computed yet is no score."""
    hidden = spread(HIDDEN)
    for g in range(2 * pair, 2 * pair + 2):
        at, token = scores + 64 * g, 16 * g
        x = where_below(np.int32(high - token), load_f32(at), hidden)
        store_f32(at, where_below(np.int32(low - token), hidden, x))


@inline
def soften(args: Int, scores: Int, first: Int, end: Int, span: Int, position: Int, part: Int) -> None:
    """Products of one row with the groups first..end of a split become weights, in place, by pairs of groups.

    As bfloat16, number t at 2t; without the instruction as float32, at 4t.
    """
    low, high = max(first_key(position, word(args, WINDOW)) - span, 0), min(position + 1 - span, 16 * end)
    near, far = low // 32, (high + 31) // 32
    if high <= low:
        near, far = end, end
    elif get_f32(args + 8 * CAP) > np.float32(0.0):
        cap(args, scores, 2 * near, 2 * far)
    if low > 32 * near and near < far:
        hide(scores, near, low, high)
    if high < 32 * far and near < far:
        hide(scores, far - 1, low, high)
    top, other = spread(LOWEST), spread(LOWEST)
    for g in range(2 * near, 2 * far, 2):
        top, other = above(top, load_f32(scores + 64 * g)), above(other, load_f32(scores + 64 * g + 64))
    top = upward(spread(peak(above(top, other))))
    sum = weigh(scores, near, far, top)
    clear(scores, first // 2, min(near, (end + 1) // 2))
    clear(scores, far, (end + 1) // 2)
    store_some(part, top, np.int32(1))
    put_f32(part + 4, total(sum))


@inline
def weigh(scores: Int, near: Int, far: Int, top: Floats) -> Floats:
    """The weights of pairs of groups near..far, and their sum in lanes."""
    sum, ones = zero_f32(), spread_int(ONES)
    for pair in range(near, far):
        at = scores + 128 * pair
        x, y = power(sub(load_f32(at), top)), power(sub(load_f32(at + 64), top))
        if HARDWARE:
            both = both_bf16(x, y)
            store_i32(scores + 64 * pair, both)
            sum = dot_bf16(sum, both, ones)
        else:
            x, y = rounded_bf16(x), rounded_bf16(y)
            store_f32(at, x)
            store_f32(at + 64, y)
            sum = add(add(sum, second_of_pairs(x, y)), first_of_pairs(x, y))
    return sum


@inline
def clear(scores: Int, first: Int, end: Int) -> None:
    """Weights of nothing."""
    for pair in range(first, end):
        if HARDWARE:
            store_i32(scores + 64 * pair, zero_i32())
        else:
            store_f32(scores + 128 * pair, zero_f32())
            store_f32(scores + 128 * pair + 64, zero_f32())


@inline
def begin(args: Int, kv_head: Int, row: Int, state: Int, record: Int) -> None:
    """As `rows.begin`; a sink's weight is not rounded."""
    for i in range(64, record, 64):
        store_f32(state + i, zero_f32())
    put_f32(state, LOWEST)
    put_f32(state + 4, np.float32(0.0))
    if word(args, SINKS) != 0:
        group = word(args, HEADS) // word(args, KV_HEADS)
        sink = spread(get_f32(word(args, SINKS) + 4 * (kv_head * group + row % group)) * LOG2_E)
        store_some(state, upward(sink), np.int32(1))
        store_some(state + 4, power(sub(sink, upward(sink))), np.int32(1))


@inline
def fold(state: Int, part: Int, record: Int) -> None:
    """As `rows.fold`: both factors are powers of two, one of them 1."""
    old, new = spread(get_f32(state)), spread(get_f32(part))
    top = largest(old, new)
    a, b = whole_power(sub(old, top)), whole_power(sub(new, top))
    sum = fma(spread(get_f32(part + 4)), b, mul(spread(get_f32(state + 4)), a))
    for i in range(64, record, 64):
        store_f32(state + i, fma(load_f32(part + i), b, mul(load_f32(state + i), a)))
    store_some(state, top, np.int32(1))
    store_some(state + 4, sum, np.int32(1))
