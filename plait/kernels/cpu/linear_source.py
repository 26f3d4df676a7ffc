"""The text of the kernels of quantized linear maps: one per layout, made when a model needs it.

A kernel rounds its rows to int8 first and then multiplies, in one launch. Rounded rows are kept in *bundles*
of as many as one register tile takes: for each block of 32 inputs, 32 codes of every row, then a scale of
every row, then a number per group of weights. That number is what the zero point takes off, as an int32 to
start the integer sum with, or what the minimum is multiplied by.

An output is a sum over groups, in order, of fma(integer sum · activation scale, weight scale, sum): the same
operations whatever the rows beside it, the thread, or the instruction set.
"""

from __future__ import annotations

from functools import cache
from string import Template

from plait.kernels.cpu.kernel import Kernel, generated
from plait.kernels.cpu.layout import BLOCK, LAYOUTS, LINE, Layout

BUNDLES = (8, 4, 2, 1)  # rows of codes in a register tile, the larger first
AHEAD = {64: 3072, 256: 6144}  # bytes that weights are fetched before they are needed, by the step's length
PANEL = 320 << 10  # bytes of rounded rows that tiles pass by before the next rows come: they stay in L2
ALONE = 2  # rows of codes up to which every thread rounds all of them, rather than wait for the others

_SOURCE = Template('''"""Quantized linear map, made by plait.kernels.cpu.linear_source."""
import numpy as np

from plait.kernels.cpu.frame import barrier, rows_of, shared_of, word
from plait.kernels.cpu.kernel import inline, kernel
from plait.kernels.cpu.vec import (
    absolute, add, add_i32, and_i32, dot, dot8, fma, get_i64, high4, largest, left, load_f16, load_f32,
    load_i32, load_i8, load_some, load_u8, low4, mul, nearest, or_i32, peak, prefetch, put_f32, put_i32,
    right, spread, spread_f32, spread_i32, spread_int,
    store_i8, store_some, sub, sum_i32, to_f32, to_i32, total,
    zero_f32, zero_i32,
)

SMALLEST = np.float32(3.8e-37)  # below it, 127 / largest is no float32: such a block is zeros


@inline
def put_codes(to, size, at, a, b, scale):
    """One row's 32 codes and what goes with them, row `at` of a bundle of `size`."""
    i, j = to_i32(a), to_i32(b)
    store_i8(to + 32 * at, i)
    store_i8(to + 32 * at + 16, j)
    put_f32(to + 32 * size + 4 * at, scale)
$sums


@inline
def round_block(x, to, size, at, terms):
    """32 activations into one row of codes, or two: the second takes what the first leaves over."""
    u, v = load_f32(x), load_f32(x + 64)
    most = peak(largest(absolute(u), absolute(v)))
    odd = total(add(sub(u, u), sub(v, v)))  # 0, or NaN beside a number that is not finite
    scale, per_unit = most / np.float32(127.0), np.float32(0.0)
    if most >= SMALLEST:
        per_unit = np.float32(1.0) / most * np.float32(127.0)
    a, b = nearest(mul(u, spread(per_unit))), nearest(mul(v, spread(per_unit)))
    put_codes(to, size, at, a, b, scale + odd)
    if terms == 2:
        kept, finer = spread(scale), spread(per_unit * np.float32(254.0))
        a = nearest(mul(sub(u, mul(a, kept)), finer))
        b = nearest(mul(sub(v, mul(b, kept)), finer))
        put_codes(to, size, at + 1, a, b, scale / np.float32(254.0) + odd)


@inline
def round_rows(x, row_bytes, n, to, rows, terms, thread, threads):
    """This thread's share of blocks of all rows, into bundles at `to`. Blocks behind n are zeros."""
    blocks = (n + $step - 1) // $step * $blocks
    codes = rows * terms
    i, end = rows * blocks * thread // threads, rows * blocks * (thread + 1) // threads
    while i < end:
        row, first = i // blocks, i % blocks
        last = min(blocks, first + end - i)
        at, size, start = row * terms, $largest, 0
        whole = (codes + 1) // size * size  # where bundles of this size end
        while at >= whole:
            start, size = whole, size // 2
            whole = start + (codes - start + (1 if size > 2 else 0)) // size * size
        start += (at - start) // size * size
        bundle = to + start * blocks * $record
        for b in range(first, last):
            block = bundle + b * size * $record
            if 32 * b < n:
                round_block(x + row * row_bytes + 128 * b, block, size, at - start, terms)
            else:
                for k in range(terms):
                    put_codes(block, size, at - start + k, zero_f32(), zero_f32(), np.float32(0.0))
        i += last - first


@inline
def keep(out, value, bias, columns):
    if bias != 0:
        value = add(value, load_some(bias, np.int32(columns)))
    store_some(out, value, np.int32(columns))


@inline
def pieces(rows, terms, panel, n_out):
    """How many pieces of work some rows are: a panel of them through a tile each."""
    return (rows * terms + panel - 1) // panel * ((n_out + 15) // 16)


@kernel
def linear_rows(frame, args, thread, threads):
    """The words of `packed`."""
    x, row_bytes, n, weight = word(args, 2), word(args, 3), word(args, 4), word(args, 5)
    n_out, bias, out, out_bytes = word(args, 6), word(args, 7), word(args, 8), word(args, 9)
    terms = word(args, 10)
    groups, starts, weights, room = word(args, 11), word(args, 12), word(args, 13), word(args, 14)
    rows = rows_of(frame, args)
    if groups != 0:
        rows = get_i64(starts + 8 * groups)
    steps = (n + $step - 1) // $step
    blocks = steps * $blocks
    rounded, each = shared_of(frame), blocks * $record
    alone = rows * terms <= $alone and threads * rows * terms * each <= room
    apart = 2 * each  # room for one row of codes more than a group has: its last bundle may be larger
    if alone:
        apart = terms * each
        rounded += thread * rows * terms * each
    panel, work = max($largest, $panel // each // $largest * $largest), 0
    me, all_of_us = (0, 1) if alone else (thread, threads)
    if groups == 0:
        round_rows(x, row_bytes, n, rounded, rows, terms, me, all_of_us)
        work = pieces(rows, terms, panel, n_out)
    for g in range(groups):
        first, end = get_i64(starts + 8 * g), get_i64(starts + 8 * g + 8)
        to = rounded + first * apart
        round_rows(x + first * row_bytes, row_bytes, n, to, end - first, terms, me, all_of_us)
        work += pieces(end - first, terms, panel, n_out)
    if not alone:
        barrier(frame, threads)
    tiles, before = (n_out + 15) // 16, 0
    mine, stop = work * thread // threads, work * (thread + 1) // threads
    for g in range(max(groups, 1)):
        first, end = 0, rows
        if groups != 0:
            first, end = get_i64(starts + 8 * g), get_i64(starts + 8 * g + 8)
            weight = get_i64(weights + 8 * g)
        count = pieces(end - first, terms, panel, n_out)
        for i in range(max(mine, before) - before, min(stop, before + count) - before):
            at, t = i // tiles * panel, i % tiles
            weights_at, rounded_at = weight + t * steps * $nbytes, rounded + first * apart + at * each
            to, plus = out + (first + at // terms) * out_bytes + 64 * t, bias + 64 * t if bias != 0 else 0
            columns = n_out - 16 * t
            codes = min(panel, (end - first) * terms - at)
$bundles
        before += count
''')


