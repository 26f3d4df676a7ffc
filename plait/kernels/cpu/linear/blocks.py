"""Linear layers over quantized weights: packed once, multiplied by activations rounded to int8.

A weight keeps its codes and scales as they are, in the tiles of `layout`. Generated kernels move codes on all
threads, four at a time: a quad of one output is 32 bits in the tile. In a GGUF block it is perhaps a nibble
or some bits of each byte, and scales move with it. Other weights give codes as streams, the lowest bits of a
byte first, some rows at a time; torch moves their scales, because they are few.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from plait.errors import ShapeMismatch
from plait.kernels.cpu.codegen.amx_tiles import Kind
from plait.kernels.cpu.codegen.kernel import Kernel, load_generated
from plait.kernels.cpu.linear import byte_tiles
from plait.kernels.cpu.linear.blocks_source import linear_kernel
from plait.kernels.cpu.linear.layout import BLOCK, LAYOUTS, TILE, Layout, grouped_layout
from plait.kernels.cpu.linear.packed import PackedWeight, multiply
from plait.kernels.cpu.runtime.executor import Executor
from plait.kernels.cpu.runtime.row_checks import float32_rows
from plait.kernels.cpu.runtime.tile_memory import room
from plait.ops.linear import Packing, linear
from plait.ops.registry import OpFacts
from plait.quant.bits import unpack
from plait.quant.fp4 import Fp4
from plait.quant.gguf import Gguf, block_type
from plait.quant.gguf_parts import half_power
from plait.quant.grouped import Grouped
from plait.quant.weight import CachedWeight, Weight

KNOWN = (*LAYOUTS, "mxfp4", "nvfp4")
PIECE = 1 << 22  # numbers at a time
_SCALES = {torch.float16: "half", torch.bfloat16: "brain", torch.float32: "float"}
_GROUPED = re.compile(r"int(?P<bits>\d)(?:_g(?P<group>\d+))?")
_HEAD = '''"""Packs {name}: made by plait.kernels.cpu.linear.blocks."""
import numpy as np
from plait.kernels.cpu.runtime.frame import word
from plait.kernels.cpu.codegen.kernel import inline, kernel
from plait.kernels.cpu.codegen.vec import get_i32, get_u8, put_i32, put_u8


@inline
def bits(a):
    return np.int64(get_i32(a)) & 0xFFFFFFFF


@inline
def byte(a):
    return np.int64(get_u8(a))


@inline
def spread(b):
    """Bits 0..3 into four bytes."""
    return (b * 0x00204081) & 0x01010101


@inline
def put(a, v):
    put_i32(a, np.int32(v))


@inline
def put_byte(a, v):
    put_u8(a, np.int32(v))


@inline
def put_half(a, source, flip):
    """A float16; `flip`: 0x80 to change its sign."""
    put_byte(a, byte(source))
    put_byte(a + 1, byte(source + 1) ^ flip)


@kernel
def pack(frame, args, thread, threads):
    """Source, its row stride, outputs, blocks of 32 in a row, packed."""
    source, row_bytes, n_out, blocks = word(args, 2), word(args, 3), word(args, 4), word(args, 5)
    packed = word(args, 6)
    steps = (blocks + {per_step} - 1) // {per_step}
    tiles = (n_out + 15) // 16
    for t in range(tiles * thread // threads, tiles * (thread + 1) // threads):
        for step in range(steps):
            to = packed + (t * steps + step) * {nbytes}
            for n in range(min(16, n_out - 16 * t)):
                row = source + (16 * t + n) * row_bytes
                for b in range(min({per_step}, blocks - {per_step} * step)):
                    at = {per_step} * step + b
                    src, g = row + at // {per_file} * {file_bytes}, at % {per_file}
'''

_QUADS = {  # four codes of a block in four bytes
    8: "bits(src + 4 * {q})",
    4: "(byte(src + 2 * {q}) & 15) | (byte(src + 2 * {q}) & 240) << 4"
    " | (byte(src + 2 * {q} + 1) & 15) << 16 | (byte(src + 2 * {q} + 1) & 240) << 20",
    2: "(byte(src + {q}) & 3) | (byte(src + {q}) & 12) << 6 | (byte(src + {q}) & 48) << 12"
    " | (byte(src + {q}) & 192) << 18",
}
_NIBBLES = "(bits(src + {at} + 4 * {i}) >> {s}) & 0x0F0F0F0F"  # of 16 bytes: quads 0..3 low, 4..7 high
_RUN = "(bits(src + {at} + 32 * (g >> 1) + 4 * {q}) >> (4 * (g & 1))) & 0x0F0F0F0F"
_K_SCALES = (
    "byte(src + 4 + g) & 63 if g < 4 else (byte(src + 8 + g) & 15) | (byte(src + g) >> 6) << 4",
    "byte(src + 8 + g) & 63 if g < 4 else (byte(src + 8 + g) >> 4) | (byte(src + 4 + g) >> 6) << 4",
)


@dataclass(frozen=True, slots=True)
class _Reader:
    """Expressions: quad {q} of block g of 32 at address src ({i}, {s}: its place among nibbles); scales of
    the group {j} of its superblock, or the bits of a bfloat16; where its float16s are."""

    code: str
    halves: tuple[int, ...] = (0,)
    scale: str = ""
    minimum: str = ""


READERS = {
    "Q8_0": _Reader("bits(src + 2 + 4 * {q}) ^ 0x80808080"),
    "IQ4_NL": _Reader(_NIBBLES.replace("{at}", "2")),
    "MXFP4": _Reader(
        _NIBBLES.replace("{at}", "1"), (), "32 << byte(src) if byte(src) < 2 else (byte(src) - 1) << 7"
    ),
    "Q4_0": _Reader(_NIBBLES.replace("{at}", "2")),
    "Q4_1": _Reader(_NIBBLES.replace("{at}", "4"), (0, 2)),
    "Q5_0": _Reader(
        "(" + _NIBBLES.replace("{at}", "6") + ") | spread((bits(src + 2) >> (4 * {q})) & 15) << 4"
    ),
    "Q5_1": _Reader(
        "(" + _NIBBLES.replace("{at}", "8") + ") | spread((bits(src + 4) >> (4 * {q})) & 15) << 4", (0, 2)
    ),
    "Q4_K": _Reader(_RUN.replace("{at}", "16"), (0, 2), *_K_SCALES),
    "Q5_K": _Reader(
        "(" + _RUN.replace("{at}", "48") + ") | ((bits(src + 16 + 4 * {q}) >> g) & 0x01010101) << 4",
        (0, 2),
        *_K_SCALES,
    ),
    "Q6_K": _Reader(
        "((bits(src + 64 * (g >> 2) + 32 * (g & 1) + 4 * {q}) >> (2 * (g & 2))) & 0x0F0F0F0F)"
        " | ((bits(src + 128 + 32 * (g >> 2) + 4 * {q}) >> (2 * (g & 3))) & 0x03030303) << 4",
        (208,),
        "byte(src + 192 + {j})",
    ),
    "Q3_K": _Reader(
        "((bits(src + 32 + 32 * (g >> 2) + 4 * {q}) >> (2 * (g & 3))) & 0x03030303)"
        " | ((bits(src + 4 * {q}) >> g) & 0x01010101) << 2",
        (108,),
        "(((byte(src + 96 + ({j} & 7)) >> (4 * ({j} >> 3))) & 15)"
        " | ((byte(src + 104 + ({j} & 3)) >> (2 * ({j} >> 2))) & 3) << 4) - 32",
    ),
    "Q2_K": _Reader(
        "(bits(src + 16 + 32 * (g >> 2) + 4 * {q}) >> (2 * (g & 3))) & 0x03030303",
        (80, 82),
        "byte(src + {j})",
    ),
    "IQ4_XS": _Reader(
        "(bits(src + 8 + 16 * g + 4 * {i}) >> {s}) & 0x0F0F0F0F",
        (0,),
        "(((byte(src + 4 + (g >> 1)) >> (4 * (g & 1))) & 15)"
        " | ((byte(src + 2 + (g >> 2)) >> (2 * (g & 3))) & 3) << 4) - 32",
    ),
}


def _load_packer(name: str, layout: Layout, block: tuple[int, int], body: Sequence[str]) -> Kernel:
    """The kernel of these statements: source, its row stride, outputs, blocks of 32 in a row, packed.

    block: how many blocks of 32 lie together in the source, and their bytes.
    """
    sizes = dict(per_step=layout.blocks, nbytes=layout.nbytes, per_file=block[0], file_bytes=block[1])
    source = _HEAD.format(name=name, **sizes) + "".join(" " * 20 + line + "\n" for line in body)
    made: Kernel = load_generated(f"pack_{name.lower()}", source).pack
    return made


def _planes(layout: Layout) -> list[str]:
    """Statements that put the codes q0..q7 of one output into both planes of block b."""
    low = f"to + {layout.codes_at} + b * {layout.plane_bytes} + 4 * n"
    mask = {8: "", 4: " & 0x0F0F0F0F", 2: " & 0x03030303"}[layout.bits]
    per_vector, shift = 8 // layout.bits, layout.bits
    lines = []
    for i in range(8 // per_vector):
        # Two quads of a vector of nibbles are four apart; four of a vector of two bits are neighbours.
        quads = (i, i + 4) if layout.bits == 4 else tuple(range(per_vector * i, per_vector * (i + 1)))
        parts = " | ".join(f"(q{q}{mask}) << {shift * k}" for k, q in enumerate(quads))
        lines.append(f"put({low} + {64 * i}, {parts})")
    if layout.high:
        each, count = layout.high, 8 // layout.high
        ones = {1: "0x01010101", 2: "0x03030303"}[each]
        for i in range(each):
            parts = " | ".join(
                f"((q{count * i + k} >> {layout.bits}) & {ones}) << {each * k}" for k in range(count)
            )
            lines.append(f"put({low} + {layout.low_bytes + 64 * i}, {parts})")
    return lines


def _scale_lines(layout: Layout, reader: _Reader) -> list[str]:
    if layout.scales.startswith("half") and layout.group == BLOCK:
        places = (layout.scales_at, layout.minima_at)
        return [
            f"put_half(to + {place} + b * 32 + 2 * n, src + {half}, 0)"
            for place, half in zip(places, reader.halves, strict=False)
        ]
    if layout.scales == "brain":
        place = f"to + {layout.scales_at} + b * 32 + 2 * n"
        return [f"s = {reader.scale}", f"put_byte({place}, s & 255)", f"put_byte({place} + 1, s >> 8)"]
    per_block = BLOCK // layout.group
    lines = []
    if layout.scales == "six, six":
        low = f"to + {layout.minima_at} + {layout.minimum_bytes} * b + n % 8"
        lines = [
            f"s, m = {reader.scale}, {reader.minimum}",
            f"put_byte(to + {layout.scales_at} + 16 * b + n, s | (m & 3) << 6)",
            f"put_byte({low}, byte({low}) | m >> 2 << n // 8 * 4)",  # what is packed into is zeros
        ]
        reader = replace(reader, scale="", minimum="")
    for spot, text in ((layout.scales_at, reader.scale), (layout.minima_at, reader.minimum)):
        if text:
            for j in range(per_block):
                value = text.replace("{j}", f"({per_block} * g + {j})")
                lines.append(f"put_byte(to + {spot} + 16 * ({per_block} * b + {j}) + n, {value})")
    # A minimum is subtracted in the file and added here.
    for i, half_at in enumerate(reader.halves):
        lines.append(f"put_half(to + {layout.outer_at + 32 * i} + 2 * n, src + {half_at}, {0x80 * i})")
    return lines


@cache
def _block_packer(name: str) -> Kernel:
    layout, reader, kind = LAYOUTS[name], READERS[name], block_type(name)
    codes = [
        f"q{q} = "
        + reader.code.replace("{q}", str(q)).replace("{i}", str(q % 4)).replace("{s}", str(q // 4 * 4))
        for q in range(8)
    ]
    body = [*codes, *_planes(layout), *_scale_lines(layout, reader)]
    return _load_packer(name, layout, (kind.elements // BLOCK, kind.nbytes), body)


def pack_blocks(cpu: Executor, weight: Gguf) -> Tensor:
    """The tiles of a weight, uint8. Outputs and columns that fill up a tile or a step are zeros.

    Raises ShapeMismatch for bytes on another device, or if rows are not dense.
    """
    layout, (n_out, n_in) = LAYOUTS[weight.format], weight.shape
    data = weight.data
    if data.device.type != "cpu" or (data.shape[1] > 1 and data.stride(1) != 1):
        raise ShapeMismatch(
            f"packing wants rows of dense bytes in the CPU's memory, got {data.device} "
            f"with strides {data.stride()}"
        )
    out = room(-(-n_out // TILE) * layout.tile_bytes(n_in))
    cpu.launch(_block_packer(weight.format), data, data.stride(0), n_out, n_in // BLOCK, out, rows=n_out)
    return out


@dataclass(frozen=True, slots=True)
class Plane:
    """Numbers of a record: `each` per step, the first of them `at` bytes from its start."""

    at: int
    each: int
    values: Tensor  # [rows, n], their bytes as they are to be kept

    def put(self, tiles: Tensor) -> None:
        """Into its place. tiles: uint8 [tiles, steps, bytes of a record]."""
        count, steps = tiles.shape[:2]
        whole = torch.zeros(count * TILE, steps * self.each, dtype=self.values.dtype)
        whole[: self.values.shape[0], : self.values.shape[1]] = self.values
        ordered = whole.view(count, TILE, steps, self.each).permute(0, 2, 3, 1).contiguous()
        width = self.each * TILE * self.values.element_size()
        tiles[:, :, self.at : self.at + width] = ordered.view(torch.uint8).view(count, steps, width)


Rows = Callable[[int, int], tuple[Tensor, list[Plane]]]
"""Some rows of a weight: uint8 codes [rows, n], and what else a record keeps."""


Stream = tuple[Layout, int, Rows]
"""How a weight is kept, and some of its rows, in codes of so many bits."""


@cache
def _stream_packer(layout: Layout, bits: int) -> Kernel:
    body = [f"q{q} = " + _QUADS[bits].replace("{q}", str(q)) for q in range(8)]
    return _load_packer(f"{bits}_bits", layout, (1, BLOCK * bits // 8), body + _planes(layout))


def pack_rows(
    cpu: Executor, packer: Kernel, out: Tensor, shape: tuple[int, int], nbytes: int, some: Rows, *more: int
) -> None:
    """A weight of that shape into tiles of records of `nbytes`, at `out`, some rows at a time.

    packer: takes codes, their row stride, outputs, the first of `more`, tiles and the rest of `more`.
    """
    n_out, n_in = shape
    tile, rows = len(out) // -(-n_out // TILE), max(1, PIECE // n_in // TILE) * TILE
    for start in range(0, n_out, rows):
        stop = min(start + rows, n_out)
        codes, planes = some(start, stop)
        if codes.device.type != "cpu":
            raise ShapeMismatch(f"packing wants codes in the CPU's memory, got {codes.device}")
        codes = codes if codes.stride(1) == 1 else codes.contiguous()
        part = out[start // TILE * tile : -(-stop // TILE) * tile]
        cpu.launch(packer, codes, codes.stride(0), stop - start, more[0], part, *more[1:], rows=stop - start)
        for plane in planes:
            plane.put(part.view(-1, tile // nbytes, nbytes))


def _pack_stream(cpu: Executor, weight: Weight) -> tuple[Tensor, Layout]:
    """The tiles of a weight, uint8, and how they are laid out. Raises ShapeMismatch for what is not known."""
    stream, (n_out, n_in) = _stream_of(weight), weight.shape
    if stream is None:
        raise ShapeMismatch(f"{weight.format} weights cannot be packed")
    layout, bits, some = stream
    out = room(-(-n_out // TILE) * layout.tile_bytes(n_in))
    pack_rows(cpu, _stream_packer(layout, bits), out, (n_out, n_in), layout.nbytes, some, n_in // BLOCK)
    return out, layout


def _stream_of(weight: Weight) -> Stream | None:
    """How that weight is packed, or None if it is not packed here."""
    if isinstance(weight, Grouped):
        return _of_grouped(weight)
    if isinstance(weight, Fp4):
        return _of_mxfp4(weight) if weight.format == "mxfp4" else _of_nvfp4(weight)
    if isinstance(weight, Gguf) and weight.kind.parts and weight.format in LAYOUTS:
        return _of_parts(weight)
    return None


def _of_grouped(w: Grouped) -> Stream | None:
    group = w.group if w.group < w.shape[1] else 128  # a row that is one group: the same scale many times
    layout = grouped_layout(w.bits, group, _SCALES[w.scales.dtype], w.zeros is not None)
    if layout is None:
        return None
    n_in, bits = w.shape[1], w.bits if w.bits in _QUADS else 8
    of = torch.arange(0, n_in, layout.group) // w.group

    def some(start: int, stop: int) -> tuple[Tensor, list[Plane]]:
        codes = w.codes[start:stop]
        kept = [Plane(layout.scales_at, layout.groups, w.scales[start:stop][:, of])]
        if w.zeros is not None:
            kept.append(Plane(layout.minima_at, layout.groups, w.zeros[start:stop][:, of]))
        return codes if bits == w.bits else unpack(codes, w.bits, n_in), kept

    return layout, bits, some


def _brain(values: Tensor) -> Tensor:
    """bfloat16 of float32 numbers that have no more bits."""
    return (values.view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16)


def _of_mxfp4(w: Fp4) -> Stream:
    scales: Any = "brain" if w.factor is None else "float"
    layout = Layout(64, 4, 0, 32, 12, scales, "e2m1")

    def some(start: int, stop: int) -> tuple[Tensor, list[Plane]]:
        part = w.rows(start, stop)
        values = half_power(part.scales).masked_fill(part.scales == 255, float("nan"))
        values = _brain(values) if part.factor is None else values * part.factor.view(-1, 1)
        return part.codes, [Plane(layout.scales_at, layout.groups, values)]

    return layout, 4, some


def _of_nvfp4(w: Fp4) -> Stream:
    """Scales stay bytes, unless one of them has a sign or is no number."""
    plain = not bool((w.scales.view(torch.uint8) >= 0x7F).any())
    layout = Layout(256, 4, 0, 16, 12, "small" if plain else "float", "e2m1")

    def some(start: int, stop: int) -> tuple[Tensor, list[Plane]]:
        part = w.rows(start, stop)
        factor = torch.ones(1) if part.factor is None else part.factor
        halves = (factor * 0.5).view(-1, 1)
        if not plain:
            return part.codes, [Plane(layout.scales_at, layout.groups, part.scales.float() * halves)]
        above = halves.expand(stop - start, layout.steps(w.shape[1]))
        scales = Plane(layout.scales_at, layout.groups, part.scales.view(torch.uint8))
        return part.codes, [scales, Plane(layout.outer_at, 1, above)]

    return layout, 4, some


def _of_parts(w: Gguf) -> Stream:
    layout, parts = LAYOUTS[w.format], w.kind.parts
    assert parts is not None  # `_stream_of` has looked

    def some(start: int, stop: int) -> tuple[Tensor, list[Plane]]:
        rows = stop - start
        found = parts(w.data[start:stop].reshape(-1, w.kind.nbytes))
        unit, levels = found.unit.view(rows, -1), found.levels.view(rows, -1)
        codes = found.codes.view(rows, -1)
        if layout.scales in ("half", "brain"):
            unit = unit.half() if layout.scales == "half" else _brain(unit.contiguous())
            return codes, [Plane(layout.scales_at, layout.groups, unit)]
        if layout.scales == "small":  # float16 that are 256 times too small have E4M3's bits, 7 higher
            levels = ((levels / 128).half().view(torch.int16) >> 7).to(torch.uint8)
            unit = torch.full((rows, layout.steps(w.shape[1])), 0.5)
        else:
            levels = levels.to(torch.int8)
        return codes, [Plane(layout.scales_at, layout.groups, levels), Plane(layout.outer_at, 1, unit)]

    return layout, 8, some


def pack(cpu: Executor, weight: Weight | CachedWeight, dtype: torch.dtype, kind: Kind = "") -> PackedWeight:
    """A weight in tiles that keep its codes and scales as they are. `dtype` is that of x, float32.

    kind: many rows are multiplied on tiles of that kind, to the same bits.
    """
    n_out, n_in = weight.shape
    if n_in % BLOCK:
        raise ShapeMismatch(f"{n_in} inputs of a {weight.format} weight are not whole blocks of {BLOCK}")
    if isinstance(weight, CachedWeight):
        data, layout = weight.tiles, Layout(*weight.layout)
    elif isinstance(weight, Gguf) and weight.format in READERS:
        data, layout = pack_blocks(cpu, weight), LAYOUTS[weight.format]
    else:
        data, layout = _pack_stream(cpu, weight)
    order = getattr(weight, "order", None)
    # Activations may take two rows of codes each.
    shared = 2 * layout.steps(n_in) * layout.blocks * layout.rounded_block
    if not byte_tiles.can_decode(layout):
        kind = ""
    made, scratch = linear_kernel(layout, kind), byte_tiles.scratch_bytes(layout, n_in, kind)
    return PackedWeight(
        data, weight.format, n_out, n_in, made, shared, order, None, scratch, layout, joins=True
    )


def _groups_are_known(kind: str) -> bool:
    """Of a format named like 'int4_g128'."""
    found = _GROUPED.fullmatch(kind)
    return bool(found and grouped_layout(int(found["bits"]), int(found["group"] or 128), "half", False))


def blocks_and_rounding(facts: OpFacts) -> str | None:
    """The `when` of quantized weights with rounded activations."""
    kind = facts.sizes.get("kind", "plain numbers")
    if kind not in KNOWN and not _groups_are_known(kind):
        return f"it reads blocks and whole numbers in groups of 16 and more, not {kind}"
    if facts.sizes.get("activations", "float32") == "float32":
        return "it rounds activations to int8"
    if facts["n_in"] % BLOCK:
        return f"{facts['n_in']} inputs are not whole blocks of {BLOCK}"
    return float32_rows(facts)


native = Packing(pack=pack, apply=multiply)
linear.variant("native", on="cpu", when=blocks_and_rounding, native=True)(native)
