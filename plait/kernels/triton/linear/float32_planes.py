"""Products of x in float32 with weights in planes, by one kernel for any number of rows.

`--dtype float32` is there to compare results. No GPU has matrix units for it, and products over codes, scaled
afterwards (`multiply_planes`), need more registers than there are. So a program decodes 16 columns of its
outputs at a time, scales included, and multiplies them by 16 columns of its rows of x. What a thread holds
depends on no layout.

    for each unit of columns          part = 0
        for each 16 of its columns    part  += numbers [BN, 16]  x  x [16, BM]
                                      total += part

A number of the result depends on its row of x and its row of the weight alone, so `--deterministic` takes the
same kernel.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from plait.kernels.triton.dependent_launch import await_previous
from plait.kernels.triton.forms import widen
from plait.kernels.triton.linear.decode_planes import decode_field
from plait.kernels.triton.linear.many_rows import combine_number
from plait.kernels.triton.linear.plane_arguments import decode_constants, plane_strides, plane_tensors
from plait.ops.launch import launch
from plait.quant.planes import Planes

BN = 64  # outputs of a program
BM = 16  # rows of x of a program
BK = 64  # rows of planes that are summed over at a time
# Registers of a thread: left to itself, ptxas spills to have more blocks on a processor.
OPTIONS = {"num_warps": 4, "num_stages": 1, "maxnreg": 128}


@triton.jit
def _load_numbers(
    codes, high, scales, levels, table, rows, unit, field, codes_unit, high_unit, scales_row, levels_row,
    BITS: tl.constexpr, HIGH: tl.constexpr, VALUE: tl.constexpr, ZERO: tl.constexpr, SCALES: tl.constexpr,
    GROUP: tl.constexpr, BLOCK: tl.constexpr, TALL: tl.constexpr,
):  # fmt: skip
    """16 columns of some rows of planes, [rows, 16] float32, with the bits of `Weight.dequantize`.

    unit, field: numbers that a loop counts. A field is moved to where the first one is, and decoded there.
    """
    UNIT: tl.constexpr = 256 // (HIGH if HIGH else BITS)
    PARTS: tl.constexpr = BITS // HIGH if HIGH else 1
    EACH: tl.constexpr = 16 // BITS
    place = rows.to(tl.int64)[:, None] * 16 + tl.arange(0, 16)[None, :]
    word = tl.load(codes + (unit * PARTS + field // EACH).to(tl.int64) * codes_unit + place).to(tl.int32)
    at = field % EACH
    if VALUE == "e2m1" or VALUE == "e2m1 doubled":
        word = ((word >> (3 * at)) & 7) | (((word >> (12 + (at ^ 1))) & 1) << 13)
    else:
        word = word >> (BITS * at)
    more = word
    if HIGH:
        more = tl.load(high + unit.to(tl.int64) * high_unit + place).to(tl.int32) >> (HIGH * field)
    number = decode_field((word,), more, table, 0, tl.float32, BITS, HIGH, VALUE, 0)
    column = unit * UNIT + 16 * field
    first = tl.load(scales + (column // BLOCK).to(tl.int64) * scales_row + rows // TALL)
    level = first
    if SCALES != "plain" and SCALES != "pairs":
        level = tl.load(levels + (column // GROUP).to(tl.int64) * levels_row + rows)
        if SCALES == "e5m3":
            level = (level >> (8 * field)) & 255
    return combine_number(number, first, level, ZERO, SCALES)


@triton.jit
def multiply_numbers(
    x, x_there, codes, high, scales, levels, table, rows, units, n_in,
    codes_unit, high_unit, scales_row, levels_row,
    BITS: tl.constexpr, HIGH: tl.constexpr, VALUE: tl.constexpr, ZERO: tl.constexpr, SCALES: tl.constexpr,
    GROUP: tl.constexpr, BLOCK: tl.constexpr, TALL: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Rows of a weight times rows of x -> [BN, BM] float32.

    x: pointers to the first number of BM rows of x, and which of them are there; rows: [BN] row numbers;
    units: of the weight.
    """
    FIELDS: tl.constexpr = 16 // (HIGH if HIGH else BITS)
    total, none = tl.zeros([BN, BM], tl.float32), units * 0  # the interpreter counts in Python's integers
    for unit in range(units):
        part = tl.zeros([BN, BM], tl.float32)
        for field in range(FIELDS):
            number = _load_numbers(
                codes, high, scales, levels, table, rows, unit + none, field + none, codes_unit, high_unit,
                scales_row, levels_row, BITS, HIGH, VALUE, ZERO, SCALES, GROUP, BLOCK, TALL,
            )  # fmt: skip
            column = (unit * FIELDS + field) * 16 + tl.arange(0, 16)
            shown = (column < n_in)[:, None] & x_there[None, :]
            given = tl.load(x[None, :] + column[:, None], mask=shown, other=0.0)
            part = tl.dot(number, given, part, input_precision="ieee")
        total += part
    return total


