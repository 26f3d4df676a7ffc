"""Norms as the decoder uses them: on what a branch reads, and on what it gives back."""

from __future__ import annotations

import torch
from torch import Tensor

from plait import spec
from plait.checkpoint.weights import Weights
from plait.ops import norm
from plait.ops.activation import combine


class Norm:
    """RMS or layer norm over `size` features, or over each of `groups` equal parts of them."""

    def __init__(self, s: spec.NormSpec, w: Weights, size: int, groups: int = 1) -> None:
        self.spec, self.groups = s, groups
        # In float32 whatever the model computes in: Gemma's 1 + w would lose its last bits in bfloat16.
        self.weight = w.tensor("weight", (size,), torch.float32) if s.weight else _ones(size, w)
        # An RMS norm has no bias, a norm without a weight neither: one in the file is left over, and refused.
        self.bias = w.optional("bias", (size,), torch.float32) if s.kind == "layer" and s.weight else None
        self._rms = w.bind(norm.rms_norm, size=size)
        self._add_rms = w.bind(norm.add_rms_norm, size=size)
        self._combine = w.bind(combine)
        self._layer = w.bind(norm.layer_norm, size=size) if s.kind == "layer" else None

    def __call__(self, x: Tensor) -> Tensor:
        """x: [..., size] -> the same shape."""
        if self._layer:
            return self._layer(x, self.weight, self.bias, self.spec.eps, self.groups)  # type: ignore[no-any-return]
        return self._rms(x, self.weight, self.spec.eps, self.groups)  # type: ignore[no-any-return]

    def add(self, x: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor]:
        """(x + delta, its norm): the step from one branch to the next, one fused op where a kernel has it.

        Of norms with one group, as those between branches are.
        """
        if delta is None:
            return x, self(x)
        if self._layer:
            x = self._combine(x, delta, 1.0)
            return x, self(x)
        return self._add_rms(x, delta, self.weight, self.spec.eps)  # type: ignore[no-any-return]


def _ones(size: int, w: Weights) -> Tensor:
    """The weight of a norm that has none: what is multiplied by 1 keeps its bits."""
    return torch.ones(size, device=w.target.device)
