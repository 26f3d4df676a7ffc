"""Rows of a batch in paged caches of plain numbers: which tokens a row sees, where they lie, their store.

A cache is [block][token][head][column], in float32 or bfloat16, and a block table has the blocks of each
sequence in the order of its tokens.
"""

from __future__ import annotations

from torch import Tensor

from plait.kernels.cpu.codegen.kernel import inline, kernel
from plait.kernels.cpu.codegen.kinds import Int
from plait.kernels.cpu.codegen.vec import (
    get_f32,
    get_i64,
    load_f32,
    put_bf16,
    store_bf16,
    words,
)
from plait.kernels.cpu.pointwise.copy_rows import copy_row
from plait.kernels.cpu.runtime.executor import Executor
from plait.kernels.cpu.runtime.frame import rows_of
from plait.kernels.cpu.runtime.row_checks import TensorRows


@inline
def sequence_of(starts: Int, s: Int, row: Int) -> Int:
    """The sequence of a row, from that of an earlier one."""
    while get_i64(starts + 8 * s + 8) <= row:
        s += 1
    return s


@inline
def count_seen(starts: Int, lens: Int, s: Int, row: Int) -> int:
    """How many tokens a row of sequence s sees: those up to its own."""
    return get_i64(lens + 8 * s) - (get_i64(starts + 8 * s + 8) - row) + 1


@inline
def find_entry(table: Int, block: Int, token: Int) -> int:
    """Where in a cache a token of a sequence lies, in entries. table: of that sequence."""
    return get_i64(table + 8 * (token // block)) * block + token % block


@inline
def store_row(x: Int, to: Int, n: Int, size: Int) -> None:
    """Writes n floats as they are, or as bfloat16 if `size`, the bytes of one, is 2."""
    if size == 4:
        copy_row(x, to, n)
    else:
        whole = n // 16 * 16
        for i in range(0, whole, 16):
            store_bf16(to + 2 * i, load_f32(x + 4 * i))
        for i in range(whole, n):
            put_bf16(to + 2 * i, get_f32(x + 4 * i))


@kernel
def store_heads(frame: int, args: int, thread: int, threads: int) -> None:
    """x, its strides, cache, slots, heads, columns, bytes of a cached number."""
    x, row_bytes, head_bytes, cached, slots, heads, n, size = words(args, 2, 10)
    items = rows_of(frame, args) * heads
    for item in range(items * thread // threads, items * (thread + 1) // threads):
        r, h = item // heads, item % heads
        to = cached + (get_i64(slots + 8 * r) * heads + h) * n * size
        store_row(x + r * row_bytes + h * head_bytes, to, n, size)


def store_plain(cpu: Executor, x: Tensor, cache: Tensor, slot_mapping: Tensor) -> None:
    """Store new entries in a cache of plain numbers.

    x: [T, n] or [T, heads, n] float32; cache: [blocks, block, (heads,) n] float32 or bfloat16, dense. The
    caller has checked that they fit. Raises ShapeMismatch if a kernel would misread x.
    """
    rows = TensorRows.of(x)
    where = (*rows.strides, cache, slot_mapping, rows.heads, rows.width, cache.element_size())
    cpu.launch(store_heads, x, *where, rows=rows.count)
