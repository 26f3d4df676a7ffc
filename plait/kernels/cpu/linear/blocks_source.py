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
from textwrap import indent

from plait.kernels.cpu.codegen import quad_dot
from plait.kernels.cpu.codegen.amx_tiles import MEMORY, TILE, Kind
from plait.kernels.cpu.codegen.kernel import Kernel, load_generated
from plait.kernels.cpu.codegen.llvm_writer import Value, Word, Writer, block, digest
from plait.kernels.cpu.codegen.target import one_stream
from plait.kernels.cpu.linear import kernel_text
from plait.kernels.cpu.linear.codebooks import TABLES
from plait.kernels.cpu.linear.layout import BLOCK, LINE, Layout
from plait.kernels.cpu.linear.packed import JOINED
from plait.kernels.cpu.linear.quantize_rows import BASE_BITS, BUNDLES, NARROW

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
MANY = 4  # bundles from which tiles are decoded once for all, in registers
RUN = TILED  # tiles of a gate before those of `up`, in one stream: where it turns often it is slower
ALONE = 2  # rows of codes up to which every thread rounds all of them, rather than wait for the others

_FILES = (
    *("linear/blocks_source.py", "linear/kernel_text.py", "linear/quantize_rows.py", "linear/layout.py"),
    *("codegen/quad_dot.py", "codegen/amx_tiles.py"),
    *("linear/codebooks.py", "linear/fetch_adapters.py", "linear/byte_tiles.py"),
)


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


def _products(w: Writer, layout: Layout, p: Word, quads: range, a: Word, whole: list[Value]) -> list[Value]:
    """Integer sums of as many rows, with those quads of the block at p and of the bundle's at a."""
    if quad_dot.BY_FOURS and len(whole) <= quad_dot.FEW and layout.has_plain_nibbles:
        return quad_dot.add_by_halves(w, p, a, whole, quads)
    return add_quads(w, layout, [partial(read_codes, w, layout, p, q) for q in quads], quads, a, whole)


def add_quads(
    w: Writer, layout: Layout, codes: Sequence[Callable[[], Value]], quads: range, a: Word, whole: list[Value]
) -> list[Value]:
    """Integer sums of as many rows, with `quads` of a block, which `codes` read, and of the bundle's at a."""
    largest, zero = _largest(layout), None if layout.zeros else layout.zero
    if quad_dot.BY_TWOS and quad_dot.together(largest, zero):
        return quad_dot.add_by_twos(w, codes, partial(_place, a, quads), whole, largest, zero, BASE_BITS)
    product = w.dot8 if largest > 127 else w.dot
    for i, read in enumerate(codes):
        v = read()
        whole = [product(n, v, w.spread_i32(_place(a, quads, r, i))) for r, n in enumerate(whole)]
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
    (step, b, a), found = places, list(sums)
    quads, groups = BLOCK // 4 // layout.parts, layout.parts
    for j in range(groups):
        at, low_at = find_group(w, layout, step, b, j)
        scales = read_scales(w, layout, at, low_at, outer)
        if layout.zeros:
            scales.append(w.load_u8(low_at))
        codes, which = step + layout.codes_at + layout.plane_bytes * b, range(quads * j, quads * (j + 1))
        found = add_group(w, layout, (a, j), scales, found, partial(products, codes, which), together)
    return found


