"""Queries and keys, mixed by a Walsh-Hadamard transform before keys become codes (`plait.ops.entry`).

n columns in n / 16 vectors; every stage is the same, as in Pease (1968):

    in   a0 a1 … | b0 b1 …      the first half, the second half
    out  a0 + b0, a0 - b0, a1 + b1, a1 - b1, …

The number of a column rotates by one bit in a stage, so after all stages it is in its place again.
"""

from __future__ import annotations

from torch import Tensor

from plait.kernels.cpu.codegen.kernel import inline, kernel
from plait.kernels.cpu.codegen.kinds import Int
from plait.kernels.cpu.codegen.vec import (
    add,
    get_f32,
    interleave_high,
    interleave_low,
    load_f32,
    put_f32,
    store_f32,
    sub,
    words,
)
from plait.kernels.cpu.runtime.executor import Executor
from plait.kernels.cpu.runtime.frame import rows_of, scratch_of
from plait.kernels.cpu.runtime.row_checks import TensorRows
from plait.ops.entry import count_mixed


@inline
def mix_vectors(x: Int, n: Int, spare: Int, out: Int) -> None:
    """n floats at x, a power of two from 32 on -> out. spare: of as many, twice."""
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


@kernel
def mix_rows(frame: int, args: int, thread: int, threads: int) -> None:
    """q, its strides, heads, k, its strides, kv_heads, d, columns that are mixed, out (dense)."""
    q, q_row, q_head, heads, k, k_row, k_head, kv_heads, d, mixed, out = words(args, 2, 13)
    each, spare = heads + kv_heads, scratch_of(frame, thread)
    items = rows_of(frame, args) * each
    for item in range(items * thread // threads, items * (thread + 1) // threads):
        token, head = item // each, item % each
        x = q + token * q_row + head * q_head
        if head >= heads:
            x = k + token * k_row + (head - heads) * k_head
        for i in range(0, d, mixed):
            if mixed >= 32:
                mix_vectors(x + 4 * i, mixed, spare, out + 4 * (item * d + i))
            else:
                mix_few(x + 4 * i, mixed, out + 4 * (item * d + i))


def mix_heads(cpu: Executor, q: Tensor, k: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """q [T, heads, d] and k [T, kv_heads, d], float32, each head mixed. Raises ShapeMismatch."""
    rows, mixed = TensorRows.of(q), count_mixed(q.shape[-1])
    own, kv_heads = (rows, 0) if k is None else (TensorRows.of(k), k.shape[1])
    out = cpu.empty(rows.count, rows.heads + kv_heads, rows.width)
    cpu.launch(
        mix_rows, q, *rows.strides, rows.heads, q if k is None else k, *own.strides, kv_heads, rows.width,
        mixed, out, rows=rows.count, scratch=8 * mixed,
    )  # fmt: skip
    return out[:, : rows.heads], None if k is None else out[:, rows.heads :]