@triton.jit
def float32_planes(
    x, codes, high, scales, levels, table, bias, out, m, n, n_in, units, x_row, x_head, out_row, out_head,
    codes_unit, high_unit, scales_row, levels_row,
    BITS: tl.constexpr, HIGH: tl.constexpr, VALUE: tl.constexpr, ZERO: tl.constexpr, SCALES: tl.constexpr,
    GROUP: tl.constexpr, BLOCK: tl.constexpr, TALL: tl.constexpr, BIAS: tl.constexpr, BN: tl.constexpr,
    BM: tl.constexpr,
):  # fmt: skip
    """x: [m, heads, n_in] times planes of [heads * n, n_in] -> out [m, heads, n]; bias: [n], of one head.

    Grid: blocks of rows of x, tiles of outputs, heads.
    """
    await_previous()
    tokens, rows = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BN + tl.arange(0, BN)
    head, tokens_there, there = tl.program_id(2), tokens < m, rows < n
    total = multiply_numbers(
        x + tokens.to(tl.int64) * x_row + head.to(tl.int64) * x_head, tokens_there, codes, high, scales,
        levels, table, head * n + tl.where(there, rows, 0), units, n_in, codes_unit, high_unit, scales_row,
        levels_row, BITS, HIGH, VALUE, ZERO, SCALES, GROUP, BLOCK, TALL, BN, BM,
    )  # fmt: skip
    if BIAS:
        total += tl.load(bias + rows, mask=there, other=0.0).to(tl.float32)[:, None]
    place = out + tokens.to(tl.int64)[None, :] * out_row + head.to(tl.int64) * out_head + rows[:, None]
    tl.store(place, total.to(out.dtype.element_ty), mask=there[:, None] & tokens_there[None, :])


@triton.jit
def float32_transposed(
    x, codes, high, scales, levels, table, out, m, n, n_in, x_row, x_head, out_row, out_head,
    codes_unit, high_unit, scales_row, levels_row,
    BITS: tl.constexpr, HIGH: tl.constexpr, VALUE: tl.constexpr, ZERO: tl.constexpr, SCALES: tl.constexpr,
    GROUP: tl.constexpr, BLOCK: tl.constexpr, TALL: tl.constexpr, BK: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """x: [m, heads, n], planes of [heads * n, n_in] -> out [m, heads, n_in]; rows of planes are summed over.

    Grid: blocks of rows of x, 16 columns each, heads.
    """
    await_previous()
    FIELDS: tl.constexpr = 16 // (HIGH if HIGH else BITS)
    tokens, head = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(2)
    unit, field = tl.program_id(1) // FIELDS, tl.program_id(1) % FIELDS
    tokens_there, column = tokens < m, tl.program_id(1) * 16 + tl.arange(0, 16)
    line = x + (tokens.to(tl.int64) * x_row)[:, None] + head.to(tl.int64) * x_head
    total = tl.zeros([BM, 16], tl.float32)
    for at in range(0, n, BK):
        own = at + tl.arange(0, BK)
        inside = own < n
        number = _load_numbers(
            codes, high, scales, levels, table, head * n + tl.where(inside, own, 0), unit, field, codes_unit,
            high_unit, scales_row, levels_row, BITS, HIGH, VALUE, ZERO, SCALES, GROUP, BLOCK, TALL,
        )  # fmt: skip
        given = tl.load(line + own[None, :], mask=tokens_there[:, None] & inside[None, :], other=0.0)
        total = tl.dot(given, number, total, input_precision="ieee")
    place = out + (tokens.to(tl.int64) * out_row)[:, None] + head.to(tl.int64) * out_head + column[None, :]
    tl.store(place, total.to(out.dtype.element_ty), mask=tokens_there[:, None] & (column < n_in)[None, :])


def multiply_in_float32(x: Tensor, planes: Planes, bias: Tensor | None, out: Tensor) -> None:
    """However many rows: x [m, heads, in] in the order of the columns -> out [m, heads, n], float32.

    planes: [heads * n, in]; bias: [n] or None, of one head.
    """
    (m, heads, n_in), n = x.shape, out.shape[2]
    units, bn = planes.layout.padded(n_in) // planes.layout.unit, widen(BN, n, 1024)
    launch(
        float32_planes, (-(-m // BM), -(-n // bn), heads), x, *plane_tensors(planes),
        out if bias is None else bias, out, m, n, n_in, units, *x.stride()[:2], *out.stride()[:2],
        *plane_strides(planes), BIAS=bias is not None, BN=bn, BM=BM, **OPTIONS,
        **decode_constants(planes.layout),
    )  # fmt: skip


def transpose_in_float32(x: Tensor, planes: Planes, out: Tensor) -> None:
    """However many rows: x [m, heads, n] times planes of [heads * n, in] -> out [m, heads, in], float32."""
    m, heads, n = x.shape
    n_in = planes.shape[1]
    launch(
        float32_transposed, (-(-m // BM), -(-n_in // 16), heads), x, *plane_tensors(planes), out, m, n, n_in,
        *x.stride()[:2], *out.stride()[:2], *plane_strides(planes), BK=widen(BK, n), BM=BM, **OPTIONS,
        **decode_constants(planes.layout),
    )  # fmt: skip


def is_float32(x: Tensor) -> bool:
    """Whether a product with planes is this kernel's."""
    return x.dtype == torch.float32
