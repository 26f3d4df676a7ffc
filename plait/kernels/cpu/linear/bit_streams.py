"""Packs weights that are not runs of blocks: integers in groups, four-bit floats, and blocks taken apart.

Codes come as streams, the lowest bits of a byte first, some rows at a time. A generated kernel moves them
into the tiles of `layout`. Torch moves the scales, because they are few. Nothing is rounded.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from plait.errors import ShapeMismatch
from plait.kernels.cpu.codegen.kernel import Kernel, load_generated
from plait.kernels.cpu.linear.layout import BLOCK, LAYOUTS, TILE, Layout, grouped_layout
from plait.kernels.cpu.linear.pack_blocks import planes
from plait.kernels.cpu.runtime.executor import Executor
from plait.kernels.cpu.runtime.tile_memory import room
from plait.quant.bits import unpack
from plait.quant.fp4 import Fp4
from plait.quant.gguf import Gguf
from plait.quant.gguf_parts import half_power
from plait.quant.grouped import Grouped
from plait.quant.weight import Weight

PIECE = 1 << 22  # numbers at a time
_SCALES = {torch.float16: "half", torch.bfloat16: "brain", torch.float32: "float"}
_GROUPED = re.compile(r"int(?P<bits>\d)(?:_g(?P<group>\d+))?")
_HEAD = '''"""Packs streams of {bits}-bit codes: made by plait.kernels.cpu.linear.bit_streams."""
import numpy as np
from plait.kernels.cpu.runtime.frame import word
from plait.kernels.cpu.codegen.kernel import inline, kernel
from plait.kernels.cpu.codegen.vec import get_u8, put_i32


@inline
def byte(a):
    return np.int64(get_u8(a))


@inline
def put(a, v):
    put_i32(a, np.int32(v))


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
                    src = row + ({per_step} * step + b) * {block_bytes}
'''
_QUADS = {  # four codes of a block in four bytes
    8: "byte(src + 4 * {q}) | byte(src + 4 * {q} + 1) << 8 | byte(src + 4 * {q} + 2) << 16"
    " | byte(src + 4 * {q} + 3) << 24",
    4: "(byte(src + 2 * {q}) & 15) | (byte(src + 2 * {q}) & 240) << 4"
    " | (byte(src + 2 * {q} + 1) & 15) << 16 | (byte(src + 2 * {q} + 1) & 240) << 20",
    2: "(byte(src + {q}) & 3) | (byte(src + {q}) & 12) << 6 | (byte(src + {q}) & 48) << 12"
    " | (byte(src + {q}) & 192) << 18",
}


@dataclass(frozen=True, slots=True)
class Plane:
    """Numbers of a record: `each` per step, the first of them `at` bytes from its start."""

    at: int
    each: int
    values: Tensor  # [rows, n], their bytes as they are to be kept


@dataclass(frozen=True, slots=True)
class BitStream:
    """How a weight is kept, and some of its rows: uint8 codes of `bits` bits, [rows, n], and the planes."""

    layout: Layout
    bits: int
    some: Callable[[int, int], tuple[Tensor, list[Plane]]]


@cache
def _packer(layout: Layout, bits: int) -> Kernel:
    head = _HEAD.format(
        bits=bits, per_step=layout.blocks, nbytes=layout.nbytes, block_bytes=BLOCK * bits // 8
    )
    body = [f"q{q} = " + _QUADS[bits].replace("{q}", str(q)) for q in range(8)] + planes(layout)
    source = head + "".join(" " * 20 + line + "\n" for line in body)
    made: Kernel = load_generated(f"pack_{bits}_bits", source).pack
    return made


def put_plane(tiles: Tensor, plane: Plane) -> None:
    """A plane into its place. tiles: uint8 [tiles, steps, bytes of a record]."""
    count, steps = tiles.shape[:2]
    size, values = plane.values.element_size(), plane.values
    whole = torch.zeros(count * TILE, steps * plane.each, dtype=values.dtype)
    whole[: values.shape[0], : values.shape[1]] = values
    ordered = whole.view(count, TILE, steps, plane.each).permute(0, 2, 3, 1).contiguous()
    width = plane.each * TILE * size
    tiles[:, :, plane.at : plane.at + width] = ordered.view(torch.uint8).view(count, steps, width)


def pack_streams(cpu: Executor, weight: Weight) -> tuple[Tensor, Layout]:
    """The tiles of a weight, uint8, and how they are laid out. Raises ShapeMismatch for what is not known."""
    stream, (n_out, n_in) = stream_of(weight), weight.shape
    if stream is None:
        raise ShapeMismatch(f"{weight.format} weights cannot be packed")
    layout = stream.layout
    tile, steps = layout.tile_bytes(n_in), layout.steps(n_in)
    out = room(-(-n_out // TILE) * tile)
    rows = max(1, PIECE // n_in // TILE) * TILE
    for start in range(0, n_out, rows):
        stop = min(start + rows, n_out)
        codes, kept = stream.some(start, stop)
        if codes.device.type != "cpu":
            raise ShapeMismatch(f"packing wants codes in the CPU's memory, got {codes.device}")
        codes = codes if codes.stride(1) == 1 else codes.contiguous()
        part = out[start // TILE * tile : -(-stop // TILE) * tile]
        kernel = _packer(layout, stream.bits)
        cpu.launch(kernel, codes, codes.stride(0), stop - start, n_in // BLOCK, part, rows=stop - start)
        for plane in kept:
            put_plane(part.view(-1, steps, layout.nbytes), plane)
    return out, layout


def stream_of(weight: Weight) -> BitStream | None:
    """How that weight is packed, or None if it is not packed here."""
    if isinstance(weight, Grouped):
        return _of_grouped(weight)
    if isinstance(weight, Fp4):
        return _of_mxfp4(weight) if weight.format == "mxfp4" else _of_nvfp4(weight)
    if isinstance(weight, Gguf) and weight.kind.parts and weight.format in LAYOUTS:
        return _of_parts(weight)
    return None


def find_layout(kind: str) -> Layout | None:
    """The layout of a format named like 'int4_g128' (with some scale), or None."""
    found = _GROUPED.fullmatch(kind)
    return grouped_layout(int(found["bits"]), int(found["group"] or 128), "half", False) if found else None


def _of_grouped(w: Grouped) -> BitStream | None:
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

    return BitStream(layout, bits, some)


def _brain(values: Tensor) -> Tensor:
    """bfloat16 of float32 numbers that have no more bits."""
    return (values.view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16)


def _of_mxfp4(w: Fp4) -> BitStream:
    scales: Any = "brain" if w.factor is None else "float"
    layout = Layout(64, 4, 0, 32, 12, scales, "e2m1")

    def some(start: int, stop: int) -> tuple[Tensor, list[Plane]]:
        part = w.rows(start, stop)
        values = half_power(part.scales).masked_fill(part.scales == 255, float("nan"))
        values = _brain(values) if part.factor is None else values * part.factor.view(-1, 1)
        return part.codes, [Plane(layout.scales_at, layout.groups, values)]

    return BitStream(layout, 4, some)


def _of_nvfp4(w: Fp4) -> BitStream:
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

    return BitStream(layout, 4, some)


def _of_parts(w: Gguf) -> BitStream:
    layout, parts = LAYOUTS[w.format], w.kind.parts
    assert parts is not None  # `stream_of` has looked

    def some(start: int, stop: int) -> tuple[Tensor, list[Plane]]:
        rows = stop - start
        found = parts(w.data[start:stop].reshape(-1, w.kind.nbytes))
        unit, levels = found.unit.view(rows, -1), found.levels.view(rows, -1)
        match layout.scales:
            case "half":
                kept = [Plane(layout.scales_at, layout.groups, unit.half())]
            case "brain":
                kept = [Plane(layout.scales_at, layout.groups, _brain(unit.contiguous()))]
            case "small":  # float16 that are 256 times too small have E4M3's bits, 7 higher
                levels = ((levels / 128).half().view(torch.int16) >> 7).to(torch.uint8)
                unit = torch.full((rows, layout.steps(w.shape[1])), 0.5)
                kept = [Plane(layout.scales_at, layout.groups, levels), Plane(layout.outer_at, 1, unit)]
            case _:
                levels = levels.to(torch.int8)
                kept = [Plane(layout.scales_at, layout.groups, levels), Plane(layout.outer_at, 1, unit)]
        return found.codes.view(rows, -1), kept

    return BitStream(layout, 8, some)
