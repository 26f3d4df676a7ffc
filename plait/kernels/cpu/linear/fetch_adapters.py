"""Factors of adapters come into a core's cache while it multiplies the weights in front of them.

With some rows, products of weights in blocks take longer than memory does, which idles meanwhile. So a linear
layer fetches what `low_rank` reads next: a line or a few with each block that it multiplies. Each thread
fetches its share of the bytes, in the order in which it will read them.

    slots in the step       2            3                 6
    their factors       [a a a a a][a a a b b b b][b b b b b b]      a: fetched by one thread, b: by the other
"""

from __future__ import annotations

import numpy as np

from plait.kernels.cpu.codegen.kernel import inline
from plait.kernels.cpu.codegen.kinds import Int
from plait.kernels.cpu.codegen.vec import get_i64

ROWS = 64  # of a step, from which on factors are little next to products
Rest = tuple[Int, Int, Int]
"""Where the next line is, bytes from there to the end of the slot's factors, and which row it is for."""


@inline
def _find_span(slots: Int, order: Int, spans: Int, place: Int) -> Int:
    """The address of the range of the row at a place in the order of slots."""
    return spans + 16 * (get_i64(slots + 8 * get_i64(order + 8 * place)) - 1)


@inline
def next_span(slots: Int, order: Int, spans: Int, count: Int, place: Int) -> Rest:
    """The factors behind those of the row at that place; nothing is left behind the last ones."""
    before = _find_span(slots, order, spans, place) if place >= 0 else np.int64(0)
    place += 1
    while place < count and _find_span(slots, order, spans, place) == before:
        place += 1
    if place >= count:
        return np.int64(0), np.int64(0), place
    found = _find_span(slots, order, spans, place)
    return get_i64(found), get_i64(found + 8), place


@inline
def begin_share(
    slots: Int, order: Int, spans: Int, count: Int, thread: Int, threads: Int
) -> tuple[Int, Int, Int, Int]:
    """A thread's share of the factors of a step: where it begins (`Rest`), and its lines."""
    total: Int = np.int64(0)
    at, left, place = next_span(slots, order, spans, count, np.int64(-1))
    while place < count:
        total += left
        at, left, place = next_span(slots, order, spans, count, place)
    start: Int = total * thread // threads
    before: Int = np.int64(0)
    at, left, place = next_span(slots, order, spans, count, np.int64(-1))
    while place < count and before + left <= start:
        before += left
        at, left, place = next_span(slots, order, spans, count, place)
    skipped = start - before
    return at + skipped, left - skipped, place, (total // threads + 63) // 64
