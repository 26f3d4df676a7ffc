"""Specs of mixers that few families have. As those of `plait.spec`, they are plain data."""

from __future__ import annotations

from dataclasses import dataclass

from plait.spec import Activation, Recurrent


@dataclass(frozen=True, slots=True)
class RgLruSpec(Recurrent):
    """Griffin (De et al. 2024): conv and gated linear recurrence, times `activation` of a second branch."""

    width: int
    num_heads: int
    conv_kernel: int
    activation: Activation = "gelu_pytorch_tanh"
