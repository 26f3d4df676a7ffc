"""Linear layers on AMX: quantized ones to the same bits, and on request all in bfloat16 where rows are many.

In bfloat16, with float32 sums, a thread takes some rows through some outputs. It decodes PANEL inputs of
these weights at a time into pairs of bfloat16, which stay in its L2, and multiplies blocks of 32 rows by 32
outputs. Their sums stay in four tiles for a panel. Rows are rounded first, by all threads: panel after panel,
a panel's rows side by side, so that a group of rows never falls into the same few sets of a cache.

An output is the sum of its tiles of 32 inputs in their order, whatever other rows there are, and whatever
the number of threads. It is not what the kernel for few rows computes, which takes over below LEAST rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from string import Template

import torch

from plait.kernels.cpu.amx import check
from plait.kernels.cpu.codegen.amx_tiles import MEMORY, TILE, Kind, Tiles
from plait.kernels.cpu.codegen.kernel import Kernel, load_generated
from plait.kernels.cpu.codegen.llvm_writer import Value, Word, Writer, block, digest
from plait.kernels.cpu.linear import bf16_codes, blocks, blocks_source, dense, float_codes
from plait.kernels.cpu.linear.bf16_codes import Coded
from plait.kernels.cpu.linear.dense import PAIR_BYTES
from plait.kernels.cpu.linear.float_codes import Records
from plait.kernels.cpu.linear.layout import BLOCK, LINE, Layout
from plait.kernels.cpu.linear.packed import PackedWeight
from plait.kernels.cpu.runtime.executor import Executor
from plait.ops.linear import linear
from plait.ops.registry import OpFacts
from plait.quant.weight import CachedWeight, Weight

When = Callable[[OpFacts], str | None]
TILES: Kind = "amx"
LEAST = 32  # rows (of a group, on average) from which tiles are faster
PANEL = 256  # inputs of which weights are decoded at a time: 16 KiB of a pair of tiles stay in L1
WIDE, TALL = 16, 512  # tiles of outputs, and rows, that one piece of work has at most
DECODED = PANEL * 32  # bytes of a panel of sixteen outputs
SUMS = TALL // 32 * (WIDE // 2) * 4 * TILE  # bytes
SCRATCH = MEMORY + WIDE * DECODED + SUMS  # bytes of a thread
_FILES = (
    *("amx/linear.py", "codegen/amx_tiles.py", "linear/blocks_source.py", "linear/float_codes.py"),
    *("linear/layout.py", "linear/codebooks.py", "linear/bf16_codes.py", "linear/dense.py"),
)
Kept = Layout | Records | Coded | str  # how weights are kept; of plain numbers their name

_SOURCE = Template('''"""Linear layer for many rows on tiles: made by plait, from $digest."""
import numpy as np

from plait.kernels.cpu.amx import linear as amx_linear
from plait.kernels.cpu.codegen import amx_tiles
from plait.kernels.cpu.linear.bf16_codes import Coded
from plait.kernels.cpu.runtime.frame import barrier, rows_of, scratch_of, common_scratch
from plait.kernels.cpu.linear.float_codes import Records
from plait.kernels.cpu.codegen.kernel import inline, kernel
from plait.kernels.cpu.linear.layout import Layout
from plait.kernels.cpu.codegen.vec import (
    atomic_add, call_kernel, get_i64, load_some, store_bf16, word, zero_f32,
)

decode = amx_linear.decoder($kept)
start, stop = amx_tiles.start_tiles("$kind", amx_tiles.FULL), amx_tiles.stop_tiles("$kind")
multiply, keep = amx_linear.multiply_tiles("$kind"), amx_linear.keep_sums()


@inline
def round_rows(x, row_bytes, n, to, rows, begin, end):
    """Some rows as bfloat16, filled up with zeros to whole tiles."""
    for k0 in range(0, n, $panel):
        count = min($panel, n - k0)
        size = (count + 31) // 32 * 64
        at = to + k0 * 2 * (rows + 32)
        for r in range(begin, end):
            source, place = x + r * row_bytes + 4 * k0, at + r * size
            for k in range(0, size // 2, 16):
                value = zero_f32()
                if k < count:
                    value = load_some(source + 4 * k, np.int32(count - k))
                store_bf16(place + 2 * k, value)


@kernel
def amx_rows(frame, args, thread, threads):
    """The words of `packed`, and 15: the kernel for few rows."""
    x, row_bytes, n, weight = word(args, 2), word(args, 3), word(args, 4), word(args, 5)
    n_out, bias, out, out_bytes = word(args, 6), word(args, 7), word(args, 8), word(args, 9)
    groups, starts, weights, counter = word(args, 11), word(args, 12), word(args, 13), word(args, 1)
    rows = rows_of(frame, args)
    if groups != 0:
        rows = get_i64(starts + 8 * groups)
    if rows < $least * max(groups, 1):
        call_kernel(word(args, 15), frame, args, thread, threads)
        return
    rounded, scratch = common_scratch(frame), scratch_of(frame, thread)
    round_rows(x, row_bytes, n, rounded, rows, rows * thread // threads, rows * (thread + 1) // threads)
    barrier(frame, threads)
    start(scratch)
    decoded, sums = scratch + $memory, scratch + $memory + $wide * $decoded
    tiles, tile_bytes = (n_out + 15) // 16, $tile_bytes
    unit = max(2, min($wide, tiles // threads // 2 * 2))
    units = (tiles + unit - 1) // unit
    tall = $tall
    while tall > 64 and units * ((rows + tall - 1) // tall) < 2 * threads:
        tall //= 2
    item, done = np.int64(atomic_add(counter, np.int32(1))), 0
    for g in range(max(groups, 1)):
        first, end = 0, rows
        if groups != 0:
            first, end = get_i64(starts + 8 * g), get_i64(starts + 8 * g + 8)
            weight = get_i64(weights + 8 * g)
        blocks = (end - first + tall - 1) // tall
        while item < done + units * blocks:
            begin, row = (item - done) // blocks * unit, first + (item - done) % blocks * tall
            wide, high = min(unit, tiles - begin), min(tall, end - row)
            for k0 in range(0, n, $panel):
                count = min($panel, n - k0)
                size = (count + 31) // 32 * 64
                a = rounded + k0 * 2 * (rows + 32) + row * size
                for t in range(wide):
                    at = weight + $header + (begin + t) * tile_bytes
                    decode(weight, at, k0, count, n, decoded + t * $decoded)
                for t in range(0, wide, 2):
                    for r in range(0, high, 32):
                        c = sums + (r // 32 * ($wide // 2) + t // 2) * 4096
                        multiply(scratch, k0, size // 64, a + r * size, size, decoded + t * $decoded, c)
                        if k0 + count == n:
                            to = out + (row + r) * out_bytes + 64 * (begin + t)
                            left = n_out - 16 * (begin + t)
                            more = bias + 64 * (begin + t) if bias != 0 else 0
                            keep(c, to, out_bytes, min(32, high - r), left, more)
            item = np.int64(atomic_add(counter, np.int32(1)))
        done += units * blocks
    stop(scratch)
''')


def _layout_block(w: Writer, layout: Layout, step: Word, b: Word, to: Word) -> None:
    """Block b of a step: 32 inputs of sixteen outputs, as sixteen rows of pairs."""
    parts, quads = layout.parts, BLOCK // 4 // layout.parts
    outer = blocks_source.read_outer(w, layout, step + layout.outer_at)
    for j in range(parts):
        at, low_at = blocks_source.find_group(w, layout, step, b, j)
        scale, *low = blocks_source.read_scales(w, layout, at, low_at, outer)
        zero = None if layout.zero is None else w.spread_int(layout.zero)
        if zero is not None and layout.zeros:
            zero = w.mul_i32(zero, w.load_u8(low_at))
        for q in range(quads * j, quads * (j + 1)):
            v = blocks_source.read_codes(w, layout, step + layout.codes_at + layout.plane_bytes * b, q)
            bytes_ = [w.and_i32(w.right(v, 8 * i) if i else v, w.spread_int(255)) for i in range(4)]
            if zero is None:
                found = [w.fma(w.to_f32(x), scale, low[0]) for x in bytes_]
            else:
                found = [w.mul(w.to_f32(w.sub_i32(x, zero)), scale) for x in bytes_]
            w.store_i32(to + 2 * LINE * q, w.pair_bf16(*found[:2]))
            w.store_i32(to + 2 * LINE * q + LINE, w.pair_bf16(*found[2:]))


def _from_layout(layout: Layout, w: Writer, tile: Word, k0: Word, count: Word, to: Word) -> None:
    def block(i: Word) -> None:
        index = (k0 >> 5) + i
        step = index // layout.blocks
        b = index - step * layout.blocks
        _layout_block(w, layout, tile + step * layout.nbytes, b, to + i * TILE)

    w.loop(0, count >> 5, 1, (), block)


def _from_plain(kind: str, w: Writer, tile: Word, k0: Word, count: Word, to: Word) -> Word:
    source, step, pairs = tile + (k0 >> 1) * PAIR_BYTES[kind], PAIR_BYTES[kind], (count + 1) >> 1

    def pair(p: Word) -> None:
        at = source + p * step
        words = w.load_i32(at) if kind == "bfloat16" else w.pair_bf16(*dense._pair(w, kind, at))
        w.store_i32(to + LINE * p, words)

    w.loop(0, pairs, 1, (), pair)
    return pairs


def _from_records(
    kept: Records, w: Writer, weight: Word, tile: Word, k0: Word, count: Word, to: Word
) -> Word:
    table, lines = w.load_f32(weight) if kept.header else None, count // kept.each

    def line(i: Word) -> None:
        k = k0 + i * kept.each
        record = k // kept.step
        at = tile + record * kept.nbytes
        scale = w.load_f32(at + kept.codes)
        codes = at + (k - record * kept.step) // kept.each * LINE
        values = [w.mul(v, scale) for v in float_codes._weights(w, kept, codes, table)]
        for p in range(kept.each // 2):
            place = to + i * (LINE * kept.each // 2) + LINE * p
            w.store_i32(place, w.pair_bf16(*values[2 * p : 2 * p + 2]))

    w.loop(0, lines, 1, (), line)
    return lines * (kept.each // 2)


@block(takes=6)
def decoder(kept: Kept, w: Writer, *words: Word) -> None:
    """Block (weight, tile, k0, count, n, to): inputs k0..k0+count of a tile of weights, as pairs of bfloat16.

    k0 is a multiple of PANEL; rows of pairs are filled up with zeros to whole tiles.
    """
    weight, tile, k0, count, n, to = words
    if isinstance(kept, Layout):
        _from_layout(kept, w, tile, k0, count, to)
        return
    if isinstance(kept, Coded):
        bf16_codes.unpack(w, weight, tile, n, k0, count, to)
        pairs = count >> 1
    elif isinstance(kept, Records):
        pairs = _from_records(kept, w, weight, tile, k0, count, to)
    else:
        pairs = _from_plain(kept, w, tile, k0, count, to)

    def zero(p: Word) -> None:
        w.store_i32(to + LINE * p, w.zero_i32())

    w.loop(pairs, (count + 31) // 32 * 16, 1, (), zero)


@block(takes=7)
def multiply_tiles(kind: Kind, w: Writer, *words: Word) -> None:
    """Block (scratch, earlier, count, a, a_bytes, b, c): c += 32 rows at a · two tiles of outputs at b.

    count: tiles of 32 inputs; earlier: 0 if there were none, and c is written anew.
    """
    scratch, earlier, count, a, a_bytes, b, c = words
    tiles = Tiles(w, kind, scratch)

    def each(what: Callable[[int], None]) -> None:
        for t in range(4):
            what(t)

    w.when(earlier.equals(0), lambda: each(tiles.zero))
    w.when(earlier.above(0), lambda: each(lambda t: tiles.load(t, c + TILE * t, LINE)))

    def inputs(k: Word) -> None:
        tiles.load(6, b + k * TILE, LINE)
        tiles.load(4, a + k * LINE, a_bytes)
        tiles.bf16(0, 4, 6)
        tiles.load(7, b + DECODED + k * TILE, LINE)
        tiles.bf16(1, 4, 7)
        tiles.load(5, a + a_bytes * 16 + k * LINE, a_bytes)
        tiles.bf16(2, 5, 6)
        tiles.bf16(3, 5, 7)

    w.loop(0, count, 1, (), inputs)
    each(lambda t: tiles.store(t, c + TILE * t, LINE))


@block(takes=6)
def keep_sums(w: Writer, *words: Word) -> None:
    """Block (c, to, out_bytes, rows, left, bias): the first rows of 32 of sums, for `left` outputs."""
    c, to, out_bytes, rows, left, bias = words

    def biases(*_: Value) -> list[Value]:
        return [w.load_some(bias + LINE * t, left - 16 * t) for t in (0, 1)]

    more = w.unless_zero(bias, [w.spread(-0.0)] * 2, biases)

    def row(r: Word) -> None:
        source = c + (r >> 4) * (2 * TILE) + (r - (r >> 4 << 4)) * LINE
        for t in (0, 1):
            at = to + r * out_bytes + LINE * t
            w.store_some(at, w.add(w.load_f32(source + TILE * t), more[t]), left - 16 * t)

    w.loop(0, rows, 1, (), row)


@cache
def many_rows(kept: Kept, kind: Kind) -> Kernel:
    """The kernel of `packed.multiply` for weights kept that way, from LEAST rows on."""
    header = 0  # bytes in front of the first tile
    if isinstance(kept, Coded):
        header, tile_bytes = LINE, bf16_codes.TILE_BYTES
    elif isinstance(kept, str):
        tile_bytes = f"(n + 1) // 2 * {PAIR_BYTES[kept]}"
    else:
        tile_bytes = f"(n + {kept.step - 1}) // {kept.step} * {kept.nbytes}"
        header = kept.header if isinstance(kept, Records) else 0
    source = _SOURCE.substitute(
        digest=digest(*_FILES),
        kept=repr(kept),
        kind=kind,
        panel=PANEL,
        least=LEAST,
        memory=MEMORY,
        wide=WIDE,
        tall=TALL,
        decoded=DECODED,
        tile_bytes=tile_bytes,
        header=header,
    )
    made: Kernel = load_generated(f"amx_{kind}", source).amx_rows
    return made


def on_tiles(weight: PackedWeight, kept: Kept, kind: Kind) -> PackedWeight:
    """The same weight matrix, multiplied in bfloat16 where there are many rows."""
    rounded = 4 * (-(-weight.n_in // BLOCK) * BLOCK)  # two bytes of each input, and space for 32 rows more
    return replace(
        weight,
        kernel=many_rows(kept, kind),
        few=weight.kernel,
        shared_per_row=max(weight.shared_per_row, rounded),
        scratch=max(weight.scratch, SCRATCH),
        joins=False,
    )


def pack_byte_tiles(cpu: Executor, weight: Weight | CachedWeight, dtype: torch.dtype) -> PackedWeight:
    """As `blocks.pack`; sixteen rows and more go through tiles of bytes."""
    return blocks.pack(cpu, weight, dtype, TILES)


def pack_for_many(pack: Callable[..., PackedWeight]) -> Callable[..., PackedWeight]:
    """The same packing; many rows go through tiles of bfloat16."""

    def packed(cpu: Executor, weight: Weight | CachedWeight, dtype: torch.dtype) -> PackedWeight:
        made = pack(cpu, weight, dtype)
        return on_tiles(made, made.layout or made.kind, TILES)

    return packed


def in_bfloat16(when: When) -> When:
    """`when`, where there is AMX, and other arithmetic in long steps is requested."""

    def refusal(facts: OpFacts) -> str | None:
        if reason := when(facts):
            return reason
        if getattr(facts.executor, "prefill", "same") != "bf16":
            return "--prefill bf16 was not requested"
        return check.refusal()

    return refusal


def _unless_refused(facts: OpFacts) -> str | None:
    return blocks.blocks_and_rounding(facts) or check.refusal()


linear.variant("native-amx", on="cpu", when=_unless_refused, native=True)(
    replace(blocks.native, pack=pack_byte_tiles)
)
_BFLOAT16: tuple[tuple[str, Callable[..., PackedWeight], When], ...] = (
    ("amx-bf16", pack_byte_tiles, blocks.blocks_and_rounding),  # fewer rows go through those of bytes
    ("amx-bf16-dense", dense.pack, dense.plain_numbers),
    ("amx-bf16-pairs", dense.pack_pairs, dense.pairs_of_numbers),
    ("amx-bf16-floats", float_codes.pack, float_codes.small_floats),
)
for _name, _pack, _when in _BFLOAT16:
    linear.variant(_name, on="cpu", when=in_bfloat16(_when), native=True)(
        replace(blocks.native, pack=pack_for_many(_pack))
    )
