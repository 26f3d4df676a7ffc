"""The Mamba2 scan over states in int8, which are rounded after every token (`plait.ops.state_rounding`).

a row of a state   codes of N columns | a bfloat16 scale for every 64 of them
a group of 64      codes -> float32 -> its sums for y, the new numbers -> largest -> scale -> codes

A scale is of all columns of its group, so the new numbers of a group stay in registers until the largest is
known. Tokens pass one by one, in prompts and replies alike: that is the only order of rounding.

a number   h · STEPS / scale + MAGIC    float32: rounded once, to STEPS-ths of a code, in the mantissa's bits
code       (those bits + threshold) >> 15, of which the lower byte is the code with its sign turned
"""

from __future__ import annotations

import numpy as np
import torch
from llvmlite import ir
from torch import Tensor

from plait.kernels.cpu.codegen.kernel import inline, kernel
from plait.kernels.cpu.codegen.kinds import Floats, Int
from plait.kernels.cpu.codegen.llvm_writer import Value, Word, Writer, block
from plait.kernels.cpu.codegen.maths import exp
from plait.kernels.cpu.codegen.vec import (
    VF,
    VI,
    A,
    F,
    N,
    _call,
    _define,
    _ints,
    _store,
    get_f32,
    i32,
    put_bf16,
    put_f32,
    spread,
    total,
    vf32,
    vi8,
    vi32,
    words,
    zero_f32,
)
from plait.kernels.cpu.runtime.executor import Executor
from plait.kernels.cpu.runtime.frame import take_sequence
from plait.kernels.cpu.runtime.row_checks import Sequences, TensorRows, dense, float32_rows
from plait.kernels.cpu.ssm.rounding import check_positions, check_scan, row_thresholds, seed_at, wrap_int32
from plait.ops.registry import OpFacts
from plait.ops.ssm import mamba2_scan
from plait.ops.state_rounding import (
    COLUMN_STEP,
    LEAST_SCALE,
    ROW_STEP,
    STATE_GROUP,
    STEP_BITS,
    WIDEST_STEP,
    row_nbytes,
)

ROWS = 64  # of a head's state that one thread takes at a time
GROUP, LANES = STATE_GROUP, 16
VECTORS = GROUP // LANES
STEPS = float(1 << STEP_BITS)
MAGIC = 1.5 * 2**23  # a float32 near it has whole numbers in its lower 23 bits, from -2**22 to 2**22
NAN = 0x7FC00000


def _further(b: ir.IRBuilder, x: ir.Value, y: ir.Value) -> ir.Value:
    """Lane by lane the larger size, as bits: those of infinity and of what is no number are the largest."""
    return _call(b, "llvm.smax.v16i32", vi32, x, y)


def _find_scale(b: ir.IRBuilder, sizes: ir.Value) -> ir.Value:
    """The bfloat16 scale of numbers of these sizes, no number where one of them is infinite or none."""
    size = b.bitcast(_call(b, "llvm.vector.reduce.smax.v16i32", i32, sizes), vf32.element)
    wide = b.fmul(size, ir.Constant(vf32.element, WIDEST_STEP))
    scale = b.fadd(wide, b.fsub(size, size))
    bits = b.bitcast(scale, i32)
    odd = b.and_(b.lshr(bits, ir.Constant(i32, 16)), ir.Constant(i32, 1))
    near = b.and_(b.add(b.add(bits, ir.Constant(i32, 0x7FFF)), odd), ir.Constant(i32, -65536))
    return b.bitcast(b.select(b.fcmp_unordered("uno", scale, scale), ir.Constant(i32, NAN), near), scale.type)


def _invert(b: ir.IRBuilder, scale: ir.Value) -> ir.Value:
    """STEPS / scale, and 0 for a scale that is none or too small."""
    least = ir.Constant(scale.type, LEAST_SCALE)
    made = b.fdiv(ir.Constant(scale.type, STEPS), scale)
    return b.select(b.fcmp_ordered(">=", scale, least), made, ir.Constant(scale.type, 0.0))


def _store_code(b: ir.IRBuilder, a: ir.Value, x: ir.Value) -> ir.Value:
    """Sixteen codes of rounded numbers."""
    return _store(b, a, b.trunc(b.xor(b.lshr(x, _ints(STEP_BITS)), _ints(0x80)), vi8))


def _store_both(b: ir.IRBuilder, a: ir.Value, x: ir.Value, y: ir.Value) -> ir.Value:
    """Thirty-two codes: the third bytes of both, once they are moved there, by one permutation."""
    count = 4 * LANES
    parts = [b.bitcast(b.shl(v, _ints(16 - STEP_BITS)), ir.VectorType(ir.IntType(8), count)) for v in (x, y)]
    order = ir.Constant(ir.VectorType(i32, 2 * LANES), list(range(2, 2 * count, 4)))
    codes = b.shuffle_vector(*parts, order)
    return _store(b, a, b.xor(codes, ir.Constant(codes.type, [-128] * (2 * LANES))))


