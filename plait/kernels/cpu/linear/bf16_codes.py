"""bfloat16 weights in twelve bits each, from which all sixteen come back.

Weights of a matrix differ little in size: eight values of the upper seven bits of their exponents are nearly
all that there is (what is left of Huffman codes in DFloat11, arXiv:2504.11651, if every number is to take
equally many bits). The lower byte of a number is kept as it is; sign and those seven bits are one of
sixteen codes. A number with an exponent that has no code is kept outside the tile, whole.

A matrix is a line of sixteen upper bytes, four times over; then tiles of sixteen outputs; then numbers
without a code, eight bytes each: the number, and above it the place of its two bytes in the plain tile. A
tile starts with int64 offsets, from the matrix's start, of those in each PIECE of inputs, and of their end.
Then come records of eight inputs: lower bytes of two pairs of inputs, of two more, and codes, the first two
pairs' in the low halves. In each sixteen bytes eight are of one pair and eight of the next, so that
interleaving bytes gives the lines of a plain tile (`dense`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

import plait.kernels.cpu.linear.codebooks  # noqa: F401  operations that `Writer` has then
from plait.kernels.cpu.codegen.kernel import inline, kernel
from plait.kernels.cpu.codegen.kinds import Int
from plait.kernels.cpu.codegen.llvm_writer import Value, Word, Writer, straight
from plait.kernels.cpu.codegen.target import one_stream
from plait.kernels.cpu.codegen.vec import DEFINED, get_i64, get_u8, put_i64, put_u8
from plait.kernels.cpu.runtime.executor import Executor
from plait.kernels.cpu.runtime.frame import word
from plait.kernels.cpu.runtime.frame_words import LINE
from plait.kernels.cpu.runtime.tile_memory import room

TILE, RECORD_INPUTS = 16, 8
RECORD, RECORD_PLAIN = 3 * LINE, 4 * LINE  # bytes of a record, and of its lines in a plain tile
PIECE = 256  # inputs of which numbers without a code are listed together
CODES, NONE = 8, 255  # how many exponents have a code; what is written for one that has none
WORTH = 0.875  # of the plain size is the most that is worth it
AHEAD = 3072  # bytes that a tile is fetched before it is needed
SOME = 4  # rows that take longer to multiply than their weights to come from memory
SOME_AHEAD = 8192  # bytes that weights are fetched for them before they are needed, into L2
HERE = "look_bytes" in DEFINED  # where bytes are looked up in a register


@dataclass(frozen=True, slots=True)
class Coded:
    """Marks a weight matrix that is kept in codes."""

    bits: int = 12


N = TypeVar("N", int, Word)
INDEX = f"((n + {PIECE + PIECE - 1}) // {PIECE} * 8 + {LINE - 1}) // {LINE} * {LINE}"
"""Bytes of a tile of n inputs in front of its records, in the words of a kernel; `index_of` says it too."""
TILE_BYTES = f"{INDEX} + n // {RECORD_INPUTS} * {RECORD}"


def index_of(n: N) -> N:
    """Of an int or of a `Word`."""
    return ((n + (2 * PIECE - 1)) // PIECE * 8 + (LINE - 1)) // LINE * LINE


def _decode_record(w: Writer, at: Word, table: Value) -> list[Value]:
    """The four lines of a plain tile that a record is; what has no code is wrong."""
    codes, found = w.load_i32(at + 2 * LINE), list[Value]()
    for half, some in enumerate((codes, w.right(codes, 4))):
        low = w.load_i32(at + half * LINE)
        high = w.look_bytes(table, w.and_i32(some, w.spread_int(0x0F0F0F0F)))
        found += [w.low_words(low, high), w.high_words(low, high)]
    return found


def _records(n: Word, tile: Word, first: Word) -> Word:
    """Where inputs `first` and on are."""
    at: Word = tile + index_of(n)
    return at + (first >> 3) * RECORD


def _others(w: Writer, weight: Word, tile: Word, first: Word, count: Word) -> tuple[Word, Word]:
    """Where the numbers of inputs first..first+count that have no code begin and end."""
    index = tile + first // PIECE * 8
    return weight + w.get_i64(index), weight + w.get_i64(index + (count + (PIECE - 1)) // PIECE * 8)


def _mend(w: Writer, kept: Word, to: Word) -> None:
    """Put a number that has no code in its place; `to`: the plain tile."""
    at = to + (kept >> 16)
    w.put_u8(at, kept)
    w.put_u8(at + 1, kept >> 8)


def unpack(w: Writer, weight: Word, tile: Word, n: Word, first: Word, count: Word, to: Word) -> None:
    """Inputs first..first+count of the tile at that address, as a plain tile; n: inputs of the matrix.

    `first` is a multiple of PIECE, `count` of RECORD_INPUTS.
    """
    table, records = w.load_i32(weight), _records(n, tile, first)

    def record(i: Word) -> None:
        for p, line in enumerate(_decode_record(w, records + i * RECORD, table)):
            w.store_i32(to + i * RECORD_PLAIN + p * LINE, line)

    w.loop(0, count >> 3, 1, (), record)
    begin, end = _others(w, weight, tile, first, count)
    w.loop(begin, end, 8, (), lambda at: _mend(w, w.get_i64(at), to - first * (2 * TILE)))


unpacked = straight(unpack)
"""Block: `unpack`."""


@dataclass(frozen=True, slots=True)
class Walk:
    """Through tiles `apart` bytes from one another, over inputs first..first+count of n. As in `unpack`.

    scratch: RECORD_PLAIN bytes for each tile; rows: that pass by together.
    """

    weight: Word
    tile: Word
    apart: Word
    n: Word
    first: Word
    count: Word
    scratch: Word
    tiles: int
    rows: int

    def lines(self, w: Writer, sums: list[Value], add: Callable[..., list[Value]]) -> list[Value]:
        """sums = add(pair, lines, sums) for each pair of inputs, from 0, and its line of every tile."""
        table, count, tiles = w.load_i32(self.weight), self.tiles, range(self.tiles)
        at = [self.tile + self.apart * t for t in tiles]
        records = [_records(self.n, tile, self.first) for tile in at]
        others = [_others(w, self.weight, tile, self.first, self.count) for tile in at]
        total, before = self.count >> 3, self.first >> 3

        def added(i: Word, lines: list[list[Value]], sums: list[Value]) -> list[Value]:
            for p in range(4):
                sums = add(i * 4 + p, [tile[p] for tile in lines], sums)
            return sums

        def record(i: Word, *sums: Value) -> list[Value]:
            places = [r + i * RECORD for r in records]
            self._fetch(w, places)
            return added(i, [_decode_record(w, place, table) for place in places], list(sums))

        def mended(i: Word, *carried: Value) -> list[Value]:
            """A record that has numbers without a code goes through memory."""
            lines, nexts = list[list[Value]](), list[Word]()
            for t, (_, end) in enumerate(others):
                to = self.scratch + t * RECORD_PLAIN
                for p, line in enumerate(_decode_record(w, records[t] + i * RECORD, table)):
                    w.store_i32(to + p * LINE, line)
                here, tile = before + i, to - (before + i) * RECORD_PLAIN

                def other(at: Word, tile: Word = tile) -> list[Word]:
                    _mend(w, w.get_i64(at), tile)
                    return [at + 8]

                def more(at: Word, end: Word = end, here: Word = here) -> Value:
                    return _record_of(w, at, end).equals(here)

                nexts += w.repeat([carried[t]], more, other)
                lines.append([w.load_i32(to + p * LINE) for p in range(4)])
            return [*nexts, *added(i, lines, list(carried[count:]))]

        def stretch(i: Word, *carried: Value) -> list[Value]:
            """To the next record that has such numbers, and that one."""
            stop = total
            for at, (_, end) in zip(carried, others, strict=False):
                stop = stop.least(_record_of(w, at, end) - before)
            found = w.loop(i, stop, 1, carried[count:], record)
            found = w.unless_zero(total - stop, [*carried[:count], *found], lambda *c: mended(stop, *c))
            return [stop + 1, *found]

        start = [w.number(0), *(begin for begin, _ in others), *sums]
        return w.repeat(start, lambda i, *_: total.above(i), stretch)[1 + count :]

    def _fetch(self, w: Writer, places: list[Word]) -> None:
        """Weights that come later, with the records at these places.

        A processor that fetches a stream by itself goes as far as the stream has gone. Where rows take their
        time, it is a few lines ahead, and memory waits.
        """
        if one_stream() and self.rows < SOME:
            return
        fetch, ahead = (w.prefetch_l2, SOME_AHEAD) if one_stream() else (w.prefetch, AHEAD)
        for place in places:
            for line in range(0, RECORD, LINE):
                fetch(place + (ahead + line))


def _record_of(w: Writer, at: Word, end: Word) -> Word:
    """The record of the number kept there; behind the last, one that no tile has."""
    record: Word = w.pick(end.above(at), w.get_i64(at) >> 24, w.number(1 << 40))
    return record


@inline
def _number(row: Int, k: Int) -> Int:
    """The bits of a row's number."""
    return np.int64(get_u8(row + 2 * k)) | np.int64(get_u8(row + 2 * k + 1)) << 8


