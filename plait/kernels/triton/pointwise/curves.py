"""Curves and lines with parameters, in one launch each: xIELU, a share of a change, factors of rows, rates.

As in `pointwise.py` a program computes a piece of one row, in float32, and rounds once. A second and a third
input are rows like the first, or one row for all, which is a row at distance 0.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from plait.kernels.triton.dependent_launch import await_previous
from plait.kernels.triton.forms import KernelForm, with_float16, with_float32
from plait.kernels.triton.maths import apply_activation, one_minus_exp, sigmoid, softplus
from plait.kernels.triton.pointwise.pointwise import count_pieces, piece_constants
from plait.kernels.triton.row_views import view_rows
from plait.ops.activation import CURVES, key_bias, scale_rows, sigmoid_steps, xielu
from plait.ops.altup import add_three
from plait.ops.launch import launch
from plait.ops.registry import OpFacts
from plait.ops.streams import activate_scaled, write_scaled
from plait.ops.wkv import mix_shift

NAME = "triton"
WIDE = (("LDG.128",), ("STG.128",))


@triton.jit
def bend_numbers(
    x, y, z, out, x_outer, x_inner, y_outer, y_inner, z_outer, z_inner, number,
    N: tl.constexpr, BLOCK: tl.constexpr, PER_OUTER: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """out = KIND(x, y, z, number), number by number. Grid: (rows, pieces).

    y: of scale_rows one number for each row, of xielu the four of its curve.
    """
    await_previous()
    row = tl.program_id(0).to(tl.int64)
    outer, inner = row // PER_OUTER, row % PER_OUTER
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = c < N
    h = tl.load(x + outer * x_outer + inner * x_inner + c, mask=there, other=0.0).to(tl.float32)
    second = y + outer * y_outer + inner * y_inner
    if KIND == "xielu":
        bent = -one_minus_exp(tl.minimum(h, tl.load(y + 3))) - h
        bent = tl.where(h > 0, tl.load(y) * h * h, bent * tl.load(y + 1))
        h = bent + tl.load(y + 2) * h
    elif KIND == "scale_rows":
        h = h * tl.load(second).to(tl.float32)
    else:
        other = tl.load(second + c, mask=there, other=0.0).to(tl.float32)
        if KIND == "key_bias":
            h = number * tl.exp(other * softplus(h))
        else:
            third = tl.load(z + outer * z_outer + inner * z_inner + c, mask=there, other=0.0).to(tl.float32)
            if KIND == "mix_shift":
                h = h + other * third
            elif KIND == "add_three":
                h = (h + other + third) * number
            else:
                tl.static_assert(KIND == "sigmoid_steps")
                h = sigmoid(third * (h + other))
    tl.store(out + row * N + c, h.to(out.dtype.element_ty), mask=there)


@triton.jit
def activate_rescaled(
    x, out, x_row, scale, magnitude, N: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr
):  # fmt: skip
    """out = magnitude · KIND(scale · x), rows of N numbers. Grid: (rows, pieces)."""
    await_previous()
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = c < N
    h = tl.load(x + row * x_row + c, mask=there, other=0.0).to(tl.float32)
    h = (softplus(h * scale) if KIND == "softplus" else apply_activation(h * scale, KIND)) * magnitude
    tl.store(out + row * N + c, h.to(out.dtype.element_ty), mask=there)


@triton.jit
def add_scaled(
    x, scale, shift, y, y_scale, y_shift, out, x_row, y_row,
    N: tl.constexpr, BLOCK: tl.constexpr, HAS_Y: tl.constexpr,
):  # fmt: skip
    """`write_scaled`: x, y [T, N], vectors [N] -> out [T, N]. Grid: (T, pieces)."""
    await_previous()
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = c < N
    h = tl.load(x + row * x_row + c, mask=there, other=0.0).to(tl.float32)
    total = tl.load(shift + c, mask=there, other=0.0).to(tl.float32)
    total += h * tl.load(scale + c, mask=there, other=0.0).to(tl.float32)
    if HAS_Y:
        other = tl.load(y + row * y_row + c, mask=there, other=0.0).to(tl.float32)
        added = tl.load(y_shift + c, mask=there, other=0.0).to(tl.float32)
        total += added + other * tl.load(y_scale + c, mask=there, other=0.0).to(tl.float32)
    tl.store(out + row * N + c, (total - h).to(out.dtype.element_ty), mask=there)


def _bend(
    kind: str, dtype: torch.dtype, x: Tensor, y: Tensor, z: Tensor | None = None, number: float = 0.0
) -> Tensor:
    """What `bend_numbers` computes: y and z have rows as x has, but for the curve of xielu."""
    rows = view_rows(x, x if kind == "xielu" else y, x if z is None else z)
    second = y if kind == "xielu" else rows.tensors[1]
    out, sizes = torch.empty(x.shape, dtype=dtype, device=x.device), piece_constants(x.shape[-1])
    grid = rows.count, count_pieces(x.shape[-1], sizes)
    launch(
        bend_numbers, grid, rows.tensors[0], second, rows.tensors[2], out, *rows.strides, number,
        **sizes, PER_OUTER=rows.per_outer, KIND=kind,
    )  # fmt: skip
    return out


@xielu.variant(NAME, on="cuda")
def bend_xielu(x: Tensor, curve: Tensor) -> Tensor:
    """`xielu`: the same arguments and result."""
    return _bend("xielu", x.dtype, x, curve.contiguous())


@mix_shift.variant(NAME, on="cuda")
def add_share(x: Tensor, change: Tensor, share: Tensor) -> Tensor:
    """`mix_shift`: the same arguments and result."""
    dtype = torch.promote_types(torch.promote_types(x.dtype, change.dtype), share.dtype)
    return _bend("mix_shift", dtype, x, change, share)


@scale_rows.variant(NAME, on="cuda")
def scale_whole_rows(x: Tensor, by: Tensor) -> Tensor:
    """`scale_rows`: the same arguments and result."""
    factors = by if x.dim() == 2 else by.expand(x.shape[:-1])[..., None]
    return _bend("scale_rows", x.dtype, x, factors)


@add_three.variant(NAME, on="cuda")
def add_three_rows(x: Tensor, y: Tensor, z: Tensor, scale: float) -> Tensor:
    """`add_three`: the same arguments and result."""
    return _bend("add_three", x.dtype, x, y, z, scale)


@key_bias.variant(NAME, on="cuda")
def bend_key_bias(x: Tensor, rate: Tensor, scale: float) -> Tensor:
    """`key_bias`: the same arguments and result."""
    return _bend("key_bias", x.dtype, x, rate, None, scale)


@sigmoid_steps.variant(NAME, on="cuda")
def bend_steps(dt: Tensor, bias: Tensor, rate: Tensor) -> Tensor:
    """`sigmoid_steps`: the same arguments and result."""
    return _bend("sigmoid_steps", torch.float32, dt, bias.expand(dt.shape), rate.expand(dt.shape))


@write_scaled.variant(NAME, on="cuda")
def write_in_one_launch(
    x: Tensor, scale: Tensor, shift: Tensor, y: Tensor | None, y_scale: Tensor, y_shift: Tensor
) -> Tensor:
    """`write_scaled`: the same arguments and result."""
    rows, sizes = view_rows(x, x if y is None else y), piece_constants(x.shape[1])
    out = torch.empty(x.shape, dtype=torch.promote_types(x.dtype, scale.dtype), device=x.device)
    vectors = [vector.contiguous() for vector in (scale, shift, y_scale, y_shift)]
    launch(
        add_scaled, (rows.count, count_pieces(x.shape[1], sizes)), rows.tensors[0], *vectors[:2],
        rows.tensors[1], *vectors[2:], out, rows.strides[0], rows.strides[2], **sizes, HAS_Y=y is not None,
    )  # fmt: skip
    return out


def _why_unknown(facts: OpFacts) -> str | None:
    kind = facts.sizes.get("kind")
    return None if kind in CURVES else f"no kernel computes {kind}"


@activate_scaled.variant(NAME, on="cuda", when=_why_unknown)
def activate_in_pieces(x: Tensor, scale: float, kind: str, magnitude: float) -> Tensor:
    """`activate_scaled`: the same arguments and result."""
    rows, sizes = view_rows(x), piece_constants(x.shape[1])
    out, grid = x.new_empty(x.shape), (rows.count, count_pieces(x.shape[1], sizes))
    numbers = rows.strides[0], scale, magnitude
    launch(activate_rescaled, grid, *rows.tensors, out, *numbers, KIND=kind, **sizes)
    return out


TYPES = {
    "x": "bf16*", "y": "bf16*", "z": "bf16*", "out": "bf16*", "x_outer": "i32!", "x_inner": "i32!",
    "y_outer": "i32!", "y_inner": "i32!", "z_outer": "i32!", "z_inner": "i32!", "number": "fp32",
}  # fmt: skip
KINDS: dict[str, tuple[str, int, int, dict[str, str]]] = {  # kind, width, rows of one outer, types
    "xielu, apertus": ("xielu", 21504, 1, {"y": "fp32*"}),
    "mix_shift, rwkv": ("mix_shift", 4096, 1, {}),
    "mix_shift, zaya": ("mix_shift", 2048, 1, {"x": "fp32*", "z": "fp32*", "out": "fp32*"}),
    "add_three, gemma-3n": ("add_three", 2048, 1, {}),
    "scale_rows, talkie": ("scale_rows", 5120, 1, {"y": "fp32*", "y_outer": "i32"}),
    "scale_rows, heads": ("scale_rows", 128, 32, {"y": "fp32*", "y_outer": "i32", "y_inner": "i32"}),
    "scale_rows, heads' gates": ("scale_rows", 128, 32, {"y_outer": "i32", "y_inner": "i32"}),
    "key_bias, doge": ("key_bias", 8, 1, {"y": "fp32*"}),
    "sigmoid_steps, kimi-k3": ("sigmoid_steps", 12288, 1, {"y": "fp32*", "z": "fp32*", "out": "fp32*"}),
}


@with_float16
@with_float32
def forms() -> Iterator[KernelForm]:
    """Each kind at a published width."""
    for name, (kind, width, per_outer, own) in KINDS.items():
        sizes = piece_constants(width)
        warps, types, demands = sizes.pop("num_warps"), TYPES | own, WIDE if width > 1000 else ()
        constants = {**sizes, "PER_OUTER": per_outer, "KIND": kind}
        yield KernelForm(f"bend_numbers, {name}", bend_numbers, types, constants, warps, demands=demands)
    vectors = dict.fromkeys(("scale", "shift", "y_scale", "y_shift", "out"), "fp32*")
    for name, has_y in (("zaya", True), ("zaya, x alone", False)):
        sizes = piece_constants(2048)
        warps, types = sizes.pop("num_warps"), TYPES | vectors | {"x_row": "i32!", "y_row": "i32!"}
        named, constants = f"add_scaled, {name}", {**sizes, "HAS_Y": has_y}
        yield KernelForm(named, add_scaled, types, constants, warps, demands=WIDE)
    for name, kind, width in (
        ("qwen4-exp", "silu", 64),
        ("qwen4-exp", "sigmoid", 4),
        ("k2-horizon", "silu", 4096),
        ("k2-horizon", "softplus", 4096),
    ):
        sizes = piece_constants(width)
        warps, types = sizes.pop("num_warps"), TYPES | {"scale": "fp32", "magnitude": "fp32"}
        types, demands = (types | {"x_row": "i32!"}, WIDE) if width > 1000 else (types, ())
        constants, named = {**sizes, "KIND": kind}, f"activate_rescaled, {name}, {kind}"
        yield KernelForm(named, activate_rescaled, types, constants, warps, demands=demands)
