"""Linear layers over small floats: E4M3 and places in a table of sixteen; float32 activations.

A tile holds sixteen outputs, cut into records of `step` inputs: codes, then a float32 scale for each output.
64 bytes of codes are four inputs of eight bits (each two bytes of the first half are input 0 and 2, of the
second 1 and 3) or eight of four bits (in each four bytes the lowest bits first). A table lies before the
first tile. In a record every fourth input is summed apart; the four sums are joined, scaled and added to the
rest, whatever the number of rows or threads.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from math import gcd
from string import Template

import numpy as np
import torch
from torch import Tensor

import plait.kernels.cpu.linear.codebooks  # noqa: F401  operations that `Writer` has then
from plait.errors import ShapeMismatch
from plait.kernels.cpu.codegen.kernel import Body, Kernel, load_generated
from plait.kernels.cpu.codegen.llvm_writer import Value, Word, Writer, block, digest
from plait.kernels.cpu.codegen.plain_x86 import write_fma
from plait.kernels.cpu.codegen.target import wide_registers
from plait.kernels.cpu.codegen.vec import get_u8, put_u8
from plait.kernels.cpu.linear.blocks import Plane, pack_rows
from plait.kernels.cpu.linear.dense import write_groups
from plait.kernels.cpu.linear.layout import LINE, TILE
from plait.kernels.cpu.linear.packed import COUNTED, PackedWeight, multiply
from plait.kernels.cpu.runtime.executor import Executor
from plait.kernels.cpu.runtime.frame import word
from plait.kernels.cpu.runtime.row_checks import float32_rows
from plait.kernels.cpu.runtime.tile_memory import room
from plait.ops.linear import Packing, linear
from plait.ops.registry import OpFacts
from plait.quant.codebook import Codebook
from plait.quant.fp8 import Fp8
from plait.quant.weight import CachedWeight, Weight

_FILES = ("linear/float_codes.py", "linear/codebooks.py", "linear/dense.py", "codegen/plain_x86.py")
AHEAD = 3072  # bytes that weights are fetched before they are needed
_FP8 = re.compile(r"fp8(?:_b(?P<block>\d+))?")


@dataclass(frozen=True, slots=True)
class Records:
    """How a format is kept: `bits` of a code, 8 or 4, and the inputs of a record."""

    bits: int
    step: int

    @property
    def codes(self) -> int:
        """Bytes of a record's codes."""
        return TILE * self.step * self.bits // 8

    @property
    def nbytes(self) -> int:
        return self.codes + 4 * TILE

    @property
    def each(self) -> int:
        """Inputs in 64 bytes."""
        return LINE * 8 // self.bits // TILE

    @property
    def header(self) -> int:
        """Bytes of the table."""
        return LINE if self.bits == 4 else 0

    def steps(self, n_in: int) -> int:
        return -(-n_in // self.step)


def _weights(w: Writer, kept: Records, at: Word, table: Value) -> list[Value]:
    """What the 64 bytes there stand for: sixteen numbers of each of their inputs."""
    codes = w.load_i32(at)
    if kept.bits == 4:
        return [w.pick_f32(table, w.right(codes, 4 * j) if j else codes) for j in range(8)]
    even, odd = w.upper_e4m3(w.left(codes, 8)), w.upper_e4m3(codes)
    return [w.low_halves(even), w.high_halves(even), w.low_halves(odd), w.high_halves(odd)]


def _sums(w: Writer, kept: Records, x: list[Word], n: Word, tile: Word, table: Value) -> list[Value]:
    """Rows at the addresses x through the tile."""
    rows = len(x)

    def record(k: Word, at: Word, *found: Value) -> list[Value]:
        def some(i: Word, *sums: Value) -> list[Value]:
            place = at + LINE * i
            w.prefetch(place + AHEAD)
            now = list(sums)
            for j, v in enumerate(_weights(w, kept, place, table)):
                for r, row in enumerate(x):
                    one = w.spread_f32(row + 4 * kept.step * k + 4 * kept.each * i + 4 * j)
                    now[4 * r + j % 4] = write_fma(w, one, v, now[4 * r + j % 4])
            return now

        inputs = (n - k * kept.step).least(kept.step)
        parts = w.loop(0, inputs // kept.each, 1, [w.zero_f32()] * (4 * rows), some)
        scale = w.load_f32(at + kept.codes)
        joined = [
            w.add(w.add(*parts[4 * r : 4 * r + 2]), w.add(*parts[4 * r + 2 : 4 * r + 4])) for r in range(rows)
        ]
        return [at + kept.nbytes, *(write_fma(w, a, scale, b) for a, b in zip(joined, found, strict=True))]

    steps = (n + kept.step - 1) // kept.step
    return w.loop(0, steps, 1, (tile, *[w.zero_f32()] * rows), record)[1:]


@block(takes=10)
def rows_through(kept: Records, w: Writer, *words: Word) -> None:
    """Block: rows through one tile. bias: an address or 0; left: outputs from this tile on."""
    x, row_bytes, n, tile, rows, out, out_bytes, bias, left, table_at = words
    table = w.load_f32(table_at) if kept.header else None

    def some(row: Word, size: int) -> None:
        at = [x + row_bytes * (row + r) for r in range(size)]
        sums = _sums(w, kept, at, n, tile, table)

        def biased(*sums: Value) -> list[Value]:
            more = w.load_some(bias, left)
            return [w.add(s, more) for s in sums]

        for r, s in enumerate(w.unless_zero(bias, sums, biased)):
            w.store_some(out + out_bytes * (row + r), s, left)

    write_groups(w, rows, (4, 2, 1) if wide_registers() else (2, 1), some)


_SOURCE = Template(
    '''"""Products with small floats: made by plait, from $digest."""
import numpy as np

from plait.kernels.cpu.linear import float_codes
from plait.kernels.cpu.runtime.frame import rows_of, scratch_of
from plait.kernels.cpu.codegen.kernel import inline, kernel
from plait.kernels.cpu.codegen.vec import atomic_add, get_i64, word

through = float_codes.rows_through(float_codes.$kept)


@inline
def tiles_of(x, row_bytes, n, weight, tile_bytes, begin, end, n_out, bias, out, out_bytes, rows, scratch):
    """Rows through the tiles begin..end."""
    for t in range(begin, end):
        plus = bias + 64 * t if bias != 0 else 0
        at, left = weight + $header + t * tile_bytes, n_out - 16 * t
        through(x, row_bytes, n, at, rows, out + 64 * t, out_bytes, plus, left, weight)
'''
    + COUNTED
)


@cache
def product(kept: Records) -> Kernel:
    """The kernel that multiplies rows by records of that kind."""
    source = _SOURCE.substitute(
        name="floats_rows",
        digest=digest(*_FILES),
        kept=repr(kept),
        tile_bytes=f"(n + {kept.step - 1}) // {kept.step} * {kept.nbytes}",
        header=kept.header,
        least=1,
        block=32,
        prepare="",
    )
    made: Kernel = load_generated(f"floats_{kept.bits}_{kept.step}", source).floats_rows
    return made


def _packer(each: int) -> Callable[[Callable[[int, int, int], None]], Kernel]:
    """Decorator: a function that moves `each` inputs, four bytes, of output j of a tile -> Kernel.

    Its words: source, bytes between its rows, n_out, n_in, tiles, bytes of a record, step.
    """

    def loop(move: Callable[[int, int, int], None]) -> Body:
        def run(frame: int, args: int, thread: int, threads: int) -> None:
            source, row_bytes, n_out, n = word(args, 2), word(args, 3), word(args, 4), word(args, 5)
            out, nbytes, step = word(args, 6), word(args, 7), word(args, 8)
            tiles, steps = (n_out + 15) // 16, (n + step - 1) // step
            for t in range(tiles * thread // threads, tiles * (thread + 1) // threads):
                for j in range(min(16, n_out - 16 * t)):
                    row = source + (16 * t + j) * row_bytes
                    for k in range(0, n, each):
                        to = out + (t * steps + k // step) * nbytes + k % step // each * 64
                        move(row + k // each * 4, to, j)

        return run

    return lambda move: Kernel(move, loop)


@_packer(4)
def pack_eights(codes: int, to: int, j: int) -> None:
    for i in range(4):
        put_u8(to + 32 * (i & 1) + 2 * j + (i >> 1), get_u8(codes + i))


@_packer(8)
def pack_fours(codes: int, to: int, j: int) -> None:
    """The first input of a byte is in its upper half."""
    for i in range(4):
        both = get_u8(codes + i)
        put_u8(to + 4 * j + i, (both >> 4) | (both & np.int32(15)) << 4)


def records_of(weight: Weight) -> Records | None:
    """How that weight is kept, or None if it is not kept here."""
    if isinstance(weight, Fp8):
        cols, size = weight.shape[1], weight.block[1]
        step = 128 if size >= cols else gcd(size, 128)
        # A shorter one, where it leaves no record unfinished.
        return Records(8, max(32, gcd(step, cols))) if step >= 32 else None
    if isinstance(weight, Codebook) and weight.block % 8 == 0:
        return Records(4, gcd(weight.block, 64))
    return None


def _codes_and_scales(weight: Weight, kept: Records, start: int, stop: int) -> tuple[Tensor, list[Plane]]:
    """Bytes of some rows, and the scales of their records, float32 [rows, records]."""
    at = torch.arange(kept.steps(weight.shape[1])) * kept.step
    if isinstance(weight, Codebook):
        part = weight.rows(start, stop)
        return part.codes, [Plane(kept.codes, 1, part.magnitudes()[:, at // part.block])]
    assert isinstance(weight, Fp8)  # `records_of` has looked
    codes = weight.codes[start:stop].view(torch.uint8)
    scale = weight.scale[torch.arange(start, stop) // weight.block[0]][:, at // weight.block[1]]
    scale = scale * 256  # codes are read as float16 that are so much too small
    damaged = torch.nn.functional.pad((codes & 0x7F) == 0x7F, (0, len(at) * kept.step - codes.shape[1]))
    scale = scale.masked_fill(damaged.unflatten(1, (-1, kept.step)).any(-1), float("nan"))
    return codes, [Plane(kept.codes, 1, scale)]


def pack(cpu: Executor, weight: Weight | CachedWeight, dtype: torch.dtype) -> PackedWeight:
    """A weight of small floats in tiles, its codes as they are. `dtype` is that of x, float32."""
    if isinstance(weight, CachedWeight):
        known = Records(*weight.layout)
        return PackedWeight(weight.tiles, weight.format, *weight.shape, product(known), 0, layout=known)
    kept, (n_out, n_in) = records_of(weight), weight.shape
    if kept is None or n_in % kept.each:
        raise ShapeMismatch(f"a {weight.format} weight of {[n_out, n_in]} cannot be packed")
    data = room(kept.header + -(-n_out // TILE) * kept.steps(n_in) * kept.nbytes)
    if isinstance(weight, Codebook):
        data[: kept.header] = weight.table.float().contiguous().view(torch.uint8)
    packer, some = pack_eights if kept.bits == 8 else pack_fours, partial(_codes_and_scales, weight, kept)
    sizes = (n_in, kept.nbytes, kept.step)
    pack_rows(cpu, packer, data[kept.header :], (n_out, n_in), kept.nbytes, some, *sizes)
    return PackedWeight(data, weight.format, n_out, n_in, product(kept), 0, layout=kept)


def small_floats(facts: OpFacts) -> str | None:
    """The `when` of eight-bit floats and of tables of sixteen, with exact activations."""
    kind = str(facts.sizes.get("kind", "plain numbers"))
    found = _FP8.fullmatch(kind)
    if not (found and gcd(int(found["block"] or 128), 128) >= 32) and not kind.startswith("bnb_"):
        return f"it reads eight-bit floats and tables of sixteen, not {kind}"
    if facts.sizes.get("activations", "float32") != "float32":
        return "it does not round activations"
    if facts["n_in"] % 8:
        return f"{facts['n_in']} inputs are no multiple of 8"
    return float32_rows(facts)


native = Packing(pack=pack, apply=multiply)
linear.variant("native-floats", on="cpu", when=small_floats, native=True)(native)
