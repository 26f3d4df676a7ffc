"""A norm behind a residual branch, the sum, and the norm in front of the next branch, in one launch.

A program computes a row, in float32 and in one tile. The order of its sums follows from the width alone, so
the bits of a row depend on no other row. What is normed is rounded before it is added, as two ops round it.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from plait.kernels.triton.dependent_launch import await_previous
from plait.kernels.triton.forms import KernelForm, with_float16, with_float32
from plait.kernels.triton.pointwise.norm import NAME, WIDE, tile_row, why_too_wide
from plait.ops.launch import launch
from plait.ops.norm import norm_add, norm_add_norm


@triton.jit
def join_norms(
    x, delta, before, weight, total, out, x_row, delta_row, before_eps, eps,
    N: tl.constexpr, BLOCK: tl.constexpr, AGAIN: tl.constexpr,
):  # fmt: skip
    """x + norm(delta) · before -> total; AGAIN: norm(total) · weight -> out. Grid: (rows,)."""
    await_previous()
    row, c = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    there = c < N
    y = tl.load(delta + row * delta_row + c, mask=there, other=0.0).to(tl.float32)
    y = y * tl.rsqrt(tl.sum(y * y, 0) / N + before_eps)
    y = (y * tl.load(before + c, mask=there, other=0.0)).to(total.dtype.element_ty).to(tl.float32)
    h = tl.load(x + row * x_row + c, mask=there, other=0.0).to(tl.float32) + y
    added = h.to(total.dtype.element_ty)
    tl.store(total + row * N + c, added, mask=there)
    if AGAIN:
        h = added.to(tl.float32)
        h = h * tl.rsqrt(tl.sum(h * h, 0) / N + eps) * tl.load(weight + c, mask=there, other=0.0)
        tl.store(out + row * N + c, h.to(out.dtype.element_ty), mask=there)


def _launch(
    x: Tensor, delta: Tensor, before: tuple[Tensor, float], after: tuple[Tensor, float] | None
) -> tuple[Tensor, Tensor]:
    """(x + norm(delta), the norm of that); before, after: weight and eps of each."""
    x, delta = (t if t.stride(-1) == 1 else t.contiguous() for t in (x, delta))
    total = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    out = total if after is None else torch.empty_like(total)
    weight, eps = after or before
    launch(
        join_norms, (len(x),), x, delta, before[0], weight, total, out, x.stride(0), delta.stride(0),
        before[1], eps, **tile_row(x.shape[1]), AGAIN=after is not None,
    )  # fmt: skip
    return total, out


@norm_add.variant(NAME, on="cuda", when=why_too_wide)
def add_normed(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`norm_add`: the same arguments and result."""
    return _launch(x, delta, (weight, eps), None)[0]


@norm_add_norm.variant(NAME, on="cuda", when=why_too_wide)
def norm_added(
    x: Tensor, delta: Tensor, before: Tensor, before_eps: float, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """`norm_add_norm`: the same arguments and results."""
    return _launch(x, delta, (before, before_eps), (weight, eps))


TYPES = {
    "x": "bf16*", "delta": "bf16*", "before": "fp32*", "weight": "fp32*", "total": "bf16*", "out": "bf16*",
    "x_row": "i32!", "delta_row": "i32!", "before_eps": "fp32", "eps": "fp32",
}  # fmt: skip


@with_float16
@with_float32
def forms() -> Iterator[KernelForm]:
    """Rows of Gemma 3 (4B and 27B) and OLMo 2 (7B), and the widest ones."""
    for width, is_again in ((2560, True), (5376, True), (16384, True), (4096, False)):
        constants = tile_row(width) | {"AGAIN": is_again}
        warps = constants.pop("num_warps")
        words = f"join_norms, {width}" + ("" if is_again else ", of the branch alone")
        yield KernelForm(words, join_norms, TYPES, constants, warps, demands=WIDE)
