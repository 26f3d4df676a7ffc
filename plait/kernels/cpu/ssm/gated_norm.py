"""The norm after a state-space scan, the step sizes before it, and biases of keys by the same softplus."""

from __future__ import annotations

import math

import numpy as np
from torch import Tensor

from plait.errors import ShapeMismatch
from plait.kernels.cpu.codegen.kernel import inline, kernel
from plait.kernels.cpu.codegen.kinds import Float, Floats, Int
from plait.kernels.cpu.codegen.maths import exp, load_left, sigmoid, silu, softplus, store_left
from plait.kernels.cpu.codegen.vec import (
    add,
    fma,
    get_f32,
    mul,
    spread,
    sub,
    total,
    where_less,
    word,
    words,
    zero_f32,
)
from plait.kernels.cpu.pointwise.elementwise import native
from plait.kernels.cpu.runtime.executor import Executor
from plait.kernels.cpu.runtime.frame import rows_of
from plait.kernels.cpu.runtime.row_checks import TensorRows, dense, float32_rows
from plait.ops.activation import key_bias, sigmoid_steps, step_sizes
from plait.ops.norm import gated_rms_norm


@inline
def _gated_row(x: Int, gate: Int, weight: Int, eps: Float, n: Int, norm_first: Int, out: Int) -> None:
    """One group of a row; without a weight there is no norm."""
    squares = zero_f32()
    for i in range(0, n, 16):
        h = load_left(x + 4 * i, n - i)
        if not norm_first:
            h = mul(h, silu(load_left(gate + 4 * i, n - i)))
            store_left(out + 4 * i, h, n - i)
        squares = fma(h, h, squares)
    if weight == 0:
        return
    factor = spread(np.float32(1.0 / math.sqrt(np.float64(total(squares)) / n + np.float64(eps))))
    for i in range(0, n, 16):
        h = load_left(x + 4 * i, n - i) if norm_first else load_left(out + 4 * i, n - i)
        h = mul(mul(h, factor), load_left(weight + 4 * i, n - i))
        if norm_first:
            h = mul(h, silu(load_left(gate + 4 * i, n - i)))
        store_left(out + 4 * i, h, n - i)


