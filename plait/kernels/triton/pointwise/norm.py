"""Norms in one launch: RMS and layer norms, over groups, with the sum of a residual or a gate.

A program computes one group of one row, in float32 and in one tile. The order of its sums follows from the
width alone, so the bits of a row depend on no other row. Rows may lie apart in memory.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from plait.kernels.triton.dependent_launch import await_previous
from plait.kernels.triton.forms import KernelForm, with_float16, with_float32
from plait.kernels.triton.maths import sigmoid
from plait.kernels.triton.row_views import view_rows
from plait.ops.launch import launch
from plait.ops.norm import (
    NO_LENGTH,
    add_rms_norm,
    gated_rms_norm,
    layer_norm,
    limit_length,
    rms_norm,
)
from plait.ops.registry import OpFacts

NAME = "triton"
WIDEST = 32768  # numbers of a tile
EACH = 16  # numbers of a thread
NOT_GATED, GATE_FIRST, NORM_FIRST = 0, 1, 2


@triton.jit
def norm_rows(
    x, other, weight, bias, total, out, x_outer, x_inner, other_outer, other_inner, eps,
    N: tl.constexpr, BLOCK: tl.constexpr, GROUPS: tl.constexpr, PER_OUTER: tl.constexpr,
    ADD: tl.constexpr, LAYER: tl.constexpr, GATED: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """out = norm(x) * weight + bias. Grid: (rows, GROUPS); N: the width of a group.

    other: with ADD what is added to x first, and `total` gets the sum; with GATED the gate.
    """
    await_previous()
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    c = tl.arange(0, BLOCK)
    there = c < N
    at = group * N + c
    outer, inner = row // PER_OUTER, row % PER_OUTER
    to = row * (GROUPS * N) + at
    h = tl.load(x + outer * x_outer + inner * x_inner + at, mask=there, other=0.0).to(tl.float32)
    if ADD or GATED > 0:
        beside = tl.load(other + outer * other_outer + inner * other_inner + at, mask=there, other=0.0)
        beside = beside.to(tl.float32)
        if ADD:
            added = (h + beside).to(total.dtype.element_ty)
            tl.store(total + to, added, mask=there)
            h = added.to(tl.float32)
        else:
            beside = beside * sigmoid(beside)
    if GATED == 1:
        h = h * beside
    if LAYER:
        h = tl.where(there, h - tl.sum(h, 0) / N, 0.0)
    if NORM:
        h = (
            h
            * tl.rsqrt(tl.sum(h * h, 0) / N + eps)
            * tl.load(weight + at, mask=there, other=0.0).to(tl.float32)
        )
    if BIAS:
        h += tl.load(bias + at, mask=there, other=0.0).to(tl.float32)
    if GATED == 2:
        h = h * beside
    tl.store(out + to, h.to(out.dtype.element_ty), mask=there)


def _launch_norm(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    groups: int = 1,
    *,
    bias: Tensor | None = None,
    delta: Tensor | None = None,
    gate: Tensor | None = None,
    gating: int = NOT_GATED,
    is_layer: bool = False,
) -> tuple[Tensor, Tensor]:
    """(the norm of x, x + delta): see `norm_rows`; without a delta the second is garbage."""
    other = next((t for t in (delta, gate) if t is not None), x)
    rows = view_rows(x, other)
    out = torch.empty(x.shape, dtype=x.dtype if gate is None else gate.dtype, device=x.device)
    total = out if delta is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    width = x.shape[-1] // groups
    launch(
        norm_rows, (rows.count, groups), *rows.tensors, out if weight is None else weight,
        out if bias is None else bias, total, out, *rows.strides, eps,
        **_constants(width, groups, rows.per_outer), ADD=delta is not None, LAYER=is_layer, GATED=gating,
        NORM=weight is not None, BIAS=bias is not None,
    )  # fmt: skip
    return out, total


def _constants(width: int, groups: int, per_outer: int) -> dict[str, int]:
    return {**tile_row(width), "GROUPS": groups, "PER_OUTER": per_outer}


def tile_row(width: int) -> dict[str, int]:
    """A program of so many numbers: those that are there, those of its tile, and its warps."""
    block = triton.next_power_of_2(width)
    return {"N": width, "BLOCK": block, "num_warps": min(max(block // (32 * EACH), 1), 32)}


def why_too_wide(facts: OpFacts) -> str | None:
    """Why a program cannot hold a group, or None."""
    width = facts.sizes.get("size", 0) // facts.sizes.get("groups", 1)
    return f"a group of {width} numbers is wider than a program's {WIDEST}" if width > WIDEST else None


@rms_norm.variant(NAME, on="cuda", when=why_too_wide)
def norm_rms(x: Tensor, weight: Tensor, eps: float, groups: int = 1) -> Tensor:
    """`rms_norm`: the same arguments and result."""
    return _launch_norm(x, weight, eps, groups)[0]


@add_rms_norm.variant(NAME, on="cuda", when=why_too_wide)
def add_norm_rms(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`add_rms_norm`: the same arguments and results."""
    out, total = _launch_norm(x, weight, eps, delta=delta)
    return total, out


