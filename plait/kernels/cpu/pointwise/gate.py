"""What closes itself: rows multiplied by the sigmoids of others, number by number."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from plait.errors import ShapeMismatch
from plait.kernels.cpu.codegen.kernel import inline, kernel
from plait.kernels.cpu.codegen.maths import sigmoid
from plait.kernels.cpu.codegen.vec import load_some, mul, spread, store_some, where_less, zero_f32
from plait.kernels.cpu.runtime.executor import Executor
from plait.kernels.cpu.runtime.frame import rows_of, word
from plait.kernels.cpu.runtime.row_checks import Rows, float32_rows
from plait.ops.activation import gate

PIECE = 256  # floats that a thread takes at a time, so that one long row is enough for all threads


@inline
def _gated(x, z):
    """x · sigmoid(z). exp makes a number of a NaN: only what is below 0 or above -1 is one."""
    s = sigmoid(z)
    return mul(x, where_less(z, zero_f32(), s, where_less(spread(np.float32(-1.0)), z, s, z)))


@kernel
def gate_pieces(frame, args, thread, threads):
    """x, bytes between its rows, z, bytes between its rows, n, out (dense)."""
    x, x_bytes, z, z_bytes = word(args, 2), word(args, 3), word(args, 4), word(args, 5)
    n, out = word(args, 6), word(args, 7)
    pieces = (n + PIECE - 1) // PIECE
    items = rows_of(frame, args) * pieces
    for item in range(items * thread // threads, items * (thread + 1) // threads):
        row, start = item // pieces, item % pieces * PIECE
        for i in range(start, min(start + PIECE, n), 16):
            left = np.int32(n - i)
            y = _gated(load_some(x + row * x_bytes + 4 * i, left), load_some(z + row * z_bytes + 4 * i, left))
            store_some(out + 4 * (n * row + i), y, left)


@gate.variant("native", on="cpu", when=float32_rows, native=True)
def _gate(cpu: Executor, x: Tensor, by: Tensor) -> Tensor:
    a, b = Rows.of(x), Rows.of(by)
    if x.shape != by.shape or x.dim() != 2:
        raise ShapeMismatch(f"[T, n] is gated by its like, got {list(x.shape)} and {list(by.shape)}")
    out = cpu.empty(*x.shape)
    cpu.launch(gate_pieces, x, a.row_bytes, by, b.row_bytes, a.width, out, rows=a.count)
    return out
