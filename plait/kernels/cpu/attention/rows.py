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

from plait.kernels.cpu.codegen.kernel import inline
from plait.kernels.cpu.codegen.kinds import Int
from plait.kernels.cpu.codegen.maths import above, exp, tanh
from plait.kernels.cpu.codegen.vec import (
    add,
    div,
    fma,
    get_f32,
    get_i64,
    largest,
    load_bf16,
    load_f32,
    load_some,
    mul,
    peak,
    put_f32,
    put_i64,
    spread,
    store_f32,
    store_some,
    sub,
    total,
    where_below,
    word,
    zero_f32,
)

TILE = 12  # rows of which products are computed together, at most
SIZES = (1, 2, 3, 4, 8, 12)  # of tiles; what is left over takes the smallest that holds it
LOWEST = np.float32(-3.0e38)  # below any score, and finite: exp(-inf - LOWEST) is 0, not NaN
HIDDEN = np.float32(-np.inf)

# Words of a launch: addresses, strides in bytes, sizes.
Q, Q_ROW, Q_HEAD, OUT, KEYS, VALUES, TABLE, TABLE_ROW, START, LENS = range(2, 12)
HEADS, KV_HEADS, K_DIM, V_DIM, BLOCK, WINDOW, SCALE, CAP, BUDGET, SINKS, FEW = range(12, 23)


@inline
def size_of(count: Int) -> Int:
    """The smallest tile that holds `count` rows."""
    if count <= 4:
        return count
    return 8 if count <= 8 else 12


@inline
def first_key(position: Int, window: Int) -> Int:
    """The first position that a query at `position` sees; window 0: all of them."""
    return max(position - window + 1, 0) if window > 0 else np.int64(0)


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
def soften(args: Int, scores: Int, first: Int, end: Int, span: Int, position: Int, part: Int) -> None:
    """Products of one row with the groups first..end of a split become exp(score - largest), in place."""
    scale, cap = spread(get_f32(args + 8 * SCALE)), spread(get_f32(args + 8 * CAP))
    capped, hidden = get_f32(args + 8 * CAP) > np.float32(0.0), spread(HIDDEN)
    low, top = first_key(position, word(args, WINDOW)), spread(LOWEST)
    for g in range(first, end):
        at, key = scores + 64 * g, span + 16 * g
        x = mul(load_f32(at), scale)
        if capped:
            x = mul(cap, tanh(div(x, cap)))
        if key < low or key + 15 > position:
            x = where_below(np.int32(position + 1 - key), x, hidden)
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
def weigh(args: Int, scores: Int, first: Int, end: Int, places: Int) -> None:
    """Numbers of one row with the groups first..end of a split, each times the scale of its token's value.

    places: addresses of groups of int8 values, behind which their scales lie.
    """
    for g in range(first, end):
        at = scores + 64 * g
        store_f32(at, mul(load_f32(at), load_bf16(get_i64(places + 8 * g) + 16 * word(args, V_DIM))))


@inline
def begin(args: Int, kv_head: Int, row: Int, state: Int, record: Int) -> None:
    """A state that has seen no key, but its head's sink if there is one: a key with the value 0."""
    for i in range(64, record, 64):
        store_f32(state + i, zero_f32())
    if word(args, SINKS) != 0:
        group = word(args, HEADS) // word(args, KV_HEADS)
        put_f32(state, get_f32(word(args, SINKS) + 4 * (kv_head * group + row % group)))
        put_f32(state + 4, np.float32(1.0))
    else:
        put_f32(state, LOWEST)
        put_f32(state + 4, np.float32(0.0))


@inline
def fold(state: Int, part: Int, record: Int) -> None:
    """Add a part to a state. A part without visible keys changes nothing, exactly."""
    old, new = spread(get_f32(state)), spread(get_f32(part))
    top = largest(old, new)
    a, b = exp(sub(old, top)), exp(sub(new, top))
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
