"""Low-rank adapters, each row's own: y += scale · (x Aᵀ) Bᵀ, in one launch behind a linear layer.

A row finds its adapter's factors in the layer's table, which a recorded step reads anew each time. Without an
adapter in the step, a thread looks at one number and leaves.

    A [16 ranks][input][rank]    lanes are ranks       hidden [row][part][rank]
    B [rank][output]             lanes are outputs     y[row] += scale · hidden · B

    rows in the order of their adapters:   a a a a │ a b b b │ b b           four at a time, if they share one
    work of A: part, 16 ranks, four rows   work of B: 64 outputs of a part, four rows

A row's sums go over inputs, by turns in four, then over ranks: alone or with others it has the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from plait.errors import ShapeMismatch
from plait.kernels.cpu.codegen.kernel import Kernel, inline, kernel
from plait.kernels.cpu.codegen.kinds import Floats, Int
from plait.kernels.cpu.codegen.vec import (
    add,
    fma,
    get_f32,
    get_i64,
    load_bf16,
    load_f32,
    load_some,
    spread,
    spread_f32,
    store_f32,
    store_some,
    words,
    zero_f32,
)
from plait.kernels.cpu.runtime.address_table import keep_addresses
from plait.kernels.cpu.runtime.executor import Executor
from plait.kernels.cpu.runtime.frame import barrier, rows_of
from plait.kernels.cpu.runtime.row_checks import TensorRows, dense, float32_rows
from plait.ops.linear import Linear
from plait.ops.low_rank import WORDS, AdapterRows, AdapterSite, StepRows, add_head_low_rank, add_low_rank

Quad = tuple[Int, Int, Int, Int]
Inlined = Callable[..., None]
BLOCK = 8  # quads of rows that share what is in the cache
ENTRY = 8 * WORDS  # bytes of a table's entry


@inline
def _row(where: tuple[Int, Int, Int, Int, Int, Int, Int, Int, Int], i: Int) -> Int:
    """The row at a place in the order of adapters: rows of one adapter are neighbours in it.

    where: slots, which token a row is (or 0), rows of one token, the experts of rows (or 0), tables (of each
    expert, or of the layer), parts, row and pair strides of the experts' numbers, tokens in order (or 0).
    """
    each, order = where[2], where[8]
    return i if order == 0 else get_i64(order + 8 * (i // each)) * each + i % each


@inline
def _entry(where: tuple[Int, Int, Int, Int, Int, Int, Int, Int, Int], row: Int, part: Int) -> Int:
    """The address of a row's entry for a part; 0: nothing is added."""
    slots, tokens, each, experts, tables, parts, row_bytes, pair_bytes, _ = where
    token = row // each
    slot = get_i64(slots + 8 * (token if tokens == 0 else get_i64(tokens + 8 * token)))
    if slot == 0:
        return np.int64(0)
    table = tables
    if experts != 0:
        table = get_i64(tables + 8 * get_i64(experts + token * row_bytes + row % each * pair_bytes))
    entry = table + ((slot - 1) * parts + part) * ENTRY
    return entry if get_i64(entry) != 0 else np.int64(0)