def _sums(layout: Layout) -> list[str]:
    """Statements of `put_codes`: each group's sum of codes, as its zero point or minimum needs it."""
    parts = ["add_i32(i, j)"] if layout.group == BLOCK else ["i", "j"]
    lines = []
    for k, part in enumerate(parts):
        at = f"to + {36 + 4 * k} * size + 4 * at"
        if layout.zero is None:
            lines.append(f"put_f32({at}, scale * np.float32(sum_i32({part})))")
        else:
            lines.append(f"put_i32({at}, np.int32({-layout.zero} * sum_i32({part})))")
    return lines


def _low(layout: Layout, q: int) -> list[str]:
    """Statements that leave the low bits of quad q of a block, at address p, in v."""
    if layout.bits == 8:
        return [f"v = load_i32(p + {LINE * q})"]
    if layout.bits == 4:
        return [f"v = {'low4' if q < 4 else 'high4'}(load_i32(p + {LINE * (q % 4)}))"]
    x = f"load_i32(p + {LINE * (q // 4)})"
    moved = f"right({x}, np.int32({2 * (q % 4)}))" if q % 4 else x
    return [f"v = and_i32({moved}, spread_int(np.int32(0x03030303)))"]


def _high(layout: Layout, q: int) -> list[str]:
    """Statements that put the high bits of quad q of a block, at address p, into v."""
    if not layout.high:
        return []
    per = 8 // layout.high
    shift = layout.bits - layout.high * (q % per)
    x = f"load_i32(p + {layout.low_bytes + LINE * (q // per)})"
    if shift:
        x = f"{'left' if shift > 0 else 'right'}({x}, np.int32({abs(shift)}))"
    mask = (0x01010101 if layout.high == 1 else 0x03030303) << layout.bits
    return [f"v = or_i32(v, and_i32({x}, spread_int(np.int32(0x{mask:08X}))))"]


