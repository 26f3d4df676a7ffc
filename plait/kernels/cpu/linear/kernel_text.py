"""The text of kernels of quantized linear layers, which `blocks_source` puts together: around its blocks."""

from __future__ import annotations

from string import Template

SOURCE = Template('''"""Quantized linear layer: made by plait, from $digest."""
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

TILE = """tile_{rows} = linear_source.tile(layout, {rows})
joined_{rows}, keep_{rows} = linear_source.make_join({rows}), linear_source.keep({rows})"""

# One row less than a large bundle takes is one, too: what is computed for the missing row is not kept.
BUNDLE = """while codes >= {least}:
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


KEPT = """                u = t + {k} * part + up * tiles
                keep_1(to + {k} * between, 0, 1, n_out - 16 * u, beside(bias, u, n_out), sums[{k}:{end}])
"""

# Bundles of the largest size, and one with a row less: a tile is decoded once, and then meets all of them.
ON_TILES = """if codes >= {least}:
    for k in range(halves * rest):
        up, t = k % halves, tile + k // halves
        u = t + up * tiles
        ahead, other = next_tiles(weight, t, low, high, tile_bytes, up, to_up)
        decode_tile(weight + u * tile_bytes, steps, ahead, other, decoded)
        for b in range((codes + 1) // {rows}):
            kept, place = min({rows}, codes - {rows} * b) // terms, to + b * ({rows} // terms) * out_bytes
            if not up:
                prefetch_tiled(place + 64 * t, out_bytes)
            sums = on_tiles(decoded, rounded_at + b * {rows} * each, steps{scratch})
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

DECODED = """
from plait.kernels.cpu.linear import byte_tiles
decode_tile, prefetch_tiled = byte_tiles.decode_tile(layout, {signed}), byte_tiles.prefetch_rows({rows})
join_tiled, keep_tiled = linear_source.make_join({rows}), linear_source.keep({rows})"""

IN_REGISTERS = """
on_tiles = byte_tiles.multiply_decoded(layout, {rows})"""

TILES = """
from plait.kernels.cpu.codegen import amx_tiles
on_tiles = byte_tiles.amx_tile(layout, "{kind}")
start_tiles = amx_tiles.start_tiles("{kind}", byte_tiles.tile_shapes(layout))
stop_tiles = amx_tiles.stop_tiles("{kind}")"""

PLACE = """
    decoded = scratch_of(frame, thread) + {decoded}"""

START = """
    scratch, tiled = scratch_of(frame, thread), rows * terms >= {least}
    if tiled:
        start_tiles(scratch)"""

STOP = """
    if tiled:
        stop_tiles(scratch)"""
