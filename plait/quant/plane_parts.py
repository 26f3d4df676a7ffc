"""How each storage becomes planes: its codes, and its scales as factors that are exact.

`pack_planes` lays a weight out; a storage without planes gives None, and is decoded at each use instead.
Everything runs on the weight's own device, some rows at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from plait.quant.bits import bits, fields, nibbles, unpack
from plait.quant.codebook import Codebook
from plait.quant.fp4 import Fp4
from plait.quant.fp8 import Fp8
from plait.quant.gguf import Gguf
from plait.quant.gguf_parts import BlockParts
from plait.quant.grouped import Grouped
from plait.quant.planes import ALL, E5M3_WORD, IQ4_ORDER, LANES, PlaneLayout, Planes, fill_plane, pieces_of
from plait.quant.weight import Weight

NO_NUMBER = 0x7F  # E4M3's NaN, of either sign


@dataclass(frozen=True, slots=True)
class CodeParts:
    """Some rows taken apart. codes: uint8 [n, columns]; scales: [n, blocks]; levels: [n, groups] or None."""

    codes: Tensor
    scales: Tensor
    levels: Tensor | None = None


Take = Callable[[Tensor], CodeParts]  # blocks uint8 [n, bytes of a block] -> parts, n rows


def _halves(blocks: Tensor, at: int) -> Tensor:
    """The float16 at a byte of every block, [n, 1], as it is stored."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16)


def _words(blocks: Tensor, at: int) -> Tensor:
    """Two float16 as one int32, [n, 1]; the first one is low."""
    return blocks[:, at : at + 4].contiguous().view(torch.int32)


def _four(blocks: Tensor, at: int) -> Tensor:
    return nibbles(blocks[:, None, at : at + 16]).flatten(1)


def _five(blocks: Tensor, at: int) -> Tensor:
    return _four(blocks, at + 4) | (bits(blocks[:, at : at + 4]) << 4)


def _take_q4_0(blocks: Tensor) -> CodeParts:
    return CodeParts(_four(blocks, 2), _halves(blocks, 0))


def _take_q4_1(blocks: Tensor) -> CodeParts:
    return CodeParts(_four(blocks, 4), _words(blocks, 0))


def _take_q5_0(blocks: Tensor) -> CodeParts:
    return CodeParts(_five(blocks, 2), _halves(blocks, 0))


def _take_q5_1(blocks: Tensor) -> CodeParts:
    return CodeParts(_five(blocks, 4), _words(blocks, 0))


def _q2_k(blocks: Tensor) -> CodeParts:
    codes = fields(blocks[:, 16:80].reshape(-1, 2, 32), 2).flatten(1)
    return CodeParts(codes, _words(blocks, 80), blocks[:, :16])


def _q3_k(blocks: Tensor) -> CodeParts:
    low = nibbles(blocks[:, None, 96:104]).flatten(1)
    levels = (low | (fields(blocks[:, None, 104:108], 2).flatten(1) << 4)).to(torch.int8) - 32
    codes = fields(blocks[:, 32:96].reshape(-1, 2, 32), 2).flatten(1)
    codes |= fields(blocks[:, None, :32], 1).flatten(1) << 2
    return CodeParts(codes, _halves(blocks, 108), levels)


def _k_levels(packed: Tensor) -> Tensor:
    """[n, 12] -> [n, 8] int16: the six-bit scale of a group below, its minimum above (see `gguf_k`)."""
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scale = torch.cat((first & 63, (third & 15) | ((first >> 6) << 4)), 1)
    minimum = torch.cat((second & 63, (third >> 4) | ((second >> 6) << 4)), 1)
    return scale.to(torch.int16) | minimum.to(torch.int16) << 8


def _q4_k(blocks: Tensor) -> CodeParts:
    codes = nibbles(blocks[:, 16:].reshape(-1, 4, 32)).flatten(1)
    return CodeParts(codes, _words(blocks, 0), _k_levels(blocks[:, 4:16]))


def _q5_k(blocks: Tensor) -> CodeParts:
    codes = nibbles(blocks[:, 48:].reshape(-1, 4, 32)) | (fields(blocks[:, None, 16:48], 1) << 4)
    return CodeParts(codes.flatten(1), _words(blocks, 0), _k_levels(blocks[:, 4:16]))


def _q6_k(blocks: Tensor) -> CodeParts:
    low = nibbles(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 8, 32)
    high = fields(blocks[:, 128:192].reshape(-1, 2, 32), 2)
    levels = blocks[:, 192:208].contiguous().view(torch.int8)
    return CodeParts((low | (high << 4)).flatten(1), _halves(blocks, 208), levels)