def add_group(
    w: Writer,
    layout: Layout,
    place: tuple[Word, int],
    scales: list[Value],
    sums: list[Value],
    products: Callable[[Word, list[Value]], list[Value]],
    together: int,
) -> list[Value]:
    """Sums of as many rows, with a group of weights: its integer sums, then the floats.

    place: where the bundle's block is, and which of its groups; scales: of the group, and what is with them,
    its minima or zero points; products: integer sums, and the products of the rows from an address on.
    """
    (a, j), rows, found = place, len(sums), list(sums)
    extra = a + (40 + 4 * j) * rows
    for part in (range(r, min(r + together, rows)) for r in range(0, rows, together)):
        base = w.spread_int(BASE_BITS)
        whole = [base if layout.zero is None else w.spread_i32(extra + 4 * r) for r in part]
        if layout.zeros:
            whole = [w.add_i32(base, w.mul_i32(scales[1], n)) for n in whole]
        whole = products(a + 32 * part.start, whole)
        for r in part:
            scale, off = (w.spread_f32(a + k * rows + 4 * r) for k in (32, 36))
            x = w.fma(w.bits_f32(whole[r - part.start]), scale, off)
            found[r] = w.fma(x, scales[0], found[r])
            if layout.zero is None:
                found[r] = w.fma(scales[1], w.spread_f32(extra + 4 * r), found[r])
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
            for k in range(lines if rows >= FETCHED or not one_stream() else 0):
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


def decodes_once(layout: Layout, kind: Kind) -> bool:
    """Whether many rows meet a tile that is decoded once for all of them.

    Where registers hold the sums of few rows, decoding for each bundle takes as long as its products. Codes
    that are bytes are read as they are. With registers for many rows it is slower from 2,048 inputs on: all
    rows come from L2 for every tile then.
    """
    return bool(kind) or (NARROW and layout.bits < 8)


def place_decoded(kind: Kind) -> int:
    """Where the decoded tile lies in a thread's scratch."""
    return DECODED_AT if kind else JOINED


@cache
def linear_kernel(layout: Layout, kind: Kind = "", streams: int = 0) -> Kernel:
    """The kernel of `packed.multiply` for weights in that layout.

    kind: "amx" multiplies bundles of TILED rows of codes on its tiles ("software": on what stands for them),
    to the same bits; it needs `byte_tiles.scratch_bytes`. streams: of one row, to the same bits; 0: what is
    fastest here.
    """
    streams = streams or (1 if one_stream() else STREAMS)
    # Codes that are bytes take as long to decode as to multiply: a single bundle of them goes without.
    alone = not kind or (layout.bits == 8 and BUNDLES[0] == TILED)
    sizes = [n for n in BUNDLES if n < TILED or alone]
    tiles = [kernel_text.TILE.format(rows=n) for n in sizes]
    bundles = [kernel_text.BUNDLE.format(rows=n, least=n - 1 if n > 2 else n) for n in sizes]
    decodes, most = decodes_once(layout, kind), TILED if kind else sizes[0]
    least = ((2 if alone else 1) * TILED if kind else MANY * most) - 1
    if decodes:
        tiles += [kernel_text.DECODED.format(rows=most, signed=bool(kind))]
        tiles += [(kernel_text.TILES if kind else kernel_text.IN_REGISTERS).format(kind=kind, rows=most)]
        bundles.insert(
            0, kernel_text.ON_TILES.format(rows=most, least=least, scratch=", scratch" if kind else "")
        )
        sizes = sorted({most, *sizes}, reverse=True)
    source = kernel_text.SOURCE.substitute(
        step=layout.step,
        blocks=layout.blocks,
        nbytes=layout.nbytes,
        record=layout.rounded_block,
        largest=sizes[0],
        sizes=repr(tuple(sizes)),
        start=(kernel_text.PLACE.format(decoded=place_decoded(kind)) if decodes else "")
        + (kernel_text.START.format(least=least) if kind else ""),
        stop=kernel_text.STOP if kind else "",
        ups=UPS_AT if kind else 0,
        streams=streams,
        run=RUN if streams == 1 else 1,
        kept="".join(kernel_text.KEPT.format(k=k, end=k + 1) for k in range(streams)),
        layout=repr(layout),
        bundles=indent("\n".join(bundles), " " * 12),
        tiles="\n".join(tiles),
        digest=digest(*_FILES),
    )
    name = f"linear_{layout.bits}_{layout.scales.split(',')[0]}"
    made: Kernel = load_generated(f"{name}_{kind}" if kind else name, source).linear_rows
    return made
