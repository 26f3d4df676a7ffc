"""A matrix for each head in one launch: MLA's absorbed products, and gates that are block-diagonal.

    plain numbers        out[t, h] = W[h] x[t, h]        the tiles of `few_dense`, a head for each program
    stored, rows         the same, W[h] rows of planes   the loop of `multiply_planes`; in float32
                                                         `float32_planes`
    stored, transposed   out[t, h] = W[h]ᵀ x[t, h]       rows of planes are summed over; in float32 there, too

Up to `MOST` rows of x, over planes in float32 any number of them; a row has the same bits whatever other rows
there are. More rows are torch's product, over numbers that are decoded some heads at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from plait.kernels.triton.dependent_launch import await_previous, is_dependent
from plait.kernels.triton.forms import FLOAT16, FLOAT32, KernelForm, split_options, widen
from plait.kernels.triton.linear.decode_planes import decode_field, load_level, load_unit
from plait.kernels.triton.linear.few_rows import EARLY
from plait.kernels.triton.linear.float32_planes import is_float32, multiply_in_float32, transpose_in_float32
from plait.kernels.triton.linear.linear import PlanesTiling, why_several, write_scratch
from plait.kernels.triton.linear.many_rows import combine_number
from plait.kernels.triton.linear.multiply_planes import add_units, multiply_planes, prefetch_planes
from plait.kernels.triton.linear.plane_arguments import (
    decode_constants,
    plane_constants,
    plane_strides,
    plane_tensors,
)
from plait.kernels.triton.linear.plane_forms import (
    EVERY,
    FLOAT16_POINTERS,
    FLOAT32_POINTERS,
    POINTERS,
    WIDE_LOADS,
    scale_types,
)
from plait.kernels.triton.shared_memory import LEAST_SHARED, shared_limit
from plait.ops.heads import HeadPacking, HeadRows, map_heads
from plait.ops.launch import launch
from plait.quant.plane_parts import pack_planes
from plait.quant.planes import PlaneLayout, Planes
from plait.quant.weight import Dense

MOST = 64  # rows of x
BN = 32  # outputs of a program
UNIT = 32  # plain columns of a warp and step
UNITS = 4  # warps, and units of a step
BK = 32  # rows of planes that are summed over at a time
BM = 16  # rows of x of a program that sums over rows


@triton.jit
def heads_dense(
    x, weight, out, m, n, n_in, steps, x_row, x_head, out_row, out_head,
    weight_head, weight_row, weight_column,
    UNIT: tl.constexpr, UNITS: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """x: [m, H, n_in], weight: [H, n, n_in] -> out [m, H, n]. Grid: tiles of outputs, heads, rows of x."""
    await_previous()
    rows, head = tl.program_id(0) * BN + tl.arange(0, BN), tl.program_id(1).to(tl.int64)
    tokens = tl.program_id(2) * BM + tl.arange(0, BM)
    there, tokens_there = rows < n, tokens < m
    column = tl.arange(0, UNITS)[:, None] * UNIT + tl.arange(0, UNIT)[None, :]
    # 32 bits hold the matrices of all heads
    line = weight + head * weight_head + (tl.where(there, rows, 0) * weight_row)[None, :, None]
    line_x = x + head * x_head + (tokens.to(tl.int64) * x_row)[None, None, :]
    total = tl.zeros([UNITS, BN, BM], tl.float32)
    for step in range(steps):
        at = step * (UNITS * UNIT) + column
        inside = at < n_in
        numbers = tl.load(line + at[:, None, :] * weight_column, mask=inside[:, None, :], other=0.0)
        given = tl.load(
            line_x + at[:, :, None], mask=inside[:, :, None] & tokens_there[None, None, :], other=0.0
        )
        total = tl.dot(numbers, given, total, input_precision="ieee")
    place = out + tokens.to(tl.int64)[None, :] * out_row + head * out_head + rows[:, None]
    found = add_units(total, UNITS, BN, BM).to(out.dtype.element_ty)
    tl.store(place, found, mask=there[:, None] & tokens_there[None, :])


@triton.jit
def heads_planes(
    x, codes, high, scales, levels, table, out, m, n, n_in, units, steps, x_row, x_head, out_row, out_head,
    codes_unit, high_unit, scales_row, levels_row,
    BITS: tl.constexpr, HIGH: tl.constexpr, VALUE: tl.constexpr, ZERO: tl.constexpr, SCALES: tl.constexpr,
    GROUP: tl.constexpr, BLOCK: tl.constexpr, TALL: tl.constexpr, APPLY: tl.constexpr, BASE: tl.constexpr,
    CODE: tl.constexpr, EVEN: tl.constexpr, UNITS: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """The same with planes of [H * n, n_in]."""
    rows, head = tl.program_id(0) * BN + tl.arange(0, BN), tl.program_id(1)
    tokens = tl.program_id(2) * BM + tl.arange(0, BM)
    there, tokens_there = rows < n, tokens < m
    line = head * n + tl.where(there, rows, 0)
    if is_dependent():
        prefetch_planes(codes, high, line, 0, units, codes_unit, high_unit, BITS, HIGH, UNITS, EARLY)
    await_previous()
    x_at = x + tokens.to(tl.int64) * x_row + head.to(tl.int64) * x_head
    total = multiply_planes(
        x_at, tokens_there, codes, high, scales, levels, table, line, 0, steps, units, n_in,
        codes_unit, high_unit, scales_row, levels_row, BITS, HIGH, VALUE, ZERO, SCALES, GROUP,
        BLOCK, TALL, APPLY, BASE, CODE, EVEN, UNITS, BN, BM,
    )  # fmt: skip
    place = out + tokens.to(tl.int64)[None, :] * out_row + head.to(tl.int64) * out_head + rows[:, None]
    tl.store(place, total.to(out.dtype.element_ty), mask=there[:, None] & tokens_there[None, :])


@triton.jit
def heads_transposed(
    x, codes, high, scales, levels, table, out, m, n, n_in, x_row, x_head, out_row, out_head,
    codes_unit, high_unit, scales_row, levels_row,
    BITS: tl.constexpr, HIGH: tl.constexpr, VALUE: tl.constexpr, ZERO: tl.constexpr, SCALES: tl.constexpr,
    GROUP: tl.constexpr, BLOCK: tl.constexpr, TALL: tl.constexpr, BK: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """x: [m, H, n], planes of [H * n, n_in] -> out [m, H, n_in]. Grid: units of columns, heads, rows.

    Numbers are rounded to the dtype of x, as `HeadRows.numbers` does.
    """
    await_previous()
    UNIT_: tl.constexpr = 256 // (HIGH if HIGH else BITS)
    PARTS: tl.constexpr = BITS // HIGH if HIGH else 1
    unit, head, lane = tl.program_id(0), tl.program_id(1), tl.arange(0, 16)
    tokens = tl.program_id(2) * BM + tl.arange(0, BM)
    tokens_there = tokens < m
    codes_at, high_at = codes + unit.to(tl.int64) * (PARTS * codes_unit), high + unit.to(tl.int64) * high_unit
    x_at = x + (tokens.to(tl.int64) * x_row)[:, None] + head.to(tl.int64) * x_head
    out_at = out + (tokens.to(tl.int64) * out_row)[:, None] + head.to(tl.int64) * out_head
    for field in tl.static_range(UNIT_ // 16):
        column = unit * UNIT_ + 16 * field
        total = tl.zeros([BM, 16], tl.float32)
        for start in range(0, n, BK):
            own = start + tl.arange(0, BK)
            inside = own < n
            row = head * n + tl.where(inside, own, 0)
            place = row.to(tl.int64)[:, None] * 16 + lane[None, :]
            words, more = load_unit(codes_at + place, high_at + place, codes_unit, BITS, HIGH)
            first = tl.load(scales + (column // BLOCK).to(tl.int64) * scales_row + row // TALL)
            level = first
            if SCALES != "plain" and SCALES != "pairs":
                level = load_level(levels + (column // GROUP).to(tl.int64) * levels_row + row, field, SCALES)
            number = decode_field(words, more, table, field, tl.float32, BITS, HIGH, VALUE, 0)
            number = combine_number(number, first, level, ZERO, SCALES).to(x.dtype.element_ty)
            given = tl.load(x_at + own[None, :], mask=tokens_there[:, None] & inside[None, :], other=0.0)
            total = tl.dot(given, number, total, input_precision="ieee")
        shown = tokens_there[:, None] & (column + lane < n_in)[None, :]
        tl.store(out_at + (column + lane)[None, :], total.to(out.dtype.element_ty), mask=shown)


@dataclass(frozen=True, eq=False)
class HeadPlanes:
    """Each head's matrix in planes [heads * count, in]. `turned`: it is transposed, from `count` to `in`."""

    planes: Planes
    heads: int
    turned: bool

    @property
    def count(self) -> int:
        """Rows of a head."""
        return self.planes.shape[0] // self.heads

    @property
    def n_out(self) -> int:
        """Numbers that come out of a head."""
        return self.planes.shape[1] if self.turned else self.count

    @cached_property
    def tiling(self) -> PlanesTiling:
        return PlanesTiling(self.planes.layout, *self.planes.shape)


