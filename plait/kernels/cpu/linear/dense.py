"""Linear layers over plain numbers: float32, bfloat16 or float16 weights, float32 sums.

Inputs are float32, or with bfloat16 weights rounded to bfloat16, too: then they are multiplied in pairs
(`bf16_pairs`), at up to twice the speed.

A tile holds sixteen outputs, two inputs at a time, in the width the weights came in. In float32 and float16
there are 16 numbers of the even input, then 16 of the odd one. In bfloat16 there are 16 words with the odd
input in the high half, which costs one shift and one mask to widen.

Every output is the sum of chunks of `CHUNK` inputs, added in order. Within a chunk even and odd inputs are
summed apart, and pairs together, the odd input first. That order changes neither with the number of rows nor
with how threads share tiles. It is the same for bfloat16 in twelve bits (`bf16_codes`): a thread makes plain
tiles of a chunk in its cache first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, partial
from itertools import product as pairs_of
from string import Template

import torch
from torch import Tensor

from plait.errors import ShapeMismatch
from plait.kernels.cpu.codegen.kernel import Kernel, kernel, load_generated
from plait.kernels.cpu.codegen.llvm_writer import Value, Word, Writer, block, digest
from plait.kernels.cpu.codegen.plain_x86 import write_fma
from plait.kernels.cpu.codegen.target import one_stream, wide_registers
from plait.kernels.cpu.codegen.vec import get_i32, get_u8, put_i32, put_u8, word
from plait.kernels.cpu.linear import bf16_codes, bf16_pairs
from plait.kernels.cpu.linear.bf16_codes import Coded
from plait.kernels.cpu.linear.packed import COUNTED, PackedWeight, multiply
from plait.kernels.cpu.runtime.executor import Executor
from plait.kernels.cpu.runtime.frame_words import LINE
from plait.kernels.cpu.runtime.row_checks import float32_rows
from plait.kernels.cpu.runtime.tile_memory import room
from plait.ops.linear import Packing, linear
from plait.ops.registry import OpFacts
from plait.quant.weight import CachedWeight, Dense, Weight

PAIR_BYTES = {"float32": 128, "bfloat16": 64, "float16": 64}  # two inputs of a tile
CHUNK = 512  # inputs of which products are summed before they join the rest: a pair of tiles stays in L2
PAIRS_CHUNK = 256  # the same for pairs: half the time for as many bytes, so a pair of tiles stays in L1
BLOCK = 192  # rows of one piece of work
# Rows that codes are decoded for in registers, of up to MOST, by whether they were rounded; more take plain
# tiles. Decoding and products overlap then; a pass that makes plain tiles first is waited for.
FEW = {False: (4, 2, 1), True: (8, 4, 3, 2, 1)}
MOST = {False: 12, True: 64}
AHEAD = 4096  # bytes that one row fetches weights before it needs them
_FILES = (
    *("linear/dense.py", "linear/bf16_codes.py", "linear/bf16_pairs.py", "linear/codebooks.py"),
    *("codegen/plain_x86.py", "codegen/bf16_dot.py"),
)
CHUNK_BYTES = CHUNK * 3 // 2 * 32  # of a plain tile of bfloat16, at most


def write_groups(w: Writer, rows: Word, sizes: Iterable[int], write: Callable[[Word, int], None]) -> None:
    """write(row, size) for so many rows, in groups of these sizes, the larger first."""
    row = w.number(0)
    for size in sizes:
        end = row + (rows - row) // size * size
        w.loop(row, end, size, (), lambda i, size=size: write(i, size))
        row = end


def _shapes(paired: bool) -> tuple[tuple[int, int], ...]:
    """(rows, tiles) held in registers at once, the larger first: their number never changes a result."""
    if paired:
        return (
            ((8, 2), (4, 2), (2, 2), (1, 2), (4, 1), (1, 1)) if wide_registers() else ((4, 1), (1, 2), (1, 1))
        )
    return ((6, 2), (4, 2), (2, 2), (1, 2), (4, 1), (1, 1)) if wide_registers() else ((3, 1), (1, 2), (1, 1))


def _pair(w: Writer, kind: str, at: Word) -> tuple[Value, Value]:
    """Sixteen weights of an even and of an odd input."""
    match kind:
        case "float32":
            return w.load_f32(at), w.load_f32(at + 64)
        case "float16":
            return w.load_f16(at), w.load_f16(at + 32)
        case _:
            words = w.load_i32(at)
            return w.low_bf16(words), w.high_bf16(words)


@dataclass(frozen=True, slots=True)
class _Part:
    """Rows through some tiles, over part of the inputs. The arguments of `rows_through`."""

    kind: str
    paired: bool
    tiles: int
    x: Word
    row_bytes: Word
    weights: Word
    weights_apart: Word
    n: Word
    out: Word
    out_bytes: Word
    earlier: Word
    bias: Word
    left: Word
    apart: Word

    def write(self, w: Writer, row: Word, rows: int, sums: list[Value] | None = None) -> None:
        """Write rows row..row+rows, as many as registers hold sums of. `sums`: theirs, if computed before."""
        out = self.out + self.out_bytes * row
        grid = [(r, t) for r in range(rows) for t in range(self.tiles)]
        places = [
            (out + self.out_bytes * r + 64 * self.apart * t, self.left - 16 * self.apart * t) for r, t in grid
        ]

        def behind(*sums: Value) -> list[Value]:
            return [w.add(w.load_some(*place), s) for place, s in zip(places, sums, strict=True)]

        def biased(*sums: Value) -> list[Value]:
            steps = [self.apart * t for t in range(self.tiles)]
            vectors = [w.load_some(self.bias + 64 * t, self.left - 16 * t) for t in steps]
            return [w.add(s, vectors[t]) for s, (_, t) in zip(sums, grid, strict=True)]

        sums = w.unless_zero(self.earlier, sums or self._sums(w, self.x + self.row_bytes * row, rows), behind)
        for (at, columns), s in zip(places, w.unless_zero(self.bias, sums, biased), strict=True):
            w.store_some(at, s, columns)

    def _sums(self, w: Writer, x: Word, rows: int) -> list[Value]:
        """Sums over even and over odd inputs together, row by row."""
        step, tiles, count = PAIR_BYTES[self.kind], self.tiles, rows * self.tiles
        rows_at = [x + self.row_bytes * r for r in range(rows)]
        tiles_at = [self.weights + self.weights_apart * t for t in range(tiles)]
        if self.paired:
            return self._sums_of_pairs(w, rows_at, tiles_at)

        def pair(k: Word, *sums: Value) -> list[Value]:
            if rows == 1 and not one_stream():
                for at, line in pairs_of(tiles_at, range(0, step, LINE)):
                    w.prefetch(at + step * k + (AHEAD + line))
            pairs = [_pair(w, self.kind, at + step * k) for at in tiles_at]
            even, odd = [], []
            for r, at in enumerate(rows_at):
                v, u = w.spread_f32(at + 8 * k), w.spread_f32(at + 8 * k + 4)
                even += [write_fma(w, v, a, sums[r * tiles + t]) for t, (a, _) in enumerate(pairs)]
                odd += [write_fma(w, u, b, sums[count + r * tiles + t]) for t, (_, b) in enumerate(pairs)]
            return even + odd

        def last(_: Word, *sums: Value) -> list[Value]:
            weights = [_pair(w, self.kind, at + step * (self.n >> 1))[0] for at in tiles_at]
            ys = [w.spread_f32(at + 4 * self.n - 4) for at in rows_at]
            return [write_fma(w, ys[i // tiles], weights[i % tiles], s) for i, s in enumerate(sums)]

        sums = w.loop(0, self.n >> 1, 1, [w.zero_f32()] * (2 * count), pair)
        even = w.loop(self.n >> 1 << 1, self.n, 1, sums[:count], last)  # the odd one, if there is one
        return [w.add(a, b) for a, b in zip(even, sums[count:], strict=True)]

    def _sums_of_pairs(self, w: Writer, rows_at: list[Word], tiles_at: list[Word]) -> list[Value]:
        """The same of rounded rows, pair by pair; behind an odd number of inputs are zeros."""

        def pair(p: Word, *sums: Value) -> list[Value]:
            if len(rows_at) == 1 and not one_stream():
                for at in tiles_at:
                    w.prefetch(at + LINE * p + AHEAD)
            lines = [w.load_i32(at + LINE * p) for at in tiles_at]
            rows = [at + 2 * bf16_pairs.SIZE * p for at in rows_at]
            return bf16_pairs.write_pairs(w, rows, lines, sums)

        return w.loop(0, (self.n + 1) >> 1, 1, [w.zero_f32()] * (len(rows_at) * len(tiles_at)), pair)


@block(takes=12)
def rows_through(tiles: int, kind: str, paired: bool, w: Writer, *words: Word) -> None:
    """Block (the words of `_Part`, rows): `rows` rows through so many tiles, in the largest groups that
    registers hold. paired: the rows were rounded by `bf16_pairs.round_rows`.

    earlier: 0 if these are the first inputs; otherwise what `out` has is added. bias: an address or 0.
    left: outputs from the first tile on; apart: from one of the tiles to the next, in tiles, and
    weights_apart in bytes.
    """
    *places, rows = words
    sizes = sorted({r for r, t in _shapes(paired) if t == tiles}, reverse=True)
    write_groups(w, rows, sizes, partial(_Part(kind, paired, tiles, *places).write, w))


@block(takes=15)
def few_through_codes(tiles: int, paired: bool, w: Writer, *words: Word) -> None:
    """Block: as `rows_through`, of a few rows, with weights in twelve bits: `bf16_codes.Walk` says where."""
    x, row_bytes, weight, tile, tile_apart, n, first, count, scratch, *places, rows = words
    out, out_bytes, bias, left, apart = places
    none = w.number(0)

    def some(row: Word, size: int) -> None:
        walk = bf16_codes.Walk(weight, tile, tile_apart, n, first, count, scratch, tiles, size)
        source, to, half = x + row_bytes * row, out + out_bytes * row, size * tiles

        def add(p: Word, lines: list[Value], sums: list[Value]) -> list[Value]:
            evens, odds = [w.low_bf16(line) for line in lines], [w.high_bf16(line) for line in lines]
            at = [source + row_bytes * r + 8 * p for r in range(size)]
            made = [(w.spread_f32(a + 4 * odd), odds if odd else evens) for odd in (0, 1) for a in at]
            terms = [(v, weights) for v, several in made for weights in several]
            return [write_fma(w, v, weights, s) for (v, weights), s in zip(terms, sums, strict=True)]

        def add_pairs(p: Word, lines: list[Value], sums: list[Value]) -> list[Value]:
            at = [source + row_bytes * r + 2 * bf16_pairs.SIZE * p for r in range(size)]
            return bf16_pairs.write_pairs(w, at, lines, sums)

        if paired:
            joined = walk.lines(w, [w.zero_f32()] * half, add_pairs)
        else:
            sums = walk.lines(w, [w.zero_f32()] * (2 * half), add)
            joined = [w.add(a, b) for a, b in zip(sums[:half], sums[half:], strict=True)]
        part = _Part(
            "bfloat16",
            paired,
            tiles,
            source,
            none,
            tile,
            none,
            count,
            to,
            out_bytes,
            first,
            bias,
            left,
            apart,
        )
        part.write(w, none, size, joined)

    write_groups(w, rows, FEW[paired] if wide_registers() else (1,), some)


_SOURCE = Template(
    '''"""Products of float32 rows with $kind tiles: made by plait, from $digest."""
import numpy as np

from plait.kernels.cpu.linear import bf16_codes, dense
from plait.kernels.cpu.linear.bf16_pairs import ALONE, round_rows, row_bytes_of
from plait.kernels.cpu.runtime.frame import rows_of, scratch_of
from plait.kernels.cpu.codegen.kernel import inline, kernel
from plait.kernels.cpu.codegen.vec import atomic_add, get_i64, word

through_one, through_two = (dense.rows_through(tiles, "$kind", $paired) for tiles in (1, 2))
$few


@inline
def tiles_of(x, row_bytes, n, weight, tile_bytes, begin, end, n_out, bias, out, out_bytes, rows, scratch):
    """Rows through the tiles begin..end."""
    # Few rows read both halves of the tiles at a time, where a single stream leaves memory waiting.
    t, half = begin, (end - begin) // 2 if $least_apart <= rows <= $most else 0
    while t < end:
        tiles, step = min(end - t, $together), 1
        if half > 1:
            step = half
        to, left = out + 64 * t, n_out - 16 * t
        k = 0
        while k < n:
            count = n - k if n - k < $chunk * 3 // 2 else $chunk
            at, apart = weight + $header + t * tile_bytes, step * tile_bytes
            plus = bias + 64 * t if bias != 0 and k + count == n else 0
            some = x + $size * k
            $find
            k += count
        t += 1 if half > 1 else tiles
        if half > 1 and t == begin + half:
            t, half = begin + 2 * half, 0
'''
    + COUNTED
)


_MULTIPLY = """
            if tiles == 2:
                through_two(some, row_bytes, at, apart, count, to, out_bytes, k, plus, left, step, rows)
            else:
                through_one(some, row_bytes, at, apart, count, to, out_bytes, k, plus, left, step, rows)
