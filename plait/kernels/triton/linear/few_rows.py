"""Linear layers of 1 to 16 rows in one launch: weights in planes, or plain, by tensor cores.

A program has BN outputs and a share of the inputs. Shares are there where outputs alone do not fill a device;
the program of a tile that is done last adds all of them, in a fixed tree, and finishes: bias, activation of
gate and up, rounding. A counter for each tile says who is last, and goes back to 0.

All of 1 to 16 rows have the same bits as any of them alone: the number of rows changes neither the tiles of a
weight nor the order of sums. Rows of x are the small side of the product, padded to 8 or 16.
"""

from __future__ import annotations

import triton
import triton.language as tl

from plait.kernels.triton.dependent_launch import await_previous, is_dependent, prefetch_rows
from plait.kernels.triton.linear.multiply_planes import add_units, multiply_planes, prefetch_planes
from plait.kernels.triton.maths import apply_gated

MOST = 16  # rows of x
BN = 64  # outputs of a program
UNITS = 4  # warps, and units of columns of a step
DENSE_UNIT = 64  # plain columns of a warp and step
PROGRAMS = 528  # four for each processor of a large device: fewer tiles share their inputs out
SHARES = 8  # at most
EARLY: tl.constexpr = tl.constexpr(2)  # steps of planes that are in the L2 cache when the kernel may begin

ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", "relu", "relu2", "sigmoid", "swiglu_oai")


