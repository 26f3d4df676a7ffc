"""A matrix for each head, as it is stored: some rows at a time are decoded into scratch, for all rows of x.

Decoding is the embedding's (`embed.reader`): a kernel for each storage, called here by its address. Products
with rows are `heads`' own, added in the same tree. Those with columns (`turned`) add a multiple of one stored
row after the other, from the first on. Neither order depends on how many rows x has, or on threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from string import Template
from typing import Any

import numpy as np
import torch
from torch import Tensor

from plait.errors import ShapeMismatch
from plait.kernels.cpu.codegen.kernel import Kernel, load_generated
from plait.kernels.cpu.embed.embed import RowReader, reader, why_unknown_format
from plait.kernels.cpu.linear.dense import wide_registers
from plait.kernels.cpu.moe.head_maps import dots
from plait.kernels.cpu.runtime.executor import Executor, argument
from plait.kernels.cpu.runtime.row_checks import TensorRows
from plait.ops.heads import HeadRows, map_heads
from plait.ops.registry import OpFacts
from plait.quant.codebook import Codebook
from plait.quant.weight import Weight

WORDS = 32  # of a recipe: a decoder's own, then those of this file
START, WIDTH, COUNT = 24, 25, 26  # its first column, its columns; where a decoder finds how many rows
TILE = 64  # rows decoded at a time where many rows of x pass, 16 where few do
_HEAD = 8 * WORDS  # bytes of scratch before the decoded rows

_SOURCE = Template('''

from plait.kernels.cpu.runtime.frame import scratch_of
from plait.kernels.cpu.codegen.vec import call_kernel, get_i64, put_i64, spread_f32


@inline
def decode(frame, own, recipe, decoder, row, count):
    """`count` rows of the weight from `row` on, dense, behind the recipe's copy in this thread's scratch."""
    for i in range(2, $start):
        put_i64(own + 8 * i, get_i64(recipe + 8 * i))
    put_i64(own, own + 8 * $count - frame)
    put_i64(own + 8 * $count, count)
    put_i64(own + 16, get_i64(recipe + 16) + 8 * row)
    put_i64(own + 56, own + $head)
    call_kernel(decoder, frame, own, 0, 1)


@kernel
def stored_rows(frame, args, thread, threads):
    """x, its row and head strides, heads, n, m, out (dense), rows of a head, the first of them that counts,
    recipes, how many, address of the decoder; then what recipes point into, which a recording has to hold."""
    x, row_bytes, head_bytes, heads = word(args, 2), word(args, 3), word(args, 4), word(args, 5)
    n, m, out, each, skip = word(args, 6), word(args, 7), word(args, 8), word(args, 9), word(args, 10)
    recipe, decoder, rows = word(args, 11), word(args, 13), rows_of(frame, args)
    own = scratch_of(frame, thread)
    tile, step = own + $head, 16 if rows <= ROWS else $tile
    columns = (m + step - 1) // step
    items = heads * columns
    for item in range(items * thread // threads, items * (thread + 1) // threads):
        h, start = item // columns, item % columns * step
        count = min(step, m - start)
        decode(frame, own, recipe, decoder, h * each + skip + start, count)
        for row in range(0, rows, ROWS):
            for i in range(0, count, 16):
                w, last, left = tile + i * 4 * n, min(count - i, 16) - 1, np.int32(count - i)
                for r in range(row, min(row + ROWS, rows)):
                    to = out + ((r * heads + h) * m + start + i) * 4
                    dots(x + r * row_bytes + h * head_bytes, w, 4 * n, last, n, to, left)

$sums

@kernel
def stored_columns(frame, args, thread, threads):
    """As `stored_rows`."""
    x, row_bytes, head_bytes, heads = word(args, 2), word(args, 3), word(args, 4), word(args, 5)
    n, m, out, each, skip = word(args, 6), word(args, 7), word(args, 8), word(args, 9), word(args, 10)
    recipes, pieces, decoder = word(args, 11), word(args, 12), word(args, 13)
    rows, own = rows_of(frame, args), scratch_of(frame, thread)
    tile, items, out_bytes = own + $head, heads * pieces, 4 * heads * m
    for item in range(items * thread // threads, items * (thread + 1) // threads):
        h, recipe = item // pieces, recipes + 8 * $words * (item % pieces)
        width, to = get_i64(recipe + 8 * $width), out + (h * m + get_i64(recipe + 8 * $start)) * 4
        source, many = x + h * head_bytes, width // (16 * $vectors) * (16 * $vectors)
        for k in range(0, n, 16):
            count = min(n - k, 16)
            decode(frame, own, recipe, decoder, h * each + skip + k, count)
            for c in range(0, many, 16 * $vectors):
                w, at, left, some = tile + 4 * c, to + 4 * c, np.int32(16), rows // $rows * $rows
                for r in range(0, some, $rows):
                    row, y = source + r * row_bytes + 4 * k, at + r * out_bytes
                    sums_$rows(row, row_bytes, w, 4 * width, count, y, out_bytes, k, left)
                for r in range(some, rows):
                    row, y = source + r * row_bytes + 4 * k, at + r * out_bytes
                    sums_1(row, row_bytes, w, 4 * width, count, y, out_bytes, k, left)
            for c in range(many, width, 16):
                w, at, left = tile + 4 * c, to + 4 * c, np.int32(width - c)
                for r in range(rows):
                    row, y = source + r * row_bytes + 4 * k, at + r * out_bytes
                    edge(row, row_bytes, w, 4 * width, count, y, out_bytes, k, left)
''')


def _sums(name: str, rows: int, vectors: int) -> str:
    """The text of a function: some vectors of the outputs of some rows of x, in registers."""
    every = [(r, v) for r in range(rows) for v in range(vectors)]
    place = "out + {r} * out_bytes + 64 * {v}"
    text = [
        "@inline",
        f"def {name}(x, x_bytes, w, w_bytes, count, out, out_bytes, before, left):",
        '    """out += x · w, `count` rows of w; `before`: how many came before, 0: out is not read."""',
        *(f"    a{r}_{v} = zero_f32()" for r, v in every),
        "    if before > 0:",
        *(f"        a{r}_{v} = load_some({place.format(r=r, v=v)}, left)" for r, v in every),
        "    for i in range(count):",
        *(f"        w{v} = load_f32(w + i * w_bytes + 64 * {v})" for v in range(vectors)),
    ]
    for r in range(rows):
        text += [f"        s = spread_f32(x + {r} * x_bytes + 4 * i)"]
        text += [f"        a{r}_{v} = fma(s, w{v}, a{r}_{v})" for v in range(vectors)]
    text += [f"    store_some({place.format(r=r, v=v)}, a{r}_{v}, left)" for r, v in every]
    return "\n".join(text) + "\n\n"


@cache
def product(turned: bool) -> Kernel:
    """The kernel for stored rows, or stored columns; it serves every storage."""
    rows, vectors = (4, 4) if wide_registers() else (2, 2)
    sums = [_sums(f"sums_{rows}", rows, vectors), _sums("sums_1", 1, vectors), _sums("edge", 1, 1)]
    source = _SOURCE.substitute(
        sums="\n".join(sums), rows=rows, vectors=vectors, start=START, width=WIDTH, count=COUNT,
        head=_HEAD, tile=TILE, words=WORDS,
    )  # fmt: skip
    module = load_generated("heads_stored", dots() + source)
    made: Kernel = module.stored_columns if turned else module.stored_rows
    return made


def _pieces(weight: Weight) -> Sequence[tuple[int, Weight]]:
    """Ranges of its columns for threads to share, each with its first column; one if it cannot be cut."""
    cols = weight.shape[1]
    if isinstance(weight, Codebook) and weight.nested:  # cut, its magnitudes would be kept decoded
        return [(0, weight)]
    for width in (128, 256, 512):
        try:
            return [(at, weight.cols(at, min(at + width, cols))) for at in range(0, cols, width)]
        except ShapeMismatch:
            continue
    return [(0, weight)]


@dataclass(frozen=True, slots=True)
class Recipes:
    """How one weight is decoded, column piece by column piece."""

    words: Tensor  # int64 [pieces, WORDS]
    readers: Sequence[RowReader]
    held: Sequence[Tensor]  # all that the words point into, the rows' own numbers first
    width: int  # of the widest piece

    @classmethod
    def of(cls, maps: HeadRows) -> Recipes:
        """Raises ShapeMismatch for a storage no kernel reads."""
        cut = _pieces(maps.weight) if maps.turned else [(0, maps.weight)]
        ids = torch.from_numpy(np.arange(maps.weight.shape[0]))  # in a recording torch must not compute
        readers = [reader(part) for _, part in cut]
        words, held = np.zeros((len(cut), WORDS), np.int64), [ids]
        for row, (start, part), how in zip(words, cut, readers, strict=True):
            width = part.shape[1]
            told = (ids, *how.source, how.pieces, 1.0, None, width, *how.more)
            row[2 : 2 + len(told)] = [argument(value) for value in told]
            row[START], row[WIDTH] = start, width
            held += [value for value in told[1:] if isinstance(value, Tensor)]
        return cls(torch.from_numpy(words), readers, held, max(part.shape[1] for _, part in cut))

    @property
    def decoder(self) -> int:
        return self.readers[0].kernel.address


class StoredHeads:
    """The native `map_heads` of one weight, which it prepares in the first call."""

    def __init__(self, cpu: Executor) -> None:
        self._cpu = cpu
        self._seen: tuple[HeadRows, Recipes] | None = None

    @classmethod
    def on(cls, cpu: Executor) -> StoredHeads:
        return cls(cpu)

    def __call__(self, x: Tensor, weight: HeadRows) -> Tensor:
        """See `ops.heads.map_heads`."""
        if self._seen is None or self._seen[0] is not weight:
            self._seen = weight, Recipes.of(weight)
        how, rows, (n, m) = self._seen[1], TensorRows.of(x), weight.widths
        if x.dim() != 3 or (rows.heads, rows.width) != (weight.heads, n):
            raise ShapeMismatch(f"{weight.heads} maps {n} -> {m} were given {list(x.shape)}")
        out = self._cpu.empty(rows.count, weight.heads, m)
        where: tuple[Any, ...] = (x, *rows.strides, weight.heads, n, m, out, weight.each, weight.first)
        self._cpu.launch(
            product(weight.turned), *where, how.words, len(how.readers), how.decoder, *how.held,
            rows=rows.count, scratch=_HEAD + 4 * (how.width + 16) * (16 if weight.turned else TILE),
        )  # fmt: skip
        return out


def why_unstored(facts: OpFacts) -> str | None:
    """The `when` of matrices in storages that are decoded."""
    return (
        why_unknown_format(facts) if "kind" in facts.sizes else "it decodes what is stored, not plain numbers"
    )


map_heads.variant("native-stored", on="cpu", when=why_unstored, native=True)(StoredHeads)
