"""Embedding rows of a quantized table: decoded from planes by one launch.

A program decodes some units of one token's row. A row of a plane is 32 bytes of each unit, so nothing that is
not of the row is read. The numbers are those of `Weight.gather`: rounded to the result's dtype once, then
scaled.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from plait.kernels.triton.dependent_launch import await_previous
from plait.kernels.triton.forms import FLOAT16, FLOAT32, KernelForm
from plait.kernels.triton.linear.decode_planes import decode_field, load_level, load_unit
from plait.kernels.triton.linear.many_rows import combine_number
from plait.kernels.triton.linear.plane_arguments import decode_constants, plane_strides, plane_tensors
from plait.kernels.triton.linear.plane_forms import (
    EVERY,
    FLOAT16_POINTERS,
    FLOAT32_POINTERS,
    POINTERS,
    scale_types,
)
from plait.ops.launch import launch
from plait.ops.registry import OpFacts
from plait.ops.rows import TablePacking, embed
from plait.quant.plane_parts import pack_planes
from plait.quant.planes import Planes
from plait.quant.weight import Weight

UNITS = 16  # of a program


@triton.jit
def embed_planes(
    ids, codes, high, scales, levels, table, out, units, n_in, factor, out_row,
    codes_unit, high_unit, scales_row, levels_row,
    BITS: tl.constexpr, HIGH: tl.constexpr, VALUE: tl.constexpr, ZERO: tl.constexpr, SCALES: tl.constexpr,
    GROUP: tl.constexpr, BLOCK: tl.constexpr, TALL: tl.constexpr, UNITS: tl.constexpr,
    IS_SCALED: tl.constexpr,
):  # fmt: skip
    """ids: [T] int64 -> out [T, n_in], rows of planes times `factor`."""
    await_previous()
    UNIT: tl.constexpr = 256 // (HIGH if HIGH else BITS)
    PARTS: tl.constexpr = BITS // HIGH if HIGH else 1
    token, lane = tl.program_id(0).to(tl.int64), tl.arange(0, 16)
    row = tl.load(ids + token).to(tl.int64)
    unit = tl.program_id(1) * UNITS + tl.arange(0, UNITS)
    safe = tl.minimum(unit, units - 1)
    place = row * 16 + lane[None, :]
    at = safe.to(tl.int64)[:, None]
    words, more = load_unit(
        codes + at * (PARTS * codes_unit) + place, high + at * high_unit + place, codes_unit, BITS, HIGH
    )
    for field in tl.static_range(UNIT // 16):
        column = safe * UNIT + 16 * field
        first = tl.load(scales + (column // BLOCK).to(tl.int64) * scales_row + row // TALL)
        level = first
        if SCALES != "plain" and SCALES != "pairs":
            level = load_level(levels + (column // GROUP).to(tl.int64) * levels_row + row, field, SCALES)
        number = decode_field(words, more, table, field, tl.float32, BITS, HIGH, VALUE, 0)
        number = combine_number(number, first, level, ZERO, SCALES).to(out.dtype.element_ty)
        if IS_SCALED:
            by = (tl.zeros([1, 1], tl.float32) + factor).to(
                out.dtype.element_ty
            )  # the reference rounds it, too
            number = (number.to(tl.float32) * by.to(tl.float32)).to(out.dtype.element_ty)
        columns = (unit * UNIT + 16 * field)[:, None] + lane[None, :]
        tl.store(out + token * out_row + columns, number, mask=columns < n_in)


def pack(table: Weight) -> Planes | Weight:
    """The table in planes; one that has none, or with columns in another order, is kept as it is."""
    planes = pack_planes(table)
    return table if planes is None or planes.order is not None else planes


def take_rows(token_ids: Tensor, table: Planes | Weight, scale: float, dtype: torch.dtype) -> Tensor:
    """`embed` of what `pack` made."""
    if not isinstance(table, Planes):
        return embed.reference(token_ids, table, scale, dtype)
    n_in, layout, ids = table.shape[1], table.layout, token_ids.flatten()
    out = torch.empty(len(ids), n_in, dtype=dtype, device=token_ids.device)
    units = layout.padded(n_in) // layout.unit
    if len(ids):
        launch(
            embed_planes, (len(ids), -(-units // UNITS)), ids, *plane_tensors(table), out,
            units, n_in, scale, out.stride(0), *plane_strides(table), UNITS=UNITS, IS_SCALED=scale != 1.0,
            num_warps=1, **decode_constants(layout),
        )  # fmt: skip
    return out.view(*token_ids.shape, n_in).flatten(1)


def why_not(facts: OpFacts) -> str | None:
    """The `when`: a table that is quantized."""
    kind = facts.sizes.get("kind")
    is_plain = kind is None or getattr(getattr(torch, kind, None), "is_floating_point", False)
    return "the table is plain numbers" if is_plain else None


embed.variant("planes", on="cuda", when=why_not)(TablePacking(pack, take_rows))


def forms() -> Iterator[KernelForm]:
    """Tables of the formats that published models have, and of every format in float32."""
    for name, (layout, scales) in EVERY.items():
        of = scale_types(layout, scales) | {"ids": "i64*", "factor": "fp32"}
        constants = decode_constants(layout) | {"UNITS": UNITS, "IS_SCALED": True}
        for end, pointers in (("", POINTERS), (FLOAT32, FLOAT32_POINTERS), (FLOAT16, FLOAT16_POINTERS)):
            if end == FLOAT32 or name in (("Q4_K", "Q6_K", "Q8_0") if not end else ("Q4_K",)):
                yield KernelForm(
                    f"embed, {name}{end}", embed_planes, pointers | of, constants, num_warps=1,
                    demands=(("LDG.128",),),
                )  # fmt: skip
