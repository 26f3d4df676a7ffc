"""Rotary positions in one launch, with sines and cosines computed in the kernel.

No table is read: for 131,072 positions of a head of 128 one takes 67 MB for each kind of rotation. The
hardware's sine does not serve, because its error grows with the angle: 0.01 at position 131,072. So an angle
is reduced to a quarter of a turn in float64, three operations that lose 1e-10 there, and a polynomial of
float32 does the rest (Moshier's Cephes; the error is below 1e-7). The angle itself is a product of float32,
rounded as in the op, since models are trained with that.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from plait.kernels.triton.dependent_launch import await_previous
from plait.kernels.triton.forms import KernelForm, with_float16, with_float32
from plait.ops.launch import launch
from plait.ops.rope import rotate

NAME = "triton"
TILE = 1024  # numbers of a program


@triton.jit
def sin_cos(angle):
    """(sine, cosine) of float32 angles below 10^8."""
    wide = angle.to(tl.float64)
    quarters = tl.floor(wide * tl.full([], 0.6366197723675814, tl.float64) + tl.full([], 0.5, tl.float64))
    x = (wide - quarters * tl.full([], 1.5707963267948966, tl.float64)).to(tl.float32)
    quarter = quarters.to(tl.int32) & 3
    y = x * x
    s = x + x * y * (-1.6666654611e-1 + y * (8.3321608736e-3 + y * -1.9515295891e-4))
    c = (
        1.0
        - 0.5 * y
        + y * y * (4.166664568298827e-2 + y * (-1.388731625493765e-3 + y * 2.443315711809948e-5))
    )
    odd = (quarter & 1) == 1
    sine, cosine = tl.where(odd, c, s), tl.where(odd, s, c)
    sine = tl.where(quarter >= 2, -sine, sine)
    cosine = tl.where((quarter == 1) | (quarter == 2), -cosine, cosine)
    return sine, cosine


@triton.jit
def rotate_pairs(a, b, position, inv_freq, j, mscale, PAIRS: tl.constexpr):
    """Numbers [heads, pairs] of a head's first and second halves, rotated. j: [1, pairs], from 0."""
    frequency = tl.load(inv_freq + j, mask=j < PAIRS, other=0.0)
    sine, cosine = sin_cos(position.to(tl.float32) * frequency)
    sine, cosine = sine * mscale, cosine * mscale
    return a * cosine - b * sine, b * cosine + a * sine


@triton.jit
def pair_columns(j, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The columns of the first and of the second number of pairs."""
    if INTERLEAVED:
        first, second = 2 * j, 2 * j + 1
    else:
        first, second = j, j + PAIRS
    return first, second


@triton.jit
def rotate_heads(
    x, positions, inv_freq, out, x_row, x_head, mscale,
    H: tl.constexpr, D: tl.constexpr, PAIRS: tl.constexpr, PAIRSP: tl.constexpr, RESTP: tl.constexpr,
    HB: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """x: [T, H, D] -> out: [T, H, D], with 2 PAIRS columns rotated. Grid: (T, blocks of HB heads)."""
    await_previous()
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HB + tl.arange(0, HB))[:, None]
    j = tl.arange(0, PAIRSP)[None, :]
    first, second = pair_columns(j, PAIRS, INTERLEAVED)
    there = (head < H) & (j < PAIRS)
    # 32 bits hold the heads of a row
    at, to = x + token * x_row + head * x_head, out + (token * H + head) * D
    a = tl.load(at + first, mask=there, other=0.0).to(tl.float32)
    b = tl.load(at + second, mask=there, other=0.0).to(tl.float32)
    a, b = rotate_pairs(a, b, tl.load(positions + token), inv_freq, j, mscale, PAIRS)
    tl.store(to + first, a.to(out.dtype.element_ty), mask=there)
    tl.store(to + second, b.to(out.dtype.element_ty), mask=there)
    if RESTP:
        r = 2 * PAIRS + tl.arange(0, RESTP)[None, :]
        there = (head < H) & (r < D)
        tl.store(to + r, tl.load(at + r, mask=there, other=0.0), mask=there)


def _constants(heads: int, dim: int, pairs: int, is_interleaved: bool) -> dict[str, int]:
    rest, wide = dim - 2 * pairs, triton.next_power_of_2(dim)
    return {
        "H": heads,
        "D": dim,
        "PAIRS": pairs,
        "PAIRSP": triton.next_power_of_2(pairs),
        "RESTP": triton.next_power_of_2(rest) if rest else 0,
        "HB": min(max(TILE // wide, 1), triton.next_power_of_2(heads)),
        "INTERLEAVED": is_interleaved,
        "num_warps": 2,
    }


@rotate.variant(NAME, on="cuda")
def rotate_rows(x: Tensor, positions: Tensor, inv_freq: Tensor, mscale: float, interleaved: bool) -> Tensor:
    """`rotate`: the same arguments and result."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    tokens, heads, dim = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    sizes = _constants(heads, dim, len(inv_freq), interleaved)
    launch(
        rotate_heads, (tokens, -(-heads // sizes["HB"])), x, positions, inv_freq, out, x.stride(0),
        x.stride(1), mscale, **sizes,
    )  # fmt: skip
    return out


POINTERS = {
    "x": "bf16*", "positions": "i64*", "inv_freq": "fp32*", "out": "bf16*", "x_row": "i32!", "x_head": "i32!",
    "mscale": "fp32",
}  # fmt: skip


@with_float16
@with_float32
def forms() -> Iterator[KernelForm]:
    """Heads of published sizes."""
    shapes = {
        "32 × 128": (32, 128, 64, False),
        "64 of 128": (32, 128, 32, False),
        "64 pairs": (16, 64, 32, True),
        "32 pairs of 64": (16, 64, 16, True),
    }
    for name, shape in shapes.items():
        constants = _constants(*shape)
        warps = constants.pop("num_warps")
        wide = () if shape[-1] else (("LDG.128",), ("STG.128",))
        yield KernelForm(f"rotate_heads, {name}", rotate_heads, POINTERS, constants, warps, demands=wide)
