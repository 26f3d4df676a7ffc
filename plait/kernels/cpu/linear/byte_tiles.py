"""Quantized linear layers of many rows: tiles that are decoded once, to the bits of those that are not.

A tile of sixteen outputs is decoded for all rows of a piece: codes, a byte each, and scales and minima as
floats. A bundle of rows then goes through it, a group of inputs after the other. In registers, codes stay
unsigned, and zero points with them. On AMX codes are signed, without their zero point. The integer sums of
sixteen rows and a group come from one product of tiles, by way of memory, and vectors scale them. Products
are two groups ahead of the vectors, so that neither waits for the other.

    decoded: [group 0: codes, a quad of sixteen outputs a line | scales | minima or zero points, if any]
             [group 1 ...] ...
"""

from __future__ import annotations

from functools import partial

from plait.kernels.cpu.codegen.amx_tiles import MEMORY, TILE, Kind, Shapes, Tiles
from plait.kernels.cpu.codegen.llvm_writer import Value, Word, Writer, block
from plait.kernels.cpu.linear.blocks_source import (
    EIGHT,
    TILED,
    add_group,
    add_quads,
    decodes_once,
    find_group,
    place_decoded,
    read_codes,
    read_outer,
    read_scales,
)
from plait.kernels.cpu.linear.layout import BLOCK, LINE, Layout

EACH = 2  # groups of which products are made together
SUMS = MEMORY  # where integer sums lie in a thread's scratch: those being made, and those being scaled


def _quads(layout: Layout) -> int:
    """Quads of a group, or of the part of one that is in a block."""
    return BLOCK // 4 // layout.parts


def _group_bytes(layout: Layout, signed: bool = True) -> int:
    """Bytes of a decoded group. signed: its codes have no zero point any more."""
    keeps_more = layout.zero is None or (layout.zeros and not signed)
    return LINE * (_quads(layout) + 1 + keeps_more)


def _block_bytes(layout: Layout, signed: bool) -> int:
    """Bytes of a decoded block of 32 inputs."""
    return layout.parts * _group_bytes(layout, signed)


def can_decode(layout: Layout) -> bool:
    """Whether codes without their zero points are signed bytes."""
    return not (layout.zeros and layout.bits == 8)


def scratch_bytes(layout: Layout, n_in: int, kind: Kind) -> int:
    """Bytes that each thread needs: the decoded tile of sixteen outputs comes last."""
    if not decodes_once(layout, kind):
        return 0
    return place_decoded(kind) + layout.steps(n_in) * layout.blocks * _block_bytes(layout, bool(kind))


def tile_shapes(layout: Layout) -> Shapes:
    """Per group its sums, its codes of x, and its weights."""
    quads = _quads(layout)
    return (*((TILED, LINE),) * EACH, *((TILED, 4 * quads),) * EACH, *((quads, LINE),) * EACH)


def _decode_block(
    w: Writer, layout: Layout, signed: bool, places: tuple[Word, Word, Word], outer: list[Value]
) -> None:
    """places: a step, which block of it, and where to."""
    (step, b, to), quads, each = places, _quads(layout), _group_bytes(layout, signed)
    codes_at = step + layout.codes_at + layout.plane_bytes * b
    for j in range(layout.parts):
        at, low_at = find_group(w, layout, step, b, j)
        zero = w.load_u8(low_at) if layout.zeros else None
        taken = None
        if signed and layout.zero is not None:
            taken = w.mul_i32(w.spread_int(layout.zero) if zero is None else zero, w.spread_int(0x01010101))
        place = to + each * j
        for q in range(quads):
            v = read_codes(w, layout, codes_at, quads * j + q)
            w.store_i32(place + LINE * q, v if taken is None else w.sub_bytes(v, taken))
        for k, one in enumerate(read_scales(w, layout, at, low_at, outer)):
            w.store_f32(place + LINE * (quads + k), one)
        if zero is not None and not signed:
            w.store_i32(place + LINE * (quads + 1), zero)


