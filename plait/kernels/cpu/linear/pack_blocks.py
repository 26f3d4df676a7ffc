"""Packing: GGUF blocks into the tiles of `layout`, on all threads, by one generated kernel per format.

Codes are moved four at a time: a quad of one output is 32 bits, in the file (perhaps a nibble or some bits of
each byte) and in the tile.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch

from plait.errors import ShapeMismatch
from plait.kernels.cpu.codegen.kernel import Kernel, load_generated
from plait.kernels.cpu.linear.layout import BLOCK, LAYOUTS, TILE, Layout
from plait.kernels.cpu.runtime.executor import Executor
from plait.kernels.cpu.runtime.tile_memory import room
from plait.quant.gguf import Gguf, block_type

_HEAD = '''"""Packs {name} blocks: made by plait.kernels.cpu.linear.pack_blocks."""
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

_NIBBLES = "(bits(src + {at} + 4 * {i}) >> {s}) & 0x0F0F0F0F"  # of 16 bytes: quads 0..3 low, 4..7 high
_RUN = "(bits(src + {at} + 32 * (g >> 1) + 4 * {q}) >> (4 * (g & 1))) & 0x0F0F0F0F"
_PAIRS = "(bits(src + {at} + 32 * (g >> 2) + 4 * {{q}}) >> (2 * (g & 3))) & 0x03030303"
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


def planes(layout: Layout) -> list[str]:
    """Statements that put the codes q0..q7 of one output into both planes of block b."""
    low = f"to + b * {layout.plane_bytes} + 4 * n"
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


def _scales(layout: Layout, reader: _Reader) -> list[str]:
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
def packer(name: str) -> Kernel:
    """The kernel that packs a GGUF format: source, its row stride, outputs, blocks of 32 in a row, packed."""
    layout, reader, kind = LAYOUTS[name], READERS[name], block_type(name)
    head = _HEAD.format(
        name=name,
        per_step=layout.blocks,
        nbytes=layout.nbytes,
        per_file=kind.elements // BLOCK,
        file_bytes=kind.nbytes,
    )
    codes = [
        f"q{q} = "
        + reader.code.replace("{q}", str(q)).replace("{i}", str(q % 4)).replace("{s}", str(q // 4 * 4))
        for q in range(8)
    ]
    body = [*codes, *planes(layout), *_scales(layout, reader)]
    source = head + "".join(" " * 20 + line + "\n" for line in body)
    made: Kernel = load_generated(f"pack_{name.lower()}", source).pack
    return made


def pack_blocks(cpu: Executor, weight: Gguf) -> torch.Tensor:
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
    cpu.launch(packer(weight.format), data, data.stride(0), n_out, n_in // BLOCK, out, rows=n_out)
    return out
