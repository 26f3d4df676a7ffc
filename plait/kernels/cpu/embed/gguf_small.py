"""Embedding lookup in tables of blocks of codes: IQ1 to IQ3, ternary, one- and two-bit, four-bit floats.

The products are those of `quant.gguf_parts`, exact in float32 up to the scale of the embedding, so the bits
are the same. Kernels take the words of `skeleton`; then, for grids, the address of the grid: a byte for
each number, its place among the magnitudes.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from plait.kernels.cpu.codegen.kernel import Kernel, inline
from plait.kernels.cpu.codegen.kinds import Array, Float, Int
from plait.kernels.cpu.codegen.vec import get_f16, get_f32, get_i8, get_u8, put_f32
from plait.kernels.cpu.embed.skeleton import by_block, get_byte

IQ2 = np.array([8, 25, 43], np.float32)
IQ3_XXS = np.array([4, 12, 20, 28, 36, 44, 52, 62], np.float32)
IQ3_S = np.array([1, 3, 5, 7, 9, 11, 13, 15], np.float32)
E2M1 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)
POWERS = np.array([2.0 ** (e - 25) for e in range(32)], np.float32)  # float16's, of whole mantissas
E8M0 = np.array([2.0 ** (e - 128) for e in range(256)], np.float32)  # halves, for doubled numbers
TERNARY = np.array([1, 3, 9, 27, 81], np.int64)


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
        value = factor * magnitudes[get_u8(row + j)]
        if signs >> j & 1:
            value = -value
        put_f32(out + 4 * j, value * scale)


@by_block
def iq2_xxs(block: int, to: int, scale: float, grid: int) -> None:
    """8 groups of 32: four rows of the grid, then four times seven signs and a level."""
    unit = get_f16(block) * np.float32(0.125)
    for k in range(32):
        packed = _word(block + 6 + k // 4 * 8)
        row = grid + 8 * get_byte(block + 2 + k // 4 * 8 + k % 4)
        signs = _eight((packed >> (7 * (k % 4))) & 127)
        _put_signed(to + 32 * k, IQ2, row, 8, signs, _level(unit, packed >> 28), scale)


@by_block
def iq2_xs(block: int, to: int, scale: float, grid: int) -> None:
    """16 groups of 16; nine bits of a row and seven signs in each two bytes."""
    unit = get_f16(block) * np.float32(0.125)
    for k in range(32):
        packed, level = _short(block + 2 + 2 * k), _nibble(block + 66, k // 2)
        row, signs = grid + 8 * (packed & 511), _eight(packed >> 9)
        _put_signed(to + 32 * k, IQ2, row, 8, signs, _level(unit, level), scale)


@by_block
def iq2_s(block: int, to: int, scale: float, grid: int) -> None:
    """16 groups of 16: ten bits of a row, two of them apart; a sign for each number."""
    unit = get_f16(block) * np.float32(0.125)
    for k in range(32):
        high = (get_byte(block + 66 + k // 4) >> (2 * (k % 4))) & 3
        row, level = grid + 8 * (get_byte(block + 2 + k) | high << 8), _nibble(block + 74, k // 2)
        _put_signed(to + 32 * k, IQ2, row, 8, get_byte(block + 34 + k), _level(unit, level), scale)


@by_block
def iq3_xxs(block: int, to: int, scale: float, grid: int) -> None:
    """8 groups of 32: eight rows of four; signs and level as in iq2_xxs."""
    unit = get_f16(block) * np.float32(0.25)
    for k in range(64):
        packed, row = _word(block + 66 + k // 8 * 4), grid + 4 * get_byte(block + 2 + k)
        signs = _eight((packed >> (7 * (k % 8 // 2))) & 127) >> (4 * (k % 2))
        _put_signed(to + 16 * k, IQ3_XXS, row, 4, signs, _level(unit, packed >> 28), scale)


@by_block
def iq3_s(block: int, to: int, scale: float, grid: int) -> None:
    """8 groups of 32: nine bits of a row of four, one of them apart; a sign for each number."""
    unit = get_f16(block)
    for k in range(64):
        high = (get_byte(block + 66 + k // 8) >> (k % 8)) & 1
        row, level = grid + 4 * (get_byte(block + 2 + k) | high << 8), _nibble(block + 106, k // 8)
        signs = get_byte(block + 74 + k // 2) >> (4 * (k % 2))
        _put_signed(to + 16 * k, IQ3_S, row, 4, signs, _level(unit, level), scale)


@inline
def _put_eighths(out: Int, row: Int, more: Int, factor: Float, scale: Float) -> None:
    """Eight times -1, 0 or 1, an eighth more or less."""
    for j in range(8):
        put_f32(out + 4 * j, factor * np.float32(8 * get_byte(row + j) - 8 + more) * scale)


@by_block
def iq1_s(block: int, to: int, scale: float, grid: int) -> None:
    """8 groups of 32: eleven bits of a row, three of them apart; a level, and which way the eighth goes."""
    unit = get_f16(block) * np.float32(0.125)
    for k in range(32):
        packed = _short(block + 34 + k // 4 * 2)
        row = grid + 8 * (get_byte(block + 2 + k) | ((packed >> (3 * (k % 4))) & 7) << 8)
        more = 1 - 2 * (packed >> 15)
        _put_eighths(to + 32 * k, row, more, _level(unit, packed >> 12 & 7), scale)


@inline
def _half_of(bits: Int) -> Float:
    """float16 of its bits."""
    exponent, mantissa = bits >> 10 & 31, bits & 1023
    value: Float = np.float32(mantissa) * POWERS[1]
    if exponent > 0:
        value = np.float32(1024 + mantissa) * POWERS[exponent]
    if exponent == 31:
        value = np.float32(np.nan) if mantissa else np.float32(np.inf)
    return -value if bits >> 15 else value


@by_block
def iq1_m(block: int, to: int, scale: float, grid: int) -> None:
    """16 groups of 16 as in iq1_s; the float16 is in the tops of four words of levels."""
    bits = np.int64(0)
    for k in range(4):
        bits |= (_short(block + 48 + 2 * k) >> 12) << (4 * k)
    unit = _half_of(bits) * np.float32(0.125)
    for k in range(32):
        level = (_short(block + 48 + k // 8 * 2) >> (3 * (k // 2 % 4))) & 7
        high = _nibble(block + 32, k)
        row = grid + 8 * (get_byte(block + k) | (high & 7) << 8)
        _put_eighths(to + 32 * k, row, 1 - 2 * (high >> 3), _level(unit, level), scale)


@by_block
def tq1_0(block: int, to: int, scale: float, _: int) -> None:
    """256 ternary numbers, base 3: runs of 32 and 16 bytes of five, then one of four bytes of four."""
    unit = get_f16(block + 52)
    for k in range(256):
        at, digit = k % 32, k // 32
        if k >= 240:
            at, digit = 48 + k % 4, (k - 240) // 4
        elif k >= 160:
            at, digit = 32 + k % 16, (k - 160) // 16
        trit = ((get_byte(block + at) * TERNARY[digit] & 255) * 3 >> 8) - 1
        put_f32(to + 4 * k, unit * np.float32(trit) * scale)


@by_block
def tq2_0(block: int, to: int, scale: float, _: int) -> None:
    """256 numbers -1 … 2: four two-bit fields to a byte in runs of 32."""
    unit = get_f16(block + 64)
    for k in range(256):
        field = (get_byte(block + k // 128 * 32 + k % 32) >> (k % 128 // 32 * 2)) & 3
        put_f32(to + 4 * k, unit * np.float32(field - 1) * scale)


@by_block
def q1_0(block: int, to: int, scale: float, _: int) -> None:
    """128 bits: d or -d."""
    unit = get_f16(block)
    for k in range(128):
        put_f32(to + 4 * k, unit * np.float32(2 * (get_byte(block + 2 + k // 8) >> (k % 8) & 1) - 1) * scale)


@by_block
def q2_0(block: int, to: int, scale: float, _: int) -> None:
    """64 numbers -1 … 2, neighbours in one byte."""
    unit = get_f16(block)
    for k in range(64):
        field = (get_byte(block + 2 + k // 4) >> (2 * (k % 4))) & 3
        put_f32(to + 4 * k, unit * np.float32(field - 1) * scale)


@by_block
def mxfp4(block: int, to: int, scale: float, _: int) -> None:
    """32 four-bit floats under a power of two."""
    unit = E8M0[get_u8(block)]
    for k in range(32):
        code = (get_byte(block + 1 + k % 16) >> (k // 16 * 4)) & 15
        put_f32(to + 4 * k, unit * E2M1[code] * scale)


@inline
def _half_ue4m3(byte: Int) -> Float:
    """Half of an unsigned E4M3 number; what is none is 0."""
    exponent, mantissa = byte >> 3 & 15, byte & 7
    value: Float = np.float32(mantissa) * POWERS[15]  # 2 ** -10
    if exponent > 0:
        value = np.float32(8 + mantissa) * np.float32(POWERS[14 + exponent])
    return np.float32(0.0) if byte == 0x7F else value


@by_block
def nvfp4(block: int, to: int, scale: float, _: int) -> None:
    """Four groups of 16 four-bit floats, each under an eight-bit float."""
    for k in range(64):
        code = (get_byte(block + 4 + k // 16 * 8 + k % 8) >> (k % 16 // 8 * 4)) & 15
        put_f32(to + 4 * k, _half_ue4m3(get_byte(block + k // 16)) * E2M1[code] * scale)


@by_block
def q8_1(block: int, to: int, scale: float, _: int) -> None:
    """A float16 scale, a sum, 32 signed bytes."""
    for k in range(32):
        put_f32(to + 4 * k, get_f16(block) * np.float32(get_i8(block + 4 + k)) * scale)


@by_block
def q8_k(block: int, to: int, scale: float, _: int) -> None:
    """A float32 scale, 256 signed bytes, sums."""
    for k in range(256):
        put_f32(to + 4 * k, get_f32(block) * np.float32(get_i8(block + 4 + k)) * scale)


KERNELS: Mapping[str, Kernel] = {
    **{made.name.upper(): made for made in (iq1_s, iq1_m, iq2_xxs, iq2_xs, iq2_s, iq3_xxs, iq3_s)},
    **{made.name.upper(): made for made in (tq1_0, tq2_0, q1_0, q2_0, mxfp4, nvfp4, q8_1, q8_k)},
}
"""The name of a block format -> the kernel that reads it."""
