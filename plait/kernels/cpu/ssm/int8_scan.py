"""The Mamba2 scan over states in int8, which are rounded after every token (`plait.ops.state_rounding`).

a row of a state   codes of N columns | a bfloat16 scale for every 64 of them
a token            row -> float32 -> its sums for y, the new numbers -> largest -> scale -> codes

A scale is of all columns of its group, so a row's numbers wait in scratch memory until the largest is known.
Tokens pass one by one, in prompts and replies alike: that is the only order of rounding.
"""

from __future__ import annotations

import numpy as np
import torch
from llvmlite import ir
from torch import Tensor

from plait.errors import ShapeMismatch
from plait.kernels.cpu.codegen.kernel import inline, kernel
from plait.kernels.cpu.codegen.kinds import Floats, Int
from plait.kernels.cpu.codegen.maths import exp
from plait.kernels.cpu.codegen.vec import (
    VF,
    _call,
    _define,
    absolute,
    div,
    fma,
    get_bf16,
    get_f32,
    largest,
    load_f32,
    load_i8,
    mul,
    peak,
    put_bf16,
    put_f32,
    right,
    smallest,
    spread,
    store_f32,
    store_i8,
    to_f32,
    to_i32,
    total,
    vf32,
    words,
    zero_f32,
)
from plait.kernels.cpu.runtime.executor import Executor
from plait.kernels.cpu.runtime.frame import scratch_of, take_sequence
from plait.kernels.cpu.runtime.row_checks import Sequences, TensorRows, dense, float32_rows
from plait.kernels.cpu.ssm.rounding import check_scan, column_thresholds, seed_at
from plait.ops.registry import OpFacts
from plait.ops.ssm import mamba2_scan
from plait.ops.state_rounding import STATE_GROUP, row_nbytes

ROWS = 64  # of a head's state that one thread takes at a time
GROUP = STATE_GROUP


def _floor(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    return _call(b, "llvm.floor.v16f32", vf32, x)


downward = _define("downward", VF, (VF,), _floor)


@inline
def _round_group(h: Int, end: Int, codes: Int, scale: Int, seed: Int, row: Int, column: Int) -> None:
    """The float32 at h, up to `end` columns from `column` on, become codes and a scale."""
    top, odd = zero_f32(), zero_f32()
    for i in range(column, end, 16):
        v = load_f32(h + 4 * i)
        top, odd = largest(top, absolute(v)), fma(v, zero_f32(), odd)
    # Above the largest, whichever way it is rounded, so that no code is cut off: that would be a decay.
    put_bf16(scale, peak(top) / np.float32(127.0) * np.float32(1.00390625) + total(odd))
    step = get_bf16(scale)
    unit = spread(step if step > np.float32(0.0) else np.float32(1.0))
    low, high = spread(np.float32(-127.0)), spread(np.float32(127.0))
    for i in range(column, end, 16):
        draw = to_f32(right(column_thresholds(seed, row, i), np.int32(8)))
        v = downward(fma(draw, spread(np.float32(2.0**-24)), div(load_f32(h + 4 * i), unit)))
        store_i8(codes + i, to_i32(smallest(largest(v, low), high)))


@inline
def _move_row(
    state: Int, n: Int, decay: Floats, v: Floats, b: Int, c: Int, h: Int, seed: Int, row: Int, begins: Int
) -> float:
    """One token of a row of a state: the row moves on; what it adds to y. h: float32 scratch."""
    y = zero_f32()
    for column in range(0, n, GROUP):
        end, scale = min(column + GROUP, n), state + n + column // GROUP * 2
        old = spread(np.float32(0.0) if begins else get_bf16(scale))
        for i in range(column, end, 16):
            kept = zero_f32() if begins else mul(to_f32(load_i8(state + i)), old)
            s = fma(decay, kept, mul(v, load_f32(b + 4 * i)))
            store_f32(h + 4 * i, s)
            y = fma(s, load_f32(c + 4 * i), y)
        _round_group(h, end, state, scale, seed, row, column)
    return total(y)


@kernel
def mamba2_codes(frame: int, args: int, thread: int, threads: int) -> None:
    """heads, P, heads of a group, N, bytes of a row; x, its strides; dt, its row stride; A, D or 0; B, its
    strides; C, its strides; state, its slot stride; slots, query_start, has_history; out (dense);
    positions."""
    heads, dim, ratio, n, row_bytes, x, x_row, x_head, dt, dt_bytes, a, skip = words(args, 2, 14)
    b, b_row, b_head, c, c_row, c_head, state, slot_bytes = words(args, 14, 22)
    slots, starts, history, out, positions = words(args, 22, 27)
    parts, h = (dim + ROWS - 1) // ROWS, scratch_of(frame, thread)
    while True:
        i, slot, past, begin, tokens = take_sequence(frame, args, heads * parts, (slots, starts, history))
        if i < 0:
            return
        head, first = i // parts, i % parts * ROWS
        last = min(first + ROWS, np.int64(dim))
        own, group = state + slot * slot_bytes + head * dim * row_bytes, head // ratio
        for t in range(begin, begin + tokens):
            step, seed = get_f32(dt + t * dt_bytes + 4 * head), np.int64(seed_at(positions, t))
            decay, begins = exp(spread(step * get_f32(a + 4 * head))), t == begin and not past
            at_b, at_c = b + t * b_row + group * b_head, c + t * c_row + group * c_head
            for p in range(first, last):
                u, row = get_f32(x + t * x_row + head * x_head + 4 * p), head * dim + p
                at = own + p * row_bytes
                y = _move_row(at, n, decay, spread(u * step), at_b, at_c, h, seed, row, begins)
                if skip != 0:
                    y += get_f32(skip + 4 * head) * u
                put_f32(out + 4 * ((t * heads + head) * dim + p), y)


def why_unserved(facts: OpFacts) -> str | None:
    """The `when` of this scan."""
    if (kept := facts.sizes.get("state_dtype", "float32")) != "int8":
        return f"it keeps states in int8, not in {kept}"
    if facts.sizes.get("state", 16) % 16:
        return f"it keeps states of a multiple of 16 columns, not of {facts['state']}"
    return float32_rows(facts)


@mamba2_scan.variant("native-int8", on="cpu", when=why_unserved, native=True)
def _mamba2_int8(
    cpu: Executor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    state: Tensor,
    slots: Tensor,
    query_start: Tensor,
    has_history: Tensor,
    num_decodes: int,
    chunk_size: int = 256,
    positions: Tensor | None = None,
) -> Tensor:
    """Nothing here depends on `num_decodes` or `chunk_size`. Raises ShapeMismatch."""
    (count, heads, dim), (groups, size) = x.shape, B.shape[1:]
    rows, steps, where = TensorRows.of(x), TensorRows.of(dt), Sequences.of(slots, query_start, has_history)
    check_scan(x, dt, A, B, C, D)
    width = row_nbytes(size)
    dense("a slot's state", state[0], heads, dim, width, dtype=torch.int8)
    if positions is None:
        raise ShapeMismatch("a kernel wants the positions of all tokens: it rounds their states by them")
    dense("positions", positions, count, dtype=torch.int64)
    out, b, c = cpu.empty(count, heads, dim), TensorRows.of(B), TensorRows.of(C)
    cpu.launch(
        mamba2_codes, heads, dim, heads // groups, size, width, x, *rows.strides, dt, steps.row_bytes, A, D,
        B, *b.strides, C, *c.strides, state, state.stride(0), *where.words, out, positions,
        rows=count, seqs=len(slots), scratch=4 * size,
    )  # fmt: skip
    return out
