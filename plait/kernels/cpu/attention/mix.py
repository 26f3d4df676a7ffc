"""Heads, mixed by a Walsh-Hadamard transform before they become codes (`plait.ops.entry`).

n columns in n / 16 vectors; every stage is the same, as in Pease (1968):

    in   a0 a1 … | b0 b1 …      the first half, the second half
    out  a0 + b0, a0 - b0, a1 + b1, a1 - b1, …

The number of a column rotates by one bit in a stage, so after all stages it is in its place again.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from plait.kernels.cpu.codegen.kernel import inline, kernel
from plait.kernels.cpu.codegen.kinds import Int
from plait.kernels.cpu.codegen.vec import (
    add,
    get_f32,
    interleave_high,
    interleave_low,
    load_f32,
    load_some,
    mul,
    put_f32,
    spread,
    store_f32,
    store_some,
    sub,
    words,
)
from plait.kernels.cpu.runtime.executor import Executor
from plait.kernels.cpu.runtime.frame import rows_of, scratch_of
from plait.kernels.cpu.runtime.row_checks import TensorRows
from plait.ops.entry import count_mixed


@inline
def mix_vectors(x: Int, n: Int, spare: Int, out: Int) -> None:
    """n floats at x, a power of two from 32 on -> out, which may be x. spare: of as many, twice."""
    source, stages = x, 0
    while n >> stages > 1:
        stages += 1
    for stage in range(stages):
        to = out if stage == stages - 1 else spare + 4 * n * (stage % 2)
        for i in range(0, n // 2, 16):
            a, b = load_f32(source + 4 * i), load_f32(source + 4 * (n // 2 + i))
            plus, minus = add(a, b), sub(a, b)
            store_f32(to + 8 * i, interleave_low(plus, minus))
            store_f32(to + 8 * i + 64, interleave_high(plus, minus))
        source = to


@inline
def mix_few(x: Int, n: Int, out: Int) -> None:
    """The same of 16 floats or fewer."""
    for i in range(n):
        put_f32(out + 4 * i, get_f32(x + 4 * i))
    half = n // 2
    while half:
        for first in range(0, n, 2 * half):
            for i in range(first, first + half):
                a, b = get_f32(out + 4 * i), get_f32(out + 4 * (i + half))
                put_f32(out + 4 * i, a + b)
                put_f32(out + 4 * (i + half), a - b)
        half //= 2


@inline
def mix_head(x: Int, d: Int, mixed: Int, spare: Int, out: Int) -> None:
    """d floats at x -> out, which may be x: every `mixed` neighbours. spare: of that many, twice."""
    for i in range(0, d, mixed):
        if mixed >= 32:
            mix_vectors(x + 4 * i, mixed, spare, out + 4 * i)
        else:
            mix_few(x + 4 * i, mixed, out + 4 * i)


@kernel
def mix_rows(frame: int, args: int, thread: int, threads: int) -> None:
    """q, its strides, heads, k, its strides, heads, v, its strides, heads, d, columns that are mixed, out
    (dense)."""
    q, q_row, q_head, heads, k, k_row, k_head, k_heads = words(args, 2, 10)
    v, v_row, v_head, v_heads, d, mixed, out = words(args, 10, 17)
    each, spare = heads + k_heads + v_heads, scratch_of(frame, thread)
    items = rows_of(frame, args) * each
    for item in range(items * thread // threads, items * (thread + 1) // threads):
        token, head = item // each, item % each
        x = q + token * q_row + head * q_head
        if head >= heads + k_heads:
            x = v + token * v_row + (head - heads - k_heads) * v_head
        elif head >= heads:
            x = k + token * k_row + (head - heads) * k_head
        mix_head(x, d, mixed, spare, out + 4 * item * d)


@kernel
def turn_rows(frame: int, args: int, thread: int, threads: int) -> None:
    """x (dense), heads, d, columns that are mixed, 1 / as many. In place."""
    x, heads, d, mixed = words(args, 2, 6)
    items, spare, factor = rows_of(frame, args) * heads, scratch_of(frame, thread), spread(get_f32(args + 48))
    for item in range(items * thread // threads, items * (thread + 1) // threads):
        at = x + 4 * item * d
        mix_head(at, d, mixed, spare, at)
        for i in range(0, d, 16):
            count = np.int32(d - i)
            store_some(at + 4 * i, mul(load_some(at + 4 * i, count), factor), count)


def mix_heads(
    cpu: Executor, q: Tensor, k: Tensor | None, v: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """q [T, heads, d], k and v [T, kv_heads, d], float32, each head mixed. Raises ShapeMismatch."""
    rows, mixed = TensorRows.of(q), count_mixed(q.shape[-1])
    of_k, of_v = (
        (q, *rows.strides, 0) if x is None else (x, *TensorRows.of(x).strides, x.shape[1]) for x in (k, v)
    )
    k_heads, v_heads = of_k[-1], of_v[-1]
    out = cpu.empty(rows.count, rows.heads + k_heads + v_heads, rows.width)
    cpu.launch(
        mix_rows, q, *rows.strides, rows.heads, *of_k, *of_v, rows.width, mixed, out,
        rows=rows.count, scratch=8 * mixed,
    )  # fmt: skip
    parts = out.split([rows.heads, k_heads, v_heads], 1)
    return parts[0], None if k is None else parts[1], None if v is None else parts[2]


def turn_back(cpu: Executor, x: Tensor) -> None:
    """x [T, heads, d], dense float32: sums of mixed values become sums of values, in place."""
    rows, mixed = TensorRows.of(x), count_mixed(x.shape[-1])
    cpu.launch(turn_rows, x, rows.heads, rows.width, mixed, 1 / mixed, rows=rows.count, scratch=8 * mixed)
