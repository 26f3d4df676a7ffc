"""Attention of many tokens on AMX, over bfloat16 caches: sixteen rows a tile, both products in bfloat16.

Sixteen keys lie as a tile reads them. Values do not: those of a split are put into pairs of tokens once, for
all rows of a unit. Queries and exponentials are rounded to bfloat16; softmax and folding are what
`attention.source` and `attention.rows` do. Below LEAST tokens the kernel of `attention.bf16` takes over.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch

from plait.kernels.cpu.amx.linear import LEAST, TILES, in_bfloat16
from plait.kernels.cpu.attention import attention, bf16
from plait.kernels.cpu.attention.rows import WIDEST
from plait.kernels.cpu.attention.source import Form, module
from plait.kernels.cpu.codegen.amx_tiles import LINE, MEMORY, ROWS, TILE, Kind, Tiles
from plait.kernels.cpu.codegen.kernel import Kernel
from plait.kernels.cpu.codegen.llvm_writer import Value, Word, Writer, block, digest
from plait.ops.attention import paged_attention
from plait.ops.registry import OpFacts

SPAN = attention.SPAN
BEFORE = MEMORY + ROWS * SPAN * 2  # bytes before the rest of a thread's scratch: tiles, and exponentials

_PRELUDE = '''
from plait.kernels.cpu.amx import attention as amx_attention
from plait.kernels.cpu.codegen import amx_tiles
from plait.kernels.cpu.runtime.frame import rows_of

start_tiles = amx_tiles.start_tiles("{kind}", amx_tiles.FULL)
stop_tiles = amx_tiles.stop_tiles("{kind}")
pair_values = amx_attention.pair_values()  # {digest}


@inline
def pack_bf16(args, s, kv_head, base, count, size, to):
    """As `pack`, in bfloat16, row by row."""
    group, d = word(args, HEADS) // word(args, KV_HEADS), word(args, K_DIM)
    start = get_i64(word(args, START) + 8 * s)
    for r in range(size):
        q = np.int64(0)
        if r < count:
            token, head = (base + r) // group, kv_head * group + (base + r) % group
            q = word(args, Q) + (start + token) * word(args, Q_ROW) + head * word(args, Q_HEAD)
        for i in range(0, d, 16):
            store_bf16(to + 2 * (r * d + i), load_f32(q + 4 * i) if r < count else zero_f32())
'''


@block(takes=8)
def pair_values(w: Writer, *words: Word) -> None:
    """Block (places, stride, columns, first, end, start, stop, to): values of groups first..end as pairs.

    to: `[SPAN / 2 pairs][columns][2]`; tokens outside start..stop, and groups outside first..end, are zeros.
    """
    places, stride, columns, first, end, start, stop, to = words

    def bits(at: Word, token: Word) -> Value:
        zero = w.zero_i32()
        x = w.pick(stop.above(token), w.bits_i32(w.load_bf16(at)), zero)
        return w.pick(start.above(token), zero, x)

    def group(g: Word) -> None:
        row = to + g * columns * 32

        def pair(j: Word) -> None:
            v, token = w.get_i64(places + 8 * g) + stride * 2 * j, 16 * g + 2 * j
            at = row + columns * 4 * j

            def some(c: Word) -> None:
                low, high = bits(v + 2 * c, token), bits(v + stride + 2 * c, token + 1)
                w.store_i32(at + 4 * c, w.or_i32(w.right(low, 16), high))

            w.loop(0, columns, 16, (), some)

        def zeros(i: Word) -> None:
            w.store_i32(row + i, w.zero_i32())

        inside = w.pick(first.above(g), w.number(0), (end - g).most(0))
        w.when(inside.above(0), lambda: w.loop(0, 8, 1, (), pair))
        w.when(inside.equals(0), lambda: w.loop(0, columns * 32, LINE, (), zeros))

    w.loop((first >> 1) << 1, ((end + 1) >> 1) << 1, 1, (), group)


@block(takes=7)
def scores(line: int, kind: Kind, w: Writer, *words: Word) -> None:
    """Block: as `source.scores`, of sixteen rows of bfloat16."""
    _, q, d, places, first, end, to = words
    tiles = Tiles(w, kind, places - BEFORE)

    def some(g: Word) -> None:
        own = [(g + i).least(end - 1) for i in range(4)]  # a group too many is computed twice
        keys = [w.get_i64(places + 8 * n) for n in own]
        for i in range(4):
            tiles.zero(i)

        def columns(k: Word) -> None:
            tiles.load(4, q + LINE * k, d * 2)
            for i, at in enumerate(keys):
                tiles.load(5 + i % 3, at + TILE * k, LINE)
                tiles.bf16(i, 4, 5 + i % 3)

        w.loop(0, d >> 5, 1, (), columns)
        for i, n in enumerate(own):
            tiles.store(i, to + LINE * n, line)

    w.loop(first, end, 4, (), some)


@block(takes=10)
def values(line: int, kind: Kind, w: Writer, *words: Word) -> None:
    """Block: as `source.values`, of sixteen rows; `pairs` is what `pair_values` made."""
    _, at, start, end, places, pairs, columns, out, record, _ = words
    memory = places - (SPAN // 16 * 8 + BEFORE)
    tiles, weights = Tiles(w, kind, memory), memory + MEMORY
    head, tail = start >> 4, (end + 15) >> 4
    first, last = head >> 1, (tail + 1) >> 1

    def group(g: Word) -> None:
        hidden = w.pick(head.above(g), w.number(1), (g + 1 - tail).most(0))

        def row(r: Word) -> None:
            x = w.load_f32(at + r * line + LINE * g)
            w.store_bf16(weights + r * (2 * SPAN) + 32 * g, w.pick(hidden.above(0), w.zero_f32(), x))

        w.loop(0, ROWS, 1, (), row)

    def some(c: Word, wide: int) -> None:
        for i in range(wide):
            tiles.zero(i)

        def tokens(p: Word) -> None:
            tiles.load(4, weights + LINE * p, 2 * SPAN)
            for i in range(wide):
                tiles.load(5 + i % 3, pairs + (columns * p * 16 + c + 16 * i) * 4, columns * 4)
                tiles.bf16(i, 4, 5 + i % 3)

        w.loop(first, last, 1, (), tokens)
        for i in range(wide):
            tiles.store(i, out + LINE + 4 * c + LINE * i, record)

    w.loop(first << 1, last << 1, 1, (), group)
    whole = columns >> 6 << 6
    w.loop(0, whole, 64, (), partial(some, wide=4))
    w.loop(whole, columns, 16, (), partial(some, wide=1))


def form_of(kind: Kind) -> Form:
    """What the kernel is made for."""
    plain = attention.form_of(torch.bfloat16)
    made_from = digest("amx/attention.py", "codegen/amx_tiles.py")
    products = (
        "from plait.kernels.cpu.amx import attention as amx_attention\n"
        'tile_scores = amx_attention.scores({line}, "{kind}")\n'
        'tile_values = amx_attention.values({line}, "{kind}")'
    )
    return replace(
        plain,
        name=f"bfloat16_{kind}",
        rows=ROWS,
        before=BEFORE,
        prelude=_PRELUDE.format(kind=kind, digest=made_from),
        products=products.format(line=plain.line, kind=kind),
        pack="pack_bf16",
        size=str(ROWS),
        next_keys="",
        few=f"rows_of(frame, args) < {LEAST}",
        enter=f"start_tiles(scratch - {BEFORE})",
        leave="stop_tiles(scratch)",
        paired=(
            "pair_values(values, stride, columns, first, end, max(low - at, 0), min(high - at, "
            f"{SPAN}), copies)"
        ),
        values="copies",
        more=SPAN * 2,
    )


@cache
def attend(kind: Kind) -> Kernel:
    """The kernel, from LEAST tokens on."""
    made: Kernel = module(form_of(kind)).attend
    return made


def why_unserved(facts: OpFacts) -> str | None:
    """Why it cannot serve these facts, if so."""
    if (kept := facts.sizes.get("kv_dtype", "model")) != "bfloat16":
        return f"it reads caches of bfloat16, not of {kept}"
    if facts.sizes.get("dim", 32) % 32:
        return f"it wants heads of a multiple of 32, not of {facts['dim']}"
    if facts.sizes.get("dim", 32) > WIDEST:
        return f"it takes heads of at most {WIDEST}, not of {facts['dim']}"
    if facts.sizes.get("alibi"):
        return "it has no slopes of heads"
    return attention.why_unserved(facts)


def paged_attention_on_tiles(cpu: Any, *args: Any, **more: Any) -> torch.Tensor:
    """See `ops.attention.paged_attention`."""
    few = attention.Chosen(bf16.attend(), bf16.form_of())
    chosen = attention.Chosen(attend(TILES), form_of(TILES), few)
    return attention.attend(cpu, chosen, *args, **more)


paged_attention.variant("amx-bf16", on="cpu", when=in_bfloat16(why_unserved), native=True)(
    paged_attention_on_tiles
)