def _write_ranks(kind: str, load: Callable[[Int], Floats], size: int) -> tuple[Inlined, Inlined]:
    """x times sixteen ranks of A, for one row and for four."""
    step = 16 * size  # bytes of the ranks of an input

    def one(x: Int, down: Int, n: Int, out: Int) -> None:
        """x [n] times sixteen ranks of A; inputs in four sums, by turns."""
        a, b, c, d = zero_f32(), zero_f32(), zero_f32(), zero_f32()
        whole = n // 4 * 4
        for k in range(0, whole, 4):
            at, value = down + step * k, x + 4 * k
            a, b = fma(spread_f32(value), load(at), a), fma(spread_f32(value + 4), load(at + step), b)
            c = fma(spread_f32(value + 8), load(at + 2 * step), c)
            d = fma(spread_f32(value + 12), load(at + 3 * step), d)
        for k in range(whole, n):
            a = fma(spread_f32(x + 4 * k), load(down + step * k), a)
        store_f32(out, add(add(a, b), add(c, d)))

    def four(x: Quad, down: Int, n: Int, out: Quad) -> None:
        """The same of four rows at a time."""
        a, b, c, d = zero_f32(), zero_f32(), zero_f32(), zero_f32()
        e, f, g, h = zero_f32(), zero_f32(), zero_f32(), zero_f32()
        i, j, t, m = zero_f32(), zero_f32(), zero_f32(), zero_f32()
        o, p, q, r = zero_f32(), zero_f32(), zero_f32(), zero_f32()
        x0, x1, x2, x3 = x
        whole = n // 4 * 4
        for k in range(0, whole, 4):
            at, s = down + step * k, 4 * k
            value = load(at)
            a, e = fma(spread_f32(x0 + s), value, a), fma(spread_f32(x1 + s), value, e)
            i, o = fma(spread_f32(x2 + s), value, i), fma(spread_f32(x3 + s), value, o)
            value = load(at + step)
            b, f = fma(spread_f32(x0 + s + 4), value, b), fma(spread_f32(x1 + s + 4), value, f)
            j, p = fma(spread_f32(x2 + s + 4), value, j), fma(spread_f32(x3 + s + 4), value, p)
            value = load(at + 2 * step)
            c, g = fma(spread_f32(x0 + s + 8), value, c), fma(spread_f32(x1 + s + 8), value, g)
            t, q = fma(spread_f32(x2 + s + 8), value, t), fma(spread_f32(x3 + s + 8), value, q)
            value = load(at + 3 * step)
            d, h = fma(spread_f32(x0 + s + 12), value, d), fma(spread_f32(x1 + s + 12), value, h)
            m, r = fma(spread_f32(x2 + s + 12), value, m), fma(spread_f32(x3 + s + 12), value, r)
        for k in range(whole, n):
            value = load(down + step * k)
            a, e = fma(spread_f32(x0 + 4 * k), value, a), fma(spread_f32(x1 + 4 * k), value, e)
            i, o = fma(spread_f32(x2 + 4 * k), value, i), fma(spread_f32(x3 + 4 * k), value, o)
        store_f32(out[0], add(add(a, b), add(c, d)))
        store_f32(out[1], add(add(e, f), add(g, h)))
        store_f32(out[2], add(add(i, j), add(t, m)))
        store_f32(out[3], add(add(o, p), add(q, r)))

    return _rename(one, f"adapter_ranks_of_one_{kind}"), _rename(four, f"adapter_ranks_of_four_{kind}")


@inline
def _put_sums(y: Int, left: Int, scale: Floats, sums: tuple[Floats, Floats, Floats, Floats]) -> None:
    """y [left, 64 at most] += scale · sums."""
    some = np.int32(left)
    store_some(y, fma(scale, sums[0], load_some(y, some)), some)
    if left > 16:
        store_some(y + 64, fma(scale, sums[1], load_some(y + 64, some - 16)), some - 16)
    if left > 32:
        store_some(y + 128, fma(scale, sums[2], load_some(y + 128, some - 32)), some - 32)
    if left > 48:
        store_some(y + 192, fma(scale, sums[3], load_some(y + 192, some - 48)), some - 48)


