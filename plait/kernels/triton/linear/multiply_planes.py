"""Products of few rows with weights in planes: the loop that kernels over quantized weights have in common.

Each warp takes a unit of columns of its own, the same rows as the others, in matrix instructions of 16 rows x
16 columns by 8 rows of x. Codes are multiplied as they are, and sums of a group by its scale, in float32:
neither scales nor numbers are rounded. An offset is multiplied by the sum of x over the group, which a
product with ones gives where it is needed. What all codes have too much is taken away by a product with that
constant: it is the same for all rows of the weight, so sums begin with it, at no cost for each weight. Scales
of 16 columns of E2M1 (NVFP4) are multiplied into the numbers, because bfloat16 and float16 hold the product
exactly. Units of a step are added at the end, in a fixed tree.

    step s, UNITS warps        unit s UNITS + w of warp w
    [UNITS, BN, 16] codes  x  [UNITS, 16, BM] of x  ->  [UNITS, BN, BM] sums of a group, times [UNITS, BN, 1]

So a row's bits depend neither on other rows of x nor on BN and BM: one instruction serves 1 row and 16.
"""

from __future__ import annotations

import triton
import triton.language as tl

from plait.kernels.triton.dependent_launch import prefetch
from plait.kernels.triton.linear.decode_planes import (
    decode_field,
    decode_scaled,
    decode_unit,
    hold,
    lanes_of_level,
    load_unit,
    number_of_level,
    scale_of,
)


