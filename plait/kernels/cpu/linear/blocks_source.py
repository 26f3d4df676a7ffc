"""Generates the source of kernels of quantized linear layers: one per layout, made when a model needs it.

A kernel rounds its rows to int8 first and then multiplies, in one launch. Few rows are shared out to threads
beforehand, many piece by piece. Rounded rows are kept in *bundles* of as many as one register tile takes. A
block of 32 inputs has 32 codes of every row, then a scale of every row, then a number per group of weights.
That number is what the zero point takes off, as an int32 to start the integer sum with, or what the minimum
is multiplied by.

An output is a sum over groups, in order, of fma(integer sum · activation scale, weight scale, sum): the same
operations whatever the other rows, the thread, or the instruction set. Integer sums start from the bits
of BASE, so that they are those of a float that is as much above it. What a scale makes of BASE is kept with
it, and one fma takes it off, converts and multiplies. Scales are two bits shorter for that: it is exact.

    rounded rows: a bundle of R                weights: tile t of 16 outputs, a record per step (`layout`)
    [block 0: R x 32 codes | R scales | R ..]  [scales | minima | codes of blocks][next record] ...
    [block 1: ...                           ]            |
                                                     quad: 4 inputs x 16 outputs = 64 bytes = one vector
    out [R rows, 16 t .. 16 t + 15] += 4 activations of each row (in every lane) . quad

Invariants: one thread computes all of an output, and no two threads write the same one, so nothing is added
across threads or lanes. A barrier lies between rounding and multiplying, except where every thread rounds all
rows for itself (`ALONE`). Work shared by the counter changes which thread computes a tile, never its sums.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from string import Template
from textwrap import indent

from plait.kernels.cpu.codegen import avx2_dot, vnni_dot
from plait.kernels.cpu.codegen.amx_tiles import MEMORY, TILE, Kind
from plait.kernels.cpu.codegen.kernel import Kernel, load_generated
from plait.kernels.cpu.codegen.llvm_writer import Value, Word, Writer, block, digest
from plait.kernels.cpu.linear.codebooks import TABLES
from plait.kernels.cpu.linear.layout import BLOCK, LINE, Layout
from plait.kernels.cpu.linear.packed import JOINED
from plait.kernels.cpu.linear.quantize_rows import BASE_BITS, BUNDLES
from plait.kernels.cpu.linear.streams import ONE_STREAM

EIGHT = 8  # rows of which integer sums are in registers together
TILED = 16  # rows of codes in a tile of AMX
UPS_AT = MEMORY + 4 * TILE  # where `up`'s sums lie in the scratch of a thread that uses tiles of AMX
DECODED_AT = UPS_AT + JOINED  # and the tile that it has decoded
AHEAD = {64: 1536, 128: 2048, 256: 3072}  # bytes one row fetches weights ahead of need, by the step's length
ALONE_AHEAD = 2048  # the same of one stream of bytes, into L2: of 1 to 8 KB the best on a Zen 4
PAGES = 8192  # bytes of a tile with halves on different pages: memory serves two at a time faster
FEW = 2  # rows of codes that pass through all tiles of a thread in one go
FETCHED = 4  # rows of codes that could be multiplied while the weights of a piece are fetched
SHARED = 48  # rows of codes of a group from which threads take single pieces: one without a core takes fewer
PIECES = 8  # that a thread takes at least
TOGETHER = 96  # tiles of a piece at most: a bundle in L1 meets all; the first come from memory unannounced
PANEL = 320 << 10  # bytes of rounded rows that tiles pass by before the next rows come: they stay in L2
STREAMS = 3  # that one row reads weights in, or one: of two and four, Intel liked each less
RUN = TILED  # tiles of a gate before those of `up`, in one stream: where it turns often it is slower
ALONE = 2  # rows of codes up to which every thread rounds all of them, rather than wait for the others

_FILES = (
    *("linear/blocks_source.py", "linear/quantize_rows.py", "linear/layout.py", "linear/codebooks.py"),
    *("codegen/avx2_dot.py", "codegen/vnni_dot.py", "codegen/amx_tiles.py"),
    *("linear/fetch_adapters.py", "linear/streams.py", "linear/byte_tiles.py"),
)
_SOURCE = Template('''"""Quantized linear layer: made by plait, from $digest."""
import numpy as np

from plait.kernels.cpu.linear import blocks_source as linear_source
from plait.kernels.cpu.linear import quantize_rows as rounding
from plait.kernels.cpu.linear.blocks_source import (
    ALONE, FETCHED, FEW, PAGES, PANEL, PIECES, SHARED, TOGETHER,
)
from plait.kernels.cpu.runtime.frame import barrier, rows_of, scratch_of, common_scratch
from plait.kernels.cpu.codegen.kernel import inline, kernel
from plait.kernels.cpu.linear.fetch_adapters import ROWS, begin_share, next_span
from plait.kernels.cpu.linear.layout import Layout
from plait.kernels.cpu.codegen.vec import atomic_add, call_kernel, get_i64, load_some, spread, word, words

layout = $layout
round_rows = rounding.round_rows(layout, $sizes)
tiles_apart, STREAMS, RUN = linear_source.tiles_apart(layout, $streams), $streams, $run
$tiles

@inline
def panels(codes, most):
    """Panels that so many rows of codes are cut into, rows of each (of the last: at most), what one costs."""
    count = max((codes + most - 1) // most, 1)
    panel = ((codes + count - 1) // count + $largest - 1) // $largest * $largest
    return count if codes > 0 else 0, panel, min(panel, codes) + FETCHED


@inline
def pieces(codes, most, tiles, wanted):
    """Rows of codes of a panel and tiles of a piece, so that there are about as many pieces as wanted.

    Panels become shorter rather than pieces narrower: a bundle comes into L1 once per piece.
    """
    parts, bundles = (tiles + TOGETHER - 1) // TOGETHER, (codes + $largest - 1) // $largest
    each = max(bundles * parts // wanted, 1)
    most = min(most, each * $largest)
    count = (codes + most - 1) // most
    parts = min(max(parts, (wanted + count - 1) // count), tiles)
    return most, (tiles + parts - 1) // parts


@inline
def next_tiles(weight, t, low, high, tile_bytes, up, to_up):
    """Where tile t of low..high fetches what is multiplied next, and how far on from there the other half is.

    Those are halves of the next tile, or of both tiles of the next pair where they are small: t fetches the
    first halves of that pair or the second ones. Beside a gate, t + 1 and what is `to_up` from it are that
    pair, and the tile of the gate comes before that of `up`. What does not exist is tile t again, which
    costs nothing.
    """
    half = tile_bytes // 128 * 64
    if to_up != 0:
        return weight + min(t + 1, high - 1) * tile_bytes + up * half, to_up
    if tile_bytes >= PAGES:
        return weight + min(t + 1, high - 1) * tile_bytes, half
    pair = t - (t - low) % 2 + 2
    if pair >= high:
        return weight + t * tile_bytes, 0
    return weight + pair * tile_bytes + (t - low) % 2 * half, tile_bytes if pair + 1 < high else 0


@inline
def beside(bias, t, n_out):
    """What is added to the outputs of tile t: without a bias -0, which changes no bit."""
    more = spread(np.float32(-0.0))
    if bias != 0:
        more = load_some(bias + 64 * t, np.int32(n_out - 16 * t))
    return more


@kernel
def linear_rows(frame, args, thread, threads):
    """The words of `packed`."""
    x, row_bytes, n, weight = word(args, 2), word(args, 3), word(args, 4), word(args, 5)
    n_out, bias, out, out_bytes = word(args, 6), word(args, 7), word(args, 8), word(args, 9)
    terms = word(args, 10)
    groups, starts, weights, room = word(args, 11), word(args, 12), word(args, 13), word(args, 14)
    join, ups = word(args, 16), scratch_of(frame, thread) + $ups
    rows = rows_of(frame, args)
    if groups != 0:
        rows = get_i64(starts + 8 * groups)
    steps = (n + $step - 1) // $step
    blocks, tile_bytes = steps * $blocks, steps * $nbytes
    rounded, each = common_scratch(frame), blocks * $record
    alone = rows * terms <= ALONE and threads * rows * terms * each <= room
    apart = 2 * each  # room for one row of codes more than a group has: its last bundle may be larger
    if alone:
        apart = terms * each
        rounded += thread * rows * terms * each
    halves = 2 if join != 0 else 1
    most, tiles = max($largest, PANEL // each // $largest * $largest), (n_out + 15) // 16 // halves
    to_up = (halves - 1) * tiles * tile_bytes
    taken, left, shared, piece = np.int64(0), 0, threads > 1 and rows * terms >= SHARED * max(groups, 1), 1
    if shared:
        most, piece = pieces(rows * terms, most, tiles, PIECES * threads)
    work, all_tiles = 0, 0
    me, all_of_us = (0, 1) if alone else (thread, threads)
    for g in range(max(groups, 1)):
        first, end = 0, rows
        if groups != 0:
            first, end = get_i64(starts + 8 * g), get_i64(starts + 8 * g + 8)
        to = rounded + first * apart
        round_rows(x + first * row_bytes, row_bytes, n, to, end - first, terms, me, all_of_us)
        count, panel, cost = panels((end - first) * terms, most)
        work, all_tiles = work + count * tiles * cost, all_tiles + count * tiles
    if not alone:
        barrier(frame, threads)$start
    adapted, slots, order, spans = words(args, 17, 21)
    soon, soon_left, at_row = np.int64(0), np.int64(0), np.int64(0)
    per, adapted_rows = np.int64(0), np.int64(0)
    if adapted != 0 and rows <= ROWS:
        adapted_rows = get_i64(adapted)
    if 0 < adapted_rows <= rows:
        order += 8 * (rows - adapted_rows)
        soon, soon_left, at_row, lines = begin_share(slots, order, spans, adapted_rows, thread, threads)
        calls = (rows * terms + $largest - 1) // $largest * ((tiles * halves + threads - 1) // threads)
        per = (lines + calls * blocks - 1) // (calls * blocks)
    before, done, mine, stop = 0, 0, work * thread // threads, work * (thread + 1) // threads
    if shared:
        taken, left = np.int64(atomic_add(word(args, 1), np.int32(1))) * piece, piece
    for g in range(max(groups, 1)):
        first, end = 0, rows
        if groups != 0:
            first, end = get_i64(starts + 8 * g), get_i64(starts + 8 * g + 8)
            weight = get_i64(weights + 8 * g)
        count, panel, cost = panels((end - first) * terms, most)
        i, last = (mine - before + cost - 1) // cost, (stop - before + cost - 1) // cost
        i, last = max(i, 0), min(last, count * tiles)
        if shared:
            i, last = taken - done, count * tiles
        if rows * terms == 1 and groups == 0:
            # One row reads several parts of its tiles at a time, where a single stream leaves memory waiting.
            part = (last - i) // STREAMS
            for k in range(halves * part):
                run = k // (halves * RUN) * RUN
                length, place = min(RUN, part - run), k - halves * run
                up, place = place // length, place % length
                t, beneath = i + run + place, ups + 64 * STREAMS * place
                to, between = (beneath, 64) if up else (out + 64 * t, 64 * part)
                at = weight + t * tile_bytes + up * to_up
                sums = tiles_apart(at, part * tile_bytes, rounded, steps)
$kept                if up:
                    call_kernel(join, out + 64 * t, beneath, 64 * part, STREAMS)
            i += STREAMS * part
        begun = i
        while i < last:
            at, tile, rest = i // tiles * panel, i % tiles, 1
            low, high = tile - min(tile, i - begun), tile + min(tiles - tile, last - i)
            if shared:
                rest = min(left, tiles - tile)
                low, high = tile, tile + rest
            rounded_at, to = rounded + first * apart + at * each, out + (first + at // terms) * out_bytes
            codes, run = min(panel, (end - first) * terms - at), 1
            if codes <= FEW:  # one bundle, so tiles are read once: in the order of memory, as one row does
                run = RUN
                if not shared:
                    rest = high - tile
$bundles
            i += rest
            if shared:
                taken, left = taken + rest, left - rest
                if left == 0:
                    taken, left = np.int64(atomic_add(word(args, 1), np.int32(1))) * piece, piece
                    i = taken - done
        before, done = before + count * tiles * cost, done + count * tiles$stop
''')


def read_codes(w: Writer, layout: Layout, p: Word, q: int) -> Value:
    """Quad q of the block with its planes at p."""
    if layout.bits == 8:
        return w.load_i32(p + LINE * q)
    if layout.bits == 4:
        low = (w.low4 if q < 4 else w.high4)(w.load_i32(p + LINE * (q % 4)))
    else:
        low = w.right(w.load_i32(p + LINE * (q // 4)), 2 * (q % 4))
        low = w.and_i32(low, w.spread_int(0x03030303))
    if layout.table:
        return getattr(w, f"look_{layout.table}")(low)
    if not layout.high:
        return low
    per = 8 // layout.high
    high = w.load_i32(p + layout.low_bytes + LINE * (q // per))
    shift = layout.bits - layout.high * (q % per)
    if shift:
        high = (w.left if shift > 0 else w.right)(high, abs(shift))
    mask = (0x01010101 if layout.high == 1 else 0x03030303) << layout.bits
    return w.or_i32(low, w.and_i32(high, w.spread_int(mask)))


def _largest(layout: Layout) -> int:
    """The largest unsigned code that is multiplied."""
    if layout.table:
        return max(TABLES[layout.table]) - min(TABLES[layout.table])
    return (1 << (layout.bits + layout.high)) - 1


def read_scales(w: Writer, layout: Layout, at: Word, low_at: Word, outer: list[Value]) -> list[Value]:
    """The scales of a group, at `at`, and the minima it has, at `low_at`."""
    match layout.scales:
        case "half" | "half, zero":
            return [w.load_f16(at)]
        case "brain" | "brain, zero":
            return [w.load_bf16(at)]
        case "float" | "float, zero":
            return [w.load_f32(at)]
        case "small":
            return [w.mul(outer[0], w.from_e4m3(w.load_u8(at)))]
        case "half, half":
            return [w.load_f16(at), w.load_f16(low_at)]
        case "byte" | "level":
            return [w.mul(outer[0], w.to_f32(w.load_i8(at)))]
        case "six, six" | "nibbles":
            both = w.load_u8(at)
            parts = w.low4(both), w.high4(both)
            if layout.scales == "six, six":
                minimum = w.or_i32(w.right(both, 6), w.load_u4_fourfold(low_at))
                parts = w.and_i32(both, w.spread_int(63)), minimum
            return [w.mul(o, w.to_f32(part)) for o, part in zip(outer, parts, strict=True)]


def _place(a: Word, quads: range, row: int, i: int) -> Word:
    return a + 32 * row + 4 * quads[i]


def _products(w: Writer, layout: Layout, p: Word, a: Word, quads: range, whole: list[Value]) -> list[Value]:
    """Integer sums of as many rows, with those quads of the block at p and of the bundle's at a."""
    largest, zero = _largest(layout), None if layout.zeros else layout.zero
    if avx2_dot.HERE and avx2_dot.together(largest, zero):
        codes = [partial(read_codes, w, layout, p, q) for q in quads]
        where = partial(_place, a, quads)
        return avx2_dot.products(w, codes, where, whole, largest, zero, BASE_BITS)
    if vnni_dot.HERE and len(whole) <= vnni_dot.FEW and layout.has_plain_nibbles:
        return vnni_dot.products(w, p, a, whole, quads)
    product = w.dot8 if largest > 127 else w.dot
    for q in quads:
        v = read_codes(w, layout, p, q)
        whole = [product(n, v, w.spread_i32(a + 32 * r + 4 * q)) for r, n in enumerate(whole)]
    return whole


