"""Norms over rows, in float32; every row is computed by one thread, in one order of additions."""

from __future__ import annotations

import math

import numpy as np
from torch import Tensor

from plait.errors import ShapeMismatch
from plait.kernels.cpu.codegen.kernel import inline, kernel
from plait.kernels.cpu.codegen.kinds import Float, Floats, Int
from plait.kernels.cpu.codegen.vec import (
    add,
    fma,
    get_f32,
    load_f32,
    load_some,
    mul,
    spread,
    store_f32,
    store_some,
    sub,
    total,
    where_below,
    word,
    words,
    zero_f32,
)
from plait.kernels.cpu.pointwise.copy_rows import copy_row
from plait.kernels.cpu.runtime.executor import Executor
from plait.kernels.cpu.runtime.frame import rows_of
from plait.kernels.cpu.runtime.row_checks import TensorRows, dense, float32_rows
from plait.ops.norm import NO_LENGTH, add_rms_norm, layer_norm, limit_length, rms_norm


@inline
def sum_squares(x: Int, shift: Floats, n: Int) -> float:
    """Σ (x - shift)² of n floats: four sums of sixteen lanes each, so that no addition waits for another."""
    a, b, c, d = zero_f32(), zero_f32(), zero_f32(), zero_f32()
    quads, full = n // 64 * 256, n // 16 * 64
    for at in range(0, quads, 256):
        v, w = sub(load_f32(x + at), shift), sub(load_f32(x + at + 64), shift)
        y, z = sub(load_f32(x + at + 128), shift), sub(load_f32(x + at + 192), shift)
        a, b, c, d = fma(v, v, a), fma(w, w, b), fma(y, y, c), fma(z, z, d)
    for at in range(quads, full, 64):
        v = sub(load_f32(x + at), shift)
        a = fma(v, v, a)
    left = np.int32(n % 16)
    if left > 0:
        v = where_below(left, sub(load_some(x + full, left), shift), zero_f32())
        b = fma(v, v, b)
    return total(add(add(a, b), add(c, d)))


@inline
def sum_of(x: Int, n: Int) -> float:
    """Σ x of n floats, added like `sum_squares`."""
    a, b, c, d = zero_f32(), zero_f32(), zero_f32(), zero_f32()
    quads, full = n // 64 * 256, n // 16 * 64
    for at in range(0, quads, 256):
        a, b = add(a, load_f32(x + at)), add(b, load_f32(x + at + 64))
        c, d = add(c, load_f32(x + at + 128)), add(d, load_f32(x + at + 192))
    for at in range(quads, full, 64):
        a = add(a, load_f32(x + at))
    left = np.int32(n % 16)
    if left > 0:
        b = add(b, load_some(x + full, left))
    return total(add(add(a, b), add(c, d)))


@inline
def _inverse(squares: Float, n: Int, eps: Float) -> Floats:
    """1 / √(mean + eps), in float64 up to the last step."""
    return spread(np.float32(1.0 / math.sqrt(np.float64(squares) / n + np.float64(eps))))


@inline
def _rms_row(x: Int, weight: Int, eps: Float, n: Int, out: Int) -> None:
    """out = x / rms(x) * weight, for n floats."""
    factor = _inverse(sum_squares(x, zero_f32(), n), n, eps)
    full = n // 16 * 64
    for at in range(0, full, 64):
        store_f32(out + at, mul(mul(load_f32(x + at), factor), load_f32(weight + at)))
    left = np.int32(n % 16)
    if left > 0:
        y = mul(mul(load_some(x + full, left), factor), load_some(weight + full, left))
        store_some(out + full, y, left)


