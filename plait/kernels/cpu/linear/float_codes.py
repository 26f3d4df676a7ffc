"""Linear layers over small floats: E4M3 and places in a table of sixteen; float32 activations.

A tile holds sixteen outputs, cut into records of `step` inputs: codes, then a float32 scale for each output.
64 bytes of codes are four inputs of eight bits (each two bytes of the first half are input 0 and 2, of the
second 1 and 3) or eight of four bits (in each four bytes the lowest bits first). A table lies before the
first tile. In a record every fourth input is summed apart; the four sums are joined, scaled and added to the
rest, whatever the number of rows or threads.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache, partial
from math import gcd
from string import Template
from typing import Any

import numpy as np
import torch
from torch import Tensor

import plait.kernels.cpu.linear.codebooks  # noqa: F401  operations that `Writer` has then
from plait.errors import ShapeMismatch
from plait.kernels.cpu.codegen.kernel import Kernel, kernel, load_generated
from plait.kernels.cpu.codegen.llvm_writer import Value, Word, Writer, digest, straight
from plait.kernels.cpu.codegen.plain_x86 import write_fma
from plait.kernels.cpu.codegen.vec import get_u8, put_u8
from plait.kernels.cpu.linear.bit_streams import Plane, put_plane
from plait.kernels.cpu.linear.dense import wide_registers
from plait.kernels.cpu.linear.layout import LINE, TILE
from plait.kernels.cpu.linear.packed import PackedWeight, multiply
from plait.kernels.cpu.runtime.executor import Executor
from plait.kernels.cpu.runtime.frame import word
from plait.kernels.cpu.runtime.row_checks import float32_rows
from plait.kernels.cpu.runtime.tile_memory import room
from plait.ops.linear import Activations, Packing, linear
from plait.ops.registry import OpFacts
from plait.quant.codebook import Codebook
from plait.quant.fp8 import Fp8
from plait.quant.packed import CachedWeight
from plait.quant.weight import Weight

PIECE = 1 << 22  # numbers at a time
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


@cache
def rows_through(kept: Records) -> Any:
    """Block: rows through one tile. bias: an address or 0; left: outputs from this tile on."""
    sizes = (4, 2, 1) if wide_registers() else (2, 1)

    def write(
        w: Writer,
        x: Word,
        row_bytes: Word,
        n: Word,
        tile: Word,
        rows: Word,
        out: Word,
        out_bytes: Word,
        bias: Word,
        left: Word,
        table_at: Word,
    ) -> None:
        table = w.load_f32(table_at) if kept.header else None

        def some(row: Word, size: int) -> None:
            at = [x + row_bytes * (row + r) for r in range(size)]
            sums = _sums(w, kept, at, n, tile, table)

            def biased(*sums: Value) -> list[Value]:
                more = w.load_some(bias, left)
                return [w.add(s, more) for s in sums]

            for r, s in enumerate(w.unless_zero(bias, sums, biased)):
                w.store_some(out + out_bytes * (row + r), s, left)

        row = w.number(0)
        for size in sizes:
            end = row + (rows - row) // size * size
            w.loop(row, end, size, (), partial(some, size=size))
            row = end

    return straight(write)


_SOURCE = Template('''"""Products with small floats: made by plait, from $digest."""
import numpy as np

from plait.kernels.cpu.linear import float_codes as floats
from plait.kernels.cpu.runtime.frame import rows_of
from plait.kernels.cpu.codegen.kernel import kernel
from plait.kernels.cpu.codegen.vec import atomic_add, get_i64, word

through = floats.rows_through(floats.$kept)


@kernel
def floats_rows(frame, args, thread, threads):
    """The words of `packed`; pieces of work are taken from the counter."""
    x, row_bytes, n, weight = word(args, 2), word(args, 3), word(args, 4), word(args, 5)
    n_out, bias, out, out_bytes = word(args, 6), word(args, 7), word(args, 8), word(args, 9)
    groups, starts, weights, counter = word(args, 11), word(args, 12), word(args, 13), word(args, 1)
    tiles, tile_bytes = (n_out + 15) // 16, (n + $step - 1) // $step * $nbytes
    unit = max(1, min(tiles // (4 * threads), 262144 // tile_bytes))
    units = (tiles + unit - 1) // unit
    item, done = np.int64(atomic_add(counter, np.int32(1))), 0
    for g in range(max(groups, 1)):
        start, rows = 0, 0
        if groups != 0:
            start = get_i64(starts + 8 * g)
            rows, weight = get_i64(starts + 8 * g + 8) - start, get_i64(weights + 8 * g)
        else:
            rows = rows_of(frame, args)
        blocks = (rows + 31) // 32
        while item < done + units * blocks:
            begin, row = (item - done) // blocks * unit, (item - done) % blocks * 32
            first, count = start + row, min(32, rows - row)
            for t in range(begin, min(begin + unit, tiles)):
                through(
                    x + first * row_bytes, row_bytes, n, weight + $header + t * tile_bytes, count,
                    out + first * out_bytes + 64 * t, out_bytes, bias + 64 * t if bias != 0 else 0,
                    n_out - 16 * t, weight,
                )
            item = np.int64(atomic_add(counter, np.int32(1)))
        done += units * blocks
''')


@cache
def product(kept: Records) -> Kernel:
    """The kernel that multiplies rows by records of that kind."""
    source = _SOURCE.substitute(
        digest=digest("linear/float_codes.py", "linear/codebooks.py", "codegen/plain_x86.py"),
        kept=repr(kept),
        step=kept.step,
        nbytes=kept.nbytes,
        header=kept.header,
    )
    made: Kernel = load_generated(f"floats_{kept.bits}_{kept.step}", source).floats_rows
    return made


@kernel
def pack_eights(frame: int, args: int, thread: int, threads: int) -> None:
    """source (a byte for each input), bytes between its rows, n_in, n_out, tiles, bytes of a record, step."""
    source, row_bytes, n, n_out = word(args, 2), word(args, 3), word(args, 4), word(args, 5)
    out, nbytes, step = word(args, 6), word(args, 7), word(args, 8)
    tiles, steps = (n_out + 15) // 16, (n + step - 1) // step
    for t in range(tiles * thread // threads, tiles * (thread + 1) // threads):
        for j in range(min(16, n_out - 16 * t)):
            row = source + (16 * t + j) * row_bytes
            for k in range(n):
                to = out + (t * steps + k // step) * nbytes + k % step // 4 * 64 + 2 * j
                put_u8(to + 32 * (k & 1) + (k >> 1 & 1), get_u8(row + k))


@kernel
def pack_fours(frame: int, args: int, thread: int, threads: int) -> None:
    """As `pack_eights`, of two inputs to a byte, the first in its upper half."""
    source, row_bytes, n, n_out = word(args, 2), word(args, 3), word(args, 4), word(args, 5)
    out, nbytes, step = word(args, 6), word(args, 7), word(args, 8)
    tiles, steps = (n_out + 15) // 16, (n + step - 1) // step
    for t in range(tiles * thread // threads, tiles * (thread + 1) // threads):
        for j in range(min(16, n_out - 16 * t)):
            row = source + (16 * t + j) * row_bytes
            for k in range(0, n, 2):
                to = out + (t * steps + k // step) * nbytes + k % step // 8 * 64 + 4 * j
                both = get_u8(row + k // 2)
                put_u8(to + (k >> 1 & 3), (both >> 4) | (both & np.int32(15)) << 4)


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


def _codes_and_scales(weight: Weight, kept: Records, start: int, stop: int) -> tuple[Tensor, Tensor]:
    """Bytes of some rows, and the scales of their records, float32 [rows, records]."""
    at = torch.arange(kept.steps(weight.shape[1])) * kept.step
    if isinstance(weight, Codebook):
        part = weight.rows(start, stop)
        return part.codes, part.magnitudes()[:, at // part.block]
    assert isinstance(weight, Fp8)  # `records_of` has looked
    codes = weight.codes[start:stop].view(torch.uint8)
    scale = weight.scale[torch.arange(start, stop) // weight.block[0]][:, at // weight.block[1]]
    scale = scale * 256  # codes are read as float16 that are so much too small
    damaged = torch.nn.functional.pad((codes & 0x7F) == 0x7F, (0, len(at) * kept.step - codes.shape[1]))
    return codes, scale.masked_fill(damaged.unflatten(1, (-1, kept.step)).any(-1), float("nan"))


def pack(cpu: Executor, weight: Weight | CachedWeight, dtype: torch.dtype) -> PackedWeight:
    """A weight of small floats in tiles, its codes as they are. `dtype` is that of x, float32."""
    if isinstance(weight, CachedWeight):
        known = Records(*weight.layout)
        return PackedWeight(weight.tiles, weight.format, *weight.shape, product(known), 0, layout=known)
    kept, (n_out, n_in) = records_of(weight), weight.shape
    if kept is None or n_in % kept.each:
        raise ShapeMismatch(f"a {weight.format} weight of {[n_out, n_in]} cannot be packed")
    tile = kept.steps(n_in) * kept.nbytes
    data = room(kept.header + -(-n_out // TILE) * tile)
    if isinstance(weight, Codebook):
        data[: kept.header] = weight.table.float().contiguous().view(torch.uint8)
    packer, rows = pack_eights if kept.bits == 8 else pack_fours, max(1, PIECE // n_in // TILE) * TILE
    for start in range(0, n_out, rows):
        stop = min(start + rows, n_out)
        codes, scales = _codes_and_scales(weight, kept, start, stop)
        if codes.device.type != "cpu":
            raise ShapeMismatch(f"packing wants codes in the CPU's memory, got {codes.device}")
        codes = codes if codes.stride(1) == 1 else codes.contiguous()
        part = data[kept.header + start // TILE * tile : kept.header + -(-stop // TILE) * tile]
        sizes = (codes.stride(0), n_in, stop - start, part, kept.nbytes, kept.step)
        cpu.launch(packer, codes, *sizes, rows=stop - start)
        put_plane(part.view(-1, kept.steps(n_in), kept.nbytes), Plane(kept.codes, 1, scales))
    return PackedWeight(data, weight.format, n_out, n_in, product(kept), 0, layout=kept)


def apply(
    cpu: Executor,
    x: Tensor,
    weight: PackedWeight,
    bias: Tensor | None,
    activations: Activations,
    out: Tensor | None = None,
) -> Tensor:
    """x: [..., in] float32 -> [..., out] float32."""
    return multiply(cpu, x, weight, bias, activations, out)


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


native = Packing(pack=pack, apply=apply)
linear.variant("native-floats", on="cpu", when=small_floats, native=True)(native)
