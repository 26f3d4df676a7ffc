"""Softmax over splits of keys: what attention kernels do to one row between the two products.

A row is one query head of one token. Keys come in splits of fixed length, from fixed positions on. A split
gives a *part* (largest score, sum of exponentials, weighted sum of values), and parts are folded in the order
of positions (Milakov & Gimelshein 2018). So a row's bits depend on its own keys only: not on how a
prompt was cut, on the batch composition, or on which thread computed which split.

A record is a part or a state in memory: [largest, sum, padding up to 64 bytes, one float per value column].
A key that a row must not see scores -inf: it adds an exact 0 everywhere.
"""

from __future__ import annotations

import numpy as np

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
from plait.kernels.cpu.codegen.kinds import Float, Floats, Int
from plait.kernels.cpu.codegen.maths import WHOLE, above, exp, polynomial, tanh
from plait.kernels.cpu.codegen.vec import (
    add,
    add_i32,
    bits_f32,
    bits_i32,
    div,
    fma,
    get_f32,
    get_i64,
    lanes,
    largest,
    left,
    load_bf16,
    load_f32,
    load_some,
    mul,
    peak,
    put_f32,
    put_i64,
    spread,
    spread_int,
    store_f32,
    store_i32,
    store_some,
    sub,
    to_f32,
    total,
    where_below,
    word,
    zero_f32,
    zero_i32,
)

TILE = 12  # rows of which products are computed together, at most
SIZES = (1, 2, 3, 4, 8, 12)  # of tiles; what is left over takes the smallest that holds it
LOWEST = np.float32(-3.0e38)  # below any score, and finite: exp(-inf - LOWEST) is 0, not NaN
HIDDEN = np.float32(-np.inf)

# Words of a launch: addresses, strides in bytes, sizes.
Q, Q_ROW, Q_HEAD, OUT, KEYS, VALUES, TABLE, TABLE_ROW, START, LENS = range(2, 12)
HEADS, KV_HEADS, K_DIM, V_DIM, BLOCK, WINDOW, SCALE, CAP, BUDGET, SINKS, FEW, SLOPES = range(12, 24)
SINK_ROW, CHUNK, CANVAS, CANVAS_START = 24, 25, 26, 27


@inline
def size_of(count: Int) -> Int:
    """The smallest tile that holds `count` rows."""
    if count <= 4:
        return count
    return 8 if count <= 8 else 12


@inline
def open_at(args: Int, s: Int) -> Int:
    """From where on queries of sequence s see all of it; its length: nowhere."""
    at = word(args, CANVAS_START)
    return get_i64((at if at != 0 else word(args, LENS)) + 8 * s)


@inline
def first_key(args: Int, s: Int, position: Int) -> Int:
    """The first position that a query of sequence s at `position` sees; window 0: all of them.

    A window ends with the query, with its chunk, or with where its canvas begins.
    """
    window, chunk = word(args, WINDOW), word(args, CHUNK)
    if window <= 0:
        return np.int64(0)
    last = position - position % chunk + chunk - 1 if chunk > 0 else min(position, open_at(args, s))
    return max(last - window + 1, 0)


@inline
def last_key(args: Int, s: Int, position: Int) -> Int:
    """The last position that a query of sequence s at `position` sees: its own, or its canvas's last one."""
    canvas, length = word(args, CANVAS), get_i64(word(args, LENS) + 8 * s)
    if canvas > 0:
        return min(position - position % canvas + canvas, length) - 1
    return length - 1 if position >= open_at(args, s) else position


@inline
def record_bytes(args: Int) -> int:
    return 64 + (word(args, V_DIM) + 15) // 16 * 64


@inline
def past_of(args: Int, s: Int) -> int:
    """How many tokens sequence s had before this step."""
    return get_i64(word(args, LENS) + 8 * s) - rows_in(args, s)


@inline
def rows_in(args: Int, s: Int) -> int:
    """How many new tokens sequence s has."""
    start = word(args, START) + 8 * s
    return get_i64(start + 8) - get_i64(start)


@inline
def pack(args: Int, s: Int, kv_head: Int, base: Int, count: Int, size: Int, to: Int) -> None:
    """Queries of rows base..base+count of a kv head, as [K_DIM][size]; rows beyond `count` are 0.

    Row i is head i % group of the sequence's new token i // group.
    """
    group, d = word(args, HEADS) // word(args, KV_HEADS), word(args, K_DIM)
    start = get_i64(word(args, START) + 8 * s)
    for r in range(size):
        at = to + 4 * r
        if r < count:
            token, head = (base + r) // group, kv_head * group + (base + r) % group
            q = word(args, Q) + (start + token) * word(args, Q_ROW) + head * word(args, Q_HEAD)
            for i in range(d):
                put_f32(at + 4 * size * i, get_f32(q + 4 * i))
        else:
            for i in range(d):
                put_f32(at + 4 * size * i, np.float32(0.0))


