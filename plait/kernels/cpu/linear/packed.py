"""A weight matrix as kernels keep it, and the one way every one of them is called.

A packed weight is a row of *tiles* of sixteen outputs each, in K order inside; the last tile is filled up
with zeros. Its kernel takes these words (`Executor.launch`):

2 x (float32 rows), 3 bytes between rows, 4 n_in, 5 weight (address of the first tile), 6 n_out, 7 bias
(float32) or 0, 8 out, 9 bytes between its rows, 10 rounding of x (index into ROUNDINGS), 11 groups,
12 starts, 13 weights, 14 bytes of x's rounded form at most, 15 address of the kernel for few rows or 0,
16 address of the kernel that joins gate and up (`glu`) or 0: word 8 is then for the first half of n_out,
17 to 20 what is fetched for the adapters behind it, or 0 (`AddedAdapters.words`).

A weight may keep its columns in another order than its inputs come in: `order_columns` then goes first.

With groups > 0 (mixture of experts) rows starts[g]..starts[g+1] go through the weight at address weights[g].
Both are int64 arrays in memory, filled by an earlier launch and at construction. Word 5 is then not used, and
starts[groups] is how many rows there are. Without groups the frame says so.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from plait.errors import ShapeMismatch
from plait.kernels.cpu.codegen.kernel import Kernel, kernel
from plait.kernels.cpu.codegen.vec import get_i32, get_i64, put_i32, word
from plait.kernels.cpu.linear.layout import TILE, Layout
from plait.kernels.cpu.runtime.executor import Executor
from plait.kernels.cpu.runtime.frame import rows_of
from plait.kernels.cpu.runtime.row_checks import TensorRows
from plait.ops.linear import Activations
from plait.ops.low_rank import AddedAdapters

JOINED = 64 * TILE  # bytes of a thread's scratch for a tile of as many rows
ROUNDINGS: tuple[Activations, ...] = ("float32", "int8", "int8x2", "bfloat16")
COUNTED = '''

@kernel
def $name(frame, args, thread, threads):
    """The words of `packed`; pieces of work are taken from the counter."""
    x, row_bytes, n, weight = word(args, 2), word(args, 3), word(args, 4), word(args, 5)
    n_out, bias, out, out_bytes = word(args, 6), word(args, 7), word(args, 8), word(args, 9)
    groups, starts, weights, counter = word(args, 11), word(args, 12), word(args, 13), word(args, 1)
    tiles, tile_bytes, scratch = (n_out + 15) // 16, $tile_bytes, scratch_of(frame, thread)
    $prepare
    unit = max($least, min(tiles // (4 * threads), 262144 // tile_bytes) // $least * $least)
    units = (tiles + unit - 1) // unit
    item, done = np.int64(atomic_add(counter, np.int32(1))), 0
    for g in range(max(groups, 1)):
        start, rows = 0, 0
        if groups != 0:
            start = get_i64(starts + 8 * g)
            rows, weight = get_i64(starts + 8 * g + 8) - start, get_i64(weights + 8 * g)
        else:
            rows = rows_of(frame, args)
        blocks = (rows + $block - 1) // $block
        while item < done + units * blocks:
            begin, row = (item - done) // blocks * unit, (item - done) % blocks * $block
            first = start + row
            tiles_of(
                x + first * row_bytes, row_bytes, n, weight, tile_bytes, begin, min(begin + unit, tiles),
                n_out, bias, out + first * out_bytes, out_bytes, min($block, rows - row), scratch,
            )
            item = np.int64(atomic_add(counter, np.int32(1)))
        done += units * blocks
'''
"""Text of a kernel around `tiles_of`, for weights in tiles of `tile_bytes`: `least` of them and `block` rows
at once. `prepare` may put other rows in place of x, whatever their groups."""


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight:
    """A weight (n_out, n_in) in tiles. `data`: uint8, 64-byte aligned; `kind`: the layout, like "Q4_K"."""

    data: Tensor
    kind: str
    n_out: int
    n_in: int
    kernel: Kernel
    shared_per_row: int  # bytes of shared scratch that a row of x needs
    order: Tensor | None = None  # int32 [n_in]: which input a column belongs to
    few: Kernel | None = None  # what `kernel` calls where rows are few, if that is another one
    scratch: int = 0  # bytes that each thread needs
    layout: Any = None  # a description of the tiles, with plain values as fields, next to `kind`
    joins: bool = False  # whether `kernel` joins gate and up
    adapters: AddedAdapters | None = None  # what is added behind it: `kernel` may fetch the factors

    @property
    def nbytes(self) -> int:
        return self.data.numel()

    def before(self, adapters: AddedAdapters) -> PackedWeight:
        """The same weight, behind which these adapters are added, row by row."""
        return replace(self, adapters=adapters)


@dataclass(frozen=True, slots=True, eq=False)
class Groups:
    """Rows sorted by expert. starts: int64 [count + 1]; weights: int64 [count] addresses of packed weights;
    orders: int64 [count] addresses of the orders of their columns, if they have orders."""

    count: int
    starts: Tensor
    weights: Tensor
    orders: Tensor | None = None


@kernel
def order_columns(frame: int, args: int, thread: int, threads: int) -> None:
    """x, bytes between its rows, n, order (int32), out (dense), groups, starts, orders.

    out[r, c] = x[r, order[c]]; with groups, rows starts[g]..starts[g+1] by the order at address orders[g].
    """
    x, row_bytes, n, order, out = word(args, 2), word(args, 3), word(args, 4), word(args, 5), word(args, 6)
    groups, starts, orders = word(args, 7), word(args, 8), word(args, 9)
    for g in range(max(groups, 1)):
        first, end = 0, rows_of(frame, args)
        if groups != 0:
            first, end = get_i64(starts + 8 * g), get_i64(starts + 8 * g + 8)
            order = get_i64(orders + 8 * g)
        rows = end - first
        for r in range(first + rows * thread // threads, first + rows * (thread + 1) // threads):
            source, to = x + r * row_bytes, out + 4 * n * r
            for c in range(n):
                put_i32(to + 4 * c, get_i32(source + 4 * np.int64(get_i32(order + 4 * c))))


def check_bias(bias: Tensor) -> Tensor:
    """Raises ShapeMismatch for a bias that a kernel would misread."""
    if bias.dtype != torch.float32 or not bias.is_contiguous():
        raise ShapeMismatch(f"a bias must be dense float32, got {bias.dtype} with strides {bias.stride()}")
    return bias


def multiply(
    cpu: Executor,
    x: Tensor,
    weight: PackedWeight,
    bias: Tensor | None,
    activations: Activations,
    out: Tensor | None = None,
    *,
    groups: Groups | None = None,
    rows: int | None = None,
    join: Kernel | None = None,
) -> Tensor:
    """x: [R, n_in] float32 -> [R, n_out] float32, written into `out` if given (its rows may lie apart).

    With `groups`, `rows` is the launch's row count (tokens); R is the capacity of the sorted rows. With
    `join` (`glu.JOINS`), n_out is gate and up, a whole number of tiles each, and half as wide rows come out.
    """
    shape = x.shape
    if isinstance(weight.layout, Layout) and not activations.startswith("int8"):
        raise ShapeMismatch(f"the kernel of {weight.kind} weights rounds activations: ask for int8 or int8x2")
    if x.dim() == 3:
        x = x.reshape(-1, shape[-1])
    a = TensorRows.of(x)
    if a.width != weight.n_in or (bias is not None and tuple(bias.shape) != (weight.n_out,)):
        raise ShapeMismatch(f"a linear layer {weight.n_in} -> {weight.n_out} was given rows of {a.width}")
    width = weight.n_out // 2 if join else weight.n_out
    if join and not (weight.joins and width % TILE == 0):
        raise ShapeMismatch(f"{weight.kind} weights of {weight.n_out} outputs are not joined by their kernel")
    out = cpu.empty(a.count, width) if out is None else out.reshape(-1, width)
    b = TensorRows.of(out)
    if b.count != a.count:
        raise ShapeMismatch(f"{a.count} rows go in and {b.count} come out")
    if bias is not None:
        check_bias(bias)
    grouping: tuple[object, ...] = (
        (groups.count, groups.starts, groups.weights) if groups else (0, None, None)
    )
    need = a.count * weight.shared_per_row
    asked = a.count if rows is None else rows
    if weight.order is not None:
        ordered = cpu.empty(a.count, weight.n_in)
        orders = groups.orders if groups else None
        cpu.launch(
            order_columns,
            *(x, a.row_bytes, weight.n_in, weight.order, ordered, *grouping[:2], orders),
            rows=asked,
        )
        x, a = ordered, TensorRows.of(ordered)
    cpu.launch(
        weight.kernel,
        *(x, a.row_bytes, weight.n_in, weight.data, weight.n_out, bias, out, b.row_bytes),
        ROUNDINGS.index(activations),
        *grouping,
        need,
        weight.few.address if weight.few else 0,
        join.address if join else 0,
        *(weight.adapters.words() if weight.adapters and not groups else (0, 0, 0, 0)),
        rows=asked,
        scratch=weight.scratch + (JOINED if join else 0),
        shared=need,
    )
    return out.view(*shape[:-1], width)
