"""Bundles of sixteen rows of codes on AMX, for the kernels of `blocks_source`: the same bits as theirs.

A bundle's 32 codes of each row are a tile as they lie, and so are eight quads of weights, once their codes
are bytes. Integer sums are exact in any order; scales and minima are applied to them row by row, by the same
instructions as in smaller bundles. So tiles change how long a linear layer takes, and nothing else.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

from plait.kernels.cpu.codegen.amx_tiles import MEMORY, TILE, Kind, Shapes, Tiles
from plait.kernels.cpu.codegen.llvm_writer import Value, Word, Writer, straight
from plait.kernels.cpu.linear.blocks_source import QUADS, TILED, _codes, through
from plait.kernels.cpu.linear.layout import BLOCK, LINE, Layout


def _shapes(layout: Layout) -> Shapes:
    """Two tiles of sums, one of codes of x, one of weights, each as many quads as a group has in a block."""
    quads = BLOCK // 4 // layout.parts
    return ((TILED, LINE), (TILED, LINE), (TILED, 4 * quads), (quads, LINE))


def _on_tiles(
    w: Writer, layout: Layout, tiles: Tiles, p: Word, a: Word, quads: range, whole: list[Value]
) -> list[Value]:
    """As `blocks_source._products`."""
    at, to = tiles.at + MEMORY, tiles.at + MEMORY + QUADS
    which = quads.start // len(quads) % 2
    weights = p + LINE * quads.start
    if layout.bits + layout.high != 8:
        weights = at + LINE * quads.start
        for q in quads:
            w.store_i32(at + LINE * q, _codes(w, layout, p, q))
    tiles.zero(which)
    tiles.load(2, a + 4 * quads.start, BLOCK)
    tiles.load(3, weights, LINE)
    tiles.s8u8(which, 2, 3)
    tiles.store(which, to + TILE * which, LINE)
    return [w.add_i32(n, w.load_i32(to + TILE * which + LINE * r)) for r, n in enumerate(whole)]


@cache
def tile(layout: Layout, kind: Kind) -> Any:
    """Block (weights, a, steps, ahead, apart, scratch): as `blocks_source.tile`, of TILED rows."""

    def write(
        w: Writer, weights: Word, a: Word, steps: Word, ahead: Word, apart: Word, scratch: Word
    ) -> list[Value]:
        products = partial(_on_tiles, w, layout, Tiles(w, kind, scratch, _shapes(layout)))
        return through(w, layout, TILED, (weights, a, steps), products, (ahead, apart), TILED)

    return straight(write, gives=TILED)


@cache
def start(layout: Layout, kind: Kind) -> Any:
    """Block (scratch): this thread may use tiles from here on."""

    def write(w: Writer, scratch: Word) -> None:
        Tiles(w, kind, scratch, _shapes(layout)).configure()

    return straight(write)


@cache
def stop(layout: Layout, kind: Kind) -> Any:
    """Block (scratch): it will not any more."""

    def write(w: Writer, scratch: Word) -> None:
        Tiles(w, kind, scratch, _shapes(layout)).release()

    return straight(write)
