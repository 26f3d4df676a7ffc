"""A matrix for each head: sixteen dot products at a time, their lanes added in one fixed tree.

A plain weight is used as the model holds it, [heads, m, n]: sixteen of its rows stay in the first cache while
some rows of x pass. Of a stored one some rows at a time are decoded into scratch, for all rows of x, by the
embedding's kernels (`embed.reader`), called here by their addresses. Products with columns (`turned`) add a
multiple of one stored row after the other, from the first on. No order of additions depends on how many rows
x has, or on threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import torch
from torch import Tensor

from plait.errors import ShapeMismatch
from plait.kernels.cpu.codegen.kernel import inline, kernel
from plait.kernels.cpu.codegen.kinds import Int
from plait.kernels.cpu.codegen.llvm_writer import Value, Word, Writer, block
from plait.kernels.cpu.codegen.target import wide_registers
from plait.kernels.cpu.codegen.vec import call_kernel, get_i64, put_i64, words
from plait.kernels.cpu.embed.embed import RowReader, reader, why_unknown_format
from plait.kernels.cpu.runtime.address_table import keep_addresses
from plait.kernels.cpu.runtime.executor import Executor
from plait.kernels.cpu.runtime.frame import rows_of, scratch_of, word
from plait.kernels.cpu.runtime.row_checks import TensorRows, float32_rows
from plait.kernels.cpu.runtime.threads import argument, is_address
from plait.ops.heads import HeadRows, map_heads
from plait.ops.registry import OpFacts
from plait.quant.codebook import Codebook
from plait.quant.weight import Weight

WORDS = 32  # of a recipe: a decoder's own, then those of this file
START, WIDTH, COUNT = 24, 25, 26  # its first column, its columns; where a decoder finds how many rows
HEAD = 8 * WORDS  # bytes of scratch before the decoded rows
ROWS = 16  # that pass through a block of weights while it is in the first cache
TILE = 64  # rows decoded at a time where many rows of x pass, 16 where few do
TALL, WIDE = (4, 4) if wide_registers() else (2, 2)  # rows and vectors of outputs that are in registers


@block(takes=7)
def _make_dots(w: Writer, *words: Word) -> None:
    """Block (x, weight, row_bytes, last, n, out, left): out[i] = x · row i of the weight, for i < left <= 16.

    last: the last row there is.
    """
    x, weight, row_bytes, last, n, out, left = words
    order = [int(f"{i:04b}"[::-1], 2) for i in range(16)]  # each fold interleaves: bits come out reversed
    rows = [weight + row_bytes * last.least(i) for i in order]
    full, rest = n >> 4 << 6, n - (n >> 4 << 4)

    def vector(at: Word, *sums: Value) -> list[Value]:
        v = w.load_f32(x + at)
        return [w.fma(v, w.load_f32(row + at), s) for row, s in zip(rows, sums, strict=True)]

    def tail(*sums: Value) -> list[Value]:
        v = w.load_some(x + full, rest)
        return [w.fma(v, w.load_some(row + full, rest), s) for row, s in zip(rows, sums, strict=True)]

    sums = w.unless_zero(rest, w.loop(0, full, 64, [w.zero_f32()] * 16, vector), tail)
    while len(sums) > 1:
        pairs = zip(sums[::2], sums[1::2], strict=True)
        sums = [w.add(w.interleave_low(a, b), w.interleave_high(a, b)) for a, b in pairs]
    w.store_some(out, sums[0], left)


@block(takes=9)
def _make_sums(rows: int, vectors: int, w: Writer, *words: Word) -> None:
    """Block (x, x_bytes, weight, w_bytes, count, out, out_bytes, before, left): out += x · weight, of `count`
    rows, for some rows of x and vectors; before: how many rows came before, 0: out is not read."""
    x, x_bytes, weight, w_bytes, count, out, out_bytes, before, left = words
    places = [out + out_bytes * r + 64 * v for r, v in product(range(rows), range(vectors))]

    def row(i: Word, *sums: Value) -> list[Value]:
        numbers = [w.spread_f32(x + x_bytes * r + 4 * i) for r in range(rows)]
        weights = [w.load_f32(weight + w_bytes * i + 64 * v) for v in range(vectors)]
        return [w.fma(*pair, s) for pair, s in zip(product(numbers, weights), sums, strict=True)]

    zeros = [w.zero_f32()] * len(places)
    sums = w.unless_zero(before, zeros, lambda *_: [w.load_some(place, left) for place in places])
    for place, s in zip(places, w.loop(0, count, 1, sums, row), strict=True):
        w.store_some(place, s, left)


dots, block_sums, row_sums, edge = _make_dots(), _make_sums(TALL, WIDE), _make_sums(1, WIDE), _make_sums(1, 1)


@kernel
def map_rows(frame: int, args: int, thread: int, threads: int) -> None:
    """x, its row and head strides, heads, n, weight (dense), m, out (dense)."""
    x, row_bytes, head_bytes, heads = word(args, 2), word(args, 3), word(args, 4), word(args, 5)
    n, weight, m, out, rows = word(args, 6), word(args, 7), word(args, 8), word(args, 9), rows_of(frame, args)
    # Few rows: a piece of work is sixteen outputs. Many: some rows of a head: its weight stays in cache.
    step = 16 if rows <= ROWS else m
    columns, blocks = (m + step - 1) // step, (rows + ROWS - 1) // ROWS
    items = heads * columns * blocks
    for item in range(items * thread // threads, items * (thread + 1) // threads):
        h, start, row = item // blocks // columns, item // blocks % columns * step, item % blocks * ROWS
        for i in range(start, min(start + step, m), 16):
            w, left = weight + (h * m + i) * 4 * n, m - i
            for r in range(row, min(row + ROWS, rows)):
                to = out + ((r * heads + h) * m + i) * 4
                dots(x + r * row_bytes + h * head_bytes, w, 4 * n, min(left, 16) - 1, n, to, left)


@inline
def _decode(frame: Int, own: Int, recipe: Int, decoder: Int, row: Int, count: Int) -> None:
    """`count` rows of the weight from `row` on, dense, behind the recipe's copy in this thread's scratch."""
    for i in range(2, START):
        put_i64(own + 8 * i, get_i64(recipe + 8 * i))
    put_i64(own, own + 8 * COUNT - frame)
    put_i64(own + 8 * COUNT, count)
    put_i64(own + 16, get_i64(recipe + 16) + 8 * row)
    put_i64(own + 56, own + HEAD)
    call_kernel(decoder, frame, own, 0, 1)


@kernel
def stored_rows(frame: int, args: int, thread: int, threads: int) -> None:
    """x, its row and head strides, heads, n, m, out (dense), rows of a head, the first of them that counts,
    recipes, how many, address of the decoder; then what recipes point into, which a recording has to hold."""
    x, row_bytes, head_bytes, heads, n, m, out, each, skip = words(args, 2, 11)
    recipe, decoder, rows = word(args, 11), word(args, 13), rows_of(frame, args)
    own = scratch_of(frame, thread)
    tile, step = own + HEAD, 16 if rows <= ROWS else TILE
    columns = (m + step - 1) // step
    items = heads * columns
    for item in range(items * thread // threads, items * (thread + 1) // threads):
        h, start = item // columns, item % columns * step
        count = min(step, m - start)
        _decode(frame, own, recipe, decoder, h * each + skip + start, count)
        for row in range(0, rows, ROWS):
            for i in range(0, count, 16):
                w, left = tile + i * 4 * n, count - i
                for r in range(row, min(row + ROWS, rows)):
                    to = out + ((r * heads + h) * m + start + i) * 4
                    dots(x + r * row_bytes + h * head_bytes, w, 4 * n, min(left, 16) - 1, n, to, left)


@kernel
def stored_columns(frame: int, args: int, thread: int, threads: int) -> None:
    """As `stored_rows`."""
    x, row_bytes, head_bytes, heads, n, m, out, each, skip, recipes, pieces, decoder = words(args, 2, 14)
    rows, own = rows_of(frame, args), scratch_of(frame, thread)
    tile, items, out_bytes = own + HEAD, heads * pieces, 4 * heads * m
    for item in range(items * thread // threads, items * (thread + 1) // threads):
        h, recipe = item // pieces, recipes + 8 * WORDS * (item % pieces)
        width, to = get_i64(recipe + 8 * WIDTH), out + (h * m + get_i64(recipe + 8 * START)) * 4
        many, some = width // (16 * WIDE) * (16 * WIDE), rows // TALL * TALL
        for k in range(0, n, 16):
            count, source = min(n - k, 16), x + h * head_bytes + 4 * k
            _decode(frame, own, recipe, decoder, h * each + skip + k, count)
            for c in range(0, many, 16 * WIDE):
                w, at = tile + 4 * c, to + 4 * c
                for r in range(0, some, TALL):
                    row, y = source + r * row_bytes, at + r * out_bytes
                    block_sums(row, row_bytes, w, 4 * width, count, y, out_bytes, k, 16)
                for r in range(some, rows):
                    row_sums(source + r * row_bytes, 0, w, 4 * width, count, at + r * out_bytes, 0, k, 16)
            for c in range(many, width, 16):
                w, at, left = tile + 4 * c, to + 4 * c, width - c
                for r in range(rows):
                    edge(source + r * row_bytes, 0, w, 4 * width, count, at + r * out_bytes, 0, k, left)


def plain(facts: OpFacts) -> str | None:
    """The `when` of matrices that are plain numbers."""
    kind = facts.sizes.get("kind")
    return float32_rows(facts) if kind is None else f"it reads plain numbers, {kind} stays as it is stored"


@map_heads.variant("native", on="cpu", when=plain, native=True)
def _map_heads(cpu: Executor, x: Tensor, weight: Tensor) -> Tensor:
    rows = TensorRows.of(x)
    if weight.dtype != torch.float32 or weight.dim() != 3 or not weight.is_contiguous():
        raise ShapeMismatch(
            f"matrices of heads must be dense float32 [heads, m, n], got {weight.dtype} {list(weight.shape)}"
        )
    heads, m, n = weight.shape
    if x.dim() != 3 or (rows.heads, rows.width) != (heads, n):
        raise ShapeMismatch(f"{heads} matrices {n} -> {m} were given {list(x.shape)}")
    out = cpu.empty(rows.count, heads, m)
    cpu.launch(map_rows, x, *rows.strides, heads, n, weight, m, out, rows=rows.count)
    return out


def _pieces(weight: Weight) -> Sequence[tuple[int, Weight]]:
    """Ranges of its columns for threads to share, each with its first column; one if it cannot be cut."""
    cols = weight.shape[1]
    if isinstance(weight, Codebook) and weight.nested:  # cut, its magnitudes would be kept decoded
        return [(0, weight)]
    for width in (128, 256, 512):
        try:
            return [(at, weight.cols(at, min(at + width, cols))) for at in range(0, cols, width)]
        except ShapeMismatch:
            continue
    return [(0, weight)]


@dataclass(frozen=True, slots=True)
class Recipes:
    """How one weight is decoded, column piece by column piece."""

    words: Tensor  # int64 [pieces, WORDS]
    readers: Sequence[RowReader]
    held: Sequence[Tensor]  # all that the words point into, the rows' own numbers first
    width: int  # of the widest piece

    @classmethod
    def of(cls, maps: HeadRows) -> Recipes:
        """Raises ShapeMismatch for a storage no kernel reads."""
        cut = _pieces(maps.weight) if maps.turned else [(0, maps.weight)]
        ids = torch.from_numpy(np.arange(maps.weight.shape[0]))  # in a recording torch must not compute
        readers = [reader(part) for _, part in cut]
        words, held, places = np.zeros((len(cut), WORDS), np.int64), [ids], list[int]()
        for i, ((start, part), how) in enumerate(zip(cut, readers, strict=True)):
            width = part.shape[1]
            told = (ids, *how.source, how.pieces, 1.0, None, width, *how.more)
            words[i, 2 : 2 + len(told)] = [argument(value) for value in told]
            words[i, START], words[i, WIDTH] = start, width
            places += [i * WORDS + at for at, value in enumerate(told, 2) if is_address(value)]
            held += [value for value in told[1:] if isinstance(value, Tensor)]
        return cls(keep_addresses(words, held, places), readers, held, max(part.shape[1] for _, part in cut))


class StoredHeads:
    """The native `map_heads` of one weight, which it prepares in the first call."""

    def __init__(self, cpu: Executor) -> None:
        self._cpu = cpu
        self._seen: tuple[HeadRows, Recipes] | None = None

    def __call__(self, x: Tensor, weight: HeadRows) -> Tensor:
        """See `ops.heads.map_heads`."""
        if self._seen is None or self._seen[0] is not weight:
            self._seen = weight, Recipes.of(weight)
        how, rows, (n, m) = self._seen[1], TensorRows.of(x), weight.widths
        if x.dim() != 3 or (rows.heads, rows.width) != (weight.heads, n):
            raise ShapeMismatch(f"{weight.heads} matrices {n} -> {m} were given {list(x.shape)}")
        out = self._cpu.empty(rows.count, weight.heads, m)
        self._cpu.launch(
            stored_columns if weight.turned else stored_rows,
            *(x, *rows.strides, weight.heads, n, m, out, weight.each, weight.first),
            *(how.words, len(how.readers), how.readers[0].kernel.address, *how.held),
            rows=rows.count,
            scratch=HEAD + 4 * (how.width + 16) * (16 if weight.turned else TILE),
        )
        return out


def why_unstored(facts: OpFacts) -> str | None:
    """The `when` of matrices in storages that are decoded."""
    stored = "kind" in facts.sizes
    return why_unknown_format(facts) if stored else "it decodes what is stored, not plain numbers"


map_heads.variant("native-stored", on="cpu", when=why_unstored, native=True)(StoredHeads)