@kernel
def norm_gated_rows(frame: int, args: int, thread: int, threads: int) -> None:
    """x, its row stride, gate, its row stride, weight or 0, eps, groups, n of one, norm first, out (dense).

    Without a weight a row may be cut: groups then are pieces of any size, the last one shorter (n of all)."""
    x, x_bytes, gate, gate_bytes, weight = words(args, 2, 7)
    eps, (groups, n, norm_first, out, width) = get_f32(args + 56), words(args, 8, 13)
    items = rows_of(frame, args) * groups
    for i in range(items * thread // threads, items * (thread + 1) // threads):
        r, at = i // groups, i % groups * n
        scale, to = weight + 4 * at if weight != 0 else np.int64(0), out + 4 * (r * width + at)
        own, turn = x + r * x_bytes + 4 * at, gate + r * gate_bytes + 4 * at
        _gated_row(own, turn, scale, eps, min(n, width - at), norm_first, to)


@gated_rms_norm.variant("native", on="cpu", when=float32_rows, native=True)
def _gated_rms_norm(
    cpu: Executor,
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None,
    eps: float = 1e-6,
    groups: int = 1,
    norm_before_gate: bool = False,
) -> Tensor:
    a, b = TensorRows.of(x), TensorRows.of(gate)
    width = a.width
    if x.dim() != 2 or x.shape != gate.shape or width % groups:
        raise ShapeMismatch(
            f"a gated norm in {groups} groups wants x and gate of one shape [T, n], n a multiple of that; "
            f"got {list(x.shape)} and {list(gate.shape)}"
        )
    if weight is not None and TensorRows.of(weight[None]).width != width:
        raise ShapeMismatch(f"a gated norm of {width} wants as many weights, got {list(weight.shape)}")
    size = width // groups
    if weight is None:  # nothing is summed: a row may be cut anywhere, for all threads to have a piece
        size, norm_before_gate = PIECE, False
        groups = -(-width // size)
    out = cpu.empty(a.count, width)
    cpu.launch(
        *(norm_gated_rows, x, a.row_bytes, gate, b.row_bytes, weight, float(eps), groups, size),
        *(norm_before_gate, out, width),
        rows=a.count,
    )
    return out


PIECE = 256  # numbers of a row that is only gated, for one thread


@kernel
def step_rows(frame: int, args: int, thread: int, threads: int) -> None:
    """dt, its row stride, n, bias or 0, low, high, out (dense): softplus(dt + bias) within low..high."""
    dt, dt_bytes, n, bias = words(args, 2, 6)
    low, high, out = spread(get_f32(args + 48)), spread(get_f32(args + 56)), word(args, 8)
    pieces = (n + 15) // 16
    items = rows_of(frame, args) * pieces
    for i in range(items * thread // threads, items * (thread + 1) // threads):
        r, at = i // pieces, i % pieces * 16
        x = load_left(dt + r * dt_bytes + 4 * at, n - at)
        if bias != 0:
            x = add(x, load_left(bias + 4 * at, n - at))
        x = softplus(x)
        x = where_less(x, low, low, x)  # not a minimum of two: what is not a number stays visible
        store_left(out + 4 * (r * n + at), where_less(high, x, high, x), n - at)


@native(key_bias)
def _key_bias(x: Floats, rate: Floats, scale: Float) -> Floats:
    """scale · exp(rate · softplus(x)). exp makes a number of a NaN, and the difference keeps it."""
    y = mul(rate, softplus(x))
    return mul(spread(scale), add(exp(y), sub(y, y)))


@step_sizes.variant("native", on="cpu", when=float32_rows, native=True)
def _step_sizes(cpu: Executor, dt: Tensor, bias: Tensor | None, low: float, high: float) -> Tensor:
    rows = TensorRows.of(dt)
    if dt.dim() != 2 or (bias is not None and TensorRows.of(bias[None]).width != rows.width):
        raise ShapeMismatch(
            f"step sizes want dt [T, H] and a bias [H]; got {list(dt.shape)} and "
            f"{None if bias is None else list(bias.shape)}"
        )
    out = cpu.empty(*dt.shape)
    cpu.launch(step_rows, dt, rows.row_bytes, rows.width, bias, float(low), float(high), out, rows=rows.count)
    return out


@kernel
def sigmoid_step_rows(frame: int, args: int, thread: int, threads: int) -> None:
    """dt, its row stride, n, bias, rate, out (dense): sigmoid(rate (dt + bias))."""
    dt, dt_bytes, n, bias, rate, out = words(args, 2, 8)
    pieces = (n + 15) // 16
    items = rows_of(frame, args) * pieces
    for i in range(items * thread // threads, items * (thread + 1) // threads):
        r, at = i // pieces, i % pieces * 16
        x = add(load_left(dt + r * dt_bytes + 4 * at, n - at), load_left(bias + 4 * at, n - at))
        x = mul(x, load_left(rate + 4 * at, n - at))
        # exp makes a number of a NaN: only what is below 0 or above -1 is one.
        s = where_less(spread(np.float32(-1.0)), x, sigmoid(x), x)
        store_left(out + 4 * (r * n + at), where_less(x, zero_f32(), sigmoid(x), s), n - at)


@sigmoid_steps.variant("native", on="cpu", when=float32_rows, native=True)
def _sigmoid_steps(cpu: Executor, dt: Tensor, bias: Tensor, rate: Tensor) -> Tensor:
    rows, out = TensorRows.of(dt), cpu.empty(*dt.shape)
    if dt.dim() != 2:
        raise ShapeMismatch(f"sigmoid steps want dt [T, n], got {list(dt.shape)}")
    vectors = (dense("bias", bias, rows.width), dense("rate", rate, rows.width))
    cpu.launch(sigmoid_step_rows, dt, rows.row_bytes, rows.width, *vectors, out, rows=rows.count)
    return out