def _write_outputs(kind: str, load: Callable[[Int], Floats], size: int) -> tuple[Inlined, Inlined]:
    """y += scale · hidden · B, 64 outputs at a time, for one row and for four."""
    step = 16 * size  # bytes of sixteen outputs

    def one(hidden: Int, entry: Int, first: Int, width: Int, y: Int) -> None:
        """y [64 at most, from output `first` of the part's `width`] += scale · hidden · B."""
        at, rank, scale = get_i64(entry + 8) + size * first, get_i64(entry + 16), spread(get_f32(entry + 24))
        apart, left = (width + 15) // 16 * step, width - first
        a, b, c, d = zero_f32(), zero_f32(), zero_f32(), zero_f32()
        # Behind a part's last vector there is nothing: sums of the first take its place.
        i, j, k = step if left > 16 else 0, 2 * step if left > 32 else 0, 3 * step if left > 48 else 0
        for r in range(rank):
            value = spread_f32(hidden + 4 * r)
            a, b = fma(value, load(at), a), fma(value, load(at + i), b)
            c, d = fma(value, load(at + j), c), fma(value, load(at + k), d)
            at += apart
        _put_sums(y, left, scale, (a, b, c, d))

    def four(hidden: Quad, entry: Int, first: Int, width: Int, y: Quad) -> None:
        """The same of four rows at a time."""
        at, rank, scale = get_i64(entry + 8) + size * first, get_i64(entry + 16), spread(get_f32(entry + 24))
        apart, left = (width + 15) // 16 * step, width - first
        a, b, c, d = zero_f32(), zero_f32(), zero_f32(), zero_f32()
        e, f, g, h = zero_f32(), zero_f32(), zero_f32(), zero_f32()
        x, m, n, o = zero_f32(), zero_f32(), zero_f32(), zero_f32()
        p, q, s, t = zero_f32(), zero_f32(), zero_f32(), zero_f32()
        i, j, k = step if left > 16 else 0, 2 * step if left > 32 else 0, 3 * step if left > 48 else 0
        h0, h1, h2, h3 = hidden
        for r in range(rank):
            u, v, w, z = load(at), load(at + i), load(at + j), load(at + k)
            value = spread_f32(h0 + 4 * r)
            a, b, c, d = fma(value, u, a), fma(value, v, b), fma(value, w, c), fma(value, z, d)
            value = spread_f32(h1 + 4 * r)
            e, f, g, h = fma(value, u, e), fma(value, v, f), fma(value, w, g), fma(value, z, h)
            value = spread_f32(h2 + 4 * r)
            x, m, n, o = fma(value, u, x), fma(value, v, m), fma(value, w, n), fma(value, z, o)
            value = spread_f32(h3 + 4 * r)
            p, q, s, t = fma(value, u, p), fma(value, v, q), fma(value, w, s), fma(value, z, t)
            at += apart
        _put_sums(y[0], left, scale, (a, b, c, d))
        _put_sums(y[1], left, scale, (e, f, g, h))
        _put_sums(y[2], left, scale, (x, m, n, o))
        _put_sums(y[3], left, scale, (p, q, s, t))

    return _rename(one, f"adapter_outputs_of_one_{kind}"), _rename(four, f"adapter_outputs_of_four_{kind}")


@inline
def _place(places: Int, row: Int) -> Int:
    return row if places == 0 else get_i64(places + 8 * row)


@inline
def _share_entry(where: tuple[Int, Int, Int, Int, Int, Int, Int, Int, Int], i: Int, part: Int) -> Int:
    """The entry that the rows at places i … i + 3 have in common; 0: they do not, or have none."""
    first = _entry(where, _row(where, i), part)
    for k in range(1, 4):
        if _entry(where, _row(where, i + k), part) != first:
            return np.int64(0)
    return first


