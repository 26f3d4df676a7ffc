"""Specs of mixers that few families have. As those of `plait.spec`, they are plain data."""

from __future__ import annotations

from dataclasses import dataclass

from plait.spec import Activation, NormSpec, Recurrent, RopeSpec


@dataclass(frozen=True, slots=True)
class RgLruSpec(Recurrent):
    """Griffin (De et al. 2024): conv and gated linear recurrence, times `activation` of a second branch."""

    width: int
    num_heads: int
    conv_kernel: int
    activation: Activation = "gelu_pytorch_tanh"


@dataclass(frozen=True, slots=True)
class LightningSpec(Recurrent):
    """Linear attention with a fixed decay per head (MiniMax-01): h <- exp(-slope) h + v k, y = scale h q.

    q, k, v are `activation`s of one projection, q and k may be normed and turned (Ling 2.5); y is normed over
    `norm_groups` parts of all heads, and gated by a sigmoid.
    """

    num_heads: int
    head_dim: int
    slopes: tuple[float, ...]
    norm: NormSpec
    activation: Activation | None = "silu"
    qk_norm: NormSpec | None = None
    rope: RopeSpec | None = None
    scale: float = 1.0
    norm_groups: int = 1


@dataclass(frozen=True, slots=True)
class MlstmSpec(Recurrent):
    """xLSTM's mLSTM (Beck et al. 2024). `gate_cap`: of both gates' logits; `eps`: in the memory's divisor.

    `norm`: of each head's output, with a weight of its own.
    """

    num_heads: int
    key_dim: int
    value_dim: int
    norm: NormSpec
    gate_cap: float | None
    eps: float
