"""Inputs rounded to bfloat16, multiplied by bfloat16 weights as pairs: what `dense` needs for that.

A rounded row lies in memory in one of two forms. With AVX512_BF16 a pair of inputs is one word, and
`vdpbf16ps` multiplies it by a line of a plain tile, which is pairs already:

    row     x0 x1 │ x2 x3 │ …             a pair of inputs, in every lane of a register
    line    w0 w1 │ w0 w1 │ … (16)        the same two inputs of sixteen outputs
    sums    s + x1·w1 + x0·w0             in that order, each rounded once

Without it a row lies as float32, and two multiply-adds in that order give the same bits (`bf16_dot`). A row
takes an odd number of cache lines, so that rows next to one another are never in the same few sets.
"""

from __future__ import annotations

from collections.abc import Sequence

from plait.kernels.cpu.codegen.bf16_dot import HARDWARE, Pairs, spread_pair, write_dot
from plait.kernels.cpu.codegen.kernel import inline
from plait.kernels.cpu.codegen.kinds import Int
from plait.kernels.cpu.codegen.llvm_writer import Value, Word, Writer, straight
from plait.kernels.cpu.runtime.frame import barrier, common_scratch
from plait.kernels.cpu.runtime.frame_words import LINE

SIZE = 2 if HARDWARE else 4  # bytes of a rounded input
ALONE = 4  # rows that every thread rounds for itself: that is sooner than waiting for one another
VECTOR = 32  # inputs that are rounded together; a row is filled up with zeros to a multiple


@inline
def row_bytes_of(n: Int) -> Int:
    """Bytes of a rounded row of n inputs."""
    return (n + 31) // 32 * (32 * SIZE) | LINE


def shared_row_bytes(n: int) -> int:
    """The same, outside kernels."""
    return -(-n // VECTOR) * VECTOR * SIZE | LINE


def _store_rounded(w: Writer, to: Word, x: Value, y: Value) -> None:
    """Thirty-two inputs, those of x first."""
    if HARDWARE:
        w.store_i32(to, w.both_bf16(x, y))
    else:
        w.store_f32(to, w.rounded_bf16(x))
        w.store_f32(to + LINE, w.rounded_bf16(y))


def _round_row(w: Writer, x: Word, n: Word, to: Word) -> None:
    def whole(i: Word) -> None:
        at = x + i * (4 * VECTOR)
        _store_rounded(w, to + i * (SIZE * VECTOR), w.load_f32(at), w.load_f32(at + LINE))

    def rest() -> None:
        at, left = x + (n >> 5) * (4 * VECTOR), n - (n >> 5 << 5)
        halves = (w.load_some(place, count) for place, count in ((at, left), (at + LINE, left - 16)))
        _store_rounded(w, to + (n >> 5) * (SIZE * VECTOR), *halves)

    w.loop(0, n >> 5, 1, (), whole)
    w.when(n.above(n >> 5 << 5), rest)


round_row = straight(_round_row)
"""Block (x, n, to): a row of n inputs as `dense` multiplies it, and zeros behind it."""


@inline
def round_rows(
    frame: Int, x: Int, row_bytes: Int, n: Int, rows: Int, own: Int, thread: Int, threads: Int
) -> Int:
    """Where all rows lie rounded, `row_bytes_of(n)` apart. own: this thread's scratch, for ALONE of them."""
    each = row_bytes_of(n)
    if rows <= ALONE:
        for r in range(rows):
            round_row(x + r * row_bytes, n, own + r * each)
        return own
    to = common_scratch(frame)
    for r in range(rows * thread // threads, rows * (thread + 1) // threads):
        round_row(x + r * row_bytes, n, to + r * each)
    barrier(frame, threads)
    return to


def write_pairs(
    w: Writer, rows: Sequence[Word], lines: Sequence[Value], sums: Sequence[Value]
) -> list[Value]:
    """Sums, row by row, each with the product of its row's pair (at an address of rows) and a tile's line."""
    tiles: list[Pairs] = [line if HARDWARE else (w.low_bf16(line), w.high_bf16(line)) for line in lines]
    found, left = list[Value](), iter(sums)
    for at in rows:
        y = spread_pair(w, at)
        found += [write_dot(w, tile, y, next(left)) for tile in tiles]
    return found
