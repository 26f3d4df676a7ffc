"""Embedding lookup in tables of plain numbers, or of GGUF blocks: an entry for each format.

The operations are those of `quant.gguf` and `quant.gguf_parts`, in float32 and in the same order, so the bits
are the same too. Where a block names rows of a grid, `grid` is its address: a byte for each number, its place
among the magnitudes.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from plait.kernels.cpu.codegen import vec
from plait.kernels.cpu.codegen.kernel import inline
from plait.kernels.cpu.codegen.kinds import Array, Float, Floats, Int, Ints
from plait.kernels.cpu.embed.skeleton import KERNELS, by_block, by_piece, get_byte, put
from plait.quant.gguf import block_type
from plait.quant.gguf_k import IQ4_VALUES
from plait.quant.gguf_parts import E2M1_TWICE

IQ2 = np.array([8, 25, 43], np.float32)
IQ3_XXS = np.array([4, 12, 20, 28, 36, 44, 52, 62], np.float32)
IQ3_S = np.array([1, 3, 5, 7, 9, 11, 13, 15], np.float32)
IQ4, E2M1 = np.array(IQ4_VALUES, np.float32), np.array(E2M1_TWICE, np.float32)
E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()  # by the byte
UE4M3 = np.abs(E4M3) / np.float32(2.0)  # halves; of a byte that is no number, 0 and the next one
UE4M3[[0x7F, 0xFF]] = 0.0, 240.0
E8M0 = np.array([2.0 ** (e - 128) for e in range(256)], np.float32)  # halves, for doubled numbers
TERNARY = np.array([1, 3, 9, 27, 81], np.int64)


@inline
def _field(packed: Ints, shift: Int, mask: Int) -> Ints:
    """The bits of `mask` above the lowest `shift`."""
    return vec.and_i32(vec.right(packed, np.int32(shift)), vec.spread_int(np.int32(mask)))


# ---- plain numbers: whole vectors, then what is left of a row ----
def _plain(name: str, size: int, load: Callable[[int], Floats], get: Callable[[int], Float]) -> None:
    """Numbers of `size` bytes each: sixteen of them by `load`, one by `get`."""

    def decode(args: int, token: int, row: int, start: int, end: int, to: int, scale: float) -> None:
        whole = start + (end - start) // 16 * 16
        for c in range(start, whole, 16):
            put(to + 4 * c, load(row + size * c), scale)
        for c in range(whole, end):
            vec.put_f32(to + 4 * c, get(row + size * c) * scale)

    KERNELS[name] = by_piece(decode, name)


_plain("float32", 4, vec.load_f32, vec.get_f32)
_plain("bfloat16", 2, vec.load_bf16, vec.get_bf16)
_plain("float16", 2, vec.load_f16, vec.get_f16)


# ---- 32 numbers under one scale ----
@inline
def _fifth_bits(block: Int, at: Int, half: Int) -> Ints:
    """16 for each of sixteen numbers that has its bit set in the mask at `at`, else 0."""
    mask = vec.get_u8(block + at + 2 * half) + np.int32(256) * vec.get_u8(block + at + 2 * half + 1)
    bit = vec.to_i32(vec.power_of_two(vec.to_f32(vec.lanes())))
    hit = vec.to_f32(vec.and_i32(vec.spread_int(np.int32(mask)), bit))
    inverse = vec.power_of_two(vec.sub(vec.spread(np.float32(4.0)), vec.to_f32(vec.lanes())))
    return vec.to_i32(vec.mul(hit, inverse))


def _nibbles(name: str, zero: float, minimum: bool, fifth: bool) -> None:
    """A scale; a minimum or what is subtracted; a mask of fifth bits; low nibbles, then high ones."""
    at, offset = 2 + 2 * minimum + 4 * fifth, np.float32(zero)

    def decode(block: int, to: int, scale: float, _: int) -> None:
        d, packed = vec.spread(vec.get_f16(block)), vec.load_u8(block + at)
        m = vec.spread(vec.get_f16(block + 2) if minimum else np.float32(-0.0))  # -0 changes no bit
        for half in range(2):
            q = _field(packed, 4 * half, 15)
            if fifth:
                q = vec.or_i32(q, _fifth_bits(block, at - 4, half))
            put(to + 64 * half, vec.add(vec.mul(d, vec.sub(vec.to_f32(q), vec.spread(offset))), m), scale)

    by_block(decode, name)


_nibbles("q4_0", 8.0, False, False)
_nibbles("q4_1", 0.0, True, False)
_nibbles("q5_0", 16.0, False, True)
_nibbles("q5_1", 0.0, True, True)


def _bytes_of(name: str, get: Callable[[int], Float], at: int) -> None:
    """A scale, and from `at` on signed bytes."""
    count = block_type(name.upper()).elements

    def decode(block: int, to: int, scale: float, _: int) -> None:
        d = vec.spread(get(block))
        for i in range(0, count, 16):
            put(to + 4 * i, vec.mul(d, vec.to_f32(vec.load_i8(block + at + i))), scale)

    by_block(decode, name)


_bytes_of("q8_0", vec.get_f16, 2)
_bytes_of("q8_1", vec.get_f16, 4)  # a sum comes first
_bytes_of("q8_k", vec.get_f32, 4)


# ---- 256 numbers under scales of two levels ----
@by_block
def q2_k(block: int, to: int, scale: float, _: int) -> None:
    """16 groups of 16: scale and minimum share a byte; two-bit numbers, four fields to a byte."""
    d, dmin = vec.get_f16(block + 80), vec.get_f16(block + 82)
    for g in range(16):
        levels = vec.get_u8(block + g)
        s = vec.spread(d * np.float32(levels & 15))
        m = vec.spread(dmin * np.float32(levels >> 4))
        # Of each run of 32 bytes the lowest fields are two groups, the next fields the two after, …
        packed = vec.load_u8(block + 16 + g // 8 * 32 + g % 2 * 16)
        q = vec.to_f32(_field(packed, g % 8 // 2 * 2, 3))
        put(to + 64 * g, vec.sub(vec.mul(s, q), m), scale)


@inline
def _q3_level(block: Int, g: Int) -> int:
    """The six-bit scale of group g: a nibble of bytes 96..103, two bits of bytes 104..107."""
    low = vec.get_u8(block + 96 + g % 8) >> (4 * (g // 8)) & 15
    return low | (vec.get_u8(block + 104 + g % 4) >> (2 * (g // 4)) & 3) << 4


@by_block
def q3_k(block: int, to: int, scale: float, _: int) -> None:
    """16 groups of 16; the third bits are in a mask of 32 bytes, bit g // 2 for group g; clear is minus 4."""
    d = vec.get_f16(block + 108)
    for g in range(16):
        s = vec.spread(d * np.float32(_q3_level(block, g) - 32))
        packed, mask = vec.load_u8(block + 32 + g // 8 * 32 + g % 2 * 16), vec.load_u8(block + g % 2 * 16)
        q = vec.or_i32(_field(packed, g % 8 // 2 * 2, 3), vec.left(_field(mask, g // 2, 1), np.int32(2)))
        put(to + 64 * g, vec.mul(s, vec.to_f32(vec.add_i32(q, vec.spread_int(np.int32(-4))))), scale)


@inline
def _k_levels(block: Int, g: Int) -> tuple[int, int]:
    """The six-bit scale and minimum of group g of 8, out of bytes 4..15 (`gguf._k_scales`)."""
    first, second = vec.get_u8(block + 4 + g % 4), vec.get_u8(block + 8 + g % 4)
    third = vec.get_u8(block + 12 + g % 4)
    if g < 4:
        return first & 63, second & 63
    return (third & 15) | (first >> 6) << 4, (third >> 4) | (second >> 6) << 4


@inline
def _put_k(block: Int, g: Int, at: Int, q: Ints, out: Int, scale: Float) -> None:
    """Sixteen numbers of group g, under the scales that Q4_K and Q5_K share."""
    level, minimum = _k_levels(block, g)
    s = vec.spread(vec.get_f16(block) * np.float32(level))
    m = vec.spread(vec.get_f16(block + 2) * np.float32(minimum))
    put(out + 4 * at, vec.sub(vec.mul(s, vec.to_f32(q)), m), scale)


def _runs(name: str, at: int) -> None:
    """8 groups of 32; of each run of 32 bytes from `at` on the low nibbles are a group, the high ones the
    next. In Q5_K bit g of 32 bytes of fifth bits belongs to group g."""

    def decode(block: int, to: int, scale: float, _: int) -> None:
        for half in range(8):
            run, part = half // 2, half % 2 * 16
            packed, fifth = vec.load_u8(block + at + 32 * run + part), vec.load_u8(block + 16 + part)
            for i in range(2):
                q = _field(packed, 4 * i, 15)
                if at > 16:
                    q = vec.or_i32(q, vec.left(_field(fifth, 2 * run + i, 1), np.int32(4)))
                _put_k(block, 2 * run + i, 64 * run + 32 * i + part, q, to, scale)

    by_block(decode, name)


_runs("q4_k", 16)
_runs("q5_k", 48)


@by_block
def q6_k(block: int, to: int, scale: float, _: int) -> None:
    """16 groups of 16 with signed bytes as scales; each half: 64 bytes of nibbles, 32 of two-bit fields."""
    d = vec.get_f16(block + 208)
    for g in range(16):
        s = vec.spread(d * np.float32(vec.get_i8(block + 192 + g)))
        half, run = g // 8, g % 8 // 2  # a run is 32 numbers
        packed = vec.load_u8(block + 64 * half + run % 2 * 32 + g % 2 * 16)
        top = _field(vec.load_u8(block + 128 + 32 * half + g % 2 * 16), 2 * run, 3)
        q = vec.or_i32(_field(packed, run // 2 * 4, 15), vec.left(top, np.int32(4)))
        put(to + 64 * g, vec.mul(s, vec.to_f32(vec.add_i32(q, vec.spread_int(np.int32(-32))))), scale)


# ---- numbers out of a table of sixteen ----
@inline
def _put_nibbles(packed: Int, count: Int, table: Array, d: Float, out: Int, scale: Float) -> None:
    """`count` bytes: the numbers of their low nibbles, then those of their high ones."""
    for j in range(count):
        byte = vec.get_u8(packed + j)
        vec.put_f32(out + 4 * j, d * table[byte & 15] * scale)
        vec.put_f32(out + 4 * (count + j), d * table[byte >> 4] * scale)


@by_block
def iq4_nl(block: int, to: int, scale: float, _: int) -> None:
    """32 numbers under one scale."""
    _put_nibbles(block + 2, 16, IQ4, vec.get_f16(block), to, scale)


@by_block
def iq4_xs(block: int, to: int, scale: float, _: int) -> None:
    """8 groups of 32 with six-bit scales: nibbles at byte 4, two high bits each at byte 2."""
    d = vec.get_f16(block)
    for g in range(8):
        low = vec.get_u8(block + 4 + g // 2) >> (4 * (g % 2)) & 15
        level = low | (vec.get_u8(block + 2 + g // 4) >> (2 * (g % 4)) & 3) << 4
        _put_nibbles(block + 8 + 16 * g, 16, IQ4, d * np.float32(level - 32), to + 128 * g, scale)


@by_block
def mxfp4(block: int, to: int, scale: float, _: int) -> None:
    """32 four-bit floats under a power of two."""
    _put_nibbles(block + 1, 16, E2M1, E8M0[vec.get_u8(block)], to, scale)


@by_block
def nvfp4(block: int, to: int, scale: float, _: int) -> None:
    """Four groups of 16 four-bit floats, each under an eight-bit float."""
    for g in range(4):
        _put_nibbles(block + 4 + 8 * g, 8, E2M1, UE4M3[vec.get_u8(block + g)], to + 64 * g, scale)


# ---- rows of a grid ----
@inline
def _short(address: Int) -> Int:
    return get_byte(address) | get_byte(address + 1) << 8


@inline
def _word(address: Int) -> Int:
    return _short(address) | _short(address + 2) << 16


@inline
def _eight(seven: Int) -> Int:
    """Seven sign bits and the eighth, with which an even number is set."""
    folded = seven ^ (seven >> 4)
    folded ^= folded >> 2
    return seven | ((folded ^ (folded >> 1)) & 1) << 7


@inline
def _nibble(address: Int, i: Int) -> Int:
    return (get_byte(address + i // 2) >> (4 * (i % 2))) & 15


@inline
def _level(unit: Float, level: Int) -> Float:
    return unit * np.float32(2 * level + 1)


@inline
def _put_signed(
    out: Int, magnitudes: Array, row: Int, count: Int, signs: Int, factor: Float, scale: Float
) -> None:
    """Numbers of one row of a grid, a bit of `signs` for each: set is minus."""
    for j in range(count):
        value = factor * magnitudes[vec.get_u8(row + j)]
        if signs >> j & 1:
            value = -value
        vec.put_f32(out + 4 * j, value * scale)


@by_block
def iq2_xxs(block: int, to: int, scale: float, grid: int) -> None:
    """8 groups of 32: four rows of the grid, then four times seven signs and a level."""
    unit = vec.get_f16(block) * np.float32(0.125)
    for k in range(32):
        packed = _word(block + 6 + k // 4 * 8)
        row = grid + 8 * get_byte(block + 2 + k // 4 * 8 + k % 4)
        signs = _eight((packed >> (7 * (k % 4))) & 127)
        _put_signed(to + 32 * k, IQ2, row, 8, signs, _level(unit, packed >> 28), scale)


@by_block
def iq2_xs(block: int, to: int, scale: float, grid: int) -> None:
    """16 groups of 16; nine bits of a row and seven signs in each two bytes."""
    unit = vec.get_f16(block) * np.float32(0.125)
    for k in range(32):
        packed, level = _short(block + 2 + 2 * k), _nibble(block + 66, k // 2)
        row, signs = grid + 8 * (packed & 511), _eight(packed >> 9)
        _put_signed(to + 32 * k, IQ2, row, 8, signs, _level(unit, level), scale)


@by_block
def iq2_s(block: int, to: int, scale: float, grid: int) -> None:
    """16 groups of 16: ten bits of a row, two of them apart; a sign for each number."""
    unit = vec.get_f16(block) * np.float32(0.125)
    for k in range(32):
        high = (get_byte(block + 66 + k // 4) >> (2 * (k % 4))) & 3
        row, level = grid + 8 * (get_byte(block + 2 + k) | high << 8), _nibble(block + 74, k // 2)
        _put_signed(to + 32 * k, IQ2, row, 8, get_byte(block + 34 + k), _level(unit, level), scale)


@by_block
def iq3_xxs(block: int, to: int, scale: float, grid: int) -> None:
    """8 groups of 32: eight rows of four; signs and level as in iq2_xxs."""
    unit = vec.get_f16(block) * np.float32(0.25)
    for k in range(64):
        packed, row = _word(block + 66 + k // 8 * 4), grid + 4 * get_byte(block + 2 + k)
        signs = _eight((packed >> (7 * (k % 8 // 2))) & 127) >> (4 * (k % 2))
        _put_signed(to + 16 * k, IQ3_XXS, row, 4, signs, _level(unit, packed >> 28), scale)


@by_block
def iq3_s(block: int, to: int, scale: float, grid: int) -> None:
    """8 groups of 32: nine bits of a row of four, one of them apart; a sign for each number."""
    unit = vec.get_f16(block)
    for k in range(64):
        high = (get_byte(block + 66 + k // 8) >> (k % 8)) & 1
        row, level = grid + 4 * (get_byte(block + 2 + k) | high << 8), _nibble(block + 106, k // 8)
        signs = get_byte(block + 74 + k // 2) >> (4 * (k % 2))
        _put_signed(to + 16 * k, IQ3_S, row, 4, signs, _level(unit, level), scale)


@inline
def _put_eighths(out: Int, row: Int, more: Int, factor: Float, scale: Float) -> None:
    """Eight times -1, 0 or 1, an eighth more or less."""
    for j in range(8):
        vec.put_f32(out + 4 * j, factor * np.float32(8 * get_byte(row + j) - 8 + more) * scale)


@by_block
def iq1_s(block: int, to: int, scale: float, grid: int) -> None:
    """8 groups of 32: eleven bits of a row, three of them apart; a level, and which way the eighth goes."""
    unit = vec.get_f16(block) * np.float32(0.125)
    for k in range(32):
        packed = _short(block + 34 + k // 4 * 2)
        row = grid + 8 * (get_byte(block + 2 + k) | ((packed >> (3 * (k % 4))) & 7) << 8)
        more = 1 - 2 * (packed >> 15)
        _put_eighths(to + 32 * k, row, more, _level(unit, packed >> 12 & 7), scale)


@by_block
def iq1_m(block: int, to: int, scale: float, grid: int) -> None:
    """16 groups of 16 as in iq1_s; the float16 is in the tops of four words of levels."""
    bits = np.int64(0)
    for k in range(4):
        bits |= (_short(block + 48 + 2 * k) >> 12) << (4 * k)
    vec.put_u8(to, np.int32(bits & 255))  # for a moment, where its numbers will be
    vec.put_u8(to + 1, np.int32(bits >> 8))
    unit = vec.get_f16(to) * np.float32(0.125)
    for k in range(32):
        level = (_short(block + 48 + k // 8 * 2) >> (3 * (k // 2 % 4))) & 7
        high = _nibble(block + 32, k)
        row = grid + 8 * (get_byte(block + k) | (high & 7) << 8)
        _put_eighths(to + 32 * k, row, 1 - 2 * (high >> 3), _level(unit, level), scale)


# ---- numbers of two bits and fewer ----
@by_block
def tq1_0(block: int, to: int, scale: float, _: int) -> None:
    """256 ternary numbers, base 3: runs of 32 and 16 bytes of five, then one of four bytes of four."""
    unit = vec.get_f16(block + 52)
    for k in range(256):
        at, digit = k % 32, k // 32
        if k >= 240:
            at, digit = 48 + k % 4, (k - 240) // 4
        elif k >= 160:
            at, digit = 32 + k % 16, (k - 160) // 16
        trit = ((get_byte(block + at) * TERNARY[digit] & 255) * 3 >> 8) - 1
        vec.put_f32(to + 4 * k, unit * np.float32(trit) * scale)


def _few_bits(name: str, at: int, unit_at: int, bits: int, apart: int) -> None:
    """Fields of one or two bits from `at` on; numbers `apart` from each other lie in one byte."""
    count, per_byte, step = block_type(name.upper()).elements, 8 // bits, 3 - bits

    def decode(block: int, to: int, scale: float, _: int) -> None:
        unit = vec.get_f16(block + unit_at)
        for k in range(count):
            byte = get_byte(block + at + k // (per_byte * apart) * apart + k % apart)
            field = byte >> (k // apart % per_byte * bits) & ((1 << bits) - 1)
            vec.put_f32(to + 4 * k, unit * np.float32(step * field - 1) * scale)

    by_block(decode, name)


_few_bits("tq2_0", 0, 64, 2, 32)  # -1 … 2
_few_bits("q2_0", 2, 0, 2, 1)  # -1 … 2
_few_bits("q1_0", 2, 0, 1, 1)  # -1 or 1