@cache
def adder(kind: str) -> Kernel:
    """The kernel over factors of that dtype."""
    load, size = {"float32": (load_f32, 4), "bfloat16": (load_bf16, 2)}[kind]
    one_ranks, four_ranks = _write_ranks(kind, load, size)
    one_outputs, four_outputs = _write_outputs(kind, load, size)
    step = 16 * size

    def add_adapters(frame: int, args: int, thread: int, threads: int) -> None:
        """how many tokens have an adapter (an address), x, its row stride, n; y, its row stride; hidden;
        ranks that a part has in it; the address of how many times sixteen ranks are in use; parts, where each
        begins in y (and the end); places of rows in x and y (or 0); then slots, tokens, rows of one token,
        experts, tables, their strides, and tokens in order (or 0): see `_row`. In order, those with an
        adapter are the last.
        """
        active, x, x_bytes, n, y, y_bytes = words(args, 2, 8)
        hidden, ranks, used, parts, starts, places = words(args, 8, 14)
        slots, tokens, each, experts, tables, row_bytes, pair_bytes, order = words(args, 14, 22)
        count = get_i64(active)
        if count == 0:
            return
        if order != 0:
            order += 8 * (rows_of(frame, args) - count)
        else:
            count = rows_of(frame, args)
        where = (slots, tokens, each, experts, tables, parts, row_bytes, pair_bytes, order)
        rows, groups = count * each, get_i64(used)
        quads = (rows + 3) // 4
        block = min(quads, BLOCK)
        blocks, h_bytes = (quads + block - 1) // block if quads > 0 else 0, 4 * parts * ranks
        items = blocks * parts * groups * block
        for item in range(items * thread // threads, items * (thread + 1) // threads):
            unit = item // block
            i, part = 4 * (unit // (parts * groups) * block + item % block), unit // groups % parts
            group = unit % groups
            out = hidden + 4 * (part * ranks + 16 * group)
            entry = _share_entry(where, i, part) if i + 4 <= rows else np.int64(0)
            if entry != 0:
                if 16 * group < get_i64(entry + 16):
                    a, b, c, d = _row(where, i), _row(where, i + 1), _row(where, i + 2), _row(where, i + 3)
                    some = (
                        x + _place(places, a) * x_bytes,
                        x + _place(places, b) * x_bytes,
                        x + _place(places, c) * x_bytes,
                        x + _place(places, d) * x_bytes,
                    )
                    to = (out + a * h_bytes, out + b * h_bytes, out + c * h_bytes, out + d * h_bytes)
                    four_ranks(some, get_i64(entry) + step * n * group, n, to)
            else:
                for k in range(i, min(i + 4, rows)):
                    row = _row(where, k)
                    entry = _entry(where, row, part)
                    if entry != 0 and 16 * group < get_i64(entry + 16):
                        own = x + _place(places, row) * x_bytes
                        one_ranks(own, get_i64(entry) + step * n * group, n, out + row * h_bytes)
        barrier(frame, threads)
        tiles: Int = np.int64(0)
        for part in range(parts):
            tiles += (get_i64(starts + 8 * part + 8) - get_i64(starts + 8 * part) + 63) // 64
        items = blocks * tiles * block
        for item in range(items * thread // threads, items * (thread + 1) // threads):
            unit = item // block
            i, tile = 4 * (unit // tiles * block + item % block), unit % tiles
            index: Int = np.int64(0)
            begin, width = get_i64(starts), get_i64(starts + 8)
            while tile >= (width + 63) // 64:
                tile -= (width + 63) // 64
                index += 1
                begin = get_i64(starts + 8 * index)
                width = get_i64(starts + 8 * index + 8) - begin
            out, source = y + 4 * (begin + 64 * tile), hidden + 4 * index * ranks
            entry = _share_entry(where, i, index) if i + 4 <= rows else np.int64(0)
            if entry != 0:
                a, b, c, d = _row(where, i), _row(where, i + 1), _row(where, i + 2), _row(where, i + 3)
                to = (
                    out + _place(places, a) * y_bytes,
                    out + _place(places, b) * y_bytes,
                    out + _place(places, c) * y_bytes,
                    out + _place(places, d) * y_bytes,
                )
                some = (
                    source + a * h_bytes,
                    source + b * h_bytes,
                    source + c * h_bytes,
                    source + d * h_bytes,
                )
                four_outputs(some, entry, 64 * tile, width, to)
            else:
                for k in range(i, min(i + 4, rows)):
                    row = _row(where, k)
                    entry = _entry(where, row, index)
                    if entry != 0:
                        own = out + _place(places, row) * y_bytes
                        one_outputs(source + row * h_bytes, entry, 64 * tile, width, own)

    add_adapters.__name__ = add_adapters.__qualname__ = f"add_adapters_{kind}"
    return kernel(add_adapters)


def _rename(write: Inlined, name: str) -> Inlined:
    """Machine code goes by this name, and no two functions may share one."""
    write.__name__ = write.__qualname__ = name
    return inline(write)


@add_low_rank.variant("native", on="cpu", when=float32_rows, native=True)
def _add_low_rank(
    cpu: Executor, y: Tensor, x: Tensor, site: AdapterSite, rows: AdapterRows, tokens: Tensor | None = None
) -> Tensor:
    """Writes into y, which its linear layer has just made."""
    count = len(y)
    check_rows(y, x, site)
    hidden = cpu.empty(count, site.num_parts * site.max_rank)
    if tokens is not None:
        dense("tokens", tokens, count, dtype=torch.int64)
    cpu.launch(
        *(
            adder(site.kind),
            rows.count,
            x,
            TensorRows.of(x).row_bytes,
            site.n_in,
            y,
            TensorRows.of(y).row_bytes,
        ),
        *(hidden, site.max_rank, site.used, site.num_parts, site.starts, 0),
        *(slots_of(rows), tokens, 1, 0, site.table, 0, 0, rows.order if tokens is None else 0),
        rows=count,
    )
    return y


def check_rows(y: Tensor, x: Tensor, site: AdapterSite) -> None:
    """Raises ShapeMismatch if a kernel would misread them."""
    if x.dim() != 2 or y.dim() != 2 or len(x) != len(y):
        raise ShapeMismatch(f"adapters add to rows, got x {list(x.shape)} and y {list(y.shape)}")
    if x.shape[1] != site.n_in or y.shape[1] != sum(site.out_sizes):
        raise ShapeMismatch(
            f"adapters of {site.n_in} -> {sum(site.out_sizes)} do not fit {list(x.shape)}, {list(y.shape)}"
        )


def slots_of(rows: AdapterRows) -> Tensor:
    """Raises ShapeMismatch if a kernel would misread them."""
    dense("order", rows.order, len(rows.slots), dtype=torch.int64)
    return dense("slots", rows.slots, len(rows.slots), dtype=torch.int64)


@add_head_low_rank.variant("native", on="cpu", when=float32_rows, native=True)
def _add_head_low_rank(
    cpu: Executor, y: Tensor, x: Tensor, sites: Sequence[AdapterSite], rows: AdapterRows
) -> Tensor:
    """Writes into y. A head is what an expert is elsewhere: each row of a token has the next one."""
    (count, heads), site, inputs, outputs = y.shape[:2], sites[0], TensorRows.of(x), TensorRows.of(y)
    for each in (inputs, outputs):
        if each.heads != len(sites) or (count > 1 and each.row_bytes != each.heads * each.head_bytes):
            raise ShapeMismatch(
                f"adapters of {len(sites)} heads do not fit {list(x.shape)} and {list(y.shape)}"
            )
    check_rows(y[:, 0], x[:, 0], site)
    tables = [one.table for one in sites]
    addresses = keep_addresses(np.array([table.data_ptr() for table in tables], np.int64), tables)
    numbers = keep_addresses(np.arange(heads, dtype=np.int64), ())
    hidden = cpu.empty(count * heads, site.max_rank)
    cpu.launch(
        *(adder(site.kind), rows.count, x, inputs.head_bytes, site.n_in, y, outputs.head_bytes),
        *(hidden, site.max_rank, site.used, 1, site.starts, 0),
        *(slots_of(rows), 0, heads, numbers, addresses, 0, 8, rows.order),
        rows=count,
    )
    return y


@dataclass(frozen=True, slots=True)
class ExpertTables:
    """The tables of a layer's experts, of one shape. site: of one of them; step: which rows there are."""

    site: AdapterSite
    step: StepRows
    addresses: Tensor  # int64 [experts]

    @classmethod
    def of(cls, linears: Sequence[Linear]) -> ExpertTables | None:
        """None: no adapter changes any of these."""
        found = [one.added for one in linears]
        first = next((one for one in found if one is not None), None)
        if first is None:
            return None
        nothing = keep_addresses(
            np.zeros(tuple(first.site.table.shape), np.int64), ()
        )  # no torch: it may be recorded
        tables = [nothing if one is None else one.site.table for one in found]
        kept = keep_addresses(np.array([table.data_ptr() for table in tables], np.int64), tables)
        return cls(first.site, first.step, kept)

    def add(self, cpu: Executor, y: Tensor, x: Tensor, places: Tensor, index: Tensor) -> None:
        """Write into y. x, y: sorted rows; places: [tokens, k], where a pair's row is; index: its expert."""
        rows = self.step.current
        if rows is None:
            return
        check_rows(y, x, self.site)
        site, (tokens, k) = self.site, index.shape
        hidden = cpu.empty(tokens * k, site.num_parts * site.max_rank)
        cpu.launch(
            *(adder(site.kind), rows.count, x, TensorRows.of(x).row_bytes, site.n_in),
            *(
                y,
                TensorRows.of(y).row_bytes,
                hidden,
                site.max_rank,
                site.used,
                site.num_parts,
                site.starts,
                places,
            ),
            *(
                slots_of(rows),
                0,
                k,
                index,
                self.addresses,
                8 * index.stride(0),
                8 * index.stride(1),
                rows.order,
            ),
            rows=tokens,
        )
