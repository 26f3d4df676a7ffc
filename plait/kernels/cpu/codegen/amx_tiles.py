"""Tiles of AMX: eight registers of sixteen rows of 64 bytes, and products of whole tiles.

`Tiles` is what straight blocks calculate with. "amx" writes the instructions. "software" does in memory what
Intel documents of them, order and rounding of every addition included. It is for tests on machines without
AMX only, because it is many times slower than no tiles at all.

A tile keeps its shape from `configure` to `release`, on the thread that called it. LLVM takes every operation
here for one that may read and write any memory, and so keeps them, and the stores around them, in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from llvmlite import ir

from plait.kernels.cpu.codegen.llvm_writer import Value, Word, Writer, block
from plait.kernels.cpu.codegen.vec import (
    VF,
    VI,
    VOID,
    A,
    N,
    _at,
    _call,
    _define,
    _ints,
    _round_bf16,
    i8,
    vf32,
    vi32,
)

Kind = Literal["", "amx", "software"]
ROWS, LINE = 16, 64  # of a tile, and bytes of its row
TILE = ROWS * LINE  # bytes
CONFIG, COUNT = 64, 8  # bytes of a configuration, and tiles
MEMORY = CONFIG + COUNT * TILE  # bytes of scratch memory that `Tiles` wants
FULL = ((ROWS, LINE),) * COUNT
Shapes = Sequence[tuple[int, int]]  # rows, and bytes of a row, of tile 0, 1, …


def _which(tile: ir.Value) -> ir.Constant:
    """The number of a tile is a part of the instruction."""
    return ir.Constant(i8, tile.constant)


def _move(name: str, b: ir.IRBuilder, tile: ir.Value, address: ir.Value, stride: ir.Value) -> ir.Value:
    _call(b, f"llvm.x86.{name}", VOID, _which(tile), _at(b, address, i8), stride)
    return _ints(0)


def _run(name: str, b: ir.IRBuilder, *tiles: ir.Value) -> ir.Value:
    _call(b, f"llvm.x86.{name}", VOID, *(_which(t) for t in tiles))
    return _ints(0)


def _configure_tiles(b: ir.IRBuilder, address: ir.Value) -> ir.Value:
    _call(b, "llvm.x86.ldtilecfg", VOID, _at(b, address, i8))
    return _ints(0)


def _sub_bytes(b: ir.IRBuilder, x: ir.Value, y: ir.Value) -> ir.Value:
    """Byte by byte, modulo 256."""
    return b.bitcast(b.sub(*(b.bitcast(v, ir.VectorType(i8, LINE)) for v in (x, y))), vi32)


def _flush_subnormals(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """x, with zeros of its sign in place of numbers too small to be normal."""
    bits = b.bitcast(x, vi32)
    size = b.and_(bits, _ints(0x7FFFFFFF))
    tiny = b.icmp_unsigned("<", size, _ints(0x00800000))
    return b.bitcast(b.select(tiny, b.and_(bits, _ints(-(1 << 31))), bits), vf32)


def _fma_flushed(b: ir.IRBuilder, x: ir.Value, y: ir.Value, z: ir.Value) -> ir.Value:
    return _flush_subnormals(b, _call(b, "llvm.fma.v16f32", vf32, x, y, z))


def _pair_bf16(b: ir.IRBuilder, x: ir.Value, y: ir.Value) -> ir.Value:
    """x in the low half of each int and y in the high one, rounded to nearest even."""
    low, high = (_round_bf16(b, v, vi32, _ints) for v in (x, y))
    return b.or_(b.and_(low, _ints(0xFFFF)), b.shl(high, _ints(16)))


_define("tile_configure", VI, (A,), _configure_tiles)
_define("tile_release", VI, (), partial(_run, "tilerelease"))
_define("tile_zero", VI, (N,), partial(_run, "tilezero"))
_define("tile_load", VI, (N, A, A), partial(_move, "tileloadd64"))
_define("tile_store", VI, (N, A, A), partial(_move, "tilestored64"))
_define("tile_bf16", VI, (N, N, N), partial(_run, "tdpbf16ps"))
_define("tile_s8u8", VI, (N, N, N), partial(_run, "tdpbsud"))
_define("tile_s8s8", VI, (N, N, N), partial(_run, "tdpbssd"))
_define("sub_bytes", VI, (VI, VI), _sub_bytes)
_define("flushed", VF, (VF,), _flush_subnormals)
_define("pair_bf16", VI, (VF, VF), _pair_bf16)
_define("fma_flushed", VF, (VF, VF, VF), _fma_flushed)


def configuration(shapes: Shapes) -> list[int]:
    """The sixteen int32 that `ldtilecfg` reads: palette 1, bytes of every tile's rows, then its rows."""
    table = bytearray(CONFIG)
    table[0] = 1
    for tile, (rows, nbytes) in enumerate(shapes):
        table[16 + 2 * tile : 18 + 2 * tile] = nbytes.to_bytes(2, "little")
        table[48 + tile] = rows
    return [int.from_bytes(table[i : i + 4], "little", signed=True) for i in range(0, CONFIG, 4)]


