"""A gate for each head: one number of the token multiplies all that the head found (LFM3, Laguna)."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from plait.checkpoint.weights import Weights
from plait.ops.activation import activate, scale_rows, step_sizes


class HeadGate:
    """sigmoid or softplus of a linear layer with a row for each head, `head_gate`."""

    def __init__(self, kind: Literal["sigmoid", "softplus"], w: Weights, heads: int) -> None:
        self.linear = w.linear("head_gate", in_size=w.target.hidden_size, out_sizes=(heads,))
        self._sigmoid = w.bind(activate, kind="sigmoid", gated=False) if kind == "sigmoid" else None
        self._softplus = w.bind(step_sizes)
        self._scale = w.bind(scale_rows)

    def __call__(self, out: Tensor, x: Tensor) -> Tensor:
        """out: [T, heads, d], x: [T, hidden] -> out's like."""
        by = self.linear(x)
        if self._sigmoid:
            by = self._sigmoid(by, "sigmoid", False)
        else:
            by = self._softplus(by, None, 0.0, float("inf"))
        gated: Tensor = self._scale(out, by)
        return gated
