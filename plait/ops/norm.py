"""Norms, computed in float32 whatever the input's dtype; one of them is gated by z, as after a scan."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from plait.ops.activation import activate, combine, multiply
from plait.ops.case import Case
from plait.ops.registry import Arguments, TensorFn, op

CASES: list[Case] = [
    dict(tokens=1, hidden=64, groups=1),
    dict(tokens=63, hidden=576, groups=1),
    dict(tokens=5, hidden=512, groups=4),
]

NO_LENGTH = 1e-6  # what is added to a length before something is divided by it


@op(cases=CASES)
def rms_norm(x: Tensor, weight: Tensor, eps: float, groups: int = 1) -> Tensor:
    """x / rms(x) * weight over the last dimension, or over each of `groups` equal parts of it.

    x: [..., n], weight: [n] -> [..., n] in x's dtype. Zhang & Sennrich 2019.
    """
    h: Tensor = x.float().unflatten(-1, (groups, -1))
    h = (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)).flatten(-2)
    return (h * weight.float()).to(x.dtype)


@rms_norm.inputs
def _rms_norm_inputs(case: Case, dtype: torch.dtype, device: str) -> Arguments:
    x = torch.randn(case["tokens"], case["hidden"], dtype=dtype, device=device)
    return (x, torch.randn(case["hidden"], dtype=dtype, device=device), 1e-6, case["groups"]), {}


@op(cases=[case for case in CASES if case["groups"] == 1])
def add_rms_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x + delta, and the RMS norm of that. x, delta: [T, n] -> two tensors [T, n]."""
    x = x + delta
    return x, rms_norm.reference(x, weight, eps)


