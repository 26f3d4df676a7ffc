"""The text of an attention kernel: register tiles for both products, and the walk over the work.

`attention_rows.py` holds what happens between the products. Every score is one chain of multiply-adds over
the columns of a key, every column of an output one chain over the tokens of a span: tiles of any size give
a row the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from types import ModuleType

from plait.kernels.cpu.attention_rows import SIZES, TILE
from plait.kernels.cpu.kernel import generated

TILES = 8  # of one unit of work, at most: they share the keys and values of a span while those are in L2
FEW = 4  # rows: tiles up to here wait for memory, and ask for the next group while they work on one


@dataclass(frozen=True, slots=True)
class Form:
    """What one kernel is made for. Sizes are of one cached number, in bytes (4: float32, 2: bfloat16)."""

    name: str
    span: int  # tokens
    key_size: int  # 4: [column][token]; 2: [column pair][token][2]
    value_size: int
    value_stride: str  # bytes from token to token, in terms of `args`
    locate: str  # the statement that finds the groups of a span
    least: int = 1  # tiles of a unit of work, at least
    prelude: str = ""  # functions that `locate` calls

    @property
    def line(self) -> int:
        """Bytes from row to row of the scores; the padding keeps rows out of one another's cache sets."""
        return 4 * (self.span + 16)

    def scratch(self, k_dim: int, v_dim: int) -> int:
        """Bytes per thread, in the order of `cover`, without what `locate` needs."""
        record = record_bytes(v_dim)
        packed = TILES * TILE * k_dim * 4
        return self.span + TILE * self.line + TILE * record + packed + TILES * TILE * record


