"""A matrix for each head: sixteen dot products at a time, their lanes added in one fixed tree.

The weight is used as the model holds it, [heads, m, n]: sixteen of its rows stay in the first cache while
some rows of x pass.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from plait.errors import ShapeMismatch
from plait.kernels.cpu.codegen.kernel import Kernel, load_generated
from plait.kernels.cpu.runtime.executor import Executor
from plait.kernels.cpu.runtime.row_checks import TensorRows, float32_rows
from plait.ops.heads import map_heads
from plait.ops.registry import OpFacts

_DOTS = '''"""Sixteen dot products at a time."""
import numpy as np

from plait.kernels.cpu.runtime.frame import rows_of, word
from plait.kernels.cpu.codegen.kernel import inline, kernel
from plait.kernels.cpu.codegen.vec import (
    add, fma, interleave_high, interleave_low, load_f32, load_some, store_some, zero_f32,
)

ROWS = 16  # that pass through a block of weights while it is in the first cache


@inline
def fold(a, b):
    """The sums of lanes eight apart: of a in even lanes, of b in odd ones."""
    return add(interleave_low(a, b), interleave_high(a, b))


@inline
def dots(x, w, row_bytes, last, n, out, left):
    """out[i] = x · row i of w, for i < left <= 16; `last`: the last row there is."""
{addresses}
{zeros}
    full = n // 16 * 64
    for at in range(0, full, 64):
        v = load_f32(x + at)
{whole}
    tail = np.int32(n % 16)
    if tail > 0:
        v = load_some(x + full, tail)
{rest}
{folds}
    store_some(out, a0, left)
'''
_SOURCE = '''

@kernel
def map_rows(frame, args, thread, threads):
    """x, its row and head strides, heads, n, weight (dense), m, out (dense)."""
    x, row_bytes, head_bytes, heads = word(args, 2), word(args, 3), word(args, 4), word(args, 5)
    n, weight, m, out, rows = word(args, 6), word(args, 7), word(args, 8), word(args, 9), rows_of(frame, args)
    # Few rows: a piece of work is sixteen outputs. Many: some rows of a head, whose weight stays in cache.
    step = 16 if rows <= ROWS else m
    columns, blocks = (m + step - 1) // step, (rows + ROWS - 1) // ROWS
    items = heads * columns * blocks
    for item in range(items * thread // threads, items * (thread + 1) // threads):
        h, start, row = item // blocks // columns, item // blocks % columns * step, item % blocks * ROWS
        for i in range(start, min(start + step, m), 16):
            w, last, left = weight + (h * m + i) * 4 * n, min(m - i, 16) - 1, np.int32(m - i)
            for r in range(row, min(row + ROWS, rows)):
                to = out + ((r * heads + h) * m + i) * 4
                dots(x + r * row_bytes + h * head_bytes, w, 4 * n, last, n, to, left)
'''


@cache
def dots() -> str:
    """The text of `dots`, with what it needs: it names sixteen sums one by one."""
    order = [int(f"{i:04b}"[::-1], 2) for i in range(16)]  # each fold interleaves: bits come out reversed
    folds = [f"    a{i} = fold(a{i}, a{i + step})" for step in (1, 2, 4, 8) for i in range(0, 16, 2 * step)]
    return _DOTS.format(
        addresses="\n".join(f"    w{i} = w + min({order[i]}, last) * row_bytes" for i in range(16)),
        zeros="\n".join(f"    a{i} = zero_f32()" for i in range(16)),
        whole="\n".join(f"        a{i} = fma(v, load_f32(w{i} + at), a{i})" for i in range(16)),
        rest="\n".join(f"        a{i} = fma(v, load_some(w{i} + full, tail), a{i})" for i in range(16)),
        folds="\n".join(folds),
    )


@cache
def product() -> Kernel:
    """The kernel of plain numbers."""
    made: Kernel = load_generated("heads", dots() + _SOURCE).map_rows
    return made


def plain(facts: OpFacts) -> str | None:
    """The `when` of matrices that are plain numbers."""
    kind = facts.sizes.get("kind")
    return float32_rows(facts) if kind is None else f"it reads plain numbers, {kind} stays as it is stored"


@map_heads.variant("native", on="cpu", when=plain, native=True)
def _map_heads(cpu: Executor, x: Tensor, weight: Tensor) -> Tensor:
    rows = TensorRows.of(x)
    if weight.dtype != torch.float32 or weight.dim() != 3 or not weight.is_contiguous():
        raise ShapeMismatch(
            f"maps of heads want dense float32 [heads, m, n], got {weight.dtype} {list(weight.shape)}"
        )
    heads, m, n = weight.shape
    if x.dim() != 3 or (rows.heads, rows.width) != (heads, n):
        raise ShapeMismatch(f"{heads} maps {n} -> {m} were given {list(x.shape)}")
    out = cpu.empty(rows.count, heads, m)
    cpu.launch(product(), x, *rows.strides, heads, n, weight, m, out, rows=rows.count)
    return out