@add_rms_norm.replaces(combine, rms_norm, exact=True)
def _add_then_norm(
    add: TensorFn, norm: TensorFn, x: Tensor, delta: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    x = add(x, delta, 1.0)
    return x, norm(x, weight, eps)


@add_rms_norm.inputs
def _add_rms_norm_inputs(case: Case, dtype: torch.dtype, device: str) -> Arguments:
    (x, weight, eps, _), _ = _rms_norm_inputs(case, dtype, device)
    return (x, torch.randn_like(x), weight, eps), {}


@op(cases=[case for case in CASES if case["groups"] == 1])
def norm_add(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x and the RMS norm of delta: a residual branch that ends with a norm. x, delta: [T, n] -> [T, n]."""
    normed: Tensor = rms_norm.reference(delta, weight, eps)
    return x + normed


@norm_add.replaces(rms_norm, combine)
def _norm_then_add(
    norm: TensorFn, add: TensorFn, x: Tensor, delta: Tensor, weight: Tensor, eps: float
) -> Tensor:
    return add(x, norm(delta, weight, eps), 1.0)


@norm_add.inputs
def _norm_add_inputs(case: Case, dtype: torch.dtype, device: str) -> Arguments:
    (x, delta, weight, eps), _ = _add_rms_norm_inputs(case, dtype, device)
    return (x, delta, weight.float(), eps), {}


@op(cases=[case for case in CASES if case["groups"] == 1])
def norm_add_norm(
    x: Tensor, delta: Tensor, before: Tensor, before_eps: float, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """`norm_add`, and the RMS norm of that, with which the next branch begins.

    x, delta: [T, n]; before: weight of the norm of delta, [n] float32; weight: of the next branch's, the same
    -> two tensors [T, n].
    """
    x = norm_add.reference(x, delta, before, before_eps)
    return x, rms_norm.reference(x, weight, eps)


@norm_add_norm.replaces(rms_norm, add_rms_norm)
def _norm_then_add_norm(
    norm: TensorFn,
    add: TensorFn,
    x: Tensor,
    delta: Tensor,
    before: Tensor,
    before_eps: float,
    weight: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    return add(x, norm(delta, before, before_eps), weight, eps)  # type: ignore[return-value]


@norm_add_norm.inputs
def _norm_add_norm_inputs(case: Case, dtype: torch.dtype, device: str) -> Arguments:
    (x, delta, weight, eps), _ = _norm_add_inputs(case, dtype, device)
    return (x, delta, torch.rand_like(weight) + 0.5, 1e-5, weight, eps), {}


@op(cases=CASES)
def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, groups: int = 1) -> Tensor:
    """(x - mean) / std * weight + bias over the last dimension, or over each of `groups` equal parts of it.

    x: [..., n], weight, bias: [n] -> [..., n] in x's dtype; the variance is the biased one. Ba et al. 2016.
    """
    h: Tensor = x.float().unflatten(-1, (groups, -1))
    h = F.layer_norm(h, h.shape[-1:], None, None, eps).flatten(-2) * weight.float()
    return (h if bias is None else h + bias.float()).to(x.dtype)


@layer_norm.inputs
def _layer_norm_inputs(case: Case, dtype: torch.dtype, device: str) -> Arguments:
    (x, weight, eps, groups), _ = _rms_norm_inputs(case, dtype, device)
    return (x, weight, torch.randn_like(weight), eps, groups), {}


LENGTH_CASES: list[Case] = [
    dict(tokens=1, heads=2, size=64, weight=True),
    dict(tokens=33, heads=3, size=5, weight=False),
    dict(tokens=5, heads=4, size=100, weight=True),
]


@op(cases=LENGTH_CASES)
def limit_length(x: Tensor, weight: Tensor | None, limit: float) -> Tensor:
    """Each head's vector x · weight, made as long as `limit` where it is longer (Inkling 2).

    The factor is limit / (length + 1e-6), at most 1. x: [T, H, n], rows may lie apart, weight: [H, n] float32
    -> x's like, dense.
    """
    h: Tensor = x.float() if weight is None else x.float() * weight
    lengths: Tensor = h.square().sum(-1, keepdim=True).sqrt()
    return (h * (limit / (lengths + NO_LENGTH)).clamp(max=1.0)).to(x.dtype)


@limit_length.inputs
def _limit_length_inputs(case: Case, dtype: torch.dtype, device: str) -> Arguments:
    heads, size = case["heads"], case["size"]
    x = torch.randn(case["tokens"], heads, 2 * size, dtype=dtype, device=device).chunk(2, -1)[0]
    return (x, torch.randn(heads, size, device=device) if case["weight"] else None, size**0.5), {}


GATED_CASES: list[Case] = [
    dict(tokens=1, size=64, groups=1, before=False),
    dict(tokens=33, size=96, groups=4, before=False),
    dict(tokens=5, size=96, groups=2, before=True),
    dict(tokens=3, size=32, groups=1, before=False, weight=False),
]


@op(cases=GATED_CASES)
def gated_rms_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None,
    eps: float = 1e-6,
    groups: int = 1,
    norm_before_gate: bool = False,
) -> Tensor:
    """norm(x · silu(gate)) · weight, or norm(x) · weight · silu(gate); without a weight x · silu(gate).

    x, gate: [T, n], weight: [n] -> [T, n] in gate's dtype, computed in float32. The norm is the RMS norm over
    each of `groups` equal parts of n. Dao & Gu 2024, section 8.
    """
    h: Tensor = x.float()
    gated = F.silu(gate.float())
    if weight is None:
        return (h * gated).to(gate.dtype)
    h = (h if norm_before_gate else h * gated).unflatten(-1, (groups, -1))
    h = (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)).flatten(-2) * weight.float()
    return (h * gated if norm_before_gate else h).to(gate.dtype)


@gated_rms_norm.replaces(activate, multiply, rms_norm)
def _gate_then_norm(
    activate: TensorFn,
    multiply: TensorFn,
    norm: TensorFn,
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None,
    eps: float = 1e-6,
    groups: int = 1,
    norm_before_gate: bool = False,
) -> Tensor:
    gated = activate(gate, "silu", False)
    if weight is None:
        return multiply(x, gated)
    if norm_before_gate:
        return multiply(norm(x, weight, eps, groups), gated)
    return norm(multiply(x, gated), weight, eps, groups)


@gated_rms_norm.inputs
def _gated_rms_norm_inputs(case: Case, dtype: torch.dtype, device: str) -> Arguments:
    x, gate = (torch.randn(case["tokens"], case["size"], dtype=dtype, device=device) for _ in range(2))
    weight = torch.randn(case["size"], dtype=dtype, device=device) if case.get("weight", True) else None
    return (x, gate, weight, 1e-5, case["groups"], case["before"]), {}