def record_bytes(v_dim: int) -> int:
    return 64 + -(-v_dim // 16) * 64


def module(form: Form) -> ModuleType:
    """The module whose `attend` is the kernel of this form."""
    return generated(f"attention_{form.name}", source(form))


def source(form: Form) -> str:
    digest = sha256(Path(__file__).with_name("attention_rows.py").read_bytes()).hexdigest()
    parts = [
        _HEAD.format(name=form.name, digest=digest),
        form.prelude,
        *(_scores(rows, form) + _values(rows, form) for rows in SIZES),
        _BODY.format(
            span=form.span,
            groups=form.span // 16,
            line=form.line,
            tile=TILE,
            parts=TILES,
            least=form.least,
            stride=form.value_stride,
            locate=form.locate,
            part_at=form.span + TILE * form.line,
            scores=_choice("scores_{}(packed + i * d * 4, d, scratch, head, tail, scores)"),
            values=_choice("values_{}(scores, start, stop, values, stride, columns, parts, record)"),
        ),
    ]
    return "\n".join(parts)


def _scores(rows: int, form: Form) -> str:
    """Products of `rows` queries with keys, several groups of sixteen at a time."""
    wide = 8 if rows <= 2 else 4 if rows <= 4 else 2
    text = [f"\n@inline\ndef scores_{rows}(q, d, places, first, end, to):", "    last = end - 1"]
    text += [f"    for g in range(first, end, {wide}):"]
    for i in range(wide):  # a group too many is one computed twice
        text += [f"        g{i} = min(g + {i}, last)", f"        k{i} = get_i64(places + 8 * g{i})"]
    text += [f"        a{r}_{i} = zero_f32()" for r in range(rows) for i in range(wide)]
    ahead = rows <= FEW
    if ahead:
        text += [f"        n{i} = get_i64(places + 8 * min(g + {wide + i}, last))" for i in range(wide)]
    pair = form.key_size == 2
    text += ["        for p in range(d // 2):" if pair else "        for p in range(d):"]
    text += [f"            w{i} = load_{'i32' if pair else 'f32'}(k{i} + 64 * p)" for i in range(wide)]
    if ahead:
        text += [f"            prefetch(n{i} + 64 * p)" for i in range(wide)]
    for half, unpack in enumerate(("low_bf16", "high_bf16") if pair else ("",)):
        if pair:
            text += [f"            x{i} = {unpack}(w{i})" for i in range(wide)]
        for r in range(rows):
            step = 8 * rows if pair else 4 * rows
            text += [f"            y = spread_f32(q + {step} * p + {4 * (rows * half + r)})"]
            name = "x" if pair else "w"
            text += [f"            a{r}_{i} = fma({name}{i}, y, a{r}_{i})" for i in range(wide)]
    for r in range(rows):
        text += [f"        store_f32(to + {form.line * r} + 64 * g{i}, a{r}_{i})" for i in range(wide)]
    return "\n".join(text) + "\n"


def _values(rows: int, form: Form) -> str:
    """Sums of values weighted by `rows` rows of scores, over the tokens start..end of a span."""
    wide = 4 if rows <= 4 else 2
    text = [
        f"\n@inline\ndef values_{rows}(scores, start, end, places, stride, columns, out, record):",
        f"    whole = columns // {16 * wide} * {16 * wide}",
        f"    for c in range(0, whole, {16 * wide}):",
        *_columns(rows, wide, form, masked=False),
        "    for c in range(whole, columns, 16):",
        *_columns(rows, 1, form, masked=True),
    ]
    return "\n".join(text) + "\n"


def _columns(rows: int, wide: int, form: Form, *, masked: bool) -> list[str]:
    size = form.value_size
    load = "load_f32({})" if size == 4 else "load_bf16({})"
    text = [f"a{r}_{i} = zero_f32()" for r in range(rows) for i in range(wide)]
    if masked:
        text += [f"left = np.int32(min(columns - c, 16) // {4 // size})"]
        load = "load_some({}, left)"
        if size == 2:
            load = "widened(load_some({}, left))"
    text += ["for g in range(start // 16, (end + 15) // 16):"]
    text += [f"    v, s = get_i64(places + 8 * g) + {size} * c, scores + 64 * g"]
    if ahead := rows <= FEW and not masked:
        text += [f"    n = get_i64(places + 8 * min(g + 1, (end - 1) // 16)) + {size} * c"]
    text += ["    for j in range(max(start - 16 * g, 0), min(end - 16 * g, 16)):"]
    text += ["        at = v + stride * j"]
    if ahead:
        text += [f"        prefetch(n + stride * j + {i})" for i in range(0, 16 * size * wide, 64)]
    text += [f"        x{i} = {load.format(f'at + {16 * size * i}')}" for i in range(wide)]
    for r in range(rows):
        text += [f"        y = spread_f32(s + {form.line * r} + 4 * j)"]
        text += [f"        a{r}_{i} = fma(x{i}, y, a{r}_{i})" for i in range(wide)]
    for r in range(rows):
        text += [f"store_f32(out + {r} * record + 64 + 4 * c + {64 * i}, a{r}_{i})" for i in range(wide)]
    return [" " * 8 + line for line in text]


def _choice(call: str) -> str:
    """A call of the tile of a size. Not a function: LLVM would go through the tiles once more."""
    text = []
    for rows in SIZES:
        text += [f"            {'if' if rows == 1 else 'elif'} size == {rows}:"]
        text += [f"                {call.format(rows)}"]
    return "\n".join(text).lstrip()


_HEAD = '''"""Attention kernel {name}: made by plait, from {digest}."""

import numpy as np

from plait.kernels.cpu.attention_rows import *
from plait.kernels.cpu.frame import barrier, scratch_of, shared_of, word
from plait.kernels.cpu.kernel import inline, kernel
from plait.kernels.cpu.vec import *


@inline
def widened(x):
    """Sixteen bfloat16 that lie in the first eight lanes."""
    bits = bits_i32(x)
    return interleave_low(low_bf16(bits), high_bf16(bits))
'''

_BODY = '''
@inline
def first_span(args, s):
    return first_key(past_of(args, s), word(args, WINDOW)) // {span}


@inline
def spans_of(args, s):
    return (get_i64(word(args, LENS) + 8 * s) + {span} - 1) // {span} - first_span(args, s)


@inline
def units_of(args, s, rows, spans):
    """Units of work of one sequence: kv heads x pieces of `rows` rows (x spans, if those are apart)."""
    group, kv_heads = word(args, HEADS) // word(args, KV_HEADS), word(args, KV_HEADS)
    units = (rows_in(args, s) * group + rows - 1) // rows * kv_heads
    return units * spans_of(args, s) if spans > 0 else units


@inline
def plan(args, seqs, threads):
    """(rows of a unit; into how many spans a row is divided at most, 0 if spans are not units)."""
    group, tokens, tiles, spans, units = word(args, HEADS) // word(args, KV_HEADS), 0, 0, 0, 0
    for s in range(seqs):
        tokens += rows_in(args, s)
        tiles += (rows_in(args, s) * group + {tile} - 1) // {tile} * word(args, KV_HEADS)
        spans = max(spans, spans_of(args, s))
    rows = min(max(tiles // (4 * threads), {least}), {parts}) * {tile}
    for s in range(seqs):
        units += units_of(args, s, rows, 0)
    wanted = tokens * word(args, HEADS) * spans * record_bytes(args)
    apart = threads > 1 and spans > 1 and units < 4 * threads and wanted <= word(args, BUDGET)
    return rows, spans if apart else 0


@inline
def part_of(frame, args, s, kv_head, row, spans, span):
    """Where the part of a row over a span waits for the others."""
    group = word(args, HEADS) // word(args, KV_HEADS)
    token = get_i64(word(args, START) + 8 * s) + row // group
    head = token * word(args, HEADS) + kv_head * group + row % group
    return shared_of(frame) + (head * spans + span - first_span(args, s)) * record_bytes(args)


@inline
def cover(frame, args, thread, s, kv_head, base, count, spans, only):
    """Rows base..base+count of a kv head: over all they see, or over one span, for `gather`."""
    group, past, record = word(args, HEADS) // word(args, KV_HEADS), past_of(args, s), record_bytes(args)
    window, d, columns = word(args, WINDOW), word(args, K_DIM), word(args, V_DIM)
    scratch = scratch_of(frame, thread)
    scores, parts, values, stride = scratch + {span}, scratch + {part_at}, scratch + 8 * {groups}, {stride}
    packed = parts + {tile} * record
    states = packed + {parts} * {tile} * d * 4
    copies = states + {parts} * {tile} * record
    low, high = first_key(past + base // group, window), past + (base + count - 1) // group + 1
    from_span, to_span = low // {span}, (high + {span} - 1) // {span}
    if spans > 0:
        from_span, to_span = max(from_span, only), min(to_span, only + 1)
    if from_span >= to_span:
        return
    for i in range(0, count, {tile}):
        left = min(count - i, {tile})
        pack(args, s, kv_head, base + i, left, size_of(left), packed + i * d * 4)
    for i in range(count):
        begin(states + i * record, record)
    for span in range(from_span, to_span):
        at = span * {span}
        first, end = max(low - at, 0) // 16, (min(high - at, {span}) + 15) // 16
        {locate}
        for i in range(0, count, {tile}):
            left = min(count - i, {tile})
            earliest, latest = past + (base + i) // group, past + (base + i + left - 1) // group
            start, stop = max(first_key(earliest, window) - at, 0), min(latest + 1 - at, {span})
            if start >= stop:
                continue
            head, tail, size = start // 16, (stop + 15) // 16, size_of(left)
            {scores}
            for r in range(left):
                position = past + (base + i + r) // group
                soften(args, scores + r * {line}, head, tail, at, position, parts + r * record)
            {values}
            for r in range(left):
                part = parts + r * record
                if spans > 0:
                    copy(part, part_of(frame, args, s, kv_head, base + i + r, spans, span), record)
                else:
                    fold(states + (i + r) * record, part, record)
    if spans == 0:
        for i in range(count):
            finish(args, s, kv_head, base + i, states + i * record)


@inline
def gather(frame, args, thread, threads, seqs, spans):
    """Fold the parts that `cover` left, row by row."""
    group, record, turn = word(args, HEADS) // word(args, KV_HEADS), record_bytes(args), 0
    state = scratch_of(frame, thread)
    for s in range(seqs):
        past = past_of(args, s)
        for row in range(rows_in(args, s) * group):
            for kv_head in range(word(args, KV_HEADS)):
                turn += 1
                if turn % threads != thread:
                    continue
                position = past + row // group
                begin(state, record)
                for span in range(first_key(position, word(args, WINDOW)) // {span}, position // {span} + 1):
                    fold(state, part_of(frame, args, s, kv_head, row, spans, span), record)
                finish(args, s, kv_head, row, state)


@kernel
def attend(frame, args, thread, threads):
    """Attention of every new token; units of work are taken from the counter."""
    seqs, kv_heads = get_i64(frame + 24), word(args, KV_HEADS)
    group = word(args, HEADS) // kv_heads
    rows, spans = plan(args, seqs, threads)
    s, before, units = -1, 0, 0
    while True:
        unit = np.int64(atomic_add(word(args, 1), np.int32(1)))
        while s < seqs and unit >= before + units:
            before, s = before + units, s + 1
            units = units_of(args, s, rows, spans) if s < seqs else 0
        if s >= seqs:
            break
        unit, only = unit - before, 0
        if spans > 0:
            own = spans_of(args, s)
            unit, only = unit // own, first_span(args, s) + unit % own
        base = unit // kv_heads * rows
        count = min(rows, rows_in(args, s) * group - base)
        cover(frame, args, thread, s, unit % kv_heads, base, count, spans, only)
    if spans > 0:
        barrier(frame, threads)
        gather(frame, args, thread, threads, seqs, spans)
'''