@triton.jit
def add_units(total, UNITS: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr):
    """[UNITS, BN, BM] -> [BN, BM]: halves are added to each other until one is left, a power of two."""
    if UNITS > 1:
        halves = tl.permute(tl.reshape(total, [2, UNITS // 2, BN, BM]), (1, 2, 3, 0))
        low, high = tl.split(halves)
        whole = add_units(low + high, UNITS // 2, BN, BM)
    else:
        whole = tl.reshape(total, [BN, BM])
    return whole


@triton.jit
def entry_at(step, own, column: tl.constexpr, SIZE: tl.constexpr, UNIT: tl.constexpr, UNITS: tl.constexpr):
    """Which entry of scales, of SIZE columns each, a column of each unit has: (of the step, of the unit).

    A part of the step alone is a scalar, which costs no instruction of a thread.
    """
    STEP: tl.constexpr = UNIT * UNITS
    if STEP % SIZE == 0:
        # 32 bits hold entries of a row
        of_step, of_unit = step * (STEP // SIZE), (own * UNIT + column) // SIZE
    elif SIZE % STEP == 0:
        of_step, of_unit = step // (SIZE // STEP), own * 0
    else:
        of_step, of_unit = step * 0, (step * STEP + own * UNIT + column) // SIZE
    return of_step, of_unit


@triton.jit
def _decode_inside(
    words, levels, unit, units, rows, levels_row, CODE: tl.constexpr, DTYPE: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    """The four fields of some units of E2M1 times their levels of E5M3 and 2^-7: DTYPE holds that exactly."""
    last = unit if EVEN else tl.minimum(unit, units - 1)
    # 32 bits hold the levels of a weight
    word = tl.load(levels + rows[None, :, None] + last[:, None, None] * levels_row)
    one, two, three, four = word & 255, (word >> 8) & 255, (word >> 16) & 255, (word >> 24) & 255
    if CODE != "":
        numbers = decode_scaled(
            words,
            lanes_of_level(one, DTYPE),
            lanes_of_level(two, DTYPE),
            lanes_of_level(three, DTYPE),
            lanes_of_level(four, DTYPE),
            CODE,
            DTYPE,
        )
    else:
        numbers = (
            _field_inside(words, one, 0, DTYPE),
            _field_inside(words, two, 1, DTYPE),
            _field_inside(words, three, 2, DTYPE),
            _field_inside(words, four, 3, DTYPE),
        )
    return numbers


@triton.jit
def _field_inside(words, level, AT: tl.constexpr, DTYPE: tl.constexpr):
    number = decode_field(words, words[0], words[0], AT, tl.float32, 4, 0, "e2m1", 0)
    return (number * (number_of_level(level) * 0.0078125)).to(DTYPE)


@triton.jit
def prefetch_planes(
    codes, high, rows, step, units, codes_unit, high_unit,
    BITS: tl.constexpr, HIGH: tl.constexpr, UNITS: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """Ask for the codes of COUNT steps from `step` on, with the arguments of `multiply_planes`.

    A row of a unit is one sector of a plane.
    """
    PARTS: tl.constexpr = BITS // HIGH if HIGH else 1
    # 32 bits hold units of a row
    unit = tl.minimum(step * UNITS + tl.arange(0, COUNT * UNITS), units - 1).to(tl.int64)[:, None]
    row = rows.to(tl.int64)[None, :] * 16
    for part in tl.static_range(PARTS):
        prefetch(codes + (unit * PARTS + part) * codes_unit + row)
    if HIGH:
        prefetch(high + unit * high_unit + row)


@triton.jit
def multiply_planes(
    x, x_there, codes, high, scales, levels, table, rows, begin, end, units, n_in,
    codes_unit, high_unit, scales_row, levels_row,
    BITS: tl.constexpr, HIGH: tl.constexpr, VALUE: tl.constexpr, ZERO: tl.constexpr, SCALES: tl.constexpr,
    GROUP: tl.constexpr, BLOCK: tl.constexpr, TALL: tl.constexpr, APPLY: tl.constexpr, BASE: tl.constexpr,
    CODE: tl.constexpr, EVEN: tl.constexpr, UNITS: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Rows of a weight times rows of x, over steps begin .. end of UNITS units -> [BN, BM] float32.

    x: pointers to the first number of BM rows of x, and which of them are there; rows: [BN] row numbers;
    units: of the whole weight; APPLY: columns that share a scale, at most a unit. EVEN: `units` are whole
    steps, and n_in are whole units.
    """
    UNIT: tl.constexpr = 256 // (HIGH if HIGH else BITS)
    PARTS: tl.constexpr = BITS // HIGH if HIGH else 1
    OFFSET: tl.constexpr = SCALES == "zeros" or SCALES == "pairs" or SCALES == "mins" or SCALES == "nibbles"
    AHEAD: tl.constexpr = BASE + ZERO != 0 and not OFFSET  # sums begin with the correction
    INSIDE: tl.constexpr = SCALES == "e5m3"  # levels are multiplied into the numbers, which is exact
    DTYPE: tl.constexpr = x.dtype.element_ty
    lane, own = tl.arange(0, 16), tl.arange(0, UNITS)
    row = (rows.to(tl.int64) * 16)[None, :, None] + lane[None, None, :]
    mine = own.to(tl.int64)[:, None, None]
    codes_at, high_at = codes + mine * (PARTS * codes_unit) + row, high + mine * high_unit + row
    x_at = x[None, None, :] + (own * UNIT)[:, None, None] + lane[None, :, None]
    scales_at, levels_at = scales + (rows // TALL)[None, :], levels + rows[None, :]
    constant = tl.full([UNITS, BN, 16], 1.0 if OFFSET else -(BASE + ZERO), DTYPE)
    total = tl.zeros([UNITS, BN, BM], tl.float32)
    for step in range(begin, end):
        # 32 bits hold units of a row
        unit = step * UNITS
        if EVEN:
            words, more = load_unit(
                codes_at + unit.to(tl.int64) * (PARTS * codes_unit), high_at + unit.to(tl.int64) * high_unit,
                codes_unit, BITS, HIGH,
            )  # fmt: skip
        else:
            # 32 bits hold units of a row. Behind the last one x is zero.
            last = tl.minimum(unit + own, units - 1).to(tl.int64)[:, None, None]
            words, more = load_unit(
                codes + last * (PARTS * codes_unit) + row,
                high + last * high_unit + row,
                codes_unit,
                BITS,
                HIGH,
            )
        if INSIDE:
            numbers = _decode_inside(words, levels, unit + own, units, rows, levels_row, CODE, DTYPE, EVEN)
        elif CODE != "":
            numbers = decode_unit(words, more, CODE, DTYPE, BITS, HIGH)
        part = total if INSIDE else tl.zeros([UNITS, BN, BM], tl.float32)
        for group in tl.static_range(UNIT // APPLY):
            beside = tl.zeros([UNITS, BN, BM], tl.float32)
            given = ()
            for field in tl.static_range(group * APPLY // 16, (group + 1) * APPLY // 16):
                if EVEN:
                    given_there = x_there[None, None, :]
                else:
                    column = (unit + own)[:, None, None] * UNIT + 16 * field + lane[None, :, None]
                    given_there = x_there[None, None, :] & (column < n_in)
                # 32 bits hold columns of a weight
                found = tl.load(x_at + (unit * UNIT + 16 * field), mask=given_there, other=0.0)
                given += (found,)  # type: ignore[assignment]
                if AHEAD:
                    beside = tl.dot(constant, given[field % (APPLY // 16)], beside, input_precision="ieee")
            if AHEAD:
                part = beside  # the same for all rows: sums begin with it
            for field in tl.static_range(group * APPLY // 16, (group + 1) * APPLY // 16):
                if CODE != "" or INSIDE:
                    number = numbers[field]
                else:
                    number = decode_field(words, more, table, field, DTYPE, BITS, HIGH, VALUE, BASE)
                part = tl.dot(number, given[field % (APPLY // 16)], part, input_precision="ieee")
                if OFFSET:
                    beside = tl.dot(constant, given[field % (APPLY // 16)], beside, input_precision="ieee")
            if not INSIDE:
                of_step, of_unit = entry_at(step, own, group * APPLY, BLOCK, UNIT, UNITS)
                if not EVEN:
                    of_unit = tl.minimum(of_unit, (units * UNIT - 1) // BLOCK - of_step)
                # 32 bits hold the scales of a weight
                first = tl.load(scales_at + of_unit[:, None] * scales_row + of_step * scales_row)
                level = first
                if SCALES != "plain" and SCALES != "pairs":
                    of_step, of_unit = entry_at(step, own, group * APPLY, GROUP, UNIT, UNITS)
                    if not EVEN:
                        of_unit = tl.minimum(of_unit, (units * UNIT - 1) // GROUP - of_step)
                    # 32 bits hold the levels of a weight
                    level = tl.load(levels_at + of_unit[:, None] * levels_row + of_step * levels_row)
                scale, offset = scale_of(first, level, SCALES)
                if SCALES != "pairs":
                    scale = hold(scale, CODE)
                    if OFFSET:
                        offset = hold(offset, CODE)
                total += part * scale[:, :, None]
                if OFFSET:
                    offset = offset - (BASE + ZERO) * scale
                    total += beside * offset[:, :, None]
                if not AHEAD and not INSIDE:
                    part = tl.zeros([UNITS, BN, BM], tl.float32)
        if INSIDE:
            total = part
    whole = add_units(total, UNITS, BN, BM)
    if INSIDE:
        whole *= (tl.load(scales + rows).to(tl.float32) * 128.0)[:, None]
    return whole