@kernel
def count_exponents(frame: int, args: int, thread: int, threads: int) -> None:
    """source, bytes between its rows, n_in, n_out, counts (int64 [threads, 128])."""
    source, row_bytes, n, n_out = word(args, 2), word(args, 3), word(args, 4), word(args, 5)
    counts = word(args, 6) + 1024 * thread
    for r in range(n_out * thread // threads, n_out * (thread + 1) // threads):
        row = source + r * row_bytes + 1
        for k in range(n):
            at = counts + 8 * np.int64(get_u8(row + 2 * k) & 127)
            put_i64(at, get_i64(at) + 1)


@inline
def _code(codes: Int, number: Int) -> Int:
    return np.int64(get_u8(codes + (number >> 8 & 127)))


@kernel
def pack_codes(frame: int, args: int, thread: int, threads: int) -> None:
    """source, bytes between its rows, n_in, n_out, tiles, codes (uint8 [128]), bytes of a tile and its index.

    The index gets how many numbers of each piece have no code.
    """
    source, row_bytes, n, n_out = word(args, 2), word(args, 3), word(args, 4), word(args, 5)
    out, codes, tile_bytes, index = word(args, 6), word(args, 7), word(args, 8), word(args, 9)
    tiles = (n_out + 15) // 16
    for t in range(tiles * thread // threads, tiles * (thread + 1) // threads):
        tile = out + t * tile_bytes
        for r in range(n // 8):
            to, missed = tile + index + r * 192, 0
            for j in range(min(16, n_out - 16 * t)):
                row = source + (16 * t + j) * row_bytes
                for i in range(4):  # two inputs of the first two pairs, and four inputs on
                    place, both = 2 * j + (i & 1), np.int64(0)
                    at = to + place // 8 * 16 + 8 * (i >> 1) + place % 8
                    for half in range(2):
                        number = _number(row, 8 * r + i + 4 * half)
                        code = _code(codes, number)
                        if code == 255:
                            number, code, missed = 0, 0, missed + 1
                        both |= (code | number >> 15 << 3) << 4 * half
                        put_u8(at + 64 * half, np.int32(number & 255))
                    put_u8(at + 128, np.int32(both))
            at = tile + 8 * (r // 32)
            put_i64(at, get_i64(at) + missed)


@kernel
def keep_others(frame: int, args: int, thread: int, threads: int) -> None:
    """Numbers without a code. Words of `pack_codes`, and the matrix; the index says by now where they go."""
    source, row_bytes, n, n_out = word(args, 2), word(args, 3), word(args, 4), word(args, 5)
    out, codes, tile_bytes, whole = word(args, 6), word(args, 7), word(args, 8), word(args, 10)
    tiles = (n_out + 15) // 16
    for t in range(tiles * thread // threads, tiles * (thread + 1) // threads):
        tile = out + t * tile_bytes
        for piece in range((n + 255) // 256):
            to, end = whole + get_i64(tile + 8 * piece), whole + get_i64(tile + 8 * piece + 8)
            k = 256 * piece
            while to < end:
                for j in range(min(16, n_out - 16 * t)):
                    number = _number(source + (16 * t + j) * row_bytes, k)
                    if _code(codes, number) == 255:
                        put_i64(to, (k // 2 * 64 + 4 * j + 2 * (k & 1)) << 16 | number)
                        to += 8
                k += 1


def pack(cpu: Executor, source: Tensor) -> Tensor | None:
    """bfloat16 (out, in), dense rows, coded; None where that would be no smaller or cannot be read."""
    n_out, n_in = source.shape
    if not HERE or n_in % RECORD_INPUTS or not n_in:
        return None
    words = (source, source.stride(0) * 2, n_in, n_out)
    counts = torch.zeros(cpu.threads, 128, dtype=torch.int64)
    cpu.launch(count_exponents, *words, counts, rows=n_out)
    found = torch.topk(counts.sum(0), CODES)
    without = source.numel() - int(found.values.sum())
    tiles, index_bytes, upper = -(-n_out // TILE), index_of(n_in), found.indices.to(torch.uint8)
    tile_bytes = index_bytes + n_in // RECORD_INPUTS * RECORD
    behind = LINE + tiles * tile_bytes
    if behind + 8 * without > WORTH * source.numel() * 2:
        return None
    data = room(behind + 8 * without + 8)  # what is behind the last may be looked at
    data[:LINE] = torch.cat([upper, upper | 128]).repeat(4)
    codes = torch.full((128,), NONE, dtype=torch.uint8)
    codes[found.indices] = torch.arange(CODES, dtype=torch.uint8)
    more = (*words, data[LINE:], codes, tile_bytes, index_bytes)
    cpu.launch(pack_codes, *more, rows=n_out)
    pieces = -(-n_in // PIECE)
    index = data[LINE:behind].view(tiles, tile_bytes)[:, : 8 * (pieces + 1)].view(torch.int64)
    ends = index[:, :pieces].reshape(-1).cumsum(0).view(tiles, pieces) * 8 + behind
    index[:, 0] = torch.cat([torch.tensor([behind]), ends[:-1, -1]])
    index[:, 1:] = ends
    cpu.launch(keep_others, *more, data, rows=n_out)
    return data