def _block(
    w: Writer,
    layout: Layout,
    places: tuple[Word, Word, Word],
    outer: list[Value],
    sums: Sequence[Value],
    products: Callable[..., list[Value]],
    together: int,
) -> list[Value]:
    """Sums of as many rows, with a block: for every group its integer sums, then the floats.

    places: the step, which block of it, and where the bundle's is; products: as `_products`, of `together`
    rows at a time.
    """
    (step, b, a), rows, found = places, len(sums), list(sums)
    quads, groups = BLOCK // 4 // layout.parts, layout.parts
    for j in range(groups):
        extra = a + (40 + 4 * j) * rows
        at, low_at = find_group(w, layout, step, b, j)
        s, *m = read_scales(w, layout, at, low_at, outer)
        for part in (range(r, min(r + together, rows)) for r in range(0, rows, together)):
            base = w.spread_int(BASE_BITS)
            whole = [base if layout.zero is None else w.spread_i32(extra + 4 * r) for r in part]
            if layout.zeros:
                zeros = w.load_u8(low_at)
                whole = [w.add_i32(base, w.mul_i32(zeros, n)) for n in whole]
            some = a + 32 * part.start
            codes, which = step + layout.codes_at + layout.plane_bytes * b, range(quads * j, quads * (j + 1))
            whole = products(codes, some, which, whole)
            for r in part:
                scale, off = (w.spread_f32(a + k * rows + 4 * r) for k in (32, 36))
                x = w.fma(w.bits_f32(whole[r - part.start]), scale, off)
                found[r] = w.fma(x, s, found[r])
                if layout.zero is None:
                    found[r] = w.fma(m[0], w.spread_f32(extra + 4 * r), found[r])
    return found


