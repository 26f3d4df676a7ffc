"""Norms over rows, in float32; every row is computed by one thread, in one order of additions."""

from __future__ import annotations

import math

import numpy as np
from torch import Tensor

from plait.kernels.cpu.executor import Executor
from plait.kernels.cpu.frame import rows_of, word
from plait.kernels.cpu.kernel import inline, kernel
from plait.kernels.cpu.rows import Rows, float32_rows
from plait.kernels.cpu.vec import add, fma, get_f32, load_some, mul, spread, store_some, total, zero_f32
from plait.ops.norm import add_rms_norm, rms_norm
from plait.ops.registry import Facts


@inline
def _rms_row(x, weight, eps, n, out):
    """out = x / rms(x) * weight, for n floats."""
    squares = zero_f32()
    for i in range(0, n, 16):
        v = load_some(x + 4 * i, np.int32(n - i))
        squares = fma(v, v, squares)
    factor = spread(np.float32(1.0 / math.sqrt(np.float64(total(squares)) / n + np.float64(eps))))
    for i in range(0, n, 16):
        left = np.int32(n - i)
        store_some(
            out + 4 * i, mul(mul(load_some(x + 4 * i, left), factor), load_some(weight + 4 * i, left)), left
        )


@kernel
def rms_rows(frame, args, thread, threads):
    """x, its row and head strides, heads, n, weight, eps, out (dense)."""
    x, row_bytes, head_bytes, heads, n = (
        word(args, 2),
        word(args, 3),
        word(args, 4),
        word(args, 5),
        word(args, 6),
    )
    weight, eps, out = word(args, 7), get_f32(args + 64), word(args, 9)
    items = rows_of(frame, args) * heads
    for i in range(items * thread // threads, items * (thread + 1) // threads):
        _rms_row(x + i // heads * row_bytes + i % heads * head_bytes, weight, eps, n, out + 4 * n * i)


@kernel
def add_rms_rows(frame, args, thread, threads):
    """x, its row stride, delta, its row stride, n, weight, eps, sum (dense), out (dense)."""
    x, x_bytes, delta, delta_bytes, n = (
        word(args, 2),
        word(args, 3),
        word(args, 4),
        word(args, 5),
        word(args, 6),
    )
    weight, eps, summed, out = word(args, 7), get_f32(args + 64), word(args, 9), word(args, 10)
    rows = rows_of(frame, args)
    for r in range(rows * thread // threads, rows * (thread + 1) // threads):
        to = summed + 4 * n * r
        for i in range(0, n, 16):
            left = np.int32(n - i)
            a, b = load_some(x + r * x_bytes + 4 * i, left), load_some(delta + r * delta_bytes + 4 * i, left)
            store_some(to + 4 * i, add(a, b), left)
        _rms_row(to, weight, eps, n, out + 4 * n * r)


def one_group(facts: Facts) -> str | None:
    return "it has no groups" if facts.sizes.get("groups", 1) != 1 else float32_rows(facts)


@rms_norm.variant("native", on="cpu", when=one_group, native=True)
def _rms_norm(cpu: Executor, x: Tensor, weight: Tensor, eps: float, groups: int = 1) -> Tensor:
    rows = Rows.of(x)
    out = cpu.empty(*x.shape)
    cpu.launch(rms_rows, x, *rows.strides, rows.heads, rows.width, weight, eps, out, rows=rows.count)
    return out


@add_rms_norm.variant("native", on="cpu", when=float32_rows, native=True)
def _add_rms_norm(
    cpu: Executor, x: Tensor, delta: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    a, b = Rows.of(x), Rows.of(delta)
    summed, out = cpu.empty(*x.shape), cpu.empty(*x.shape)
    cpu.launch(
        add_rms_rows, x, a.row_bytes, delta, b.row_bytes, a.width, weight, eps, summed, out, rows=a.count
    )
    return summed, out
