"""Embedding lookup in tables packed as in safetensors files: integers in groups, small floats, codebooks.

The operations are those of `quant`, in float32 and in the same order: so are the bits. Kernels take the words
of `skeleton` and n; then their own.
"""

from __future__ import annotations

import numpy as np
import torch

from plait.kernels.cpu.codegen.kernel import inline
from plait.kernels.cpu.codegen.kinds import Float, Floats, Int, Ints
from plait.kernels.cpu.codegen.vec import (
    and_i32,
    bits_f32,
    bits_i32,
    get_bf16,
    get_f16,
    get_f32,
    get_i32,
    get_u8,
    interleave_high,
    interleave_low,
    left,
    load_u8,
    mul,
    or_i32,
    put_f32,
    right,
    spread,
    spread_int,
    sub_i32,
    to_f32,
    where_less,
)
from plait.kernels.cpu.embed.skeleton import by_piece, get_byte, put
from plait.kernels.cpu.runtime.frame import word
from plait.quant.fp4 import VALUES

E2M1 = np.array(VALUES, np.float32)
E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()  # by the byte
E8M0 = np.array([2.0 ** (e - 127) for e in range(255)] + [np.nan], np.float32)
LARGEST = np.float32(448.0)  # of E4M3: what would be more is none
FROM_E4M3, FROM_E2M1 = np.float32(2.0**120), np.float32(2.0**126)  # of bits put where float32 has its own


@inline
def _put(to: int, x: Floats, by: Float, scale: Float) -> None:
    put(to, mul(x, spread(by)), scale)


@inline
def _put_eights(row: Int, c: Int, stop: Int, zero: Int, by: Float, scale: Float, to: Int) -> Int:
    """Integers of a byte each; the column where it ended."""
    while c + 16 <= stop:
        _put(to + 4 * c, to_f32(sub_i32(load_u8(row + c), spread_int(np.int32(zero)))), by, scale)
        c += 16
    return c


