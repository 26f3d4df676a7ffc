"""Two tensors, number by number: what gated convolutions are made of."""

from __future__ import annotations

from torch import Tensor

from plait.ops.elementwise import elementwise_op


@elementwise_op()
def multiply(x: Tensor, y: Tensor) -> Tensor:
    """x · y, number by number. x, y: [T, n], with rows that may lie apart in memory -> [T, n]."""
    return x * y