def pack(weight: Tensor | HeadRows) -> Tensor | HeadRows | HeadPlanes:
    """Rows of a quantized weight in planes; plain numbers, and what has no planes, are kept as they are."""
    if isinstance(weight, Tensor) or isinstance(weight.weight, Dense):
        return weight
    planes = pack_planes(weight.pick_own())
    if planes is None or planes.order is not None:
        return weight
    return HeadPlanes(planes, weight.heads, weight.turned)


def multiply_heads(x: Tensor, packed: Tensor | HeadRows | HeadPlanes) -> Tensor:
    """`map_heads` of what `pack` made."""
    if isinstance(packed, HeadRows) or not len(x):
        return map_heads.reference(x, packed)
    if len(x) > MOST and (isinstance(packed, Tensor) or not is_float32(x)):
        return _multiply_many(x, packed)
    return multiply_in_blocks(x, packed, 8 if len(x) <= 8 else 16)


def multiply_in_blocks(x: Tensor, packed: Tensor | HeadPlanes, rows: int) -> Tensor:
    """`map_heads` by programs of so many rows of x, 8 or 16; transposed planes take `BM` of them."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    if isinstance(packed, Tensor):
        return _multiply_numbers(x, packed, rows)
    return _multiply_turned(x, packed) if packed.turned else _multiply_rows(x, packed, rows)


def _multiply_many(x: Tensor, packed: Tensor | HeadPlanes) -> Tensor:
    if isinstance(packed, Tensor):
        return map_heads.reference(x, packed)
    numbers = write_scratch(packed.planes, x.dtype).unflatten(0, (packed.heads, -1))
    found: Tensor = torch.einsum("thn,hnm->thm" if packed.turned else "thn,hmn->thm", x, numbers)
    return found


def _multiply_numbers(x: Tensor, weight: Tensor, bm: int) -> Tensor:
    (m, heads, n_in), n = x.shape, weight.shape[1]
    out, bn = torch.empty(m, heads, n, dtype=x.dtype, device=x.device), widen(BN, n)
    launch(
        heads_dense, (-(-n // bn), heads, -(-m // bm)), x, weight, out, m, n, n_in,
        -(-n_in // (UNITS * UNIT)),
        *x.stride()[:2], *out.stride()[:2], *weight.stride(), UNIT=UNIT, UNITS=UNITS, BN=bn, BM=bm,
        num_warps=UNITS, num_stages=2,
    )  # fmt: skip
    return out


def _multiply_rows(x: Tensor, packed: HeadPlanes, bm: int) -> Tensor:
    planes, tiling, (m, heads, n_in) = packed.planes, packed.tiling, x.shape
    out = torch.empty(m, heads, packed.count, dtype=x.dtype, device=x.device)
    if is_float32(x):
        multiply_in_float32(x, planes, None, out)
        return out
    launch(
        heads_planes, (-(-packed.count // BN), heads, -(-m // bm)), x, *plane_tensors(planes), out,
        m, packed.count, n_in, tiling.units, tiling.few_steps, *x.stride()[:2], *out.stride()[:2],
        *plane_strides(planes), **_row_constants(tiling, bm, shared_limit(x.device)),
        **plane_constants(planes.layout, x.dtype, has_assembly=x.is_cuda),
    )  # fmt: skip
    return out


def _row_constants(tiling: PlanesTiling, bm: int, limit: int = LEAST_SHARED) -> dict[str, Any]:
    return {
        "EVEN": tiling.is_even(UNITS), "UNITS": UNITS, "BN": BN, "BM": bm,
        "num_warps": UNITS, "num_stages": min(2, tiling.few_stages(bm, BN, limit)),
    }  # fmt: skip


def _multiply_turned(x: Tensor, packed: HeadPlanes) -> Tensor:
    planes, (m, heads, count) = packed.planes, x.shape
    n_in = planes.shape[1]
    out = torch.empty(m, heads, n_in, dtype=x.dtype, device=x.device)
    if is_float32(x):
        transpose_in_float32(x, planes, out)
        return out
    launch(
        heads_transposed, (packed.tiling.units, heads, -(-m // BM)), x, *plane_tensors(planes), out,
        m, count, n_in, *x.stride()[:2], *out.stride()[:2], *plane_strides(planes), BK=BK, BM=BM, num_warps=1,
        **decode_constants(planes.layout),
    )  # fmt: skip
    return out


map_heads.variant("triton", on="cuda", when=why_several)(HeadPacking(pack, multiply_heads))


def forms() -> Iterator[KernelForm]:
    """MLA's absorbed products of DeepSeek-V2-Lite and V3, plain and stored, and gates of RecurrentGemma.

    Stored matrices in float32 are forms of `float32_planes`.
    """
    strides = dict.fromkeys(("x_head", "out_head", "weight_head", "weight_row"), "i32!")
    for end, pointers, demands in (
        ("", POINTERS, WIDE_LOADS),
        (FLOAT32, FLOAT32_POINTERS, WIDE_LOADS[:1]),
        (FLOAT16, FLOAT16_POINTERS, WIDE_LOADS),
    ):
        for rows in (8, 16):
            constants = {"UNIT": UNIT, "UNITS": UNITS, "BN": BN, "BM": rows, "weight_column": 1}
            named = f"heads, plain, {rows} rows{end}"
            yield KernelForm(named, heads_dense, pointers | strides, constants, UNITS, demands=demands)
    for name in ("Q4_K", "Q8_0", "FP8 b128"):
        layout, scales = EVERY[name]
        turned = decode_constants(layout) | {"BK": BK, "BM": BM}
        for end, pointers, dtype in (
            ("", POINTERS, torch.bfloat16),
            (FLOAT16, FLOAT16_POINTERS, torch.float16),
        ):
            types = pointers | strides | scale_types(layout, scales)
            yield _row_form(f"heads, {name}{end}", layout, types, dtype)
            if not end or name == "Q8_0":  # it decodes to float32: one layout stands for all
                named = f"heads, {name}, transposed{end}"
                yield KernelForm(named, heads_transposed, types, turned, 1, demands=WIDE_LOADS)


def _row_form(name: str, layout: PlaneLayout, types: dict[str, str], dtype: torch.dtype) -> KernelForm:
    constants, options = split_options(_row_constants(PlanesTiling(layout, 16 * 128, 512), 16))
    shared = plane_constants(layout, dtype, has_assembly=True)
    return KernelForm(name, heads_planes, types, shared | constants, **options, demands=WIDE_LOADS)
