"""Specs of mixers with recurrent state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from plait.spec.model import UNLIMITED, Activation, NormSpec, Recurrent
from plait.spec.positions import RopeSpec


@dataclass(frozen=True, slots=True)
class Mamba2Spec(Recurrent):
    """State-space duality (Dao & Gu 2024). `norm_groups` is how many parts the gated norm is taken over.

    `mode` "ssd" is the recurrence; "exact" is what oxidizr's trainer computes. The latter is not causal
    (`ModelSpec.causal` is then False), because it depends on `chunk_size` and on the whole sequence.
    """

    num_heads: int
    head_dim: int
    state_size: int
    num_groups: int
    conv_kernel: int
    chunk_size: int = 256
    dt_limit: tuple[float, float] = (0.0, UNLIMITED)
    gated_norm: NormSpec | None = NormSpec()
    norm_groups: int = 1
    norm_before_gate: bool = False
    mode: Literal["ssd", "exact"] = "ssd"


@dataclass(frozen=True, slots=True)
class Mamba1Spec(Recurrent):
    """Selective scan (Gu & Dao 2023). `state_limit` clamps the state to ±limit (oxidizr).

    `norm`: of dt, B and C (Jamba). `num_heads`: A, D and the step are one number for each (PLaMo 2).
    """

    inner_size: int
    state_size: int
    dt_rank: int
    conv_kernel: int
    state_limit: float | None = None
    norm: NormSpec | None = None
    num_heads: int | None = None


@dataclass(frozen=True, slots=True)
class RememberedMamba1Spec(Mamba1Spec):
    """The same; memory units behind it read what its scan gives, before the gate (SambaY)."""


@dataclass(frozen=True, slots=True)
class DeltaNetSpec(Recurrent):
    """Gated delta rule: Gated DeltaNet (Yang et al. 2024), Kimi Delta Attention (Kimi Team 2025).

    `num_heads` have a state and a value each; key head h // (num_heads / num_key_heads) serves head h, or
    h % num_key_heads if `tiled`. `decay`: one number per head, or one per channel of a key. `beta_scale` 2
    allows negative eigenvalues. `gate`: what activates the output's gate. `decay_rank`, `gate_rank`: their
    projections have two factors, of that rank. `norm`: of each head's output, before the gate.
    """

    num_heads: int
    num_key_heads: int
    key_dim: int
    value_dim: int
    conv_kernel: int
    norm: NormSpec
    decay: Literal["head", "channel"] = "head"
    gate: Literal["silu", "sigmoid"] = "silu"
    beta_scale: float = 1.0
    decay_rank: int | None = None
    gate_rank: int | None = None
    tiled: bool = False
    decay_floor: float | None = None  # a decay's log is this number times a sigmoid, no softplus (Ling 3)


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


@dataclass(frozen=True, slots=True)
class Mamba3Spec(Recurrent):
    """oxidizr's Mamba3: trapezoidal input, B and C rotated by a running angle; MIMO, conv optional."""

    num_heads: int
    head_dim: int
    state_size: int
    num_groups: int
    conv_kernel: int | None = None
    complex_rope: bool = True
    mimo_rank: int = 0
    chunk_size: int = 256
    dt_limit: tuple[float, float] = (1e-3, 0.1)
    bc_norm: NormSpec = NormSpec(1e-6)
    gated_norm: NormSpec = NormSpec(1e-6)
    mode: Literal["ssd", "exact"] = "ssd"


@dataclass(frozen=True, slots=True)
class ShortConvSpec(Recurrent):
    """Gated short convolution (LFM2): out(C · conv(B · x)); `channels` None: the hidden size."""

    kernel: int
    channels: int | None = None


@dataclass(frozen=True, slots=True)
class MergedIdsSpec:
    """A table from `tokens` ids to `count` merged ones, which a tokenizer makes."""

    tokens: int
    count: int


@dataclass(frozen=True, slots=True)
class NgramSpec(Recurrent):
    """Embeddings of n-grams from hashed tables, gated by every residual stream, and convolved (Qwen4-Exp).

    An n-gram of 2 tokens, of 3, and so on has `dim` numbers from each of its heads; `factors` and `sizes`
    hash it (`ops.ngrams.hash_ngrams`). `rows`: of the table. No n-gram reaches over a token `end`. `taps`:
    of the convolution, `gap` tokens apart, None: there is none. `norm`: of queries, keys and what is
    convolved, in each of `streams`. `own`: of several ranks the hashes that this one looks up; None: all.

    With `merges` hashes are of merged ids: tokens that differ in case, accents or spaces alone have one
    (DeepSeek-V4.1). `end` is in front of a text then, and n-grams reach over it.
    """

    streams: int
    dim: int
    rows: int
    factors: tuple[int, ...]
    sizes: tuple[int, ...]
    end: int
    taps: int | None
    gap: int
    norm: NormSpec
    own: tuple[int, int] | None = None
    merges: MergedIdsSpec | None = None


@dataclass(frozen=True, slots=True)
class NgramSumSpec(Recurrent):
    """Embeddings of n-grams that are added to a token's own (LongCat-Flash-Lite): linear(rows of one table).

    Head h has rows of `dim` numbers, `sizes[h]` of them, for the n-grams of `lengths[h]` tokens, of which
    the ids are digits to the base `base`. None reaches over a token `end`. `own`: as in `NgramSpec`.
    """

    dim: int
    sizes: tuple[int, ...]
    lengths: tuple[int, ...]
    base: int
    end: int
    own: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Wkv4Spec(Recurrent):
    """RWKV-4's time mixing (Peng et al. 2023): averages over the past, weighed by keys; `size` channels."""

    size: int


@dataclass(frozen=True, slots=True)
class Wkv6Spec(Recurrent):
    """RWKV-6's time mixing (Peng et al. 2024): each key channel forgets at a rate that every token makes.

    `ranks`: of what moves shares of the last token, and of what makes decays; None (RWKV-5): both are
    weights. `norm`: of each head's output; None (QRWKV6): gated linear attention, of which a sigmoid is the
    gate. Key heads serve heads as in attention.
    """

    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    ranks: tuple[int, int] | None
    norm: NormSpec | None


@dataclass(frozen=True, slots=True)
class Wkv7Spec(Recurrent):
    """RWKV-7's time mixing (Peng et al. 2025), a delta rule with a decay and a rate for each key channel.

    `ranks`: of what makes decay, rate and gate, and of what mixes values with those of the first layer; None
    there: this is the first layer. `norm`: of each head's output. ARWKV-7 has neither norm nor gate.
    """

    num_heads: int
    head_dim: int
    ranks: tuple[int, int, int | None, int | None]
    norm: NormSpec | None


@dataclass(frozen=True, slots=True)
class ChannelMixSpec(Recurrent):
    """RWKV's channel mixing: an MLP of relu², of a token and the last; RWKV-4, 5 and 6 have sigmoid gates."""

    size: int
    gated: bool = False


@dataclass(frozen=True, slots=True)
class JetSpec(DeltaNetSpec):
    """JetBlock (Gu et al. 2025): a gated delta rule in which only values are convolved, by taps that each
    token makes through `rank` numbers."""

    rank: int = 0