"""
_PLAIN = f"at += k // 2 * $pair_bytes{_MULTIPLY}"
_CODED = (
    """if rows <= $most:
                if tiles == 2:
                    few_two(
                        some, row_bytes, weight, at, apart, n, k, count, scratch, to, out_bytes, plus, left,
                        step, rows,
                    )
                else:
                    few_one(
                        some, row_bytes, weight, at, apart, n, k, count, scratch, to, out_bytes, plus, left,
                        step, rows,
                    )
                k += count
                continue
            for i in range(tiles):
                unpacked(weight, at + i * apart, n, k, count, scratch + i * $chunk_bytes)
            at, apart = scratch, $chunk_bytes"""
    + _MULTIPLY
)
_FEW = """few_one, few_two = (dense.few_through_codes(tiles, $paired) for tiles in (1, 2))
unpacked = bf16_codes.unpacked"""
_ROUND = """rows = rows_of(frame, args)
    if groups != 0:
        rows = get_i64(starts + 8 * groups)
    x, row_bytes = round_rows(frame, x, row_bytes, n, rows, scratch, thread, threads), row_bytes_of(n)
    scratch += ALONE * row_bytes"""


@cache
def product(kind: str, coded: bool = False, paired: bool = False) -> Kernel:
    """The kernel that multiplies rows by tiles of that width; `coded`: of bfloat16 in twelve bits; `paired`:
    by rows rounded to bfloat16."""
    most, narrow = MOST[paired] if coded and wide_registers() else 1, paired and not wide_registers()
    alone, several = 1 if one_stream() else 2, 1 if narrow else 2  # tiles: of one, sums of more rows fit
    name = f"dense_{kind}_pairs" if paired else f"dense_{kind}"
    source = _SOURCE.safe_substitute(
        name=name,
        kind=kind,
        paired=paired,
        prepare=_ROUND if paired else "",
        size=bf16_pairs.SIZE if paired else 4,
        least_apart=2 if one_stream() else 1,
        together=f"({alone} if rows == 1 else {several})",
        digest=digest(*_FILES),
        chunk=PAIRS_CHUNK if paired else CHUNK,
        block=BLOCK,
        least=2,
        find=Template(_CODED).safe_substitute(most=most) if coded else _PLAIN,
        most=most,
        few=Template(_FEW).substitute(paired=paired) if coded else "",
        header=LINE if coded else 0,
        tile_bytes=bf16_codes.TILE_BYTES if coded else f"(n + 1) // 2 * {PAIR_BYTES[kind]}",
    )
    source = Template(source).substitute(pair_bytes=PAIR_BYTES[kind], chunk_bytes=CHUNK_BYTES)
    made: Kernel = getattr(load_generated(name, source), name)
    return made


@kernel
def pack_dense(frame: int, args: int, thread: int, threads: int) -> None:
    """source, bytes between its rows, n_in, n_out, tiles, bytes of a number, from one output to the next, and
    from an even input to the odd one."""
    source, row_bytes, n, n_out = word(args, 2), word(args, 3), word(args, 4), word(args, 5)
    out, size, each, apart = word(args, 6), word(args, 7), word(args, 8), word(args, 9)
    tiles, pairs = (n_out + 15) // 16, (n + 1) // 2
    for t in range(tiles * thread // threads, tiles * (thread + 1) // threads):
        for k0 in range(0, n, 16):  # a cache line of each of the sixteen rows
            for j in range(min(16, n_out - 16 * t)):
                row, to = source + (16 * t + j) * row_bytes, out + t * pairs * 32 * size + each * j
                for k in range(k0, min(k0 + 16, n)):
                    at = to + k // 2 * 32 * size + k % 2 * apart
                    if size == 4:
                        put_i32(at, get_i32(row + 4 * k))
                    else:  # these may lie anywhere
                        put_u8(at, get_u8(row + 2 * k))
                        put_u8(at + 1, get_u8(row + 2 * k + 1))


def pack(
    cpu: Executor, weight: Weight | CachedWeight, dtype: torch.dtype, paired: bool = False
) -> PackedWeight:
    """A Dense weight in tiles, in its own width. paired: its kernel rounds rows to bfloat16, as it is."""
    kind, (n_out, n_in) = weight.format, weight.shape
    if isinstance(weight, CachedWeight):
        return _wrap_tiles(weight.tiles, weight, bool(weight.layout), paired)
    if not isinstance(weight, Dense) or kind not in PAIR_BYTES:
        raise ShapeMismatch(f"only {', '.join(PAIR_BYTES)} are packed here, not {kind}")
    source = weight.tensor
    if n_in > 1 and source.stride(1) != 1:
        source = source.contiguous()
    if kind == "bfloat16" and (found := bf16_codes.pack(cpu, source)) is not None:
        return _wrap_tiles(found, weight, True, paired)
    data, size = room((n_out + 15) // 16 * ((n_in + 1) // 2) * PAIR_BYTES[kind]), source.element_size()
    places = {"float32": (4, 64), "bfloat16": (4, 2), "float16": (2, 32)}[kind]
    cpu.launch(pack_dense, source, source.stride(0) * size, n_in, n_out, data, size, *places, rows=n_out)
    return _wrap_tiles(data, weight, False, paired)


pack_pairs = partial(pack, paired=True)


def _wrap_tiles(data: Tensor, weight: Weight | CachedWeight, coded: bool, paired: bool) -> PackedWeight:
    layout, scratch, shared = (Coded(), 2 * CHUNK_BYTES, 0) if coded else (None, 0, 0)
    if paired:
        shared = bf16_pairs.shared_row_bytes(weight.shape[1])
        scratch += bf16_pairs.ALONE * shared
    made = product(weight.format, coded, paired)
    return PackedWeight(data, weight.format, *weight.shape, made, shared, layout=layout, scratch=scratch)


def _kind_of(facts: OpFacts) -> str:
    return str(facts.sizes.get("kind", str(facts.dtype).removeprefix("torch.")))


def plain_numbers(facts: OpFacts) -> str | None:
    """The `when` of weights that are plain numbers, with exact activations."""
    if (kind := _kind_of(facts)) not in PAIR_BYTES:
        return f"it reads plain numbers, not {kind}"
    if facts.sizes.get("activations", "float32") != "float32":
        return "it does not round activations"
    return float32_rows(facts)


def pairs_of_numbers(facts: OpFacts) -> str | None:
    """The `when` of bfloat16 weights with activations rounded to bfloat16."""
    if (kind := _kind_of(facts)) != "bfloat16":
        return f"it reads bfloat16, not {kind}"
    if (rounding := facts.sizes.get("activations", "float32")) != "bfloat16":
        return f"it rounds activations to bfloat16, and they are {rounding}"
    return float32_rows(facts)


native = Packing(pack=pack, apply=multiply)
linear.variant("native-dense", on="cpu", when=plain_numbers, native=True)(native)
linear.variant("native-bf16", on="cpu", when=pairs_of_numbers, native=True)(
    Packing(pack=pack_pairs, apply=multiply)
)
