"""Codes of seven bits, as kernels read and write them (`plait.ops.entry` has the form).

thirty-two columns   nnnn nnnn … (16 bytes)        the lower four bits of columns i and i + 16 in byte i
                     4444 5555 6666 4444 5555 6666 the upper three bits: words of sixteen columns, twice
sixteen columns      n | 16 · bit 4 | 32 · bit 5 - 64 · bit 6      in two's complement
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir

from plait.kernels.cpu.attention.codes import code, code_key, find_lane
from plait.kernels.cpu.codegen.kernel import inline, kernel
from plait.kernels.cpu.codegen.kinds import Int
from plait.kernels.cpu.codegen.vec import (
    LANES,
    VI,
    A,
    N,
    _define,
    _ints,
    _load,
    _store,
    absolute,
    and_i32,
    div,
    fma,
    get_bf16,
    get_i64,
    i16,
    largest,
    left,
    load_f32,
    nearest,
    or_i32,
    peak,
    put_bf16,
    smallest,
    spread,
    spread_int,
    store_i8,
    to_i32,
    total,
    words,
    zero_f32,
)
from plait.kernels.cpu.runtime.frame import rows_of, scratch_of

LARGEST = np.float32(63.0)  # code
UPPER = 6  # bytes of the upper bits of sixteen columns
v16i1 = ir.VectorType(ir.IntType(1), LANES)


def _join_upper(b: ir.IRBuilder, low: ir.Value, at: ir.Value) -> ir.Value:
    """Codes of sixteen columns: their lower four bits, and where words of the upper ones are."""
    code = low
    for i, bit in enumerate((16, 32, -64)):
        word = _load(b, b.add(at, ir.Constant(at.type, 2 * i)), i16)
        code = b.select(b.bitcast(word, v16i1), b.or_(code, _ints(bit)), code)
    return code


def _store_upper(b: ir.IRBuilder, at: ir.Value, code: ir.Value) -> ir.Value:
    for i, bit in enumerate((16, 32, 64)):
        found = b.icmp_unsigned("!=", b.and_(code, _ints(bit)), _ints(0))
        _store(b, b.add(at, ir.Constant(at.type, 2 * i)), b.bitcast(found, i16))
    return ir.Constant(ir.IntType(32), 0)


join_upper = _define("join_upper", VI, (VI, A), _join_upper)
store_upper = _define("store_upper", N, (A, VI), _store_upper)


@inline
def code_sevens(x: Int, n: Int, group: Int, to: Int, scales: Int) -> None:
    """n floats become codes at `to`, n and `group` multiples of 32, with a bfloat16 scale for every `group`.

    A number that is infinite or none makes the scale none: what reads it is not a number either.
    """
    low, high, nibbles = spread(-LARGEST), spread(LARGEST), spread_int(np.int32(15))
    for first in range(0, n, group):
        end = min(first + group, n)
        top, odd = zero_f32(), zero_f32()
        for i in range(first, end, 16):
            v = load_f32(x + 4 * i)
            top, odd = largest(top, absolute(v)), fma(v, zero_f32(), odd)
        scale = scales + first // group * 2
        put_bf16(scale, peak(top) / LARGEST + total(odd))
        step = get_bf16(scale)
        unit = spread(step if step > np.float32(0.0) else np.float32(1.0))
        for i in range(first, end, 32):
            a = to_i32(nearest(smallest(largest(div(load_f32(x + 4 * i), unit), low), high)))
            b = to_i32(nearest(smallest(largest(div(load_f32(x + 4 * i + 64), unit), low), high)))
            both = or_i32(and_i32(a, nibbles), left(and_i32(b, nibbles), np.int32(4)))
            store_i8(to + i // 2, both)
            upper = to + n // 2 + i // 16 * UPPER
            store_upper(upper, a)
            store_upper(upper + UPPER, b)


@kernel
def store_sevens(frame: int, args: int, thread: int, threads: int) -> None:
    """k, its strides, v, its strides, k_cache, v_cache, slots, kv_heads, d, block_size, columns of a key's
    scale."""
    k, k_row, k_head, v, v_row, v_head, keys, values, slots, heads, d, block, part = words(args, 2, 15)
    scratch, items, width = scratch_of(frame, thread), rows_of(frame, args) * heads, d // 8 * 7
    for item in range(items * thread // threads, items * (thread + 1) // threads):
        token, head, lane, group = find_lane(item, slots, heads, block)
        x, y = k + token * k_row + head * k_head, v + token * v_row + head * v_head
        key, value = keys + group * (d + (d + part - 1) // part * 2), values + group * (width + 2)
        code_key(x, d, part, key, lane, scratch)
        code_sevens(y, d, d, value + width * lane, value + 16 * width + 2 * lane)


@kernel
def store_latent_sevens(frame: int, args: int, thread: int, threads: int) -> None:
    """latent, its row stride, cache, slots, columns in codes, of a scale; where the rest begins, how many
    numbers it has, where its scale is, bytes of an entry."""
    latent, row_bytes, cached, slots, n, group, rest_at, rest, scale_at, nbytes = words(args, 2, 12)
    scratch, rows = scratch_of(frame, thread), rows_of(frame, args)
    for r in range(rows * thread // threads, rows * (thread + 1) // threads):
        x, to = latent + r * row_bytes, cached + get_i64(slots + 8 * r) * nbytes
        code_sevens(x, n, group, to, to + n // 8 * 7)
        if rest > 0:
            code(x + 4 * n, rest, to + rest_at, 1, to + scale_at, scratch)
