"""Activations as int8 for integer linear layers: how rows become bundles of codes (see `blocks_source`).

A block of 32 inputs takes its largest size for 127 steps. Sixteen rows are rounded together. One tree
finds what goes across a row's lanes, its largest size and the sums of its codes, for all of them. Their
scales are one vector. Every number is what a row alone gets, bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from plait.kernels.cpu.codegen.llvm_writer import Value, Word, Writer, block
from plait.kernels.cpu.codegen.target import wide_registers
from plait.kernels.cpu.codegen.vec import LANES
from plait.kernels.cpu.linear.layout import BLOCK, Layout
from plait.ops.linear import BASE, SMALLEST

NARROW = not wide_registers()  # registers hold a quarter as many sums, or fewer
BUNDLES = (4, 2, 1) if NARROW else (16, 8, 4, 2, 1)  # rows of codes in a register tile, the larger first
BASE_BITS = 0x4B400000  # of BASE, near which floats are whole numbers
TOGETHER = LANES  # rows of a bundle that are rounded together


def _put(
    w: Writer, layout: Layout, halves: list[Value], to: Word, size: Word, at: Word, scale: Value
) -> None:
    """One row's 32 codes and what goes with them, row `at` of a bundle of `size`."""
    ints = [w.to_i32(x) for x in halves]
    for k, part in enumerate(ints):
        w.store_i8(to + 32 * at + 16 * k, part)
    place = to + 32 * size + 4 * at
    w.put_f32(place, scale)
    place += 4 * size
    w.put_f32(place, w.product(scale, -BASE))
    for part in [w.add_i32(*ints)] if layout.parts == 1 else ints:
        place += 4 * size
        if layout.zero is None:
            w.put_f32(place, w.product(scale, w.to_float(w.sum_i32(part))))
        else:
            first = w.spread_int(0 if layout.zeros else BASE_BITS // 16)  # the sum has sixteen of them
            w.put_i32(place, w.sum_i32(w.add_i32(first, w.mul_i32(part, w.spread_int(-layout.zero)))))


def _round_block(w: Writer, layout: Layout, x: Word, to: Word, size: Word, at: Word, terms: Word) -> None:
    """32 activations into one row of codes, or two: the second takes what the first leaves over."""
    halves = [w.load_f32(x), w.load_f32(x + 64)]
    most = w.furthest(*halves)
    scale = w.shorter(w.quotient(most, 127.0))
    based = w.product(scale, BASE)
    odd = w.minus(based, based)  # 0, or NaN with a number that is not finite, or nearly so
    per_unit = w.from_on(most, SMALLEST, w.product(w.quotient(1.0, most), 127.0))
    codes = [w.nearest(w.mul(u, w.spread(per_unit))) for u in halves]
    _put(w, layout, codes, to, size, at, w.plus(scale, odd))

    def rest() -> None:
        unit, finer = w.spread(scale), w.spread(w.product(per_unit, 254.0))
        left = [w.sub(u, w.mul(code, unit)) for u, code in zip(halves, codes, strict=True)]
        fine = [w.nearest(w.mul(u, finer)) for u in left]
        _put(w, layout, fine, to, size, at + 1, w.plus(w.shorter(w.quotient(scale, 254.0)), odd))

    w.when(terms.equals(2), rest)


def _tree(w: Writer, leaf: Callable[[int], Value], combine: Callable[[Value, Value], Value]) -> Value:
    """Lane r: what all lanes of leaf(r), a vector of floats or of bits, come to.

    Leaves that meet in the end are neighbours: a step moves a lane's number up by a bit.
    """

    def some(first: int, step: int) -> Value:
        if step == LANES:
            return leaf(first)
        x, y = some(first, 2 * step), some(first + step, 2 * step)
        return combine(w.interleave_low(x, y), w.interleave_high(x, y))

    return some(0, 1)


def _round_together(w: Writer, layout: Layout, rows: Sequence[Word], to: Word) -> None:
    """32 activations of sixteen rows into a block of their bundle: as `_round_block`, without a second row.

    rows: where each row's activations lie.
    """

    def furthest(r: int) -> Value:
        return w.later_bits(*(w.absolute(w.load_f32(rows[r] + 64 * k)) for k in range(2)))

    most = _tree(w, furthest, w.later_bits)
    scale = w.bits_f32(w.and_i32(w.bits_i32(w.div(most, w.spread(127.0))), w.spread_int(-4)))
    based = w.mul(scale, w.spread(BASE))
    scale = w.add(scale, w.sub(based, based))
    below = float(np.nextafter(np.float32(SMALLEST), np.float32(0.0)))
    units = w.mul(w.div(w.spread(1.0), most), w.spread(127.0))
    place = to + 32 * TOGETHER
    w.store_f32(place, w.where_less(w.spread(below), most, units, w.zero_f32()))
    kept: list[Value] = [None] * TOGETHER

    def codes(r: int) -> Value:
        unit, found = w.spread_f32(place + 4 * r), []
        for k in range(2):
            # The sum is a whole number above BASE, and its last byte the code.
            x = w.add(w.mul(w.load_f32(rows[r] + 64 * k), unit), w.spread(BASE))
            found.append(w.bits_i32(x))
            w.store_i8(to + 32 * r + 16 * k, found[-1])
        if layout.parts == 1:
            return w.bits_f32(w.add_i32(*found))
        kept[r] = found[1]
        return w.bits_f32(found[0])

    def added(x: Value, y: Value) -> Value:
        return w.bits_f32(w.add_i32(w.bits_i32(x), w.bits_i32(y)))

    sums = [_tree(w, codes, added)]
    if layout.parts == 2:
        sums.append(_tree(w, lambda r: w.bits_f32(kept[r]), added))
    w.store_f32(place, scale)
    w.store_f32(place + 64, w.mul(scale, w.spread(-BASE)))
    over = 32 // layout.parts * BASE_BITS  # each number summed has the bits of BASE in it
    for j, bits in enumerate(sums):
        whole = w.sub_i32(w.bits_i32(bits), w.spread_int(_as_int32(over)))
        if layout.zero is None:
            w.store_f32(place + 64 * (2 + j), w.mul(scale, w.to_f32(whole)))
        else:
            first = w.spread_int(0 if layout.zeros else BASE_BITS)
            w.store_i32(place + 64 * (2 + j), w.add_i32(first, w.mul_i32(whole, w.spread_int(-layout.zero))))


def _as_int32(value: int) -> int:
    return (value + (1 << 31)) % (1 << 32) - (1 << 31)


def _bundle_of(w: Writer, at: Word, codes: Word, sizes: Sequence[int]) -> tuple[Word, Word]:
    """(first row, size) of the bundle that has row `at` of so many rows of codes."""
    start, size = w.number(0), w.number(sizes[0])
    whole = (codes + 1) // sizes[0] * sizes[0]  # where bundles of this size end
    for n in sizes[1:]:
        past = (at + 1).above(whole)
        start, size = w.pick(past, whole, start), w.pick(past, w.number(n), size)
        whole = w.pick(past, start + (codes - start + (1 if n > 2 else 0)) // n * n, whole)
    return start + (at - start) // size * size, size


@dataclass(frozen=True, slots=True)
class _Rounding:
    """The work of `round_rows`, and its arguments."""

    layout: Layout
    sizes: Sequence[int]
    x: Word
    row_bytes: Word
    n: Word
    to: Word
    rows: Word
    terms: Word
    thread: Word
    threads: Word

    @property
    def blocks(self) -> Word:
        """Of a row."""
        return (self.n + self.layout.step - 1) // self.layout.step * self.layout.blocks

    @property
    def bundle_bytes(self) -> Word:
        return self.blocks * (self.layout.rounded_block * TOGETHER)

    @property
    def filled(self) -> Word:
        """Blocks of a row that are not all zeros."""
        return (self.n + BLOCK - 1) // BLOCK

    def together(self, w: Writer, bundles: Word) -> None:
        """Bundles of TOGETHER rows, the last of which may have one row less."""
        blocks, place = self.blocks, self.layout.rounded_block * TOGETHER
        begin, end = (bundles * blocks * t // self.threads for t in (self.thread, self.thread + 1))

        def bundle(k: Word) -> None:
            at = self.to + self.bundle_bytes * k
            first, last = (begin - blocks * k).most(0), (end - blocks * k).least(blocks)
            full = last.least(self.filled).most(first)
            row = self.x + self.row_bytes * TOGETHER * k
            missing = (TOGETHER * (k + 1)).most(self.rows) - self.rows  # 0, or 1: the last row stands for it
            places = [row + self.row_bytes * r for r in range(TOGETHER - 1)]
            places.append(places[-1] + self.row_bytes * (w.number(1) - missing))

            def block(b: Word) -> None:
                _round_together(w, self.layout, [p + 4 * BLOCK * b for p in places], at + place * b)

            w.loop(first, full, 1, (), block)
            w.loop(full, last, 1, (), lambda b: self._nothing(w, at + place * b, TOGETHER, 0, TOGETHER))

        w.loop(begin // blocks, (end + blocks - 1) // blocks, 1, (), bundle)

    def apart(self, w: Writer) -> None:
        """Row by row."""
        codes, blocks, sizes = self.rows * self.terms, self.blocks, self.sizes
        begin, end = (codes * blocks * t // self.threads for t in (self.thread, self.thread + 1))
        more = (self.thread + 2).above(self.threads)
        end = w.pick(more, end + sizes[0] * blocks, end)  # a bundle may be larger

        def row(r: Word) -> None:
            at = r * self.terms
            start, size = _bundle_of(w, at, codes, sizes)
            bundle, before = self.to + start * blocks * self.layout.rounded_block, start * blocks + 1 - size
            first = ((begin - before).most(0) // size).least(blocks)
            last = ((end - before).most(0) // size).least(blocks)
            full = last.least(self.filled).most(first)
            place = size * self.layout.rounded_block

            def block(b: Word) -> None:
                source = self.x + self.row_bytes * r + 4 * BLOCK * b
                _round_block(w, self.layout, source, bundle + place * b, size, at - start, self.terms)

            def nothing(b: Word) -> None:
                self._nothing(w, bundle + place * b, size, at - start, at - start + self.terms)

            w.loop(first, full, 1, (), block)
            w.loop(full, last, 1, (), nothing)

        own = [_bundle_of(w, (u // blocks).least(codes - 1), codes, sizes) for u in (begin, end - 1)]
        end_row = ((own[1][0] + own[1][1]) // self.terms).least(self.rows)
        w.when(end.above(begin), lambda: w.loop(own[0][0] // self.terms, end_row, 1, (), row))

    def _nothing(self, w: Writer, to: Word, size: Word | int, first: Word | int, end: Word | int) -> None:
        """A block of zeros in rows first..end of a bundle."""
        zeros, size = [w.zero_f32()] * 2, w.number(size) if isinstance(size, int) else size
        w.loop(first, end, 1, (), lambda k: _put(w, self.layout, zeros, to, size, k, 0.0))


@block(takes=8)
def round_rows(layout: Layout, sizes: Sequence[int], w: Writer, *words: Word) -> None:
    """Block: this thread's share of blocks of all rows, into bundles at `to`. Blocks behind n are zeros.

    Threads share out the blocks of a bundle, not its rows: no two of them write one line of memory.
    x: the first row, others follow every `row_bytes`; terms: rows of codes per row.
    """
    work = _Rounding(layout, sizes, *words)
    if sizes[0] != TOGETHER:
        work.apart(w)
        return
    rows = work.rows
    whole = w.pick(work.terms.equals(1), (rows + 1) // TOGETHER, w.number(0))  # one row less will do
    work.together(w, whole)
    left = (rows - whole * TOGETHER).most(0)
    x, to = work.x + work.row_bytes * TOGETHER * whole, work.to + work.bundle_bytes * whole
    w.when(left.above(0), partial(replace(work, x=x, to=to, rows=left).apart, w))
