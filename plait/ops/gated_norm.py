"""The norm between a state-space scan and its output projection, gated by z."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from plait.ops.activation import activate
from plait.ops.norm import rms_norm
from plait.ops.product import multiply
from plait.ops.registry import Arguments, Bound, op

CASES: list[dict[str, Any]] = [
    dict(tokens=1, size=64, groups=1, before=False),
    dict(tokens=33, size=96, groups=4, before=False),
    dict(tokens=5, size=96, groups=2, before=True),
    dict(tokens=3, size=32, groups=1, before=False, weight=False),
]


@op(cases=CASES)
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
    activate: Bound,
    multiply: Bound,
    norm: Bound,
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None,
    eps: float = 1e-6,
    groups: int = 1,
    norm_before_gate: bool = False,
) -> Any:
    gated = activate(gate, "silu", False)
    if weight is None:
        return multiply(x, gated)
    if norm_before_gate:
        return multiply(norm(x, weight, eps, groups), gated)
    return norm(multiply(x, gated), weight, eps, groups)


@gated_rms_norm.inputs
def _inputs(case: Mapping[str, Any], dtype: torch.dtype, device: str) -> Arguments:
    x, gate = (torch.randn(case["tokens"], case["size"], dtype=dtype, device=device) for _ in range(2))
    weight = torch.randn(case["size"], dtype=dtype, device=device) if case.get("weight", True) else None
    return (x, gate, weight, 1e-5, case["groups"], case["before"]), {}