def _turn(codes: Tensor) -> Tensor:
    """Codes of IQ4 with their last bit on top: see `IQ4_ORDER`."""
    return codes >> 1 | (codes & 1) << 3


def _iq4_nl(blocks: Tensor) -> CodeParts:
    return CodeParts(_turn(_four(blocks, 2)), _halves(blocks, 0))


def _iq4_xs(blocks: Tensor) -> CodeParts:
    low = fields(blocks[:, 4:8].unsqueeze(-1), 4).flatten(1)  # neighbours share a byte
    high = fields(blocks[:, 2:4].unsqueeze(-1), 2).flatten(1)
    levels = (low | (high << 4)).to(torch.int8) - 32
    return CodeParts(_turn(nibbles(blocks[:, 8:].reshape(-1, 8, 16)).flatten(1)), _halves(blocks, 0), levels)


def _q8_k(blocks: Tensor) -> CodeParts:
    return CodeParts(blocks[:, 4:260], blocks[:, :4].contiguous().view(torch.float32))


def _nvfp4(blocks: Tensor) -> CodeParts:
    """Levels: E4M3 without a sign, and zero for what is no number."""
    levels = blocks[:, :4] & NO_NUMBER
    levels = torch.where(levels == NO_NUMBER, 0, levels)
    codes = nibbles(blocks[:, 4:].reshape(-1, 4, 8)).flatten(1)
    codes, levels = _with_e5m3(codes, levels)
    return CodeParts(codes, torch.ones(len(blocks), 1, device=blocks.device), levels)


def _with_e5m3(codes: Tensor, levels: Tensor) -> tuple[Tensor, Tensor]:
    """Codes of E2M1 and bytes of E4M3, as codes and bytes of E5M3: exact, and without what is subnormal.

    A sign of a level goes to its codes, and a level of zero makes them zeros.
    """
    numbers = levels.view(torch.float8_e4m3fn).float()
    words = numbers.abs().view(torch.int32).bitwise_right_shift_(20).sub_(E5M3_WORD)
    signs, is_none = (levels >> 7) << 3, numbers == 0
    each = codes.reshape(*levels.shape, -1) ^ signs[..., None]
    codes = each.masked_fill(is_none[..., None], 0).flatten(1)
    return codes, words.masked_fill_(is_none, 0).clamp_(max=255).to(torch.uint8)


def _whole(parts: Callable[[Tensor], BlockParts], blocks: Tensor, dtype: torch.dtype) -> CodeParts:
    """Blocks with one number above, which `dtype` holds exactly."""
    found = parts(blocks)
    return CodeParts(found.codes, found.unit.to(dtype))


def _with_levels(parts: Callable[[Tensor], BlockParts], blocks: Tensor) -> CodeParts:
    found = parts(blocks)
    return CodeParts(found.codes, found.unit, found.levels.to(torch.int8))


_SIMPLE: dict[str, tuple[PlaneLayout, Take]] = {
    "Q4_0": (PlaneLayout(4, 0, "integer", 8, "plain", 32, 32), _take_q4_0),
    "Q4_1": (PlaneLayout(4, 0, "integer", 0, "pairs", 32, 32), _take_q4_1),
    "Q5_0": (PlaneLayout(4, 1, "integer", 16, "plain", 32, 32), _take_q5_0),
    "Q5_1": (PlaneLayout(4, 1, "integer", 0, "pairs", 32, 32), _take_q5_1),
    "Q8_0": (PlaneLayout(8, 0, "byte", 0, "plain", 32, 32), lambda b: CodeParts(b[:, 2:], _halves(b, 0))),
    "Q8_1": (PlaneLayout(8, 0, "byte", 0, "plain", 32, 32), lambda b: CodeParts(b[:, 4:], _halves(b, 0))),
    "Q8_K": (PlaneLayout(8, 0, "byte", 0, "plain", 256, 256), _q8_k),
    "Q2_K": (PlaneLayout(2, 0, "integer", 0, "nibbles", 16, 256), _q2_k),
    "Q3_K": (PlaneLayout(2, 1, "integer", 4, "levels", 16, 256), _q3_k),
    "Q4_K": (PlaneLayout(4, 0, "integer", 0, "mins", 32, 256), _q4_k),
    "Q5_K": (PlaneLayout(4, 1, "integer", 0, "mins", 32, 256), _q5_k),
    "Q6_K": (PlaneLayout(4, 2, "integer", 32, "levels", 16, 256), _q6_k),
    "IQ4_NL": (PlaneLayout(4, 0, "iq4", 0, "plain", 32, 32), _iq4_nl),
    "IQ4_XS": (PlaneLayout(4, 0, "iq4", 0, "levels", 32, 256), _iq4_xs),
    "NVFP4": (PlaneLayout(4, 0, "e2m1", 0, "e5m3", 16), _nvfp4),
}  # fmt: skip
_WHOLE = {  # further blocks: (layout, what holds their number)
    "MXFP4": (PlaneLayout(4, 0, "e2m1 doubled", 0, "plain", 32, 32), torch.bfloat16),
    "TQ1_0": (PlaneLayout(2, 0, "integer", 1, "plain", 256, 256), torch.float16),
    "TQ2_0": (PlaneLayout(2, 0, "integer", 1, "plain", 256, 256), torch.float16),
    "Q1_0": (PlaneLayout(2, 0, "integer", 1, "plain", 128, 128), torch.float16),
    "Q2_0": (PlaneLayout(2, 0, "integer", 1, "plain", 64, 64), torch.float16),
}
_INTEGERS = {2: (2, 0), 3: (2, 1), 4: (4, 0), 5: (4, 1), 6: (4, 2), 7: (8, 0), 8: (8, 0)}