@dataclass(frozen=True, slots=True)
class Tiles:
    """The tiles of the thread that runs this. `at`: MEMORY bytes of its own; `shapes`: of every tile used.

    Products read rows of a and *pairs* or *quads* of b. Row k of b holds what numbers 2k, 2k + 1 (bfloat16)
    or 4k … 4k + 3 (bytes) of a row of a are multiplied by, for each of sixteen columns.
    """

    w: Writer
    kind: Kind
    at: Word
    shapes: Shapes = FULL

    @property
    def _soft(self) -> bool:
        return self.kind == "software"

    def _place(self, tile: int) -> Word:
        return self.at + (CONFIG + TILE * tile)

    def configure(self) -> None:
        """Give the tiles their shapes, and zeros. Before anything else, on every thread."""
        self.w.store_i32(self.at, ir.Constant(vi32, configuration(self.shapes)))
        if not self._soft:
            self.w.tile_configure(self.at)

    def release(self) -> None:
        """Leave the tiles: a thread that holds them costs the system more to switch."""
        if not self._soft:
            self.w.tile_release()

    def zero(self, tile: int) -> None:
        if not self._soft:
            self.w.tile_zero(tile)
            return
        for row in range(ROWS):
            self.w.store_i32(self._place(tile) + LINE * row, self.w.zero_i32())

    def load(self, tile: int, source: Word, stride: Word | int) -> None:
        """Rows that lie `stride` bytes apart."""
        if not self._soft:
            self.w.tile_load(tile, source, stride)
            return
        rows, nbytes = self.shapes[tile]
        self.zero(tile)

        def one(row: Word) -> None:
            part = self.w.load_some(source + stride * row, nbytes // 4)
            self.w.store_f32(self._place(tile) + LINE * row, part)

        self.w.loop(0, rows, 1, (), one)

    def store(self, tile: int, to: Word, stride: Word | int) -> None:
        if not self._soft:
            self.w.tile_store(tile, to, stride)
            return
        rows, nbytes = self.shapes[tile]

        def one(row: Word) -> None:
            part = self.w.load_f32(self._place(tile) + LINE * row)
            self.w.store_some(to + stride * row, part, nbytes // 4)

        self.w.loop(0, rows, 1, (), one)

    def bf16(self, c: int, a: int, b: int) -> None:
        """c += a · b, float32 += bfloat16 · bfloat16.

        Even and odd numbers of a row are summed apart, by fused multiply-adds from zero, then added, then
        added to c. Every step rounds to nearest even, and takes and leaves zeros for subnormal numbers.
        """
        if not self._soft:
            self.w.tile_bf16(c, a, b)
            return
        w = self.w

        def row(m: Word) -> None:
            def pair(k: Word, even: Value, odd: Value) -> list[Value]:
                x = w.spread_i32(self._place(a) + LINE * m + 4 * k)
                y = w.load_i32(self._place(b) + LINE * k)
                low = (w.flushed(w.low_bf16(v)) for v in (x, y))
                high = (w.flushed(w.high_bf16(v)) for v in (x, y))
                return [w.fma_flushed(*low, even), w.fma_flushed(*high, odd)]

            sums = w.loop(0, self.shapes[a][1] // 4, 1, [w.zero_f32()] * 2, pair)
            at = self._place(c) + LINE * m
            before = w.flushed(w.load_f32(at))
            w.store_f32(at, w.flushed(w.add(before, w.flushed(w.add(*sums)))))

        self.w.loop(0, self.shapes[c][0], 1, (), row)

    def s8u8(self, c: int, a: int, b: int) -> None:
        """c += a · b, int32 += int8 · uint8, exactly (modulo 2**32)."""
        if not self._soft:
            self.w.tile_s8u8(c, a, b)
            return
        self._add_bytes(c, a, b, 0)

    def s8s8(self, c: int, a: int, b: int) -> None:
        """c += a · b, int32 += int8 · int8, exactly (modulo 2**32)."""
        if not self._soft:
            self.w.tile_s8s8(c, a, b)
            return
        self._add_bytes(c, a, b, 128)

    def _add_bytes(self, c: int, a: int, b: int, more: int) -> None:
        """The product of bytes in memory. `more`: 128 if those of b have signs: with it they have none."""
        w = self.w
        over = w.mul_i32(w.spread_int(more), w.spread_int(0x01010101))

        def row(m: Word) -> None:
            def quad(k: Word, s: Value) -> list[Value]:
                x, y = w.spread_i32(self._place(a) + LINE * m + 4 * k), w.load_i32(self._place(b) + LINE * k)
                return [w.sub_i32(w.dot8(s, w.sub_bytes(y, over), x), w.dot8(w.zero_i32(), over, x))]

            at = self._place(c) + LINE * m
            (s,) = w.loop(0, self.shapes[a][1] // 4, 1, [w.load_i32(at)], quad)
            w.store_i32(at, s)

        self.w.loop(0, self.shapes[c][0], 1, (), row)


@block()
def start_tiles(kind: Kind, shapes: Shapes, w: Writer, scratch: Word) -> None:
    """Block (scratch): this thread may use tiles of these shapes from here on."""
    Tiles(w, kind, scratch, shapes).configure()


@block()
def stop_tiles(kind: Kind, w: Writer, scratch: Word) -> None:
    """Block (scratch): it will not any more."""
    Tiles(w, kind, scratch).release()
