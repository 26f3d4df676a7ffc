"""Embedding lookup in tables of plain numbers, or of the blocks most files have. One kernel per format.

The operations are those of `quant.gguf`, in float32 and in the same order, so the bits are the same too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from plait.kernels.cpu.codegen.kernel import Kernel, inline
from plait.kernels.cpu.codegen.kinds import Float, Floats, Int, Ints
from plait.kernels.cpu.codegen.vec import (
    add,
    add_i32,
    and_i32,
    get_bf16,
    get_f16,
    get_f32,
    get_i8,
    get_u8,
    lanes,
    left,
    load_bf16,
    load_f16,
    load_f32,
    load_i8,
    load_u8,
    mul,
    or_i32,
    power_of_two,
    put_f32,
    right,
    spread,
    spread_int,
    sub,
    to_f32,
    to_i32,
)
from plait.kernels.cpu.embed.skeleton import by_block, by_piece, put

IQ4_VALUES = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)


@inline
def _low(packed: Ints) -> Ints:
    return and_i32(packed, spread_int(np.int32(15)))


@inline
def _high(packed: Ints) -> Ints:
    return right(packed, np.int32(4))


@inline
def _field(packed: Ints, shift: Int, mask: Int) -> Ints:
    """The bits of `mask` above the lowest `shift`."""
    return and_i32(right(packed, np.int32(shift)), spread_int(np.int32(mask)))


# ---- 32 numbers under one scale ----
@inline
def _fifth_bits(block: Int, at: Int, half: Int) -> Ints:
    """16 for each of sixteen numbers that has its bit set in the mask at `at`, else 0."""
    mask = get_u8(block + at + 2 * half) + np.int32(256) * get_u8(block + at + 2 * half + 1)
    bit = to_i32(power_of_two(to_f32(lanes())))
    hit = to_f32(and_i32(spread_int(np.int32(mask)), bit))
    inverse = power_of_two(sub(spread(np.float32(4.0)), to_f32(lanes())))
    return to_i32(mul(hit, inverse))


@by_block
def q4_0(block: int, to: int, scale: float, _: int) -> None:
    """token ids, table, bytes of its rows, blocks of a row, scale, out (dense): so for all kernels here."""
    eight = spread(np.float32(8.0))
    d, packed = spread(get_f16(block)), load_u8(block + 2)
    put(to, mul(d, sub(to_f32(_low(packed)), eight)), scale)
    put(to + 64, mul(d, sub(to_f32(_high(packed)), eight)), scale)


@by_block
def q4_1(block: int, to: int, scale: float, _: int) -> None:
    """As q4_0, with a minimum."""
    d, m, packed = spread(get_f16(block)), spread(get_f16(block + 2)), load_u8(block + 4)
    put(to, add(mul(d, to_f32(_low(packed))), m), scale)
    put(to + 64, add(mul(d, to_f32(_high(packed))), m), scale)


@by_block
def q5_0(block: int, to: int, scale: float, _: int) -> None:
    """As q4_0, with a mask of fifth bits."""
    sixteen = spread(np.float32(16.0))
    d, packed = spread(get_f16(block)), load_u8(block + 6)
    q = or_i32(_low(packed), _fifth_bits(block, 2, 0))
    put(to, mul(d, sub(to_f32(q), sixteen)), scale)
    q = or_i32(_high(packed), _fifth_bits(block, 2, 1))
    put(to + 64, mul(d, sub(to_f32(q), sixteen)), scale)


@by_block
def q5_1(block: int, to: int, scale: float, _: int) -> None:
    """As q5_0, with a minimum."""
    d, m, packed = spread(get_f16(block)), spread(get_f16(block + 2)), load_u8(block + 8)
    q = or_i32(_low(packed), _fifth_bits(block, 4, 0))
    put(to, add(mul(d, to_f32(q)), m), scale)
    q = or_i32(_high(packed), _fifth_bits(block, 4, 1))
    put(to + 64, add(mul(d, to_f32(q)), m), scale)


@by_block
def q8_0(block: int, to: int, scale: float, _: int) -> None:
    """A scale and 32 signed bytes."""
    d = spread(get_f16(block))
    put(to, mul(d, to_f32(load_i8(block + 2))), scale)
    put(to + 64, mul(d, to_f32(load_i8(block + 18))), scale)


# ---- 256 numbers under scales of two levels ----
@by_block
def q2_k(block: int, to: int, scale: float, _: int) -> None:
    """16 groups of 16: scale and minimum share a byte; two-bit numbers, four fields to a byte."""
    d, dmin = get_f16(block + 80), get_f16(block + 82)
    for g in range(16):
        levels = get_u8(block + g)
        s = spread(d * np.float32(levels & 15))
        m = spread(dmin * np.float32(levels >> 4))
        # Of each run of 32 bytes the lowest fields are two groups, the next fields the two after, …
        packed = load_u8(block + 16 + g // 8 * 32 + g % 2 * 16)
        q = to_f32(_field(packed, g % 8 // 2 * 2, 3))
        put(to + 64 * g, sub(mul(s, q), m), scale)


@inline
def _q3_level(block: Int, g: Int) -> int:
    """The six-bit scale of group g: a nibble of bytes 96..103, two bits of bytes 104..107."""
    low = get_u8(block + 96 + g % 8) >> (4 * (g // 8)) & 15
    return low | (get_u8(block + 104 + g % 4) >> (2 * (g // 4)) & 3) << 4


@by_block
def q3_k(block: int, to: int, scale: float, _: int) -> None:
    """16 groups of 16; the third bits are in a mask of 32 bytes, bit g // 2 for group g; clear is minus 4."""
    d = get_f16(block + 108)
    for g in range(16):
        s = spread(d * np.float32(_q3_level(block, g) - 32))
        packed, mask = load_u8(block + 32 + g // 8 * 32 + g % 2 * 16), load_u8(block + g % 2 * 16)
        q = or_i32(_field(packed, g % 8 // 2 * 2, 3), left(_field(mask, g // 2, 1), np.int32(2)))
        put(to + 64 * g, mul(s, to_f32(add_i32(q, spread_int(np.int32(-4))))), scale)


@inline
def _k_levels(block: Int, g: Int) -> tuple[int, int]:
    """The six-bit scale and minimum of group g of 8, out of bytes 4..15 (`gguf._k_scales`)."""
    first, second = get_u8(block + 4 + g % 4), get_u8(block + 8 + g % 4)
    third = get_u8(block + 12 + g % 4)
    if g < 4:
        return first & 63, second & 63
    return (third & 15) | (first >> 6) << 4, (third >> 4) | (second >> 6) << 4


@inline
def _put_k(block: Int, g: Int, at: Int, q: Ints, out: Int, scale: Float) -> None:
    """Sixteen numbers of group g, under the scales that Q4_K and Q5_K share."""
    level, minimum = _k_levels(block, g)
    s = spread(get_f16(block) * np.float32(level))
    m = spread(get_f16(block + 2) * np.float32(minimum))
    put(out + 4 * at, sub(mul(s, to_f32(q)), m), scale)


@by_block
def q4_k(block: int, to: int, scale: float, _: int) -> None:
    """8 groups of 32; of each run of 32 bytes the low nibbles are a group, the high ones the next."""
    for half in range(8):
        run, part = half // 2, half % 2 * 16
        packed = load_u8(block + 16 + 32 * run + part)
        _put_k(block, 2 * run, 64 * run + part, _low(packed), to, scale)
        _put_k(block, 2 * run + 1, 64 * run + 32 + part, _high(packed), to, scale)


@by_block
def q5_k(block: int, to: int, scale: float, _: int) -> None:
    """As q4_k; bit g of 32 bytes of fifth bits belongs to group g."""
    for half in range(8):
        run, part = half // 2, half % 2 * 16
        packed, fifth = load_u8(block + 48 + 32 * run + part), load_u8(block + 16 + part)
        bit = left(_field(fifth, 2 * run, 1), np.int32(4))
        _put_k(block, 2 * run, 64 * run + part, or_i32(_low(packed), bit), to, scale)
        bit = left(_field(fifth, 2 * run + 1, 1), np.int32(4))
        _put_k(block, 2 * run + 1, 64 * run + 32 + part, or_i32(_high(packed), bit), to, scale)


@by_block
def q6_k(block: int, to: int, scale: float, _: int) -> None:
    """16 groups of 16 with signed bytes as scales; each half: 64 bytes of nibbles, 32 of two-bit fields."""
    d = get_f16(block + 208)
    for g in range(16):
        s = spread(d * np.float32(get_i8(block + 192 + g)))
        half, run = g // 8, g % 8 // 2  # a run is 32 numbers
        packed = load_u8(block + 64 * half + run % 2 * 32 + g % 2 * 16)
        top = _field(load_u8(block + 128 + 32 * half + g % 2 * 16), 2 * run, 3)
        q = or_i32(_field(packed, run // 2 * 4, 15), left(top, np.int32(4)))
        put(to + 64 * g, mul(s, to_f32(add_i32(q, spread_int(np.int32(-32))))), scale)


# ---- numbers out of a table of sixteen ----
@inline
def _put_iq4(packed: Int, d: Float, out: Int, scale: Float) -> None:
    """16 bytes: the numbers of their low nibbles, then those of their high ones."""
    for j in range(16):
        byte = get_u8(packed + j)
        put_f32(out + 4 * j, d * IQ4_VALUES[byte & 15] * scale)
        put_f32(out + 64 + 4 * j, d * IQ4_VALUES[byte >> 4] * scale)


@by_block
def iq4_nl(block: int, to: int, scale: float, _: int) -> None:
    """32 numbers under one scale."""
    _put_iq4(block + 2, get_f16(block), to, scale)


@by_block
def iq4_xs(block: int, to: int, scale: float, _: int) -> None:
    """8 groups of 32 with six-bit scales: nibbles at byte 4, two high bits each at byte 2."""
    d = get_f16(block)
    for g in range(8):
        low = get_u8(block + 4 + g // 2) >> (4 * (g % 2)) & 15
        level = low | (get_u8(block + 2 + g // 4) >> (2 * (g % 4)) & 3) << 4
        _put_iq4(block + 8 + 16 * g, d * np.float32(level - 32), to + 128 * g, scale)


# ---- plain numbers: whole vectors, then what is left of a row ----
def _plain(name: str, size: int, load: Callable[[int], Floats], get: Callable[[int], Float]) -> Kernel:
    """The kernel of numbers of `size` bytes each: sixteen of them by `load`, one by `get`."""

    def piece(args: int, token: int, row: int, start: int, end: int, to: int, scale: float) -> None:
        whole = start + (end - start) // 16 * 16
        for c in range(start, whole, 16):
            put(to + 4 * c, load(row + size * c), scale)
        for c in range(whole, end):
            put_f32(to + 4 * c, get(row + size * c) * scale)

    piece.__name__ = piece.__qualname__ = name
    return by_piece(piece)


float32 = _plain("float32", 4, load_f32, get_f32)
bfloat16 = _plain("bfloat16", 2, load_bf16, get_bf16)
float16 = _plain("float16", 2, load_f16, get_f16)

KERNELS: Mapping[str, Kernel] = {
    **{made.name: made for made in (float32, bfloat16, float16)},
    **{made.name.upper(): made for made in (q4_0, q4_1, q5_0, q5_1, q8_0, iq4_nl, iq4_xs)},
    **{made.name.upper(): made for made in (q2_k, q3_k, q4_k, q5_k, q6_k)},
}
"""The name of a storage -> the kernel that reads it."""
