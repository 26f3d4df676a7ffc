"""Copies of rows: chosen by index, joined side by side, or with other columns. Nothing is computed."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from plait.errors import ShapeMismatch
from plait.kernels.cpu.codegen.kernel import inline, kernel
from plait.kernels.cpu.codegen.kinds import Int
from plait.kernels.cpu.codegen.vec import (
    get_f32,
    get_i64,
    load_f32,
    load_some,
    put_f32,
    spread,
    store_f32,
    store_some,
    words,
)
from plait.kernels.cpu.runtime.executor import Executor
from plait.kernels.cpu.runtime.frame import barrier, rows_of
from plait.kernels.cpu.runtime.row_checks import TensorRows, dense, float32_rows
from plait.ops.rows import join, pick_columns, put_rows, scatter_logits, take_rows


@inline
def copy_row(source: Int, to: Int, n: Int) -> None:
    """n floats."""
    full = n // 16 * 64
    for at in range(0, full, 64):
        store_f32(to + at, load_f32(source + at))
    left = np.int32(n % 16)
    if left > 0:
        store_some(to + full, load_some(source + full, left), left)


@kernel
def gather_rows(frame: int, args: int, thread: int, threads: int) -> None:
    """x, its row and head strides, heads, n, index (int64), out (dense)."""
    x, row_bytes, head_bytes, heads, n, index, out = words(args, 2, 9)
    items = rows_of(frame, args) * heads
    for i in range(items * thread // threads, items * (thread + 1) // threads):
        row = get_i64(index + 8 * (i // heads))
        copy_row(x + row * row_bytes + i % heads * head_bytes, out + 4 * n * i, n)


@kernel
def concat_rows(frame: int, args: int, thread: int, threads: int) -> None:
    """a, its row and head strides, n, b, its row and head strides, m, heads, out (dense)."""
    a, a_row, a_head, n, b, b_row, b_head, m, heads, out = words(args, 2, 12)
    items = rows_of(frame, args) * heads
    for i in range(items * thread // threads, items * (thread + 1) // threads):
        row, head, to = i // heads, i % heads, out + 4 * (n + m) * i
        copy_row(a + row * a_row + head * a_head, to, n)
        copy_row(b + row * b_row + head * b_head, to + 4 * n, m)


@kernel
def pick_numbers(frame: int, args: int, thread: int, threads: int) -> None:
    """x, its row stride, columns (int64, below 0: -inf), how many, out (dense). Threads share the columns."""
    x, row_bytes, columns, m, out = words(args, 2, 7)
    first, last = m * thread // threads, m * (thread + 1) // threads
    for i in range(rows_of(frame, args)):
        for c in range(first, last):
            column = get_i64(columns + 8 * c)
            to = out + 4 * (m * i + c)
            if column >= 0:
                put_f32(to, get_f32(x + i * row_bytes + 4 * column))
            else:
                put_f32(to, np.float32(-np.inf))


@kernel
def scatter_numbers(frame: int, args: int, thread: int, threads: int) -> None:
    """x (dense), index, k, tokens, n of a cluster, vocab, out (dense). Threads share the numbers of all rows,
    which become -inf, and then the chosen clusters."""
    x, index, k, tokens, n, vocab, out = words(args, 2, 9)
    rows, low = rows_of(frame, args), spread(np.float32(-np.inf))
    blocks = (rows * vocab + 15) // 16
    for i in range(blocks * thread // threads, blocks * (thread + 1) // threads):
        store_some(out + 64 * i, low, np.int32(min(16, rows * vocab - 16 * i)))
    barrier(frame, threads)
    pairs = rows * k
    for p in range(pairs * thread // threads, pairs * (thread + 1) // threads):
        own, row = tokens + 8 * n * get_i64(index + 8 * p), out + 4 * vocab * (p // k)
        for i in range(n):
            put_f32(row + 4 * get_i64(own + 8 * i), get_f32(x + 4 * (n * p + i)))


@take_rows.variant("native", on="cpu", when=float32_rows, native=True)
def _take_rows(cpu: Executor, x: Tensor, index: Tensor) -> Tensor:
    rows = TensorRows.of(x)
    dense("row numbers", index, index.numel(), dtype=torch.int64)
    out = cpu.empty(index.shape[0], *x.shape[1:])
    where = (x, *rows.strides, rows.heads, rows.width)
    cpu.launch(gather_rows, *where, index, out, rows=index.shape[0])
    return out


@put_rows.variant("native", on="cpu", when=float32_rows, native=True)
def _put_rows(cpu: Executor, x: Tensor, index: Tensor, out: Tensor) -> Tensor:
    rows, count = TensorRows.of(x), index.shape[0]
    dense("row numbers", index, index.numel(), dtype=torch.int64)
    if out.shape[0] < count or out.shape[1:] != x.shape[1:] or not out.is_contiguous():
        raise ShapeMismatch(f"{count} rows of {list(x.shape)} cannot be put into {list(out.shape)}")
    cpu.launch(gather_rows, x, *rows.strides, rows.heads, rows.width, index, out, rows=count)
    return out[:count]


@join.variant("native", on="cpu", when=float32_rows, native=True)
def _join(cpu: Executor, a: Tensor, b: Tensor) -> Tensor:
    left, right = TensorRows.of(a), TensorRows.of(b)
    if a.shape[:-1] != b.shape[:-1]:
        raise ShapeMismatch(f"rows of {list(a.shape)} and {list(b.shape)} cannot be joined")
    out = cpu.empty(*a.shape[:-1], left.width + right.width)
    parts = (a, *left.strides, left.width, b, *right.strides, right.width)
    cpu.launch(concat_rows, *parts, left.heads, out, rows=left.count)
    return out


@pick_columns.variant("native", on="cpu", when=float32_rows, native=True)
def _pick_columns(cpu: Executor, x: Tensor, columns: Tensor) -> Tensor:
    rows, count = TensorRows.of(x), columns.shape[0]
    dense("columns", columns, columns.numel(), dtype=torch.int64)
    out = cpu.empty(x.shape[0], count)
    cpu.launch(pick_numbers, x, rows.strides[0], columns, count, out, rows=x.shape[0])
    return out


@scatter_logits.variant("native", on="cpu", when=float32_rows, native=True)
def _scatter_logits(cpu: Executor, x: Tensor, index: Tensor, tokens: Tensor) -> Tensor:
    rows, k, (count, n) = len(x), index.shape[-1], tokens.shape
    dense("logits of clusters", x, rows, k, n)
    dense("indices of clusters", index, rows, k, dtype=torch.int64)
    dense("tokens of clusters", tokens, count, n, dtype=torch.int64)
    out = cpu.empty(rows, count * n)
    cpu.launch(scatter_numbers, x, index, k, tokens, n, count * n, out, rows=rows)
    return out
