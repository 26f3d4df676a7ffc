"""Norm and rotation of heads in one launch, of which the first or the last numbers are rotated.

A program has HB heads of a token as three tiles: the first and the second numbers of pairs, and the rest. A
head's sums are its own, in an order that sizes decide. Numbers are rounded where the ops that this replaces
round them.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from plait.kernels.triton.attention.compressed.rows import rows_in_order
from plait.kernels.triton.attention.place import _round_as, _sum_numbers
from plait.kernels.triton.attention.rope import pair_columns, rotate_pairs
from plait.kernels.triton.dependent_launch import await_previous
from plait.kernels.triton.forms import KernelForm, with_float16, with_float32
from plait.ops.launch import launch
from plait.ops.place import NormWeights, Rotation, turn_heads

NAME = "triton"
TILE = 2048  # numbers of a program


@triton.jit
def turn_head_rows(
    x, weight, bias, positions, inv_freq, out, x_row, x_head, eps, mscale,
    H: tl.constexpr, D: tl.constexpr, PAIRS: tl.constexpr, PAIRSP: tl.constexpr, RESTP: tl.constexpr,
    HB: tl.constexpr, NORM: tl.constexpr, LAYER: tl.constexpr, BIAS: tl.constexpr, LAST: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """x: [T, H, D] -> out: [T, H, D], with 2 PAIRS columns rotated. Grid: (T, blocks of HB heads)."""
    await_previous()
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HB + tl.arange(0, HB))[:, None]
    j, r = tl.arange(0, PAIRSP)[None, :], tl.arange(0, max(RESTP, 1))[None, :]
    there, behind = (head < H) & (j < PAIRS), (head < H) & (r < D - 2 * PAIRS)
    first, second = pair_columns(j, PAIRS, INTERLEAVED)
    if LAST:
        first, second = first + (D - 2 * PAIRS), second + (D - 2 * PAIRS)
    else:
        r = r + 2 * PAIRS
    at, to = x + token * x_row + head * x_head, out + (token * H + head) * D
    a = tl.load(at + first, mask=there, other=0.0).to(tl.float32)
    b = tl.load(at + second, mask=there, other=0.0).to(tl.float32)
    rest = a
    if RESTP:
        rest = tl.load(at + r, mask=behind, other=0.0).to(tl.float32)
    if NORM:
        if LAYER:
            mean = _sum_numbers(a, b, rest, RESTP, False) / D
            a, b = tl.where(there, a - mean, 0.0), tl.where(there, b - mean, 0.0)
            if RESTP:
                rest = tl.where(behind, rest - mean, 0.0)
        unit = tl.rsqrt(_sum_numbers(a * a, b * b, rest * rest, RESTP, False) / D + eps)
        a = a * unit * tl.load(weight + first, mask=j < PAIRS, other=0.0).to(tl.float32)
        b = b * unit * tl.load(weight + second, mask=j < PAIRS, other=0.0).to(tl.float32)
        if RESTP:
            rest = rest * unit * tl.load(weight + r, mask=behind, other=0.0).to(tl.float32)
        if BIAS:
            a += tl.load(bias + first, mask=j < PAIRS, other=0.0).to(tl.float32)
            b += tl.load(bias + second, mask=j < PAIRS, other=0.0).to(tl.float32)
            if RESTP:
                rest += tl.load(bias + r, mask=behind, other=0.0).to(tl.float32)
        a, b = _round_as(a, x), _round_as(b, x)
    a, b = rotate_pairs(a, b, tl.load(positions + token), inv_freq, j, mscale, PAIRS)
    tl.store(to + first, a.to(out.dtype.element_ty), mask=there)
    tl.store(to + second, b.to(out.dtype.element_ty), mask=there)
    if RESTP:
        tl.store(to + r, rest.to(out.dtype.element_ty), mask=behind)


def _constants(
    heads: int, dim: int, pairs: int, norm: NormWeights | None, is_interleaved: bool, is_last: bool
) -> dict[str, int]:
    rest, wide = dim - 2 * pairs, triton.next_power_of_2(dim)
    return {
        "H": heads,
        "D": dim,
        "PAIRS": pairs,
        "PAIRSP": triton.next_power_of_2(pairs),
        "RESTP": triton.next_power_of_2(rest) if rest else 0,
        "HB": min(max(TILE // wide, 1), triton.next_power_of_2(heads)),
        "NORM": norm is not None,
        "LAYER": norm is not None and norm.is_layer,
        "BIAS": norm is not None and norm.bias is not None,
        "LAST": is_last,
        "INTERLEAVED": is_interleaved,
        "num_warps": 4 if heads > 1 else 2,
    }


@turn_heads.variant(NAME, on="cuda")
def turn(x: Tensor, positions: Tensor, norm: NormWeights | None, rotation: Rotation, is_last: bool) -> Tensor:
    """`turn_heads`: the same arguments and result."""
    x = rows_in_order(x)
    tokens, heads, dim = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    sizes = _constants(heads, dim, len(rotation.inv_freq), norm, rotation.interleaved, is_last)
    weight, bias = (norm.weight, norm.bias) if norm else (x, x)
    launch(
        turn_head_rows, (tokens, -(-heads // sizes["HB"])), x, weight, x if bias is None else bias, positions,
        rotation.inv_freq, out, x.stride(0), x.stride(1), norm.eps if norm else 0.0, rotation.mscale, **sizes,
    )  # fmt: skip
    return out


POINTERS = {
    **dict.fromkeys(("x", "out"), "bf16*"),
    **dict.fromkeys(("weight", "bias", "inv_freq"), "fp32*"),
    "positions": "i64*",
    **dict.fromkeys(("x_row", "x_head"), "i32!"),
    **dict.fromkeys(("eps", "mscale"), "fp32"),
}
SHAPES = {  # heads, columns, pairs, whether there is a norm, pairs are neighbours, and the last are rotated
    "64 × 512": (64, 512, 32, True, True, True),
    "64 × 512 without norm": (64, 512, 32, False, True, True),
    "1 × 512": (1, 512, 32, True, True, True),
    "64 × 128": (64, 128, 32, False, True, True),
    "1 × 128": (1, 128, 32, True, True, True),
    "first of 8 × 128": (8, 128, 32, True, False, False),
    "first of 1 × 128": (1, 128, 32, True, False, False),
    "last of 64 × 128, halves": (64, 128, 32, False, False, True),
    "last of 64 × 128, halves, norm": (64, 128, 32, True, False, True),
}


@with_float16
@with_float32
def forms() -> Iterator[KernelForm]:
    """Heads and entries of published sizes."""
    numbers = torch.empty(0, device="meta")
    for name, (heads, dim, pairs, has_norm, is_interleaved, is_last) in SHAPES.items():
        norm = NormWeights(numbers, None, 1e-6, False) if has_norm else None
        constants = _constants(heads, dim, pairs, norm, is_interleaved, is_last)
        warps = constants.pop("num_warps")
        yield KernelForm(f"turn_head_rows, {name}", turn_head_rows, POINTERS, constants, warps)