@inline
def locate(
    args: Int,
    s: Int,
    kv_head: Int,
    span: Int,
    first: Int,
    end: Int,
    k_bytes: Int,
    v_bytes: Int,
    to: Int,
    groups: Int,
) -> None:
    """Where each group of sixteen tokens lies: `groups` addresses of keys, then as many of values.

    `span`: the position its groups first..end count from; k_bytes, v_bytes: of a head of one token.
    """
    size, kv_heads = word(args, BLOCK), word(args, KV_HEADS)
    table = word(args, TABLE) + s * word(args, TABLE_ROW)
    for g in range(first, end):
        position = span + 16 * g
        place = get_i64(table + 8 * (position // size)) * kv_heads + kv_head
        offset = position % size
        put_i64(to + 8 * g, word(args, KEYS) + (place * size + offset) * k_bytes)
        put_i64(to + 8 * (groups + g), word(args, VALUES) + (place * size + offset) * v_bytes)


@inline
def soften(args: Int, scores: Int, first: Int, end: Int, span: Int, low: Int, last: Int, part: Int) -> None:
    """Products of one row with the groups first..end of a split become exp(score - largest), in place.

    low, last: the first and the last position that it sees.
    """
    scale, cap = spread(get_f32(args + 8 * SCALE)), spread(get_f32(args + 8 * CAP))
    capped, hidden = get_f32(args + 8 * CAP) > np.float32(0.0), spread(HIDDEN)
    top = spread(LOWEST)
    for g in range(first, end):
        at, key = scores + 64 * g, span + 16 * g
        x = mul(load_f32(at), scale)
        if capped:
            x = mul(cap, tanh(div(x, cap)))
        if key < low or key + 15 > last:
            x = where_below(np.int32(last + 1 - key), x, hidden)
            x = where_below(np.int32(low - key), hidden, x)
        store_f32(at, x)
        top = above(x, top)
    most = peak(top)
    top, sum = spread(most), zero_f32()
    for g in range(first, end):
        e = exp(sub(load_f32(scores + 64 * g), top))
        store_f32(scores + 64 * g, e)
        sum = add(sum, e)
    put_f32(part, most)
    put_f32(part + 4, total(sum))


@inline
def lean(
    args: Int,
    scores: Int,
    first: Int,
    end: Int,
    span: Int,
    position: Int,
    kv_head: Int,
    row: Int,
    unit: Float,
) -> None:
    """Products of one row with the groups first..end of a split get what the distance of keys adds, if heads
    have slopes. unit: what a score of 1 is as a product."""
    if word(args, SLOPES) != 0:
        group = word(args, HEADS) // word(args, KV_HEADS)
        slope = spread(get_f32(word(args, SLOPES) + 4 * (kv_head * group + row % group)) * unit)
        for g in range(first, end):
            at, ahead = scores + 64 * g, spread_int(np.int32(span + 16 * g - position))
            store_f32(at, fma(to_f32(add_i32(lanes(), ahead)), slope, load_f32(at)))


@inline
def weigh(scores: Int, first: Int, end: Int, places: Int, behind: Int) -> None:
    """Numbers of one row with the groups first..end of a split, each times the scale of its token's value.

    places: addresses of groups of codes of values; their scales lie so many bytes behind.
    """
    for g in range(first, end):
        at = scores + 64 * g
        store_f32(at, mul(load_f32(at), load_bf16(get_i64(places + 8 * g) + behind)))


@inline
def begin(args: Int, s: Int, kv_head: Int, row: Int, state: Int, record: Int) -> None:
    """A state that has seen no key, but its head's sink if there is one: a key with the value 0.

    Sinks are of heads, or SINK_ROW bytes behind those of the token before.
    """
    for i in range(64, record, 64):
        store_f32(state + i, zero_f32())
    if word(args, SINKS) != 0:
        group = word(args, HEADS) // word(args, KV_HEADS)
        at = word(args, SINKS) + 4 * (kv_head * group + row % group)
        if word(args, SINK_ROW) != 0:
            at += word(args, SINK_ROW) * (get_i64(word(args, START) + 8 * s) + row // group)
        put_f32(state, get_f32(at))
        put_f32(state + 4, np.float32(1.0))
    else:
        put_f32(state, LOWEST)
        put_f32(state + 4, np.float32(0.0))


@inline
def fold(state: Int, part: Int, record: Int) -> None:
    """Add a part to a state. A part without visible keys changes nothing, exactly."""
    old, new = spread(get_f32(state)), spread(get_f32(part))
    top = largest(old, new)
    _add_part(state, part, record, top, exp(sub(old, top)), exp(sub(new, top)))


@inline
def _add_part(state: Int, part: Int, record: Int, top: Floats, a: Floats, b: Floats) -> None:
    """The state times a and the part times b, as a state with this largest score."""
    sum = fma(spread(get_f32(part + 4)), b, mul(spread(get_f32(state + 4)), a))
    for i in range(64, record, 64):
        store_f32(state + i, fma(load_f32(part + i), b, mul(load_f32(state + i), a)))
    store_some(state, top, np.int32(1))
    store_some(state + 4, sum, np.int32(1))


@inline
def finish(args: Int, s: Int, kv_head: Int, row: Int, state: Int) -> None:
    """Write the output of one row."""
    group, d = word(args, HEADS) // word(args, KV_HEADS), word(args, V_DIM)
    token = get_i64(word(args, START) + 8 * s) + row // group
    out = word(args, OUT) + 4 * d * (token * word(args, HEADS) + kv_head * group + row % group)
    sum = spread(get_f32(state + 4))
    for i in range(0, d, 16):
        left = np.int32(d - i)
        store_some(out + 4 * i, div(load_some(state + 64 + 4 * i, left), sum), left)


@inline
def copy(source: Int, to: Int, nbytes: Int) -> None:
    """nbytes: a multiple of 64."""
    for i in range(0, nbytes, 64):
        store_f32(to + i, load_f32(source + i))


# ---- products of bfloat16 pairs: the same in powers of two ----
# Queries are rounded to bfloat16 times scale / ln 2, so that scores are exponents of two. In place of the
# largest score comes the next whole number above it. So exponentials of different splits differ by exact
# powers of two, and how one is rounded depends on its own score alone. They are rounded to bfloat16 and
# summed as they are rounded, so that the weights of values sum to one. What rounding does to a row is then
# in proportion to how far its values lie apart, not to how large they are.
LOG2_E = np.float32(1.4426950408889634)
ONE = np.int32(0x3F800000)  # of float32
ONES = np.int32(0x3F803F80)  # two of bfloat16
QUERY = 33 * 64  # bytes from query to query: constant, so that one address leads to all of a tile
WIDEST = 512  # numbers of a query at most


_power_terms = polynomial(
    "power_terms", 0.009582843631505966, 0.055906426161527634, 0.24024099111557007, 0.6931241750717163, 1.0
)


@inline
def power(x: Floats) -> Floats:
    """2**x of x <= 0, to 3e-6 of it, 0 below -127. A number that is none stays so."""
    least, whole = spread(np.float32(-127.0)), spread(WHOLE)
    x = above(least, x)
    at = add(x, whole)
    f = sub(x, sub(at, whole))
    return bits_f32(add_i32(bits_i32(_power_terms(f)), left(bits_i32(at), np.int32(23))))


@inline
def whole_power(x: Floats) -> Floats:
    """2**x of whole x <= 0, exactly; 0 below -126."""
    at = add(above(spread(np.float32(-127.0)), x), spread(WHOLE))
    return bits_f32(add_i32(spread_int(ONE), left(bits_i32(at), np.int32(23))))


@inline
def pack_pairs(args: Int, s: Int, kv_head: Int, base: Int, count: Int, size: Int, to: Int) -> None:
    """As `pack`, times scale / ln 2, rounded, each row QUERY bytes from the one before.

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
def soften_pairs(
    args: Int, scores: Int, first: Int, end: Int, span: Int, low: Int, last: Int, part: Int
) -> None:
    """Products of one row with the groups first..end of a split become weights, in place, by pairs of groups.

    As bfloat16, number t at 2t; without the instruction as float32, at 4t.
    """
    low, high = max(low - span, 0), min(last + 1 - span, 16 * end)
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
    sum = weigh_pairs(scores, near, far, top)
    clear(scores, first // 2, min(near, (end + 1) // 2))
    clear(scores, far, (end + 1) // 2)
    store_some(part, top, np.int32(1))
    put_f32(part + 4, total(sum))


@inline
def weigh_pairs(scores: Int, near: Int, far: Int, top: Floats) -> Floats:
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
def begin_pairs(args: Int, s: Int, kv_head: Int, row: Int, state: Int, record: Int) -> None:
    """As `begin`; a sink's weight is not rounded."""
    begin(args, s, kv_head, row, state, record)
    if word(args, SINKS) != 0:
        sink = spread(get_f32(state) * LOG2_E)
        store_some(state, upward(sink), np.int32(1))
        store_some(state + 4, power(sub(sink, upward(sink))), np.int32(1))


@inline
def fold_pairs(state: Int, part: Int, record: Int) -> None:
    """As `fold`: both factors are powers of two, one of them 1."""
    old, new = spread(get_f32(state)), spread(get_f32(part))
    top = largest(old, new)
    _add_part(state, part, record, top, whole_power(sub(old, top)), whole_power(sub(new, top)))