@block(gives=lambda layout, rows: rows)
def tile(
    layout: Layout,
    rows: int,
    w: Writer,
    weights: Word,
    a: Word,
    steps: Word,
    ahead: Word,
    apart: Word,
    soon: Word,
    per: Word,
) -> list[Value]:
    """Block (weights, a, steps, ahead, apart, soon, per): a bundle of `rows` rows of codes, at a, times a
    tile in that layout.

    As many bytes are fetched meanwhile, half of them from `ahead` and half from `apart` behind it, unless
    rows are few in one stream; where they are some, also `per` lines from `soon` on with each block.
    """
    more = (soon, per) if rows >= FETCHED else None
    products = partial(_products, w, layout)
    return _through(w, layout, rows, (weights, a, steps), products, (ahead, apart), more=more)


def _through(
    w: Writer,
    layout: Layout,
    rows: int,
    places: tuple[Word, Word, Word],
    products: Callable[..., list[Value]],
    fetched: tuple[Word, Word],
    more: tuple[Word, Word] | None = None,
) -> list[Value]:
    """What the block of `tile` writes. products: as `_products`, of EIGHT rows at a time; more: what is
    fetched besides, and lines of it with each block."""
    each, lines = layout.nbytes // layout.blocks // 2, -(-layout.nbytes // LINE // layout.blocks // 2)
    (weights, a, steps), (ahead, apart) = places, fetched

    def fetch(k: Word, at: Word) -> list[Word]:
        w.prefetch_l2(at)
        return [at + LINE]

    def step(_: Word, at: Word, a: Word, ahead: Word, soon: Word, *sums: Value) -> list[Value]:
        outer = read_outer(w, layout, at + layout.outer_at)

        def block(b: Word, a: Word, soon: Word, *sums: Value) -> list[Value]:
            for k in range(lines if rows >= FETCHED or not ONE_STREAM else 0):
                place = ahead + each * b + LINE * k
                w.prefetch_l2(place)
                w.prefetch_l2(place + apart)
            if more:
                [soon] = w.loop(0, more[1], 1, (soon,), fetch)
            found = _block(w, layout, (at, b, a), outer, sums, products, EIGHT)
            return [a + rows * layout.rounded_block, soon, *found]

        a, soon, *found = w.loop(0, layout.blocks, 1, (a, soon, *sums), block)
        return [at + layout.nbytes, a, ahead + layout.nbytes // 2, soon, *found]

    first = (weights, a, ahead, more[0] if more else ahead)
    return w.loop(0, steps, 1, (*first, *([w.zero_f32()] * rows)), step)[4:]


def find_group(w: Writer, layout: Layout, step: Word, b: Word, j: int) -> tuple[Word, Word]:
    """Where group j of block b of the step has its scales and its minima or zero points."""
    index = (b * layout.parts if layout.group <= BLOCK else w.number(0)) + j
    return (
        step + layout.scales_at + index * layout.scale_bytes,
        step + layout.minima_at + index * layout.minimum_bytes,
    )


def read_outer(w: Writer, layout: Layout, at: Word) -> list[Value]:
    """What is above a step's group scales."""
    if layout.scales in ("level", "small"):
        return [w.load_f32(at)]
    return [w.load_f16(at + 32 * i) for i in range(layout.outer_bytes // 32)]


@block(gives=lambda layout, streams: streams)
def tiles_apart(
    layout: Layout, streams: int, w: Writer, weights: Word, apart: Word, a: Word, steps: Word
) -> list[Value]:
    """Block (weights, apart, a, steps): a row of codes times as many tiles as streams, from `weights` on,
    each `apart` from the one before."""
    lines, products = -(-layout.nbytes // LINE // layout.blocks), partial(_products, w, layout)
    fetch, ahead = (w.prefetch, AHEAD[layout.step]) if streams > 1 else (w.prefetch_l2, ALONE_AHEAD)

    def step(_: Word, at: Word, a: Word, *sums: Value) -> list[Value]:
        tiles = [at + apart * k for k in range(streams)]
        outer = [read_outer(w, layout, tile + layout.outer_at) for tile in tiles]

        def block(b: Word, a: Word, *sums: Value) -> list[Value]:
            found = []
            for tile, above, sum in zip(tiles, outer, sums, strict=True):
                for k in range(lines if streams > 1 or layout.bits == 8 else 0):
                    fetch(tile + ahead + LINE * k + LINE * lines * b)
                found += _block(w, layout, (tile, b, a), above, [sum], products, 1)
            return [a + layout.rounded_block, *found]

        return [at + layout.nbytes, *w.loop(0, layout.blocks, 1, (a, *sums), block)]

    return w.loop(0, steps, 1, (weights, a, *[w.zero_f32()] * streams), step)[2:]


@block(gives=lambda rows: rows)
def make_join(rows: int, w: Writer, sums: list[Value]) -> list[Value]:
    """Block (sums): each pair, an input's two terms, becomes one; they come first, the rest is not kept."""
    return [w.add(*sums[r : r + 2]) for r in range(0, rows // 2 * 2, 2)] + sums[rows // 2 :]


@block()
def keep(
    rows: int, w: Writer, to: Word, out_bytes: Word, kept: Word, columns: Word, more: Value, sums: list[Value]
) -> None:
    """Block (to, out_bytes, kept, columns, more, sums): the first `kept` sums, each with `more` added."""

    def one(r: int) -> None:
        w.store_some(to + out_bytes * r, w.add(sums[r], more), columns)

    one(0)
    for r in range(1, rows):
        w.when(kept.above(r), partial(one, r))


@block(takes=2)
def prefetch_rows(rows: int, w: Writer, *words: Word) -> None:
    """Block (to, out_bytes): fetch the lines of sixteen outputs of these rows, which `keep` will write.

    A product takes longer than a line takes to come from a third cache; without this the stores wait for it.
    """
    to, out_bytes = words
    for r in range(rows):
        w.prefetch_to_write(to + out_bytes * r)


_TILE = """tile_{rows} = linear_source.tile(layout, {rows})
joined_{rows}, keep_{rows} = linear_source.make_join({rows}), linear_source.keep({rows})"""

# One row less than a large bundle takes is one, too: what is computed for the missing row is not kept.
_BUNDLE = """while codes >= {least}:
    kept = min({rows}, codes) // terms
    for k in range(halves * rest):
        begin = k // (halves * run) * run
        length, place = min(run, rest - begin), k - halves * begin
        up = place // length
        t = tile + begin + place - up * length
        u = t + up * tiles
        ahead, other = next_tiles(weight, t, low, high, tile_bytes, up, to_up)
        sums = tile_{rows}(weight + u * tile_bytes, rounded_at, steps, ahead, other, soon, per)
        soon += 64 * per * blocks
        soon_left -= 64 * per * blocks
        if per != 0 and soon_left <= 0:
            soon, soon_left, at_row = next_span(slots, order, spans, adapted_rows, at_row)
            if at_row >= adapted_rows:
                per = np.int64(0)
        if terms == 2:
            sums = joined_{rows}(sums)
        here, between = (ups, 64) if up else (to + 64 * t, out_bytes)
        keep_{rows}(here, between, kept, n_out - 16 * u, beside(bias, u, n_out), sums)
        if up:
            call_kernel(join, to + 64 * t, ups, out_bytes, kept)
    rounded_at += {rows} * each
    to += kept * out_bytes
    codes -= {rows}"""


_KEPT = """                u = t + {k} * part + up * tiles
                keep_1(to + {k} * between, 0, 1, n_out - 16 * u, beside(bias, u, n_out), sums[{k}:{end}])
"""

# Sixteen rows and more, and fifteen: a tile is decoded once, and then meets every bundle.
_ON_TILES = """if codes >= {least}:
    for k in range(halves * rest):
        up, t = k % halves, tile + k // halves
        u = t + up * tiles
        ahead, other = next_tiles(weight, t, low, high, tile_bytes, up, to_up)
        decode_tile(weight + u * tile_bytes, steps, ahead, other, decoded)
        for b in range((codes + 1) // {rows}):
            kept, place = min({rows}, codes - {rows} * b) // terms, to + b * ({rows} // terms) * out_bytes
            if not up:
                prefetch_tiled(place + 64 * t, out_bytes)
            sums = on_tiles(decoded, rounded_at + b * {rows} * each, steps, scratch)
            if terms == 2:
                sums = join_tiled(sums)
            here, between = (ups, 64) if up else (place + 64 * t, out_bytes)
            keep_tiled(here, between, kept, n_out - 16 * u, beside(bias, u, n_out), sums)
            if up:
                call_kernel(join, place + 64 * t, ups, out_bytes, kept)
    tiled_codes = (codes + 1) // {rows} * {rows}
    rounded_at += tiled_codes * each
    to += min(tiled_codes, codes) // terms * out_bytes
    codes -= tiled_codes"""

_TILES = """
from plait.kernels.cpu.codegen import amx_tiles
from plait.kernels.cpu.linear import byte_tiles
start_tiles = amx_tiles.start_tiles("{kind}", byte_tiles.tile_shapes(layout))
stop_tiles = amx_tiles.stop_tiles("{kind}")
decode_tile, on_tiles = byte_tiles.decode_tile(layout), byte_tiles.amx_tile(layout, "{kind}")
join_tiled, keep_tiled = linear_source.make_join({rows}), linear_source.keep({rows})
prefetch_tiled = linear_source.prefetch_rows({rows})"""

_START = """
    scratch, tiled = scratch_of(frame, thread), rows * terms >= {least}
    decoded = scratch + {decoded}
    if tiled:
        start_tiles(scratch)"""

_STOP = """
    if tiled:
        stop_tiles(scratch)"""


@cache
def linear_kernel(layout: Layout, kind: Kind = "", streams: int = 0) -> Kernel:
    """The kernel of `packed.multiply` for weights in that layout.

    kind: "amx" multiplies bundles of TILED rows of codes on its tiles ("software": on what stands for them),
    to the same bits; it needs `byte_tiles.scratch_bytes`. streams: of one row, to the same bits; 0: what is
    fastest here.
    """
    streams = streams or (1 if ONE_STREAM else STREAMS)
    # Codes that are bytes take as long to decode as to multiply: a single bundle of them goes without.
    alone = not kind or (layout.bits == 8 and BUNDLES[0] == TILED)
    sizes = [n for n in BUNDLES if n < TILED or alone]
    tiles = [_TILE.format(rows=n) for n in sizes]
    bundles = [_BUNDLE.format(rows=n, least=n - 1 if n > 2 else n) for n in sizes]
    least = 2 * TILED - 1 if alone else TILED - 1
    if kind:
        tiles.append(_TILES.format(kind=kind, rows=TILED))
        bundles.insert(0, _ON_TILES.format(rows=TILED, least=least))
        sizes = sorted({TILED, *sizes}, reverse=True)
    source = _SOURCE.substitute(
        step=layout.step,
        blocks=layout.blocks,
        nbytes=layout.nbytes,
        record=layout.rounded_block,
        largest=sizes[0],
        sizes=repr(tuple(sizes)),
        start=_START.format(least=least, decoded=DECODED_AT) if kind else "",
        stop=_STOP if kind else "",
        ups=UPS_AT if kind else 0,
        streams=streams,
        run=RUN if streams == 1 else 1,
        kept="".join(_KEPT.format(k=k, end=k + 1) for k in range(streams)),
        layout=repr(layout),
        bundles=indent("\n".join(bundles), " " * 12),
        tiles="\n".join(tiles),
        digest=digest(*_FILES),
    )
    name = f"linear_{layout.bits}_{layout.scales.split(',')[0]}"
    made: Kernel = load_generated(f"{name}_{kind}" if kind else name, source).linear_rows
    return made
