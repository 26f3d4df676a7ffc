"""Linear layers over planes for more than 16 rows: by tiles that are decoded on the way, or decoded once.

Up to `MOST` rows a program decodes a tile of the weight to the dtype of x, rounded once as
`Weight.dequantize` does, and multiplies it by 64 rows. Inputs are cut into shares at fixed places, which are
added in order: by the program that is done last where few rows leave a device idle, by one program for all
where there are many. Both give the same bits, so a row's result depends on no other row of 17 to `MOST`.

With more rows decoding is paid once: a kernel writes the numbers of some outputs to scratch memory, and torch
multiplies them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from plait.kernels.triton.dependent_launch import await_previous
from plait.kernels.triton.linear.decode_planes import (
    decode_field,
    decode_unit,
    load_level,
    load_unit,
    scale_of,
)

MOST = 512  # rows of x
SPLIT = 128  # rows of x up to which shares of the inputs are programs of their own
BN = 64  # outputs of a program
BM = 64  # rows of x of a program
SCRATCH = 1 << 25  # numbers that are decoded at a time: 64 MiB
ROWS = 64  # outputs that a program decodes to scratch memory


@triton.jit
def _scales_at(
    scales, levels, rows, unit, last, scales_row, levels_row, AT: tl.constexpr,
    SCALES: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, TALL: tl.constexpr,
    UNIT: tl.constexpr, BASE: tl.constexpr, ZERO: tl.constexpr,
):  # fmt: skip
    """(scale, offset) of field AT of some units, [BN, UNITS] float32; the offset takes BASE and ZERO away."""
    column = tl.minimum(unit, last)[None, :] * UNIT + 16 * AT
    first = tl.load(scales + (column // BLOCK).to(tl.int64) * scales_row + (rows // TALL)[:, None])
    level = first
    if SCALES != "plain" and SCALES != "pairs":
        level = load_level(levels + (column // GROUP).to(tl.int64) * levels_row + rows[:, None], AT, SCALES)
    scale, offset = scale_of(first, level, SCALES)
    return scale, offset - (BASE + ZERO) * scale


@triton.jit
def _multiply_share(
    x, x_there, codes, high, scales, levels, table, rows, begin, end, units, n_in,
    codes_unit, high_unit, scales_row, levels_row,
    BITS: tl.constexpr, HIGH: tl.constexpr, VALUE: tl.constexpr, ZERO: tl.constexpr, SCALES: tl.constexpr,
    GROUP: tl.constexpr, BLOCK: tl.constexpr, TALL: tl.constexpr, APPLY: tl.constexpr, BASE: tl.constexpr,
    CODE: tl.constexpr, EVEN: tl.constexpr, UNITS: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Steps begin .. end of UNITS units: [BN, BM] float32. Arguments are those of `multiply_planes`."""
    UNIT: tl.constexpr = 256 // (HIGH if HIGH else BITS)
    PARTS: tl.constexpr = BITS // HIGH if HIGH else 1
    DTYPE: tl.constexpr = x.dtype.element_ty
    h, own = tl.arange(0, UNITS * 16), tl.arange(0, UNITS)
    row, column_of = rows.to(tl.int64)[:, None] * 16 + (h % 16)[None, :], h // 16 * UNIT + h % 16
    total = tl.zeros([BN, BM], tl.float32)
    for step in range(begin, end):
        unit, of_lane = step * UNITS + own, step * UNITS + h // 16
        if not EVEN:
            of_lane = tl.minimum(of_lane, units - 1)
        of_lane = of_lane.to(tl.int64)[None, :]
        words, more = load_unit(
            codes + of_lane * (PARTS * codes_unit) + row,
            high + of_lane * high_unit + row,
            codes_unit,
            BITS,
            HIGH,
        )
        if CODE != "":
            numbers = decode_unit(words, more, CODE, DTYPE, BITS, HIGH)
        for field in tl.static_range(UNIT // 16):
            if (16 * field) % APPLY == 0:
                scale, offset = _scales_at(
                    scales, levels, rows, unit, units - 1, scales_row, levels_row, field,
                    SCALES, GROUP, BLOCK, TALL, UNIT, BASE, ZERO,
                )  # fmt: skip
                scale = tl.reshape(tl.broadcast_to(scale[:, :, None], (BN, UNITS, 16)), (BN, UNITS * 16))
                offset = tl.reshape(tl.broadcast_to(offset[:, :, None], (BN, UNITS, 16)), (BN, UNITS * 16))
            if CODE != "":
                number = numbers[field]
            else:
                number = decode_field(words, more, table, field, DTYPE, BITS, HIGH, VALUE, BASE)
            number = (number.to(tl.float32) * scale + offset).to(DTYPE)
            # 32 bits hold columns of a weight
            column = step * (UNITS * UNIT) + 16 * field + column_of[:, None]
            given_there = x_there[None, :] if EVEN else x_there[None, :] & (column < n_in)
            given = tl.load(x[None, :] + column, mask=given_there, other=0.0)
            total = tl.dot(number, given, total, input_precision="ieee")
    return total


@triton.jit
def many_planes(
    x, codes, high, scales, levels, table, bias, out, parts, counters,
    m, n, n_in, units, steps, x_row, out_row, codes_unit, high_unit, scales_row, levels_row,
    BITS: tl.constexpr, HIGH: tl.constexpr, VALUE: tl.constexpr, ZERO: tl.constexpr, SCALES: tl.constexpr,
    GROUP: tl.constexpr, BLOCK: tl.constexpr, TALL: tl.constexpr, APPLY: tl.constexpr, BASE: tl.constexpr,
    CODE: tl.constexpr, EVEN: tl.constexpr, SHARES: tl.constexpr, IS_SPLIT: tl.constexpr, BIAS: tl.constexpr,
    UNITS: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """x: [m, n_in] times planes -> out: [m, n]. Grid: tiles of rows of x, of outputs, shares."""
    await_previous()
    block, tile, share = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    tokens, rows = block * BM + tl.arange(0, BM), tile * BN + tl.arange(0, BN)
    tokens_there, there = tokens < m, rows < n
    safe = tl.where(there, rows, 0)
    x_at = x + tokens.to(tl.int64) * x_row
    place = out + tokens.to(tl.int64)[None, :] * out_row + rows[:, None]
    shown = there[:, None] & tokens_there[None, :]
    added = tl.zeros([BN], tl.float32)
    if BIAS:
        added = tl.load(bias + rows, mask=there, other=0.0).to(tl.float32)
    if IS_SPLIT and SHARES > 1:
        total = _multiply_share(
            x_at, tokens_there, codes, high, scales, levels, table, safe, steps * share // SHARES,
            steps * (share + 1) // SHARES, units, n_in, codes_unit, high_unit, scales_row, levels_row, BITS,
            HIGH, VALUE, ZERO, SCALES, GROUP, BLOCK, TALL, APPLY, BASE, CODE, EVEN, UNITS, BN, BM,
        )  # fmt: skip
        cell = tl.arange(0, BN)[:, None] * BM + tl.arange(0, BM)[None, :]
        number = block * tl.num_programs(1) + tile  # 32 bits hold the tiles of SPLIT rows
        first = parts + number.to(tl.int64) * (SHARES * BN * BM) + cell
        tl.store(first + share * (BN * BM), total)
        tl.debug_barrier()  # all of this share is written before it counts
        if tl.atomic_add(counters + number, 1, sem="acq_rel") == SHARES - 1:
            total = tl.load(first, cache_modifier=".cg")
            for i in tl.static_range(1, SHARES):
                total += tl.load(first + i * (BN * BM), cache_modifier=".cg")
            tl.store(counters + number, 0)
            tl.store(place, (total + added[:, None]).to(out.dtype.element_ty), mask=shown)
    else:
        total = tl.zeros([BN, BM], tl.float32)
        for i in range(SHARES):
            total += _multiply_share(
                x_at, tokens_there, codes, high, scales, levels, table, safe, steps * i // SHARES,
                steps * (i + 1) // SHARES, units, n_in, codes_unit, high_unit, scales_row, levels_row, BITS,
                HIGH, VALUE, ZERO, SCALES, GROUP, BLOCK, TALL, APPLY, BASE, CODE, EVEN, UNITS, BN, BM,
            )  # fmt: skip
        tl.store(place, (total + added[:, None]).to(out.dtype.element_ty), mask=shown)


@triton.jit
def write_numbers(
    codes, high, scales, levels, table, out, n, n_in, units, out_row,
    codes_unit, high_unit, scales_row, levels_row,
    BITS: tl.constexpr, HIGH: tl.constexpr, VALUE: tl.constexpr, ZERO: tl.constexpr, SCALES: tl.constexpr,
    GROUP: tl.constexpr, BLOCK: tl.constexpr, TALL: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """A unit of BN rows of planes -> numbers, out [n, n_in], with the bits of `Weight.dequantize`."""
    await_previous()
    UNIT: tl.constexpr = 256 // (HIGH if HIGH else BITS)
    PARTS: tl.constexpr = BITS // HIGH if HIGH else 1
    rows, lane, unit = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, 16), tl.program_id(1)
    there = rows < n
    safe = tl.where(there, rows, 0)
    row = safe.to(tl.int64)[:, None] * 16 + lane[None, :]
    words, more = load_unit(
        codes + unit.to(tl.int64) * (PARTS * codes_unit) + row, high + unit.to(tl.int64) * high_unit + row,
        codes_unit, BITS, HIGH,
    )  # fmt: skip
    for field in tl.static_range(UNIT // 16):
        number = decode_field(words, more, table, field, tl.float32, BITS, HIGH, VALUE, 0)
        column = unit * UNIT + 16 * field
        first = tl.load(scales + (column // BLOCK).to(tl.int64) * scales_row + safe // TALL)
        level = first
        if SCALES != "plain" and SCALES != "pairs":
            level = load_level(levels + (column // GROUP).to(tl.int64) * levels_row + safe, field, SCALES)
        number = combine_number(number, first, level, ZERO, SCALES)
        place = out + rows.to(tl.int64)[:, None] * out_row + (column + lane)[None, :]
        shown = there[:, None] & (column + lane < n_in)[None, :]
        tl.store(place, number.to(out.dtype.element_ty), mask=shown)


@triton.jit
def combine_number(number, first, level, ZERO: tl.constexpr, SCALES: tl.constexpr):
    """Codes [n, 16] and their row's scale, [n] -> the number that is stored, float32."""
    scale, offset = scale_of(first, level, SCALES)
    if SCALES == "zeros":  # as its own formula: one rounding less
        number = (number - ZERO - level.to(tl.float32)[:, None]) * scale[:, None]
    elif SCALES == "plain" or SCALES == "levels" or SCALES == "e5m3":
        number = (number - ZERO) * scale[:, None]
    else:
        number = number * scale[:, None] + offset[:, None]
    return number