@triton.jit
def rows_of(tile, n, ACT: tl.constexpr, BN: tl.constexpr):
    """Row numbers of a tile, [BN], and which are there. Of gate and up: BN / 2 of each, gate first."""
    if ACT == "":
        rows = tile * BN + tl.arange(0, BN)
        there = rows < n
    else:
        i = tl.arange(0, BN)
        place = tile * (BN // 2) + i % (BN // 2)
        there = place < n // 2
        rows = place + i // (BN // 2) * (n // 2)
    return tl.where(there, rows, 0), there


@triton.jit
def add_shares(place, SHARES: tl.constexpr, SIZE: tl.constexpr):
    """Halves of the shares are added to each other, as `add_units` does."""
    if SHARES > 1:
        total = add_shares(place, SHARES // 2, SIZE) + add_shares(
            place + SHARES // 2 * SIZE, SHARES // 2, SIZE
        )
    else:
        total = tl.load(place, cache_modifier=".cg")
    return total


@triton.jit
def write_result(
    total, rows, there, tokens, tokens_there, tile, bias, out, n, out_row,
    BIAS: tl.constexpr, ACT: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Bias, activation, and the result: total [BN, BM] -> out [rows of x, outputs]."""
    if BIAS:
        total += tl.load(bias + rows, mask=there, other=0.0).to(tl.float32)[:, None]
    if ACT == "":
        column, in_time = rows, there
    else:
        gate, up = tl.split(tl.permute(tl.reshape(total, [2, BN // 2, BM]), (1, 2, 0)))
        total = apply_gated(gate, up, ACT)
        column = tile * (BN // 2) + tl.arange(0, BN // 2)
        in_time = column < n // 2
    place = out + tokens.to(tl.int64)[None, :] * out_row + column[:, None]
    tl.store(place, total.to(out.dtype.element_ty), mask=in_time[:, None] & tokens_there[None, :])


@triton.jit
def _finish(
    total, rows, there, tokens, tokens_there, tile, share, bias, out, parts, counters, n, out_row,
    SHARES: tl.constexpr, BIAS: tl.constexpr, ACT: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Write the result of a tile, or this share of it; the last of its shares adds them all."""
    if SHARES > 1:
        cell = tl.arange(0, BN)[:, None] * BM + tl.arange(0, BM)[None, :]
        first = parts + tile.to(tl.int64) * (SHARES * BN * BM) + cell
        tl.store(first + share * (BN * BM), total)
        tl.debug_barrier()  # all of this share is written before it counts
        done = tl.atomic_add(counters + tile, 1, sem="acq_rel")
        if done == SHARES - 1:
            whole = add_shares(first, SHARES, BN * BM)
            tl.store(counters + tile, 0)
            write_result(
                whole, rows, there, tokens, tokens_there, tile, bias, out, n, out_row, BIAS, ACT, BN, BM
            )
    else:
        write_result(total, rows, there, tokens, tokens_there, tile, bias, out, n, out_row, BIAS, ACT, BN, BM)


@triton.jit
def _start_block(x, out, m, x_row, out_row, BM: tl.constexpr):
    """(x, out and m of this program's block of BM rows, its tile, its share, which is all of the inputs)."""
    block = tl.program_id(0)
    first = block.to(tl.int64) * BM
    return x + first * x_row, out + first * out_row, m - block * BM, tl.program_id(1), block * 0


@triton.jit
def few_planes(
    x, codes, high, scales, levels, table, bias, out, parts, counters,
    m, n, n_in, units, steps, x_row, out_row, codes_unit, high_unit, scales_row, levels_row,
    BITS: tl.constexpr, HIGH: tl.constexpr, VALUE: tl.constexpr, ZERO: tl.constexpr, SCALES: tl.constexpr,
    GROUP: tl.constexpr, BLOCK: tl.constexpr, TALL: tl.constexpr, APPLY: tl.constexpr, BASE: tl.constexpr,
    CODE: tl.constexpr, EVEN: tl.constexpr, SHARES: tl.constexpr, BIAS: tl.constexpr, ACT: tl.constexpr,
    UNITS: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, BLOCKS: tl.constexpr = False,
):  # fmt: skip
    """x: [m, n_in] times planes -> out: [m, n], or [m, n / 2] of gate and up with an activation.

    Grid: tiles of outputs, shares. BLOCKS: blocks of BM rows of x, tiles (`one_form`).
    """
    tile, share, tokens = tl.program_id(0), tl.program_id(1), tl.arange(0, BM)
    if BLOCKS:
        x, out, m, tile, share = _start_block(x, out, m, x_row, out_row, BM)
    rows, there = rows_of(tile, n, ACT, BN)
    tokens_there = tokens < m
    if is_dependent() and (HIGH != 1 or BM == 8):  # else registers are spilled
        prefetch_planes(
            codes, high, rows, steps * share // SHARES, units, codes_unit, high_unit, BITS, HIGH, UNITS, EARLY
        )
    await_previous()
    total = multiply_planes(
        x + tokens * x_row, tokens_there, codes, high, scales, levels, table, rows,
        steps * share // SHARES, steps * (share + 1) // SHARES, units, n_in,
        codes_unit, high_unit, scales_row, levels_row, BITS, HIGH, VALUE, ZERO, SCALES, GROUP, BLOCK, TALL,
        APPLY, BASE, CODE, EVEN, UNITS, BN, BM,
    )  # fmt: skip
    _finish(
        total, rows, there, tokens, tokens_there, tile, share, bias, out, parts, counters, n, out_row,
        SHARES, BIAS, ACT, BN, BM,
    )  # fmt: skip


@triton.jit
def multiply_dense(
    x, x_there, weight, rows, begin, end, n_in, weight_row,
    EVEN: tl.constexpr, UNIT: tl.constexpr, UNITS: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Rows of plain numbers times rows of x, over steps begin .. end, as `multiply_planes` has it."""
    column = tl.arange(0, UNITS)[:, None] * UNIT + tl.arange(0, UNIT)[None, :]
    weight_at = weight + rows.to(tl.int64)[None, :, None] * weight_row + column[:, None, :]
    x_at = x[None, None, :] + column[:, :, None]
    total = tl.zeros([UNITS, BN, BM], tl.float32)
    for step in range(begin, end):
        # 32 bits hold columns of a weight
        at = step * (UNITS * UNIT)
        if EVEN:
            numbers = tl.load(weight_at + at)
            given = tl.load(x_at + at, mask=x_there[None, None, :], other=0.0)
        else:
            inside = at + column < n_in
            numbers = tl.load(weight_at + at, mask=inside[:, None, :], other=0.0)
            given = tl.load(x_at + at, mask=x_there[None, None, :] & inside[:, :, None], other=0.0)
        total = tl.dot(numbers, given, total, input_precision="ieee")
    return add_units(total, UNITS, BN, BM)


@triton.jit
def few_dense(
    x, weight, bias, out, parts, counters, m, n, n_in, steps, x_row, out_row, weight_row,
    EVEN: tl.constexpr, SHARES: tl.constexpr, BIAS: tl.constexpr, ACT: tl.constexpr,
    UNIT: tl.constexpr, UNITS: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr,
    BLOCKS: tl.constexpr = False,
):  # fmt: skip
    """x: [m, n_in] times weight [n, n_in], plain numbers -> out as `few_planes` has it."""
    tile, share, tokens = tl.program_id(0), tl.program_id(1), tl.arange(0, BM)
    if BLOCKS:
        x, out, m, tile, share = _start_block(x, out, m, x_row, out_row, BM)
    rows, there = rows_of(tile, n, ACT, BN)
    tokens_there = tokens < m
    if is_dependent():
        # 32 bits hold columns of a weight
        first = steps * share // SHARES * (UNITS * UNIT)
        prefetch_rows(weight, rows, first, n_in, weight_row, UNITS * UNIT)
    await_previous()
    total = multiply_dense(
        x + tokens * x_row, tokens_there, weight, rows, steps * share // SHARES,
        steps * (share + 1) // SHARES, n_in, weight_row, EVEN, UNIT, UNITS, BN, BM,
    )  # fmt: skip
    _finish(
        total, rows, there, tokens, tokens_there, tile, share, bias, out, parts, counters, n, out_row,
        SHARES, BIAS, ACT, BN, BM,
    )  # fmt: skip


def shares_of(n_out: int, steps: int, rows: int) -> int:
    """How many programs share the inputs of the same outputs: a power of two, from sizes of the weight alone.

    rows: outputs of a program.
    """
    tiles, shares = -(-n_out // rows), 1
    while shares < SHARES and 2 * shares * tiles <= PROGRAMS and 4 * shares <= steps:
        shares *= 2
    return shares