def _group_scales(layout: Layout, j: int) -> list[str]:
    """Statements that leave the scales of group j of block b in s, and what its minimum is in m."""
    per = BLOCK // layout.group
    at = f"w + {layout.scales_at + layout.scale_bytes * j} + {layout.scale_bytes * per} * b"
    low = f"w + {layout.minima_at + layout.scale_bytes * j} + {layout.scale_bytes * per} * b"
    match layout.scales:
        case "half":
            return [f"s = load_f16({at})"]
        case "half, half":
            return [f"s, m = load_f16({at}), load_f16({low})"]
        case "byte":
            return [f"s = mul(outer, to_f32(load_i8({at})))"]
        case "byte, byte":
            return [f"s, m = mul(outer, to_f32(load_u8({at}))), mul(lower, to_f32(load_u8({low})))"]
        case "nibbles":
            return [
                f"s = load_u8({at})",
                "m = mul(lower, to_f32(high4(s)))",
                "s = mul(outer, to_f32(low4(s)))",
            ]


def _block(layout: Layout, rows: int) -> list[str]:
    """Statements of one block of 32 inputs: for every group its integer sums, then the floats."""
    lines = [f"p = w + {layout.plane_bytes} * b"]
    product = "dot8" if layout.bits == 8 else "dot"
    per = layout.group // 4
    for j in range(BLOCK // layout.group):
        extra = f"a + {(36 + 4 * j) * rows}"
        for r in range(rows):
            start = "zero_i32()" if layout.zero is None else f"spread_i32({extra} + {4 * r})"
            lines.append(f"i{r} = {start}")
        for q in range(per * j, per * (j + 1)):
            lines += [*_low(layout, q), *_high(layout, q)]
            lines += [f"i{r} = {product}(i{r}, v, spread_i32(a + {32 * r + 4 * q}))" for r in range(rows)]
        lines += _group_scales(layout, j)
        for r in range(rows):
            lines.append(f"c{r} = fma(mul(to_f32(i{r}), spread_f32(a + {32 * rows + 4 * r})), s, c{r})")
            if layout.zero is None:
                lines.append(f"c{r} = fma(m, spread_f32({extra} + {4 * r}), c{r})")
    return lines


def _tile(layout: Layout, rows: int) -> list[str]:
    """Statements that take a bundle of `rows` rows of codes, at address a, through a tile."""
    lines = ["w = weights_at", *(f"c{r} = zero_f32()" for r in range(rows)), "for _ in range(steps):"]
    if not layout.scales.startswith("half"):
        lines.append(f"    outer = load_f16(w + {layout.outer_at})")
        if layout.zero is None:
            lines.append(f"    lower = load_f16(w + {layout.outer_at + 32})")
    lines.append(f"    for b in range({layout.blocks}):")
    per = -(-layout.nbytes // LINE // layout.blocks)
    body = [f"prefetch(w + {AHEAD[layout.step] + LINE * k} + {LINE * per} * b)" for k in range(per)]
    body += [*_block(layout, rows), f"a += {rows * layout.rounded_block}"]
    lines += [" " * 8 + line for line in body]
    lines.append(f"    w += {layout.nbytes}")
    if rows > 1:
        lines.append("if terms == 2:")
        lines.append("    " + "; ".join(f"c{r} = add(c{2 * r}, c{2 * r + 1})" for r in range(rows // 2)))
    for r in range(rows):
        guard = f"if {r} < kept: " if r else ""
        lines.append(f"{guard}keep(to + {r} * out_bytes, c{r}, plus, columns)")
    return lines


def _bundles(layout: Layout) -> list[str]:
    """Statements that take `codes` rows of codes through a tile. One row less than a large bundle takes is
    one, too: what is computed beside it is not kept."""
    lines = []
    for rows in BUNDLES:
        lines += [
            f"while codes >= {rows - 1 if rows > 2 else rows}:",
            f"    a, kept = rounded_at, min({rows}, codes) // terms",
            *("    " + line for line in _tile(layout, rows)),
            f"    rounded_at += {rows} * each",
            "    to += kept * out_bytes",
            f"    codes -= {rows}",
        ]
    return lines


@cache
def linear_kernel(layout: Layout) -> Kernel:
    """The kernel of `packed.multiply` for weights in that layout."""
    name = next(name for name, other in LAYOUTS.items() if other == layout)
    source = _SOURCE.substitute(
        step=layout.step,
        blocks=layout.blocks,
        nbytes=layout.nbytes,
        record=layout.rounded_block,
        largest=BUNDLES[0],
        panel=PANEL,
        alone=ALONE,
        sums="\n".join("    " + line for line in _sums(layout)),
        bundles="\n".join(" " * 12 + line for line in _bundles(layout)),
    )
    made: Kernel = generated(f"linear_{name.lower()}", source).linear_rows
    return made