@block(takes=5)
def decode_tile(layout: Layout, signed: bool, w: Writer, *words: Word) -> None:
    """Block (weights, steps, ahead, apart, to): the tile at `weights`, decoded.

    As many bytes are fetched meanwhile, half of them from `ahead` and half from `apart` behind it.
    """
    weights, steps, ahead, apart, to = words
    each, lines = layout.nbytes // layout.blocks // 2, -(-layout.nbytes // LINE // layout.blocks // 2)
    decoded = _block_bytes(layout, signed)

    def step(_: Word, at: Word, ahead: Word, to: Word) -> list[Word]:
        outer = read_outer(w, layout, at + layout.outer_at)

        def one(b: Word) -> None:
            for k in range(lines):
                place = ahead + each * b + LINE * k
                w.prefetch_l2(place)
                w.prefetch_l2(place + apart)
            _decode_block(w, layout, signed, (at, b, to + decoded * b), outer)

        w.loop(0, layout.blocks, 1, (), one)
        return [at + layout.nbytes, ahead + layout.nbytes // 2, to + decoded * layout.blocks]

    w.loop(0, steps, 1, (weights, ahead, to), step)


@block(takes=2)
def prefetch_rows(rows: int, w: Writer, *words: Word) -> None:
    """Block (to, out_bytes): fetch the lines of sixteen outputs of these rows, which `keep` will write.

    A product takes longer than a line takes to come from a third cache; without this the stores wait for it.
    """
    to, out_bytes = words
    for r in range(rows):
        w.prefetch_to_write(to + out_bytes * r)


@block(takes=3, gives=lambda layout, rows: rows)
def multiply_decoded(layout: Layout, rows: int, w: Writer, *words: Word) -> list[Value]:
    """Block (decoded, a, steps): a bundle of `rows` rows of codes, at a, times a tile with unsigned codes."""
    decoded, a, steps = words
    quads, each = _quads(layout), _group_bytes(layout, signed=False)

    def one(_: Word, at: Word, a: Word, *sums: Value) -> list[Value]:
        found = list(sums)
        for j in range(layout.parts):
            group, which = at + each * j, range(quads * j, quads * (j + 1))
            scales = [w.load_f32(group + LINE * quads)]
            if layout.zeros:
                scales.append(w.load_i32(group + LINE * (quads + 1)))
            elif layout.zero is None:
                scales.append(w.load_f32(group + LINE * (quads + 1)))
            codes = [partial(w.load_i32, group + LINE * q) for q in range(quads)]
            products = partial(add_quads, w, layout, codes, which)
            found = add_group(w, layout, (a, j), scales, found, products, EIGHT)
        return [at + each * layout.parts, a + rows * layout.rounded_block, *found]

    return w.loop(0, steps * layout.blocks, 1, (decoded, a, *[w.zero_f32()] * rows), one)[2:]


def _multiply(w: Writer, layout: Layout, tiles: Tiles, places: tuple[Word, Word, Word]) -> None:
    """The integer sums of EACH groups, with weights and rows at places[:2], to places[2]."""
    weights, rows, to = places
    product = tiles.s8u8 if layout.zero is None else tiles.s8s8
    for k in range(EACH):
        b, j = divmod(k, layout.parts)
        tiles.zero(k)
        tiles.load(EACH + k, rows + TILED * layout.rounded_block * b + 4 * _quads(layout) * j, BLOCK)
        tiles.load(2 * EACH + k, weights + _group_bytes(layout) * k, LINE)
        product(k, EACH + k, 2 * EACH + k)
    for k in range(EACH):
        tiles.store(k, to + TILE * k, LINE)


def _scale(w: Writer, layout: Layout, places: tuple[Word, Word, Word], sums: list[Value]) -> list[Value]:
    """Sums of sixteen rows, with those integer sums; `places` as in `_multiply`."""
    weights, rows, whole = places
    for k in range(EACH):
        b, j = divmod(k, layout.parts)
        of_rows = rows + TILED * (layout.rounded_block * b + BLOCK)
        of_weights = weights + _group_bytes(layout) * k + LINE * _quads(layout)
        scales = w.load_f32(of_weights)
        minima = w.load_f32(of_weights + LINE) if layout.zero is None else None
        for r in range(TILED):
            # What one fma makes of BASE and the sum elsewhere: the product, rounded once.
            x = w.mul(w.to_f32(w.load_i32(whole + TILE * k + LINE * r)), w.spread_f32(of_rows + 4 * r))
            sums[r] = w.fma(x, scales, sums[r])
            if minima is not None:
                extra = w.spread_f32(of_rows + 4 * TILED * (2 + j) + 4 * r)
                sums[r] = w.fma(minima, extra, sums[r])
    return sums


@block(takes=4, gives=TILED)
def amx_tile(layout: Layout, kind: Kind, w: Writer, *words: Word) -> list[Value]:
    """Block (decoded, a, steps, scratch): a bundle of TILED rows of codes, at a, times a decoded tile."""
    weights, rows, steps, scratch = words
    tiles, blocks = Tiles(w, kind, scratch, tile_shapes(layout)), EACH // layout.parts
    size, far = EACH * _group_bytes(layout), blocks * TILED * layout.rounded_block
    buffer, pair = scratch + SUMS, EACH * TILE
    _multiply(w, layout, tiles, (weights, rows, buffer))

    def turn(i: Word, weights: Word, rows: Word, *sums: Value) -> list[Value]:
        odd = i - i // 2 * 2
        _multiply(w, layout, tiles, (weights + size, rows + far, buffer + pair - odd * pair))
        found = _scale(w, layout, (weights, rows, buffer + odd * pair), list(sums))
        return [weights + size, rows + far, *found]

    last = steps * (layout.blocks // blocks) - 1
    weights, rows, *sums = w.loop(0, last, 1, (weights, rows, *[w.zero_f32()] * TILED), turn)
    odd = last - last // 2 * 2
    return _scale(w, layout, (weights, rows, buffer + odd * pair), sums)
