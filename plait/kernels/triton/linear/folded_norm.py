"""Linear layers of 1 to 16 rows that compute an RMS norm between them: `ops.folded_norm`.

The kernels of few rows (`few_rows`) with other ends. The layer in front of the norm adds its result to the
residual, multiplies that by the norm's weight, and leaves the squares of the row in sums of 16 numbers. The
layer behind it adds them, and divides its own sums by the root of their mean. Nothing in a loop over a weight
is more.

All of 1 to 16 rows have the same bits as any of them alone: every sum has a fixed order, which no tile of
rows changes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from plait.kernels.triton.dependent_launch import await_previous, is_dependent, prefetch_rows
from plait.kernels.triton.forms import widen
from plait.kernels.triton.linear.few_rows import (
    ACTIVATIONS,
    EARLY,
    add_shares,
    multiply_dense,
    rows_of,
    write_result,
)
from plait.kernels.triton.linear.linear import (
    DENSE_ROWS,
    FEW_REGISTERS,
    HIGH_REGISTERS,
    PackedNumbers,
    PackedPlanes,
    dense_constants,
    make_result,
    shape_of,
    why_several,
)
from plait.kernels.triton.linear.multiply_planes import add_units, multiply_planes, prefetch_planes
from plait.kernels.triton.linear.plane_arguments import plane_constants, plane_strides, plane_tensors
from plait.kernels.triton.shared_memory import shared_limit
from plait.ops.folded_norm import GROUP, MOST_ROWS, add_linear, norm_glu, norm_linear
from plait.ops.launch import launch
from plait.ops.linear import Linear
from plait.ops.registry import OpFacts
from plait.quant.planes import PlaneLayout

NAME = "triton"
SUM: tl.constexpr = tl.constexpr(GROUP)


@triton.jit
def _divide_rows(
    total, squares, tokens, tokens_there, sums, n_in, eps, SUMS: tl.constexpr, BM: tl.constexpr
):  # fmt: skip
    """total [BN, BM], each row of x divided by its rms. squares: [rows, sums]."""
    lane, first = tl.arange(0, SUM), squares + tokens.to(tl.int64)[None, :] * sums
    found = tl.zeros([SUM, BM], tl.float32)
    for i in tl.static_range(SUMS // SUM):
        c = i * SUM + lane
        there = (c < sums)[:, None] & tokens_there[None, :]
        found += tl.load(first + c[:, None], mask=there, other=0.0)
    whole = add_units(tl.reshape(found, [SUM, 1, BM]), SUM, 1, BM)
    return total * tl.rsqrt(whole / n_in + eps)


@triton.jit
def _add_to_residual(
    total, rows, there, tokens, tokens_there, tile, bias, out, squares, residual, added, norm, scale, n,
    sums, BIAS: tl.constexpr, SCALED: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """residual + scale · total -> added, times norm -> out, the sums of its squares -> squares. [rows, n]"""
    if BIAS:
        total += tl.load(bias + rows, mask=there, other=0.0).to(tl.float32)[:, None]
    kept = added.dtype.element_ty
    delta = total.to(kept).to(tl.float32)  # rounded where the ops that this replaces round
    if SCALED:
        delta = (delta * scale).to(kept).to(tl.float32)
    place = tokens.to(tl.int64)[None, :] * n + rows[:, None]
    inside = there[:, None] & tokens_there[None, :]
    x = (tl.load(residual + place, mask=inside, other=0.0).to(tl.float32) + delta).to(kept)
    tl.store(added + place, x, mask=inside)
    wide = tl.where(inside, x.to(tl.float32), 0.0)
    weight = tl.load(norm + rows, mask=there, other=0.0)[:, None]
    tl.store(out + place, (wide * weight).to(out.dtype.element_ty), mask=inside)
    group = tile * (BN // SUM) + tl.arange(0, BN // SUM)
    found = add_units(
        tl.permute(tl.reshape(wide * wide, [BN // SUM, SUM, BM]), (1, 0, 2)), SUM, BN // SUM, BM
    )
    to = squares + tokens.to(tl.int64)[None, :] * sums + group[:, None]
    tl.store(to, found, mask=(group < sums)[:, None] & tokens_there[None, :])


@triton.jit
def _write_half(
    total, rows, there, tokens, tokens_there, tile, bias, out, squares, residual, added, norm, scale, n, n_in,
    sums, eps, out_row, BEGINS: tl.constexpr, SUMS: tl.constexpr, SCALED: tl.constexpr, BIAS: tl.constexpr,
    ACT: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """The end of a tile, in front of the norm or, with BEGINS, behind it."""
    if BEGINS:
        whole = _divide_rows(total, squares, tokens, tokens_there, sums, n_in, eps, SUMS, BM)
        write_result(whole, rows, there, tokens, tokens_there, tile, bias, out, n, out_row, BIAS, ACT, BN, BM)
    else:
        _add_to_residual(
            total, rows, there, tokens, tokens_there, tile, bias, out, squares, residual, added, norm, scale,
            n, sums, BIAS, SCALED, BN, BM,
        )  # fmt: skip


@triton.jit
def _finish_half(
    total, rows, there, tokens, tokens_there, tile, share, parts, counters,
    bias, out, squares, residual, added, norm, scale, n, n_in, sums, eps, out_row,
    BEGINS: tl.constexpr, SUMS: tl.constexpr, SCALED: tl.constexpr, SHARES: tl.constexpr, BIAS: tl.constexpr,
    ACT: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """As `few_rows` finishes a tile: the last of its shares adds them all."""
    if SHARES > 1:
        cell = tl.arange(0, BN)[:, None] * BM + tl.arange(0, BM)[None, :]
        first = parts + tile.to(tl.int64) * (SHARES * BN * BM) + cell
        tl.store(first + share * (BN * BM), total)
        tl.debug_barrier()  # all of this share is written before it counts
        if tl.atomic_add(counters + tile, 1, sem="acq_rel") == SHARES - 1:
            whole = add_shares(first, SHARES, BN * BM)
            tl.store(counters + tile, 0)
            _write_half(
                whole, rows, there, tokens, tokens_there, tile, bias, out, squares, residual, added, norm,
                scale, n, n_in, sums, eps, out_row, BEGINS, SUMS, SCALED, BIAS, ACT, BN, BM,
            )  # fmt: skip
    else:
        _write_half(
            total, rows, there, tokens, tokens_there, tile, bias, out, squares, residual, added, norm, scale,
            n, n_in, sums, eps, out_row, BEGINS, SUMS, SCALED, BIAS, ACT, BN, BM,
        )  # fmt: skip


@triton.jit
def fold_planes(
    x, codes, high, scales, levels, table, bias, out, parts, counters, squares, residual, added, norm,
    m, n, n_in, units, steps, x_row, out_row, codes_unit, high_unit, scales_row, levels_row, sums, eps, scale,
    BITS: tl.constexpr, HIGH: tl.constexpr, VALUE: tl.constexpr, ZERO: tl.constexpr, SCALES: tl.constexpr,
    GROUP: tl.constexpr, BLOCK: tl.constexpr, TALL: tl.constexpr, APPLY: tl.constexpr, BASE: tl.constexpr,
    CODE: tl.constexpr, EVEN: tl.constexpr, SHARES: tl.constexpr, BIAS: tl.constexpr, ACT: tl.constexpr,
    UNITS: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr,
    BEGINS: tl.constexpr, SUMS: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """x: [m, n_in] times planes. Grid: tiles of outputs, shares.

    BEGINS: x is a row times the norm's weight -> out: [m, n], or [m, n / 2] of gate and up with an
    activation.
    Else -> added, out: [m, n], squares: [m, sums].
    """
    tile, share, tokens = tl.program_id(0), tl.program_id(1), tl.arange(0, BM)
    rows, there = rows_of(tile, n, ACT, BN)
    tokens_there = tokens < m
    if is_dependent() and (HIGH != 1 or BM == 8):  # else registers are spilled
        prefetch_planes(
            codes, high, rows, steps * share // SHARES, units, codes_unit, high_unit, BITS, HIGH, UNITS, EARLY
        )
    await_previous()
    total = multiply_planes(
        x + tokens * x_row, tokens_there, codes, high, scales, levels, table, rows,
        steps * share // SHARES, steps * (share + 1) // SHARES, units, n_in,
        codes_unit, high_unit, scales_row, levels_row, BITS, HIGH, VALUE, ZERO, SCALES, GROUP, BLOCK, TALL,
        APPLY, BASE, CODE, EVEN, UNITS, BN, BM,
    )  # fmt: skip
    _finish_half(
        total, rows, there, tokens, tokens_there, tile, share, parts, counters, bias, out, squares, residual,
        added, norm, scale, n, n_in, sums, eps, out_row, BEGINS, SUMS, SCALED, SHARES, BIAS, ACT, BN, BM,
    )  # fmt: skip


@triton.jit
def fold_dense(
    x, weight, bias, out, parts, counters, squares, residual, added, norm,
    m, n, n_in, steps, x_row, out_row, weight_row, sums, eps, scale,
    EVEN: tl.constexpr, SHARES: tl.constexpr, BIAS: tl.constexpr, ACT: tl.constexpr,
    UNIT: tl.constexpr, UNITS: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr,
    BEGINS: tl.constexpr, SUMS: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """x: [m, n_in] times weight [n, n_in], plain numbers, as `fold_planes` has it."""
    tile, share, tokens = tl.program_id(0), tl.program_id(1), tl.arange(0, BM)
    rows, there = rows_of(tile, n, ACT, BN)
    tokens_there = tokens < m
    if is_dependent():
        # 32 bits hold columns of a weight
        first = steps * share // SHARES * (UNITS * UNIT)
        prefetch_rows(weight, rows, first, n_in, weight_row, UNITS * UNIT)
    await_previous()
    total = multiply_dense(
        x + tokens * x_row, tokens_there, weight, rows, steps * share // SHARES,
        steps * (share + 1) // SHARES, n_in, weight_row, EVEN, UNIT, UNITS, BN, BM,
    )  # fmt: skip
    _finish_half(
        total, rows, there, tokens, tokens_there, tile, share, parts, counters, bias, out, squares, residual,
        added, norm, scale, n, n_in, sums, eps, out_row, BEGINS, SUMS, SCALED, SHARES, BIAS, ACT, BN, BM,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Ends:
    """What the two ends of a folded norm add to a launch of few rows.

    tensors: squares, residual, added, norm; what one end lacks, and does not read, is another.
    """

    tensors: tuple[Tensor, ...]
    numbers: tuple[int, float, float]  # sums of a row, eps, scale
    constants: dict[str, object]


def set_registers(layout: PlaneLayout, rows: int) -> dict[str, int]:
    """Where these ends would spill with what `few_constants` lets a thread have."""
    if layout.value == "iq4":
        return {"maxnreg": FEW_REGISTERS}
    if (layout.bits, layout.high) == (2, 1) and rows <= 8:
        return {"maxnreg": HIGH_REGISTERS}
    return {"maxnreg": 255} if layout.high == 2 and rows > 8 else {}


def _launch(
    x: Tensor, packed: PackedNumbers | PackedPlanes, bias: Tensor | None, out: Tensor, act: str, ends: _Ends
) -> None:
    m, (n_out, n_in), limit = len(x), shape_of(packed), shared_limit(x.device)
    if isinstance(packed, PackedPlanes):
        tiling = packed.tiling
        constants, steps = tiling.few_constants(m, act, limit, dtype=x.dtype), tiling.few_steps
        constants |= set_registers(tiling.layout, m)
    else:
        constants = dense_constants(n_out, n_in, m, act, x.dtype, limit)
        steps = -(-n_in // (constants["UNITS"] * constants["UNIT"]))
        constants["BN"] = widen(DENSE_ROWS, n_out, 1024)
    bn, bm, shares = constants["BN"], constants["BM"], constants["SHARES"]
    tiles = -(-n_out // bn)
    parts = torch.empty(tiles * shares * bn * bm if shares > 1 else 1, dtype=torch.float32, device=x.device)
    common = (out if bias is None else bias, out, parts, packed.counters, *ends.tensors, m, n_out, n_in)
    strides = x.stride(0), out.stride(0)
    constants |= {**ends.constants, "BIAS": bias is not None}
    if isinstance(packed, PackedPlanes):
        planes = packed.planes
        launch(
            fold_planes, (tiles, shares), x, *plane_tensors(planes), *common, packed.tiling.units, steps,
            *strides, *plane_strides(planes), *ends.numbers, **constants,
            **plane_constants(planes.layout, x.dtype, has_assembly=x.is_cuda),
        )  # fmt: skip
    else:
        launch(
            fold_dense, (tiles, shares), x, packed.weight, *common, steps, *strides,
            packed.weight.stride(0), *ends.numbers, **constants,
        )  # fmt: skip


def why_not_folded(facts: OpFacts) -> str | None:
    """The `when` of all. layer: the linear layer, hidden: numbers of a row, kind: of gate and up."""
    if facts.dtype == torch.float16:
        return "a row that is not divided yet may be more than float16 holds"
    if facts.sizes.get("hidden", GROUP) % GROUP:
        return f"rows of {facts['hidden']} numbers are no multiples of {GROUP}"
    layer, kind = facts.sizes.get("layer"), facts.sizes.get("kind", "")
    if layer is not None and not all(_is_served(packed, facts.dtype) for packed, *_ in layer.parts):
        return "its kernels read plain numbers, and planes of which the columns are in order, not in float32"
    if kind and (kind not in ACTIVATIONS or (layer is not None and layer.only_part is None)):
        return f"it has no activation {kind!r}, or gate and up are stored apart"
    return why_several(facts)


def _is_served(packed: object, dtype: torch.dtype) -> bool:
    if isinstance(packed, PackedPlanes):
        return packed.planes.order is None and dtype != torch.float32
    return isinstance(packed, PackedNumbers)


def _find_parts(layer: Linear, x: Tensor) -> list[tuple[PackedNumbers | PackedPlanes, Tensor | None]]:
    """(weight, bias) of each part; none where one of them, or x, is not what the kernels read."""
    parts = [(packed, bias) for packed, bias, _ in layer.parts]
    is_few = x.dim() == 2 and 0 < len(x) <= MOST_ROWS and x.stride(1) == 1
    return parts if is_few and all(_is_served(packed, x.dtype) for packed, _ in parts) else []


@add_linear.variant(NAME, on="cuda", when=why_not_folded)
def add_few(
    h: Tensor, layer: Linear, x: Tensor, scale: float, weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """`add_linear` in one launch of 1 to 16 rows over one weight; for others the reference."""
    parts = _find_parts(layer, h)
    if len(parts) != 1 or not x.is_contiguous():
        return add_linear.reference(h, layer, x, scale, weight)
    added, rows = torch.empty_like(x), torch.empty_like(x)
    sums = x.shape[1] // GROUP
    squares = torch.empty(len(x), sums, dtype=torch.float32, device=x.device)
    how: dict[str, object] = {"BEGINS": False, "SUMS": 1, "SCALED": scale != 1.0}
    ends = _Ends((squares, x, added, weight), (sums, 0.0, scale), how)
    _launch(h, *parts[0], rows, "", ends)
    return added, rows, squares


@norm_linear.variant(NAME, on="cuda", when=why_not_folded)
def multiply_normed(rows: Tensor, squares: Tensor, layer: Linear, eps: float) -> Tensor:
    """`norm_linear` in one launch of 1 to 16 rows for each weight of the layer; for others the reference."""
    parts = _find_parts(layer, rows)
    if not parts:
        return norm_linear.reference(rows, squares, layer, eps)
    out, start = make_result(rows, layer.n_out), 0
    for packed, bias in parts:
        width = shape_of(packed)[0]
        _launch(rows, packed, bias, out[:, start : start + width], "", _behind(squares, eps))
        start += width
    return out


@norm_glu.variant(NAME, on="cuda", when=why_not_folded)
def join_normed(rows: Tensor, squares: Tensor, up: Linear, eps: float, kind: str) -> Tensor:
    """`norm_glu` in one launch of 1 to 16 rows, where gate and up are one weight; else the reference."""
    parts = _find_parts(up, rows)
    if len(parts) != 1 or kind not in ACTIVATIONS:
        return norm_glu.reference(rows, squares, up, eps, kind)
    out = make_result(rows, up.n_out // 2)
    _launch(rows, *parts[0], out, kind, _behind(squares, eps))
    return out


def _behind(squares: Tensor, eps: float) -> _Ends:
    sums = squares.shape[1]
    how: dict[str, object] = {"SUMS": triton.next_power_of_2(max(GROUP, sums)), "SCALED": False}
    return _Ends((squares, squares, squares, squares), (sums, eps, 1.0), {"BEGINS": True, **how})