further = _define("further", VI, (VI, VI), _further)
size_bits = _define("size_bits", VI, (VF,), lambda b, x: b.and_(b.bitcast(x, vi32), _ints(0x7FFFFFFF)))
find_scale = _define("find_scale", F, (VI,), _find_scale)
invert = _define("invert", F, (F,), _invert)
store_code = _define("store_code", N, (A, VI), _store_code)
store_both = _define("store_both", N, (A, VI, VI), _store_both)


@block(gives=1)
def move_columns(
    vectors: int, w: Writer, codes: Word, scales: Word, decay: Value, v: Value, b: Word, c: Word, seed: Word,
    y: Value,
) -> list[Value]:  # fmt: skip
    """Block: one token passes by so many vectors of columns, from the first one of a group on. Gives y with
    what belongs to it.

    codes, scales: where they are read and written; seed: of the thresholds of the first column. The steps of
    all groups are next to each other, because a largest number takes long to find and they can wait together.
    """
    groups, each = range(0, vectors, VECTORS), range(vectors)
    thresholds = row_thresholds(w, w.spread_int(seed))
    folds = [w.mul(decay, w.spread(w.get_bf16(scales + 2 * g))) for g, _ in enumerate(groups)]
    moved = []
    for j in each:
        old = w.to_f32(w.load_i8(codes + LANES * j))
        moved.append(w.fma(old, folds[j // VECTORS], w.mul(v, w.load_f32(b + 4 * LANES * j))))
    sizes = [_join(w, [w.size_bits(h) for h in moved[g : g + VECTORS]]) for g in groups]
    for j in each:
        y = w.fma(moved[j], w.load_f32(c + 4 * LANES * j), y)
    steps = [w.find_scale(size) for size in sizes]
    inverses = [w.spread(w.invert(step)) for step in steps]
    rounded = list[Value]()
    for j, h in enumerate(moved):
        draws = w.add_i32(thresholds, w.spread_int(wrap_int32(LANES * COLUMN_STEP * j)))
        bits = w.bits_i32(w.fma(h, inverses[j // VECTORS], w.spread(MAGIC)))
        rounded.append(w.add_i32(bits, w.right(draws, 32 - STEP_BITS)))
    for j in range(0, vectors, 2):
        if j + 1 < vectors:
            w.store_both(codes + LANES * j, *rounded[j : j + 2])
        else:
            w.store_code(codes + LANES * j, rounded[j])
    for g, step in enumerate(steps):
        w.put_bf16(scales + 2 * g, step)
    return [y]


def _join(w: Writer, sizes: list[Value]) -> Value:
    """The larger sizes, lane by lane."""
    while len(sizes) > 1:
        pairs = [sizes[i : i + 2] for i in range(0, len(sizes), 2)]
        sizes = [w.further(*pair) if len(pair) > 1 else pair[0] for pair in pairs]
    return sizes[0]


one, two, three, four, eight = (move_columns(vectors) for vectors in (1, 2, 3, 4, 8))


@inline
def _move_row(state: Int, n: Int, decay: Floats, v: Floats, b: Int, c: Int, seed: Int) -> float:
    """One token of a row of a state: the row moves on; what it adds to y. seed: of its first column."""
    y, column = zero_f32(), 0
    while column < n:
        scale, codes, at = state + n + column // GROUP * 2, state + column, seed + column * COLUMN_STEP
        x, z, left = b + 4 * column, c + 4 * column, n - column
        if left >= 2 * GROUP:
            (y,) = eight(codes, scale, decay, v, x, z, at, y)
            column += GROUP
        elif left >= GROUP:
            (y,) = four(codes, scale, decay, v, x, z, at, y)
        elif left == 16:
            (y,) = one(codes, scale, decay, v, x, z, at, y)
        elif left == 32:
            (y,) = two(codes, scale, decay, v, x, z, at, y)
        else:
            (y,) = three(codes, scale, decay, v, x, z, at, y)
        column += GROUP
    return total(y)


@kernel
def mamba2_codes(frame: int, args: int, thread: int, threads: int) -> None:
    """heads, P, heads of a group, N, bytes of a row; x, its strides; dt, its row stride; A, D or 0; B, its
    strides; C, its strides; state, its slot stride; slots, query_start, has_history; out (dense);
    positions."""
    heads, dim, ratio, n, row_bytes, x, x_row, x_head, dt, dt_bytes, a, skip = words(args, 2, 14)
    b, b_row, b_head, c, c_row, c_head, state, slot_bytes = words(args, 14, 22)
    slots, starts, history, out, positions = words(args, 22, 27)
    parts = (dim + ROWS - 1) // ROWS
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
                if begins:
                    for scale in range(at + n, at + row_bytes, 2):
                        put_bf16(scale, np.float32(0.0))
                y = _move_row(at, n, decay, spread(u * step), at_b, at_c, seed + row * ROW_STEP)
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
    check_positions(positions, count)
    out, b, c = cpu.empty(count, heads, dim), TensorRows.of(B), TensorRows.of(C)
    cpu.launch(
        mamba2_codes, heads, dim, heads // groups, size, width, x, *rows.strides, dt, steps.row_bytes, A, D,
        B, *b.strides, C, *c.strides, state, state.stride(0), *where.words, out, positions,
        rows=count, seqs=len(slots),
    )  # fmt: skip
    return out
