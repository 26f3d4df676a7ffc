"""Products of two tensors, number by number; a row is cut into pieces, so that one serves all threads."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from plait.errors import ShapeMismatch
from plait.kernels.cpu.codegen.kernel import kernel
from plait.kernels.cpu.codegen.vec import load_f32, load_some, mul, store_f32, store_some
from plait.kernels.cpu.runtime.executor import Executor
from plait.kernels.cpu.runtime.frame import rows_of, word
from plait.kernels.cpu.runtime.row_checks import Rows, float32_rows
from plait.ops.product import multiply

PIECE = 256  # floats that a thread takes at a time


@kernel
def product_rows(frame, args, thread, threads):
    """x, its row stride, y, its row stride, n, out (dense)."""
    x, x_bytes, y, y_bytes = word(args, 2), word(args, 3), word(args, 4), word(args, 5)
    n, out = word(args, 6), word(args, 7)
    pieces = (n + PIECE - 1) // PIECE
    items = rows_of(frame, args) * pieces
    for item in range(items * thread // threads, items * (thread + 1) // threads):
        row, start = item // pieces, item % pieces * PIECE
        count = min(PIECE, n - start)
        a, b, to = x + row * x_bytes + 4 * start, y + row * y_bytes + 4 * start, out + 4 * (n * row + start)
        full, left = count // 16 * 64, np.int32(count % 16)
        for at in range(0, full, 64):
            store_f32(to + at, mul(load_f32(a + at), load_f32(b + at)))
        if left > 0:
            store_some(to + full, mul(load_some(a + full, left), load_some(b + full, left)), left)


@multiply.variant("native", on="cpu", when=float32_rows, native=True)
def _multiply(cpu: Executor, x: Tensor, y: Tensor) -> Tensor:
    a, b = Rows.of(x), Rows.of(y)
    if x.dim() != 2 or x.shape != y.shape:
        raise ShapeMismatch(f"rows of {list(x.shape)} and {list(y.shape)} have no product")
    out = cpu.empty(*x.shape)
    cpu.launch(product_rows, x, a.row_bytes, y, b.row_bytes, a.width, out, rows=a.count)
    return out
