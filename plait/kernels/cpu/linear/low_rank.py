"""Low-rank adapters, each row's own: y += scale · (x Aᵀ) Bᵀ, in one launch behind a linear layer.

A row finds its adapter's factors in the layer's table, which a recorded step reads anew each time. Without an
adapter in the step, a thread looks at one number and leaves.

    A [16 ranks][input][rank]    lanes are ranks       hidden [row][part][rank]
    B [rank][output]             lanes are outputs     y[row] += scale · hidden · B

    rows in the order of their adapters:   a a a a │ a b b b │ b b           runs of the same factors
    work of A: part, 16 ranks, four rows   work of B: 512 outputs of a part, four rows

A thread takes neighbours, so of several adapters' factors it reads those of few.

Factors in float32 are multiplied as they are. Those in bfloat16 lie in pairs of inputs (of ranks), and x and
hidden are rounded to bfloat16 for them: `vdpbf16ps` multiplies two pairs to a lane, and `codegen.bf16_dot`
has its bits without it. A row's sums go over inputs, by turns in four, then over ranks: alone or with others
it has the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from string import Template

import numpy as np
import torch
from torch import Tensor

from plait.errors import ShapeMismatch
from plait.kernels.cpu.codegen import plain_x86
from plait.kernels.cpu.codegen.bf16_dot import both_bf16
from plait.kernels.cpu.codegen.kernel import Kernel, inline, load_generated
from plait.kernels.cpu.codegen.kinds import Int
from plait.kernels.cpu.codegen.llvm_writer import Value, Word, Writer, block, digest
from plait.kernels.cpu.codegen.maths import load_left
from plait.kernels.cpu.codegen.vec import get_i64, load_f32, store_i32
from plait.kernels.cpu.runtime.address_table import keep_addresses
from plait.kernels.cpu.runtime.executor import Executor
from plait.kernels.cpu.runtime.row_checks import TensorRows, dense, float32_rows
from plait.ops.linear import Linear
from plait.ops.low_rank import (
    WORDS,
    AdapterRows,
    AdapterSite,
    SitesByHead,
    StepRows,
    add_head_low_rank,
    add_low_rank,
)

Where = tuple[Int, Int, Int, Int, Int, Int, Int, Int, Int]
ENTRY = 8 * WORDS  # bytes of a table's entry
SPAN = 512  # outputs that a piece of work has
TURNS = 4  # sums of a row and sixteen ranks, so that products need not wait for each other
QUADS = 4  # four rows each, of which a thread keeps the rounded inputs

_SOURCE = Template('''"""Adds low-rank adapters with factors in $kind: made by plait, from $digest."""
import numpy as np

from plait.kernels.cpu.codegen.kernel import inline, kernel
from plait.kernels.cpu.codegen.vec import get_f32, get_i64, put_i64, spread, words
from plait.kernels.cpu.linear import low_rank
from plait.kernels.cpu.linear.low_rank import ENTRY, QUADS, SPAN, find_run, place, round_row, row_at
from plait.kernels.cpu.runtime.frame import barrier, rows_of, scratch_of

one_rank, four_ranks = low_rank.ranks("$kind", 1), low_rank.ranks("$kind", 4)
one_wide, four_wide = low_rank.outputs("$kind", 1, 4), low_rank.outputs("$kind", 4, 4)
one_rest, four_rest = low_rank.outputs("$kind", 1, 1), low_rank.outputs("$kind", 4, 1)


@inline
def _inputs(where, x, x_bytes, places, n, i, count, scratch):
    """Where x is of four rows, those at places i..i + count; rounded, if the factors lie in pairs.

    Rounded rows of a few quads are kept in `scratch`, with the place that each quad begins at, plus 1.
    """
    apart = (n + 31) // 32 * 64
    if not $paired:
        rows = (
            x + place(places, row_at(where, i)) * x_bytes,
            x + place(places, row_at(where, i + min(1, count - 1))) * x_bytes,
            x + place(places, row_at(where, i + min(2, count - 1))) * x_bytes,
            x + place(places, row_at(where, i + min(3, count - 1))) * x_bytes,
        )
        return rows
    kept = i // 4 % QUADS
    at = scratch + 64 + kept * 4 * apart
    if get_i64(scratch + 8 * kept) != i + 1:
        put_i64(scratch + 8 * kept, i + 1)
        for k in range(count):
            round_row(x + place(places, row_at(where, i + k)) * x_bytes, n, at + k * apart)
    return at, at + apart, at + 2 * apart, at + 3 * apart


@kernel
def $name(frame, args, thread, threads):
    """how many tokens have an adapter (an address), x, its row stride, n; y, its row stride; hidden;
    ranks that a part has in it; the address of how many times sixteen ranks are in use; parts, where each
    begins in y (and the end); places of rows in x and y (or 0); then slots, tokens, rows of one token,
    experts, tables, their strides, and tokens in order (or 0): see `row_at`. In order, those with an
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
    rows, groups, h_bytes, scratch = count * each, get_i64(used), 4 * parts * ranks, scratch_of(frame, thread)
    steps = (n + $each - 1) // $each
    for k in range(QUADS):
        put_i64(scratch + 8 * k, 0)
    quads, i = np.int64(0), np.int64(0)
    while i < rows:
        entries, end = find_run(where, i, rows)
        if entries != 0:
            quads += (end - i + 3) // 4
        i = end
    units = parts * groups
    first, last = quads * units * thread // threads, quads * units * (thread + 1) // threads
    done, i = np.int64(0), np.int64(0)
    while i < rows and done < last:
        entries, end = find_run(where, i, rows)
        own = (end - i + 3) // 4 if entries != 0 else 0
        for item in range(max(first - done, 0), min(last - done, own * units)):
            unit, at = item // own, i + 4 * (item % own)
            part, group = unit // groups, unit % groups
            entry = entries + part * ENTRY
            down, rank, some = get_i64(entry), get_i64(entry + 16), min(end - at, 4)
            if down != 0 and 16 * group < rank:
                xs = _inputs(where, x, x_bytes, places, n, at, some, scratch)
                out, down = hidden + $size * (part * ranks + 16 * group), down + 64 * steps * group
                h0 = out + row_at(where, at) * h_bytes
                if some == 4:
                    h1, h2 = out + row_at(where, at + 1) * h_bytes, out + row_at(where, at + 2) * h_bytes
                    four_ranks(xs, down, steps, (h0, h1, h2, out + row_at(where, at + 3) * h_bytes))
                else:
                    one_rank((xs[0],), down, steps, (h0,))
                    if some > 1:
                        one_rank((xs[1],), down, steps, (out + row_at(where, at + 1) * h_bytes,))
                    if some > 2:
                        one_rank((xs[2],), down, steps, (out + row_at(where, at + 2) * h_bytes,))
        done += own * units
        i = end
    barrier(frame, threads)
    units = 0
    for part in range(parts):
        units += (get_i64(starts + 8 * part + 8) - get_i64(starts + 8 * part) + SPAN - 1) // SPAN
    first, last = quads * units * thread // threads, quads * units * (thread + 1) // threads
    done, i = np.int64(0), np.int64(0)
    while i < rows and done < last:
        entries, end = find_run(where, i, rows)
        own = (end - i + 3) // 4 if entries != 0 else 0
        for item in range(max(first - done, 0), min(last - done, own * units)):
            span, at, part = item // own, i + 4 * (item % own), 0
            begin, stop = get_i64(starts), get_i64(starts + 8)
            while SPAN * span >= stop - begin:
                span -= (stop - begin + SPAN - 1) // SPAN
                part += 1
                begin, stop = stop, get_i64(starts + 8 * part + 8)
            entry = entries + part * ENTRY
            up, rank, scale = get_i64(entry + 8), get_i64(entry + 16), spread(get_f32(entry + 24))
            if up != 0:
                apart, left = (stop - begin + 15) // 16 * 64, min(stop - begin - SPAN * span, SPAN)
                up, steps, some = up + 4 * SPAN * span, (rank + $each - 1) // $each, min(end - at, 4)
                out, source = y + 4 * (begin + SPAN * span), hidden + $size * part * ranks
                if some == 4:
                    r0, r1 = row_at(where, at), row_at(where, at + 1)
                    r2, r3 = row_at(where, at + 2), row_at(where, at + 3)
                    h0, h1, h2 = source + r0 * h_bytes, source + r1 * h_bytes, source + r2 * h_bytes
                    hs = (h0, h1, h2, source + r3 * h_bytes)
                    y0, y1 = out + place(places, r0) * y_bytes, out + place(places, r1) * y_bytes
                    y2, y3 = out + place(places, r2) * y_bytes, out + place(places, r3) * y_bytes
                    whole = left // 64 * 64
                    for k in range(0, 4 * whole, 256):
                        to = (y0 + k, y1 + k, y2 + k, y3 + k)
                        four_wide(hs, up + k, steps, apart, scale, to, 64)
                    for k in range(4 * whole, 4 * left, 64):
                        to = (y0 + k, y1 + k, y2 + k, y3 + k)
                        four_rest(hs, up + k, steps, apart, scale, to, left - k // 4)
                else:
                    for r in range(some):
                        row = row_at(where, at + r)
                        h, y0 = source + row * h_bytes, out + place(places, row) * y_bytes
                        whole = left // 64 * 64
                        for k in range(0, 4 * whole, 256):
                            one_wide((h,), up + k, steps, apart, scale, (y0 + k,), 64)
                        for k in range(4 * whole, 4 * left, 64):
                            one_rest((h,), up + k, steps, apart, scale, (y0 + k,), left - k // 4)
        done += own * units
        i = end
''')


@inline
def row_at(where: Where, i: Int) -> Int:
    """The row at a place in the order of adapters: rows of one adapter are neighbours in it.

    where: slots, which token a row is (or 0), rows of one token, the experts of rows (or 0), tables (of each
    expert, or of the layer), parts, row and pair strides of the experts' numbers, tokens in order (or 0).
    """
    each, order = where[2], where[8]
    if order == 0:
        return i
    if each == 1:  # a division takes as long as a few products
        return get_i64(order + 8 * i)
    return get_i64(order + 8 * (i // each)) * each + i % each


@inline
def find_entries(where: Where, row: Int) -> Int:
    """The address of a row's entries, one for each part; 0: it has no adapter."""
    slots, tokens, each, experts, tables, parts, row_bytes, pair_bytes, _ = where
    token = row if each == 1 else row // each
    slot = get_i64(slots + 8 * (token if tokens == 0 else get_i64(tokens + 8 * token)))
    if slot == 0:
        return np.int64(0)
    table = tables
    if experts != 0:
        table = get_i64(tables + 8 * get_i64(experts + token * row_bytes + row % each * pair_bytes))
    return table + (slot - 1) * parts * ENTRY


@inline
def find_run(where: Where, i: Int, rows: Int) -> tuple[Int, Int]:
    """Of the row at place i, and rows behind it that have the same: their entries, and where they end."""
    entries, k = find_entries(where, row_at(where, i)), i + 1
    if where[8] != 0 and where[3] == 0 and find_entries(where, row_at(where, rows - 1)) == entries:
        k = rows  # they are in order
    while k < rows and find_entries(where, row_at(where, k)) == entries:
        k += 1
    return entries, k


@inline
def place(places: Int, row: Int) -> Int:
    """Where a row is in x and y."""
    return row if places == 0 else get_i64(places + 8 * row)


@inline
def round_row(x: Int, n: Int, to: Int) -> None:
    """x [n] as pairs of bfloat16, and zeros up to a whole vector."""
    whole = n // 32 * 32
    for k in range(0, whole, 32):
        store_i32(to + 2 * k, both_bf16(load_f32(x + 4 * k), load_f32(x + 4 * k + 64)))
    if whole < n:
        low = load_left(x + 4 * whole, n - whole)
        high = load_left(x + 4 * whole + 64, max(n - whole - 16, 0))
        store_i32(to + 2 * whole, both_bf16(low, high))


def _read(kind: str, w: Writer, at: Word, *, spread: bool) -> Value:
    """A vector of numbers or pairs, or one of these in every lane."""
    if kind == "float32":
        return w.spread_f32(at) if spread else w.load_f32(at)
    return w.spread_i32(at) if spread else w.load_i32(at)


def _multiply(kind: str, w: Writer, x: Value, y: Value, s: Value) -> Value:
    """s + x · y. Of pairs, the product of the second numbers is added first."""
    if kind == "float32":
        return w.fma(x, y, s)
    if plain_x86.HERE:  # a product of two bfloat16 is exact, so that adding it rounds once
        second = w.add(w.mul(w.high_bf16(x), w.high_bf16(y)), s)
        return w.add(w.mul(w.low_bf16(x), w.low_bf16(y)), second)
    return w.dot_bf16(s, x, y)


@block()
def ranks(kind: str, rows: int, w: Writer, xs: list[Word], down: Word, steps: Word, outs: list[Word]) -> None:
    """Block (xs, down, steps, outs): rows of x times sixteen ranks of A; inputs in TURNS sums, by turns."""

    def some(k: Word, sums: Sequence[Value], turns: int) -> list[Value]:
        found = list(sums)
        for turn in range(turns):
            a = _read(kind, w, down + (k + turn) * 64, spread=False)
            for r, x in enumerate(xs):
                value = _read(kind, w, x + (k + turn) * 4, spread=True)
                found[TURNS * r + turn] = _multiply(kind, w, value, a, found[TURNS * r + turn])
        return found

    whole = (steps >> 2) << 2
    sums = w.loop(0, whole, TURNS, [w.zero_f32()] * (TURNS * rows), lambda k, *sums: some(k, sums, TURNS))
    sums = w.loop(whole, steps, 1, sums, lambda k, *sums: some(k, sums, 1))
    for r, out in enumerate(outs):
        a, b, c, d = sums[TURNS * r : TURNS * r + TURNS]
        total = w.add(w.add(a, b), w.add(c, d))
        if kind == "float32":
            w.store_f32(out, total)
        else:
            w.store_bf16(out, w.rounded_bf16(total))


@block()
def outputs(
    kind: str,
    rows: int,
    vectors: int,
    w: Writer,
    hidden: list[Word],
    up: Word,
    steps: Word,
    apart: Word,
    scale: Value,
    ys: list[Word],
    left: Word,
) -> None:
    """Block (hidden, up, steps, apart, scale, ys, left): y += scale · hidden · B.

    For so many rows and vectors of outputs; of a single vector only `left` outputs.
    """

    def step(k: Word, at: Word, *sums: Value) -> list[Value]:
        found, columns = list(sums), [_read(kind, w, at + 64 * j, spread=False) for j in range(vectors)]
        for r, h in enumerate(hidden):
            value = _read(kind, w, h + k * 4, spread=True)
            for j, column in enumerate(columns):
                found[vectors * r + j] = _multiply(kind, w, value, column, found[vectors * r + j])
        return [at + apart, *found]

    _, *sums = w.loop(0, steps, 1, [up, *[w.zero_f32()] * (vectors * rows)], step)
    for i, total in enumerate(sums):
        at = ys[i // vectors] + 64 * (i % vectors)
        if vectors > 1:
            w.store_f32(at, w.fma(scale, total, w.load_f32(at)))
        else:
            count = left.least(16)
            w.store_some(at, w.fma(scale, total, w.load_some(at, count)), count)


@cache
def adder(kind: str) -> Kernel:
    """The kernel over factors of that dtype."""
    name = f"add_adapters_{kind}"
    text = _SOURCE.substitute(
        kind=kind,
        name=name,
        paired=kind == "bfloat16",
        each=2 if kind == "bfloat16" else 1,
        size=2 if kind == "bfloat16" else 4,
        digest=digest("linear/low_rank.py", "codegen/bf16_dot.py"),
    )
    found: Kernel = getattr(load_generated(name, text), name)
    return found


def scratch_bytes(n_in: int) -> int:
    """What a thread needs: rounded inputs of QUADS quads, and which these are."""
    return 64 + QUADS * 4 * (-(-n_in // 32) * 64)


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
        *(adder(site.kind), rows.count, x, TensorRows.of(x).row_bytes, site.n_in),
        *(y, TensorRows.of(y).row_bytes, hidden, site.max_rank, site.used, site.num_parts, site.starts, 0),
        *(slots_of(rows), tokens, 1, 0, site.table, 0, 0, rows.order if tokens is None else 0),
        rows=count,
        scratch=scratch_bytes(site.n_in),
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
    cpu: Executor, y: Tensor, x: Tensor, by_head: SitesByHead, rows: AdapterRows
) -> Tensor:
    """Writes into y. A head is what an expert is elsewhere: each row of a token has the next one."""
    sites = by_head.sites
    (count, heads), site, inputs, outputs = y.shape[:2], sites[0], TensorRows.of(x), TensorRows.of(y)
    if not inputs.heads == outputs.heads == len(sites):
        raise ShapeMismatch(f"adapters of {len(sites)} heads do not fit {list(x.shape)} and {list(y.shape)}")
    if count > 1 and any(each.row_bytes != each.heads * each.head_bytes for each in (inputs, outputs)):
        for head, one in enumerate(sites):  # something else lies between the heads of two rows
            _add_low_rank(cpu, y[:, head], x[:, head], one, rows)
        return y
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
        scratch=scratch_bytes(site.n_in),
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
        step = next((one.added.step for one in linears if one.added is not None), None)
        found = [one.added.site if one.added is not None else None for one in linears]
        first = next((site for site in found if isinstance(site, AdapterSite)), None)
        if first is None or step is None:
            return None
        nothing = keep_addresses(
            np.zeros(tuple(first.table.shape), np.int64), ()
        )  # no torch: it may be recorded
        tables = [site.table if isinstance(site, AdapterSite) else nothing for site in found]
        kept = keep_addresses(np.array([table.data_ptr() for table in tables], np.int64), tables)
        return cls(first, step, kept)

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
            *(y, TensorRows.of(y).row_bytes, hidden, site.max_rank, site.used, site.num_parts, site.starts),
            *(places, slots_of(rows), 0, k, index, self.addresses, 8 * index.stride(0)),
            *(8 * index.stride(1), rows.order),
            rows=tokens,
            scratch=scratch_bytes(site.n_in),
        )