@kernel
def rms_rows(frame: int, args: int, thread: int, threads: int) -> None:
    """x, its row and head strides, heads, groups, n of a group, weight, eps, out (dense)."""
    x, row_bytes, head_bytes, heads, groups, n, weight = words(args, 2, 9)
    eps, out = get_f32(args + 72), word(args, 10)
    items = rows_of(frame, args) * heads * groups
    for i in range(items * thread // threads, items * (thread + 1) // threads):
        group, item = 4 * n * (i % groups), i // groups
        start = x + item // heads * row_bytes + item % heads * head_bytes + group
        _rms_row(start, weight + group, eps, n, out + 4 * n * i)


@inline
def _add_row(x: Int, delta: Int, n: Int, out: Int) -> None:
    full = n // 16 * 64
    for at in range(0, full, 64):
        store_f32(out + at, add(load_f32(x + at), load_f32(delta + at)))
    left = np.int32(n % 16)
    if left > 0:
        store_some(out + full, add(load_some(x + full, left), load_some(delta + full, left)), left)


@kernel
def add_rms_rows(frame: int, args: int, thread: int, threads: int) -> None:
    """x, its row stride, delta, its row stride, n, weight, eps, sum (dense), out (dense)."""
    x, x_bytes, delta, delta_bytes, n, weight = words(args, 2, 8)
    eps, (summed, out), rows = get_f32(args + 64), words(args, 9, 11), rows_of(frame, args)
    for r in range(rows * thread // threads, rows * (thread + 1) // threads):
        to = summed + 4 * n * r
        _add_row(x + r * x_bytes, delta + r * delta_bytes, n, to)
        _rms_row(to, weight, eps, n, out + 4 * n * r)


@inline
def _layer_row(x: Int, weight: Int, bias: Int, eps: Float, n: Int, out: Int) -> None:
    """out = (x - mean) / std * weight + bias, for n floats."""
    mean = spread(np.float32(np.float64(sum_of(x, n)) / n))
    factor = _inverse(sum_squares(x, mean, n), n, eps)
    full, left = n // 16 * 64, np.int32(n % 16)
    for at in range(0, full, 64):
        y = mul(mul(sub(load_f32(x + at), mean), factor), load_f32(weight + at))
        if bias != 0:
            y = add(y, load_f32(bias + at))
        store_f32(out + at, y)
    if left > 0:
        y = mul(mul(sub(load_some(x + full, left), mean), factor), load_some(weight + full, left))
        if bias != 0:
            y = add(y, load_some(bias + full, left))
        store_some(out + full, y, left)


@kernel
def layer_rows(frame: int, args: int, thread: int, threads: int) -> None:
    """x, its row and head strides, heads, groups, n of a group, weight, bias or 0, eps, out (dense)."""
    x, row_bytes, head_bytes, heads, groups, n, weight, bias = words(args, 2, 10)
    eps, out, items = get_f32(args + 80), word(args, 11), rows_of(frame, args) * heads * groups
    for i in range(items * thread // threads, items * (thread + 1) // threads):
        group, item = 4 * n * (i % groups), i // groups
        start = x + item // heads * row_bytes + item % heads * head_bytes + group
        own = bias + group if bias != 0 else 0
        _layer_row(start, weight + group, own, eps, n, out + 4 * n * i)


@kernel
def limit_rows(frame: int, args: int, thread: int, threads: int) -> None:
    """x, its row and head strides, heads, n of a head, weight or 0, limit, what is added to a length, out
    (dense)."""
    x, row_bytes, head_bytes, heads, n, weight = words(args, 2, 8)
    limit, more, out = get_f32(args + 64), get_f32(args + 72), word(args, 10)
    items = rows_of(frame, args) * heads
    for i in range(items * thread // threads, items * (thread + 1) // threads):
        head, to = i % heads, out + 4 * n * i
        start, own = x + i // heads * row_bytes + head * head_bytes, weight + 4 * n * head
        if weight != 0:
            for c in range(0, n, 16):
                left = np.int32(n - c)
                store_some(
                    to + 4 * c, mul(load_some(start + 4 * c, left), load_some(own + 4 * c, left)), left
                )
        else:
            copy_row(start, to, n)
        length = math.sqrt(np.float64(sum_squares(to, zero_f32(), n))) + np.float64(more)
        factor = np.float32(np.float64(limit) / length)
        if not factor >= np.float32(1.0):  # what is no number stays none
            for c in range(0, n, 16):
                left = np.int32(n - c)
                store_some(to + 4 * c, mul(load_some(to + 4 * c, left), spread(factor)), left)


def _check(n: int, groups: int, weight: Tensor, bias: Tensor | None = None) -> None:
    if n % groups:
        raise ShapeMismatch(f"rows of {n} numbers cannot be cut into {groups} equal groups")
    dense("a norm's weight", weight, n)
    if bias is not None:
        dense("a norm's bias", bias, n)


@rms_norm.variant("native", on="cpu", when=float32_rows, native=True)
def _rms_norm(cpu: Executor, x: Tensor, weight: Tensor, eps: float, groups: int = 1) -> Tensor:
    rows = TensorRows.of(x)
    _check(rows.width, groups, weight)
    out = cpu.empty(*x.shape)
    where = (x, *rows.strides, rows.heads, groups, rows.width // groups)
    cpu.launch(rms_rows, *where, weight, float(eps), out, rows=rows.count)
    return out


@add_rms_norm.variant("native", on="cpu", when=float32_rows, native=True)
def _add_rms_norm(
    cpu: Executor, x: Tensor, delta: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    a, b = TensorRows.of(x), TensorRows.of(delta)
    _check(a.width, 1, weight)
    if x.shape != delta.shape or x.dim() != 2:
        raise ShapeMismatch(f"[T, n] and its like are added, got {list(x.shape)} and {list(delta.shape)}")
    summed, out = cpu.empty(*x.shape), cpu.empty(*x.shape)
    where = (x, a.row_bytes, delta, b.row_bytes, a.width)
    cpu.launch(add_rms_rows, *where, weight, float(eps), summed, out, rows=a.count)
    return summed, out


@layer_norm.variant("native", on="cpu", when=float32_rows, native=True)
def _layer_norm(
    cpu: Executor, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, groups: int = 1
) -> Tensor:
    rows = TensorRows.of(x)
    _check(rows.width, groups, weight, bias)
    out = cpu.empty(*x.shape)
    where = (x, *rows.strides, rows.heads, groups, rows.width // groups)
    cpu.launch(layer_rows, *where, weight, bias, float(eps), out, rows=rows.count)
    return out


@limit_length.variant("native", on="cpu", when=float32_rows, native=True)
def _limit_length(cpu: Executor, x: Tensor, weight: Tensor | None, limit: float) -> Tensor:
    rows = TensorRows.of(x)
    if x.dim() != 3:
        raise ShapeMismatch(f"lengths are limited of [T, heads, n], got {list(x.shape)}")
    if weight is not None:
        dense("what a head is multiplied by", weight, rows.heads, rows.width)
    out = cpu.empty(*x.shape)
    where = (x, *rows.strides, rows.heads, rows.width, weight, float(limit), NO_LENGTH, out)
    cpu.launch(limit_rows, *where, rows=rows.count)
    return out