def pack_planes(weight: Weight) -> Planes | None:
    """The weight in planes, on its device; None for plain numbers and for groups under 16."""
    match weight:
        case Gguf():
            return _pack_gguf(weight)
        case Grouped():
            return _pack_grouped(weight)
        case Fp8():
            return _pack_fp8(weight)
        case Fp4():
            return _pack_fp4(weight)
        case Codebook():
            return _pack_codebook(weight)
    return None


def _is_whole(group: int, cols: int) -> bool:
    return group >= cols or group % LANES == 0


def _fill(
    layout: PlaneLayout,
    shape: tuple[int, int],
    device: torch.device,
    take: Callable[[int, int], CodeParts],
    table: Tensor | None = None,
    order: Tensor | None = None,
) -> Planes:
    """Planes of the parts that `take` has of some rows: [n, …] each, laid out as […, n]."""
    rows, cols = shape
    width = layout.padded(cols)

    def plane(bits: int) -> Tensor:
        return torch.empty(width * bits // 256, rows, LANES, dtype=torch.int16, device=device)

    codes, high = plane(layout.bits), plane(layout.high) if layout.high else None
    columns: dict[str, Tensor] = {}

    def put(name: str, size: int, start: int, stop: int, found: Tensor, tall: int) -> None:
        count = 1 if size >= ALL else -(-width // size)
        if name not in columns:
            columns[name] = torch.empty(count, -(-rows // tall), dtype=found.dtype, device=device)
        missing = F.pad(found, (0, count - found.shape[1]))
        columns[name][:, start // tall : -(-stop // tall)] = missing.T

    for start, stop in pieces_of(rows, cols, device, layout.tall):
        found = take(start, stop)
        some = F.pad(found.codes, (0, width - cols))
        if high is not None:
            fill_plane(high[:, start:stop], some >> layout.bits, layout.high)
            some = some & ((1 << layout.bits) - 1)
        fill_plane(codes[:, start:stop], some, layout.bits, has_signs=layout.has_signs)
        put("scales", layout.block, start, stop, found.scales, layout.tall)
        levels = found.levels
        if levels is not None and layout.scales == "e5m3":
            levels = F.pad(levels, (0, width // LANES - levels.shape[1])).contiguous().view(torch.int32)
        if levels is not None:
            put("levels", layout.entry, start, stop, levels, 1)
    return Planes(layout, shape, codes, high, columns["scales"], columns.get("levels"), table, order)


def _pack_gguf(weight: Gguf) -> Planes:
    kind = weight.kind
    values: tuple[int, ...] | None = IQ4_ORDER if kind.name.startswith("IQ4") else None
    if kind.name in _SIMPLE:
        layout, split = _SIMPLE[kind.name]
    elif kind.name in _WHOLE and kind.parts:
        layout, dtype = _WHOLE[kind.name]
        split = partial(_whole, kind.parts, dtype=dtype)
    else:  # IQ1 to IQ3: a table of at most 16 numbers, levels under a float
        assert kind.parts
        values, parts = kind.table, kind.parts
        count = parts(weight.data[:1, : kind.nbytes]).levels.shape[1]
        low, high = (2, 1) if len(values) <= 8 else (4, 0)
        layout, split = (
            PlaneLayout(low, high, "table", 0, "levels", 256 // count, 256),
            partial(_with_levels, parts),
        )

    def take(start: int, stop: int) -> CodeParts:
        found = split(weight.data[start:stop].reshape(-1, kind.nbytes))
        levels = None if found.levels is None else found.levels.reshape(stop - start, -1)
        return CodeParts(
            found.codes.reshape(stop - start, -1), found.scales.reshape(stop - start, -1), levels
        )

    return _fill(layout, weight.shape, weight.data.device, take, _make_table(values, weight.data.device))


def _make_table(values: tuple[float, ...] | None, device: torch.device) -> Tensor | None:
    if values is None:
        return None
    return torch.tensor([*values, *[0.0] * (16 - len(values))], dtype=torch.float32, device=device)


def _pack_grouped(weight: Grouped) -> Planes | None:
    cols, zero = weight.shape[1], 1 << (weight.bits - 1)
    if not _is_whole(weight.group, cols):
        return None
    group = ALL if weight.group >= cols else weight.group
    low, high = _INTEGERS[weight.bits]
    value = "byte" if low == 8 else "integer"
    scales = "plain" if weight.zeros is None else "zeros"
    layout = PlaneLayout(low, high, value, 0 if low == 8 else zero, scales, group, group)

    def take(start: int, stop: int) -> CodeParts:
        codes = unpack(weight.codes[start:stop], weight.bits, cols)
        if low == 8:
            codes = codes - zero  # as signed bytes, modulo 256
        zeros = None if weight.zeros is None else (weight.zeros[start:stop].int() - zero).to(torch.int8)
        return CodeParts(codes, weight.scales[start:stop], zeros)

    return _fill(layout, weight.shape, weight.codes.device, take, order=weight.order)


def _pack_fp8(weight: Fp8) -> Planes | None:
    """A code that is no number makes its group's scale none, and so each sum over it, as it would be."""
    (rows, cols), (tall, wide) = weight.shape, weight.block
    if not _is_whole(wide, cols):
        return None
    group, tall = ALL if wide >= cols else wide, min(tall, max(1, rows))
    raw = weight.codes.view(torch.uint8)
    layout = PlaneLayout(8, 0, "e4m3", 0, "plain", group, group, tall)

    def take(start: int, stop: int) -> CodeParts:
        codes = raw[start:stop]
        off = F.pad((codes & NO_NUMBER) == NO_NUMBER, (0, -cols % min(group, cols))).unflatten(
            1, (-1, min(group, cols))
        )
        off = F.pad(off.any(2), (0, 0, 0, -len(codes) % tall)).unflatten(0, (-1, tall)).any(1)
        scale = weight.scale[start // tall : -(-stop // tall)].masked_fill(off, float("nan"))
        return CodeParts(codes, scale)

    return _fill(layout, weight.shape, weight.codes.device, take)


def _pack_fp4(weight: Fp4) -> Planes:
    cols, is_mx = weight.shape[1], weight.scales.dtype is torch.uint8
    layout = (
        PlaneLayout(4, 0, "e2m1", 0, "plain", 32, 32) if is_mx else PlaneLayout(4, 0, "e2m1", 0, "e5m3", 16)
    )
    factors = weight._row_factors()

    def take(start: int, stop: int) -> CodeParts:
        codes, scales = unpack(weight.codes[start:stop], 4, cols), weight.scales[start:stop]
        if not is_mx:
            raw = scales.view(torch.uint8)
            is_off = ((raw & NO_NUMBER) == NO_NUMBER).any(1)
            codes, levels = _with_e5m3(codes, raw)
            return CodeParts(codes, factors[start:stop].masked_fill(is_off, float("nan"))[:, None], levels)
        numbers = scales.view(torch.float8_e8m0fnu).float()
        if weight.factor is not None:
            return CodeParts(codes, numbers * factors[start:stop, None])
        return CodeParts(codes, numbers.bfloat16())  # powers of two

    return _fill(layout, weight.shape, weight.codes.device, take)


def _pack_codebook(weight: Codebook) -> Planes | None:
    if not _is_whole(weight.block, weight.shape[1]):
        return None
    layout = PlaneLayout(4, 0, "table", 0, "plain", weight.block, weight.block)
    magnitudes = weight.magnitudes()

    def take(start: int, stop: int) -> CodeParts:
        codes = weight.codes[start:stop]
        return CodeParts(torch.stack((codes >> 4, codes & 15), -1).flatten(1), magnitudes[start:stop])

    return _fill(layout, weight.shape, weight.codes.device, take, weight.table)
