"""Two tensors, number by number: what gated convolutions are made of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from plait.ops.registry import Arguments, op

CASES: list[dict[str, Any]] = [
    dict(tokens=1, size=64),
    dict(tokens=33, size=300),
    dict(tokens=5, size=7),
]


@op(cases=CASES)
def multiply(x: Tensor, y: Tensor) -> Tensor:
    """x · y, number by number. x, y: [T, n], whose rows may lie apart in memory -> [T, n]."""
    return x * y


@multiply.inputs
def _multiply_inputs(case: Mapping[str, Any], dtype: torch.dtype, device: str) -> Arguments:
    n = case["size"]
    both = torch.randn(case["tokens"], 3 * n, dtype=dtype, device=device)
    return (both[:, :n], both[:, 2 * n :]), {}
