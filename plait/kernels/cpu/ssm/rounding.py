"""Recurrent state in bfloat16, as kernels read and round it (`plait.ops.state_rounding` has the rule).

a number   s eeeeeeee mmmmmmm | mmmmmmmmmmmmmmmm      float32; only the left half is kept
+ threshold                   | tttttttttttttttt      of its position, row and column; a carry rounds up
thresholds of sixteen columns of a row:  spread(seed) + lane · COLUMN_STEP, of which the upper half counts
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from llvmlite import ir
from torch import Tensor

from plait.errors import ShapeMismatch
from plait.kernels.cpu.codegen.kernel import inline
from plait.kernels.cpu.codegen.kinds import Int, Ints
from plait.kernels.cpu.codegen.llvm_writer import Value, Writer
from plait.kernels.cpu.codegen.vec import (
    VF,
    VI,
    A,
    N,
    _define,
    _ints,
    _store,
    add_i32,
    get_i64,
    lanes,
    mul_i32,
    spread_int,
    vf32,
    vi16,
    vi32,
)
from plait.kernels.cpu.runtime.row_checks import dense, float32_rows
from plait.ops.registry import OpFacts
from plait.ops.state_rounding import COLUMN_STEP, FIRST, GOLDEN, ROW_STEP, SECOND, WORD

LANES = 16
COLUMN_LANE = COLUMN_STEP - WORD - 1  # the same, as an int32
STATE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def _round_up(b: ir.IRBuilder, x: ir.Value, thresholds: ir.Value) -> ir.Value:
    """The bits of x, rounded to bfloat16, in the upper halves; the lower halves mean nothing."""
    return b.add(b.bitcast(x, vi32), b.lshr(thresholds, _ints(16)))


def _round_state(b: ir.IRBuilder, x: ir.Value, thresholds: ir.Value) -> ir.Value:
    return b.bitcast(b.and_(_round_up(b, x, thresholds), _ints(-65536)), vf32)


def _store_upper_halves(b: ir.IRBuilder, a: ir.Value, *bits: ir.Value) -> ir.Value:
    """The upper halves of 2 × 16 ints, by one permutation."""
    halves = [b.bitcast(n, ir.VectorType(ir.IntType(16), 2 * LANES)) for n in bits]
    order = ir.Constant(ir.VectorType(ir.IntType(32), 2 * LANES), list(range(1, 4 * LANES, 2)))
    return _store(b, a, b.shuffle_vector(*halves, order))


round_state = _define("round_state", VF, (VF, VI), _round_state)  # x as it is kept, as float32
store_rounded = _define(  # sixteen numbers are rounded and kept
    "store_rounded",
    N,
    (A, VF, VI),
    lambda b, a, x, t: _store(b, a, b.trunc(b.lshr(_round_up(b, x, t), _ints(16)), vi16)),
)
store_both_rounded = _define(  # the same of thirty-two numbers
    "store_both_rounded",
    N,
    (A, VF, VI, VF, VI),
    lambda b, a, x, t, y, u: _store_upper_halves(b, a, _round_up(b, x, t), _round_up(b, y, u)),
)
store_kept = _define(  # sixteen numbers that are rounded already
    "store_kept",
    N,
    (A, VF),
    lambda b, a, x: _store(b, a, b.trunc(b.lshr(b.bitcast(x, vi32), _ints(16)), vi16)),
)


@inline
def seed_at(positions: Int, t: Int) -> int:
    """What the thresholds after token t begin with: the position, mixed."""
    x = (get_i64(positions + 8 * t) * GOLDEN) & WORD
    x = ((x ^ (x >> 16)) * FIRST) & WORD
    x = ((x ^ (x >> 13)) * SECOND) & WORD
    return x ^ (x >> 16)


@inline
def column_thresholds(seed: Int, row: Int, column: Int) -> Ints:
    """Of sixteen columns of a row, from `column` on."""
    first = np.int32((seed + row * ROW_STEP + column * COLUMN_STEP) & WORD)
    return add_i32(spread_int(first), mul_i32(lanes(), spread_int(np.int32(COLUMN_LANE))))


def wrap_int32(x: int) -> int:
    """x as an int32."""
    return (x + (1 << 31) & WORD) - (1 << 31)


def row_thresholds(w: Writer, seeds: Value) -> Value:
    """Of sixteen columns, from the first on, which has `seeds` in every lane."""
    return w.add_i32(seeds, w.mul_i32(w.lanes(), w.spread_int(wrap_int32(COLUMN_STEP))))


def rounds_columns(name: str) -> Callable[[OpFacts], str | None]:
    """The `when` of a scan with `name` columns in a row of its state: float32, or sixteens of bfloat16."""

    def when(facts: OpFacts) -> str | None:
        kept, columns = facts.sizes.get("state_dtype", "float32"), facts.sizes.get(name, 16)
        if kept not in STATE_DTYPES:
            return f"it keeps states in {' or '.join(STATE_DTYPES)}, not in {kept}"
        if kept == "bfloat16" and columns % 16:
            return f"it keeps bfloat16 states of a multiple of 16 columns, not of {columns}"
        return float32_rows(facts)

    return when


def is_rounded(state: torch.Tensor) -> bool:
    """Whether a state of slots is kept in bfloat16."""
    return state.dtype == torch.bfloat16


def check_state(state: torch.Tensor, positions: torch.Tensor | None, rows: int, *shape: int) -> int:
    """Bytes from one slot's state to the next. Raises ShapeMismatch if a kernel would misread it.

    positions: of `rows` tokens, int64; a bfloat16 state needs them.
    """
    dtype = torch.bfloat16 if is_rounded(state) else torch.float32
    dense("a slot's state", state[0], *shape, dtype=dtype)
    if is_rounded(state):
        check_positions(positions, rows)
    return state.element_size() * state.stride(0)


def check_positions(positions: Tensor | None, rows: int) -> None:
    """Raises ShapeMismatch unless there are positions of `rows` tokens, int64."""
    if positions is None:
        raise ShapeMismatch("a kernel wants the positions of all tokens: it rounds their states by them")
    dense("positions", positions, rows, dtype=torch.int64)


def check_scan(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None) -> None:
    """Raises ShapeMismatch where Mamba2's tensors do not fit each other."""
    (count, heads, _), groups = x.shape, B.shape[1]
    if dt.shape != (count, heads) or heads % groups or B.shape[0] != count or B.shape != C.shape:
        raise ShapeMismatch(
            f"a scan of x {list(x.shape)} wants dt [T, H] and B, C [T, G, N], H a multiple of G; got "
            f"{list(dt.shape)}, {list(B.shape)} and {list(C.shape)}"
        )
    dense("A", A, heads)
    if D is not None:
        dense("D", D, heads)
