"""An RMS norm between two linear layers that compute it themselves, without a launch of its own.

    add_linear     x' = x + scale · layer(h);  rows = x' · weight;  squares = sums of x'², of 16 numbers each
    norm_linear    layer(rows) / rms(x'), where the squares give the rms; `norm_glu`: of gate and up

The norm divides a row by one number, and so can the layer behind it, at its end: it is linear.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from plait.ops.activation import activate, combine
from plait.ops.case import Case
from plait.ops.linear import Linear, linear, random_layer
from plait.ops.registry import Arguments, TensorFn, op

MOST_ROWS = 16  # that kernels take: with more rows, a launch of the norm's own is little
GROUP = 16  # numbers of which the squares are one sum: every tile of a kernel has whole groups
TOLERANCE = {torch.float32: 5e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}  # as of `linear`

ADD_CASES: list[Case] = [
    dict(tokens=1, n_in=64, hidden=64, scale=1.0),
    dict(tokens=5, n_in=1031 * 8, hidden=96, scale=0.22, bias=True),
    dict(tokens=8, n_in=512, hidden=208, scale=1.0),
    *(
        Case(tokens=tokens, n_in=512, hidden=80, scale=1.0, stored=stored)
        for tokens, stored in ((1, "Q4_K"), (7, "Q4_K"), (2, "Q6_K"), (3, "Q8_0"))
    ),
]
NORM_CASES: list[Case] = [
    dict(tokens=1, hidden=64, n_out=48),
    dict(tokens=5, hidden=4096, n_out=64, bias=True),
    dict(tokens=8, hidden=208, n_out=96),
    dict(tokens=3, hidden=2080, n_out=32, group=4),  # behind experts
    *(
        Case(tokens=tokens, hidden=512, n_out=80, stored=stored)
        for tokens, stored in ((1, "Q4_K"), (11, "Q4_K"), (2, "Q6_K"), (4, "Q8_0"))
    ),
]
GLU_CASES: list[Case] = [
    dict(tokens=1, hidden=64, size=32, kind="silu"),
    dict(tokens=3, hidden=96, size=40, kind="gelu_pytorch_tanh"),
    dict(tokens=8, hidden=208, size=48, kind="silu", bias=True),
    *(
        Case(tokens=tokens, hidden=512, size=40, kind="silu", stored=stored)
        for tokens, stored in ((1, "Q4_K"), (9, "Q4_K"), (6, "Q8_0"))
    ),
]


class HalfNorm(NamedTuple):
    """What `add_linear` or `add_experts` leaves of a norm: rows [T, n], squares [T, sums] float32."""

    rows: Tensor
    squares: Tensor


@op(cases=ADD_CASES, tolerance=TOLERANCE, is_product=True)
def add_linear(
    h: Tensor, layer: Linear, x: Tensor, scale: float, weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The end of a residual branch and the first half of the norm behind it: (x', rows, squares) as above.

    h: [T, in], x: [T, n], weight: [n] float32, `layer` maps in to n, a multiple of 16
    -> x' and rows [T, n] in x's dtype, squares [T, n / 16] float32.
    """
    delta = layer(h)
    x = x + (delta if scale == 1.0 else delta * scale)
    return x, *halve_norm(x, weight)


def halve_norm(x: Tensor, weight: Tensor, group: int = GROUP) -> tuple[Tensor, Tensor]:
    """(x · weight in x's dtype, the squares of x in sums of `group` numbers each)."""
    wide = x.float()
    return (wide * weight).to(x.dtype), wide.square().unflatten(-1, (-1, group)).sum(-1)


@add_linear.replaces(combine, given=(linear,))
def _linear_then_combine(
    combine: TensorFn, h: Tensor, layer: Linear, x: Tensor, scale: float, weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    x = combine(x, layer(h), scale)
    return x, *halve_norm(x, weight)


@add_linear.inputs
def _add_inputs(case: Case, dtype: torch.dtype, device: str) -> Arguments:
    tokens, hidden = case["tokens"], case["hidden"]
    layer = random_layer(case, case["n_in"], hidden, dtype, device)
    h = torch.randn(tokens, case["n_in"], dtype=dtype, device=device)
    x = torch.randn(tokens, hidden, dtype=dtype, device=device)
    return (h, layer, x, case["scale"], torch.rand(hidden, device=device) + 0.5), {}


@op(cases=NORM_CASES, tolerance=TOLERANCE, is_product=True)
def norm_linear(rows: Tensor, squares: Tensor, layer: Linear, eps: float) -> Tensor:
    """A linear layer of what `add_linear` gives: the second half of the norm, then `layer`.

    rows: [T, n], squares: [T, sums] float32, `layer` maps n to out -> [T, out] in the dtype of rows.
    """
    return layer(finish_norm(rows, squares, eps))


@norm_linear.replaces(given=(linear,))
def _norm_then_linear(rows: Tensor, squares: Tensor, layer: Linear, eps: float) -> Tensor:
    return layer(finish_norm(rows, squares, eps))


def finish_norm(rows: Tensor, squares: Tensor, eps: float) -> Tensor:
    """The norm itself, [T, n] in the dtype of rows."""
    mean = squares.sum(-1, keepdim=True) / rows.shape[-1]
    return (rows.float() * torch.rsqrt(mean + eps)).to(rows.dtype)


@norm_linear.inputs
def _norm_inputs(case: Case, dtype: torch.dtype, device: str) -> Arguments:
    layer = random_layer(case, case["hidden"], case["n_out"], dtype, device)
    return (*_make_halves(case, dtype, device), layer, 1e-5), {}


@op(cases=GLU_CASES, tolerance=TOLERANCE, is_product=True)
def norm_glu(rows: Tensor, squares: Tensor, up: Linear, eps: float, kind: str) -> Tensor:
    """`norm_linear` where `up` maps n to [gate, up]: activation(gate) · up, [T, out / 2]."""
    return activate.reference(up(finish_norm(rows, squares, eps)), kind, True)  # type: ignore[no-any-return]


@norm_glu.replaces(activate, given=(linear,))
def _norm_then_glu(
    activate: TensorFn, rows: Tensor, squares: Tensor, up: Linear, eps: float, kind: str
) -> Tensor:
    return activate(up(finish_norm(rows, squares, eps)), kind, True)


@norm_glu.inputs
def _glu_inputs(case: Case, dtype: torch.dtype, device: str) -> Arguments:
    up = random_layer(case, case["hidden"], 2 * case["size"], dtype, device)
    return (*_make_halves(case, dtype, device), up, 1e-5, case["kind"]), {}


def _make_halves(case: Case, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    x = torch.randn(case["tokens"], case["hidden"], dtype=dtype, device=device)
    return halve_norm(x, torch.rand(case["hidden"], device=device) + 0.5, case.get("group", GROUP))