@layer_norm.variant(NAME, on="cuda", when=why_too_wide)
def norm_layer(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, groups: int = 1) -> Tensor:
    """`layer_norm`: the same arguments and result."""
    return _launch_norm(x, weight, eps, groups, bias=bias, is_layer=True)[0]


@gated_rms_norm.variant(NAME, on="cuda", when=why_too_wide)
def norm_gated(
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None,
    eps: float = 1e-6,
    groups: int = 1,
    norm_before_gate: bool = False,
) -> Tensor:
    """`gated_rms_norm`: the same arguments and result."""
    gating = NORM_FIRST if norm_before_gate else GATE_FIRST
    return _launch_norm(x, weight, eps, groups if weight is not None else 1, gate=gate, gating=gating)[0]


@triton.jit
def limit_rows(
    x, weight, out, x_row, x_head, limit, more,
    N: tl.constexpr, BLOCK: tl.constexpr, H: tl.constexpr, WEIGHT: tl.constexpr,
):  # fmt: skip
    """x: [T, H, N], weight: [H, N] -> out [T, H, N], no vector longer than `limit`. Grid: (T, H)."""
    await_previous()
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    c = tl.arange(0, BLOCK)
    there = c < N
    h = tl.load(x + row * x_row + head * x_head + c, mask=there, other=0.0).to(tl.float32)
    if WEIGHT:
        h = h * tl.load(weight + head * N + c, mask=there, other=0.0)
    h = h * tl.minimum(limit / (tl.sqrt(tl.sum(h * h, 0)) + more), 1.0)
    tl.store(out + (row * H + head) * N + c, h.to(out.dtype.element_ty), mask=there)


@limit_length.variant(NAME, on="cuda", when=why_too_wide)
def limit_lengths(x: Tensor, weight: Tensor | None, limit: float) -> Tensor:
    """`limit_length`: the same arguments and result."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    launch(
        limit_rows, tuple(x.shape[:2]), x, out if weight is None else weight, out, *x.stride()[:2], limit,
        NO_LENGTH, **_limit_constants(*x.shape[1:]), WEIGHT=weight is not None,
    )  # fmt: skip
    return out


def _limit_constants(heads: int, width: int) -> dict[str, int]:
    return {"N": width, "BLOCK": triton.next_power_of_2(width), "H": heads, "num_warps": 1}


POINTERS = {
    "x": "bf16*", "other": "bf16*", "weight": "fp32*", "bias": "fp32*", "total": "bf16*", "out": "bf16*",
    "x_outer": "i32!", "x_inner": "i32!", "other_outer": "i32!", "other_inner": "i32!", "eps": "fp32",
}  # fmt: skip
WIDE = (("LDG.128",), ("STG.128",))
OWN_TYPES = {
    "add rms 4096, float32 added": {"other": "fp32*"},
    "gated rms 8192, bfloat16 weight": {"weight": "bf16*"},
}


@with_float16
@with_float32
def forms() -> Iterator[KernelForm]:
    """Norms of published widths."""
    plain = {"ADD": False, "LAYER": False, "GATED": NOT_GATED, "NORM": True, "BIAS": False}
    kinds = {
        "rms 576": (576, 1, plain),
        "rms 128 of each head": (128, 1, plain | {"PER_OUTER": 32}),
        "add rms 4096": (4096, 1, plain | {"ADD": True}),
        "add rms 16384": (16384, 1, plain | {"ADD": True}),
        "add rms 4096, float32 added": (4096, 1, plain | {"ADD": True}),
        "layer 12288": (12288, 1, plain | {"LAYER": True, "BIAS": True}),
        "layer 8192 without bias": (8192, 1, plain | {"LAYER": True}),
        "gated rms 8192": (8192, 1, plain | {"GATED": GATE_FIRST}),
        "gated rms 32 × 128": (128, 32, plain | {"GATED": NORM_FIRST}),
        "gated rms 8192, bfloat16 weight": (8192, 1, plain | {"GATED": GATE_FIRST}),
        "gate alone 8192": (8192, 1, plain | {"GATED": GATE_FIRST, "NORM": False}),
    }
    for name, (width, groups, flags) in kinds.items():
        constants = _constants(width, groups, 1) | flags
        warps, types = constants.pop("num_warps"), POINTERS | OWN_TYPES.get(name, {})
        yield KernelForm(
            f"norm_rows, {name}", norm_rows, types, constants, warps, demands=WIDE if width > 1000 else ()
        )
    pointers = {name: POINTERS[name] for name in ("x", "weight", "out")}
    types = pointers | {"x_row": "i32!", "x_head": "i32!", "limit": "fp32", "more": "fp32"}
    sizes = {"48 × 128": (48, 128), "48 × 16": (48, 16), "48 × 128 without weight": (48, 128)}
    for name, (heads, width) in sizes.items():
        constants = _limit_constants(heads, width) | {"WEIGHT": "without" not in name}
        warps = constants.pop("num_warps")
        yield KernelForm(f"limit_rows, {name}", limit_rows, types, constants, warps)
