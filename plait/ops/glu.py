"""Gated linear units (Dauphin et al. 2016): one linear layer to gate and up, and the product of both."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from plait.ops.activation import PAIRS, activate, multiply
from plait.ops.case import Case
from plait.ops.linear import Linear, linear, random_layer
from plait.ops.registry import Arguments, TensorFn, op

CASES: list[Case] = [
    dict(tokens=1, n_in=64, size=32, kind="silu"),
    dict(tokens=19, n_in=96, size=48, kind="gelu_pytorch_tanh"),
    dict(tokens=5, n_in=64, size=40, kind="swiglu_oai", bias=True),
    *(
        Case(tokens=tokens, n_in=512, size=40, kind="silu", stored=stored)
        for tokens, stored in ((1, "Q4_K"), (12, "Q4_K"), (3, "Q8_0"))
    ),
]


@op(cases=CASES)
def glu(x: Tensor, up: Linear, kind: str, activate: Callable[[Tensor, str, bool], Tensor]) -> Tensor:
    """activation(gate) · up, where `up` maps x to [gate, up] side by side (Shazeer 2020).

    x: [..., in] -> [..., out / 2] in x's dtype. `activate`: what is bound for that op, for variants that
    compute one after the other, as the reference does.
    """
    return activate(up(x), kind, True)


@glu.replaces(activate, multiply, given=(linear,), exact=True)
def _linear_then_product(
    activate: TensorFn, multiply: TensorFn, x: Tensor, up: Linear, kind: str, _: TensorFn
) -> Tensor:
    both = up(x)
    if kind in PAIRS:
        return activate(both, kind, True)
    gate, up_rows = both.chunk(2, -1)
    return multiply(activate(gate, kind, False), up_rows)


@glu.inputs
def _inputs(case: Case, dtype: torch.dtype, device: str) -> Arguments:
    x = torch.randn(case["tokens"], case["n_in"], dtype=dtype, device=device)
    up = random_layer(case, case["n_in"], 2 * case["size"], dtype, device)
    return (x, up, case["kind"], activate.reference), {}