@inline
def _put_fours(row: Int, c: Int, stop: Int, zero: Int, by: Float, scale: Float, to: Int) -> Int:
    """Integers of four bits, the low ones first, from an even column on; the column where it ended."""
    while c + 32 <= stop:
        packed, shift = load_u8(row + c // 2), spread_int(np.int32(zero))
        low = to_f32(sub_i32(and_i32(packed, spread_int(np.int32(15))), shift))
        high = to_f32(sub_i32(right(packed, np.int32(4)), shift))
        _put(to + 4 * c, interleave_low(low, high), by, scale)
        _put(to + 4 * c + 64, interleave_high(low, high), by, scale)
        c += 32
    return c


@inline
def _float(address: Int, kind: Int) -> float:
    """A number stored as half (0), bfloat16 (1) or float32 (2)."""
    return get_f16(address) if kind == 0 else get_bf16(address) if kind == 1 else get_f32(address)


@by_piece
def groups(args: int, token: int, row: int, start: int, end: int, to: int, scale: float) -> None:
    """Own words: scales, bytes of their rows, which float they are (0 half, 1 bfloat16, 2 float32); zeros or
    0, bytes of their rows; bits, group, order or 0."""
    scales, scale_bytes = word(args, 9), word(args, 10)
    float_kind, zeros, zero_bytes, bits = word(args, 11), word(args, 12), word(args, 13), word(args, 14)
    group, order, size = word(args, 15), word(args, 16), 4 if word(args, 11) == 2 else 2
    c: Int = start
    while c < end:
        g = c // group
        stop, by = min((g + 1) * group, end), _float(scales + token * scale_bytes + size * g, float_kind)
        zero = get_byte(zeros + token * zero_bytes + g) if zeros != 0 else np.int64(1) << (bits - 1)
        if order == 0 and bits == 8:
            c = _put_eights(row, c, stop, zero, by, scale, to)
        elif order == 0 and bits == 4 and c & 1 == 0:
            c = _put_fours(row, c, stop, zero, by, scale, to)
        while c < stop:
            at, shift = row + (c * bits >> 3), c * bits & 7
            code: Int = get_byte(at) >> shift
            if shift + bits > 8:
                code |= get_byte(at + 1) << (8 - shift)
            code &= (1 << bits) - 1
            column = np.int64(get_i32(order + 4 * c)) if order != 0 else c
            put_f32(to + 4 * column, np.float32(code - zero) * by * scale)
            c += 1


@inline
def _e4m3(codes: Ints) -> Floats:
    """Sixteen of them, one in each lane, as float32."""
    size = bits_f32(left(and_i32(codes, spread_int(np.int32(127))), np.int32(20)))
    size = mul(size, spread(FROM_E4M3))
    size = where_less(spread(LARGEST), size, spread(np.float32(np.nan)), size)
    sign = left(and_i32(codes, spread_int(np.int32(128))), np.int32(24))
    return bits_f32(or_i32(bits_i32(size), sign))


@by_piece
def eights(args: int, token: int, row: int, start: int, end: int, to: int, scale: float) -> None:
    """Own words: scales (float32), how many there are in a row, rows and columns of a block."""
    scales, count = word(args, 9), word(args, 10)
    tall, wide = word(args, 11), word(args, 12)
    c = start
    above = scales + 4 * (token // tall * count)
    while c < end:
        block = c // wide
        stop, by = min((block + 1) * wide, end), get_f32(above + 4 * block)
        while c + 16 <= stop:
            _put(to + 4 * c, _e4m3(load_u8(row + c)), by, scale)
            c += 16
        while c < stop:
            put_f32(to + 4 * c, E4M3[get_u8(row + c)] * by * scale)
            c += 1


@inline
def _e2m1(codes: Ints) -> Floats:
    """Sixteen of them, one in each lane, as float32."""
    size = bits_f32(left(and_i32(codes, spread_int(np.int32(7))), np.int32(22)))
    sign = left(and_i32(codes, spread_int(np.int32(8))), np.int32(28))
    return bits_f32(or_i32(bits_i32(mul(size, spread(FROM_E2M1))), sign))


@inline
def _small(scales: Int, c: Int, group: Int, factor: Float) -> Float:
    """What multiplies column c: a power of two for groups of 32, E4M3 for those of 16; then the factor."""
    byte = get_u8(scales + c // group)
    return np.float32(E8M0[byte] if group == 32 else E4M3[byte]) * factor


@by_piece
def fours(args: int, token: int, row: int, start: int, end: int, to: int, scale: float) -> None:
    """Own words: scales (a byte each), bytes of their rows, columns of a group: 32 for powers of two, 16 for
    E4M3; factors or 0, bytes between them."""
    scales, scale_bytes, group = word(args, 9), word(args, 10), word(args, 11)
    factors, factor_bytes, nibble = word(args, 12), word(args, 13), np.int32(15)
    c = start
    factor = get_f32(factors + token * factor_bytes) if factors != 0 else np.float32(1.0)
    above = scales + token * scale_bytes
    while c + 32 <= end:
        packed = load_u8(row + c // 2)
        low, high = _e2m1(and_i32(packed, spread_int(nibble))), _e2m1(right(packed, np.int32(4)))
        _put(to + 4 * c, interleave_low(low, high), _small(above, c, group, factor), scale)
        _put(to + 4 * c + 64, interleave_high(low, high), _small(above, c + 16, group, factor), scale)
        c += 32
    while c < end:
        code = get_byte(row + c // 2) >> (4 * (c & 1)) & 15
        put_f32(to + 4 * c, E2M1[code] * _small(above, c, group, factor) * scale)
        c += 1


@by_piece
def places(args: int, token: int, row: int, start: int, end: int, to: int, scale: float) -> None:
    """Own words: table, blocks' magnitudes (float32, or bytes that stand for places in a table), bytes of
    their rows, columns of a block; that table or 0, scales, bytes of their rows, bytes under a scale,
    offsets, bytes between them."""
    table, absmax, absmax_bytes = word(args, 9), word(args, 10), word(args, 11)
    block, nested, scales, scale_bytes = word(args, 12), word(args, 13), word(args, 14), word(args, 15)
    under, offsets, offset_bytes = word(args, 16), word(args, 17), word(args, 18)
    c = start
    at = absmax + token * absmax_bytes
    while c < end:
        b = c // block
        stop = min((b + 1) * block, end)
        if nested != 0:
            by = get_f32(scales + token * scale_bytes + 4 * (b // under))
            by = get_f32(nested + 4 * get_byte(at + b)) * by + get_f32(offsets + token * offset_bytes)
        else:
            by = get_f32(at + 4 * b)
        while c < stop:
            code = get_byte(row + c // 2) >> (4 - 4 * (c & 1)) & 15
            put_f32(to + 4 * c, get_f32(table + 4 * code) * by * scale)
            c += 1
