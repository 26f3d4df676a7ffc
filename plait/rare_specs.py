"""Specs of mixers that few families have. As those of `plait.spec`, they are plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from plait.spec import (
    Activation,
    AttentionSpec,
    HyperSpec,
    Mixer,
    NormSpec,
    ParallelSpec,
    Recurrent,
    RopeSpec,
    RouterSpec,
)


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
class SharedKeysSpec(AttentionSpec):
    """Attention without keys and values of its own: it reads those of the mixer `source` (Gemma 4)."""

    source: str = ""


@dataclass(frozen=True, slots=True)
class RememberedMamba1Spec(Mamba1Spec):
    """The same; memory units behind it read what its scan gives, before the gate (SambaY)."""


@dataclass(frozen=True, slots=True)
class HybridHeadsSpec(Mamba1Spec):
    """Heads of attention and channels of Mamba1 in one mixer (Hymba; Dong et al. 2024): out((a + m) / 2) of
    their outputs, each normed, with values of `v_dim` numbers.

    `source`: the mixer with the keys and values that are read instead of its own. `front`: how many learned
    tokens lie before each text, outside of the window.
    """

    attention: AttentionSpec | None = None
    v_dim: int = 0
    head_norm: NormSpec = NormSpec()
    source: str = ""
    front: int | None = None


@dataclass(frozen=True, slots=True)
class MemoryUnitSpec(Mixer):
    """A gated memory unit (Ren et al. 2025): out(silu(in(x)) · m), m of `size` numbers of the token from the
    scan of the mixer `source`."""

    size: int
    source: str


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
class LayerInputSpec(Mixer):
    """out(activation(gate(x)) · e): e is part `index` of the model's layer inputs (Gemma 4 E2B and E4B)."""

    index: int
    size: int
    activation: Activation


@dataclass(frozen=True, slots=True)
class AltUpSpec(ParallelSpec):
    """A layer over `streams` of a token (AltUp; Gemma 3n): parts attn, ffn, and own, a `LayerInputSpec`.

    `rank`: of the path around attention (LAuReL). `norm`: of every norm in it; `norms` is not used.
    """

    streams: int = 4
    rank: int = 64
    norm: NormSpec = NormSpec()
    NORMS: ClassVar[tuple[str, ...]] = (
        *("router_norm", "attn.norm", "attn.post_norm", "ffn.norm", "ffn.post_norm", "own.post_norm"),
        "laurel.norm",
    )


@dataclass(frozen=True, slots=True)
class HyperBranchSpec(ParallelSpec):
    """A mixer, `inner`, that reads a sum of a token's streams, normed, and is added to each (`HyperSpec`)."""

    hyper: HyperSpec = field(default_factory=HyperSpec)
    norm: NormSpec = NormSpec()


@dataclass(frozen=True, slots=True)
class GatedBranchSpec(HyperBranchSpec):
    """The same, where the gated mean of normed streams is read (`HyperSpec.rank`; Qwen4-Exp)."""


@dataclass(frozen=True, slots=True)
class NgramSpec(Recurrent):
    """Embeddings of n-grams from hashed tables, gated by every residual stream, and convolved (Qwen4-Exp).

    An n-gram of 2 tokens, of 3, and so on has `dim` numbers from each of its heads; `factors` and `sizes`
    hash it (`ops.ngrams.hash_ngrams`). `rows`: of the table. No n-gram reaches over a token `end`. `taps`:
    of the convolution, `gap` tokens apart. `norm`: of queries, keys and what is convolved, in each of
    `streams`. `own`: of several ranks the hashes that this one looks up; None: all.
    """

    streams: int
    dim: int
    rows: int
    factors: tuple[int, ...]
    sizes: tuple[int, ...]
    end: int
    taps: int
    gap: int
    norm: NormSpec
    own: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class DepthSpec(ParallelSpec):
    """A mixer, `inner`, that reads a mean of what blocks of earlier layers gave and of this block so far, by
    attention over these sources (attention residuals; Kimi-K3). Without `inner` the mean itself is given.

    `sources`: blocks that have ended. `ends`: what was read last becomes one more of them, and the next one
    begins with what this gives (`BranchSpec.keep` 0). `norm`: of what `inner` reads; `eps`: of the sources.
    """

    sources: int = 0
    ends: bool = False
    norm: NormSpec | None = None
    eps: float = 1e-6


@dataclass(frozen=True, slots=True)
class CycleSpec(Mixer):
    """In front of a stack of layers that runs in cycles with another one (HRM; Wang et al. 2025): what the
    last one gave, normed, becomes the state `after`, and the sum of both is read. None: embeddings are the
    slow state, a stored vector is the fast one. "alone": what was given, normed, is read (Nanbeige 4.2)."""

    after: Literal["slow", "fast", "alone"] | None
    norm: NormSpec


@dataclass(frozen=True, slots=True)
class ShortcutSpec(ParallelSpec):
    """One mixer, next to experts, `moe`, with outputs that wait: the next one without experts adds them
    (LongCat-Flash; Cai et al. 2024). `norms`: of what either reads (Arctic); `post_norms` are not used."""


@dataclass(frozen=True, slots=True)
class GainSpec(ParallelSpec):
    """One mixer, `inner`, with outputs times one learned number; without it, a token's embedding times that
    number (Talkie)."""


@dataclass(frozen=True, slots=True)
class GatedInputSpec(ParallelSpec):
    """One mixer, `inner`, that reads x · sigmoid(widen(silu(narrow(x)))), by `rank` numbers (A.X K2)."""

    rank: int = 16


@dataclass(frozen=True, slots=True)
class Wkv4Spec(Recurrent):
    """RWKV-4's time mixing (Peng et al. 2023): averages over the past, weighed by keys; `size` channels."""

    size: int


@dataclass(frozen=True, slots=True)
class Wkv7Spec(Recurrent):
    """RWKV-7's time mixing (Peng et al. 2025), a delta rule with a decay and a rate for each key channel.

    `ranks`: of what makes decay, rate and gate, and of what mixes values with those of the first layer; None
    there: this is the first layer. `norm`: of each head's output.
    """

    num_heads: int
    head_dim: int
    ranks: tuple[int, int, int, int | None]
    norm: NormSpec


@dataclass(frozen=True, slots=True)
class ChannelMixSpec(Recurrent):
    """RWKV's channel mixing: an MLP of relu², of a token and the last one; `gated` by a sigmoid (RWKV-4)."""

    size: int
    gated: bool = False


@dataclass(frozen=True, slots=True)
class JetSpec(DeltaNetSpec):
    """JetBlock (Gu et al. 2025): a gated delta rule in which only values are convolved, by taps that each
    token makes through `rank` numbers."""

    rank: int = 0


@dataclass(frozen=True, slots=True)
class CcaSpec(AttentionSpec, Recurrent):
    """Attention over convolved queries and keys, half of the values being the last token's (CCA; ZAYA).

    `taps`: of the convolution of each channel, and of the one in each head that follows it. `value_sizes`:
    numbers of a value that are of this token, and of the last; None: as many of both.
    """

    taps: tuple[int, int] = (2, 2)
    value_sizes: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class ScaledSpec(ParallelSpec):
    """x becomes a x + b + c inner(norm(x)) + d, with learned vectors (ZAYA); without `inner` a x + b."""

    norm: NormSpec | None = None


@dataclass(frozen=True, slots=True)
class DifferenceSpec(AttentionSpec):
    """Head h minus λ times head h + num_heads / 2, over values of two heads (Ye et al. 2024; DiffLlama).

    λ is learned around `balance`. `norm`: of each pair's output, the weight being the same for all.
    """

    balance: float = 0.8
    norm: NormSpec = NormSpec()


@dataclass(frozen=True, slots=True)
class SharedDifferenceSpec(DifferenceSpec):
    """The same without keys and values of its own: it reads those of the mixer `source` (SambaY)."""

    source: str = ""


@dataclass(frozen=True, slots=True)
class ExpertHeadsSpec(AttentionSpec):
    """A mixture of attention heads (JetMoe): a token's `top_k` experts make queries, and read heads' outputs.

    Each expert has as many heads as there are key heads; `num_heads` are those of all chosen ones.
    """

    num_experts: int = 8
    top_k: int = 2
    router: RouterSpec = RouterSpec()


@dataclass(frozen=True, slots=True)
class RelativeSpec(AttentionSpec, Recurrent):
    """Attention with a bias that each query makes for each distance up to `extent`: of `rank` profiles over
    distances it mixes one (Inkling). Keys and values are convolved over `taps` tokens.

    `temperature`: of what is mixed, too.
    """

    rank: int = 16
    extent: int = 1024
    taps: int = 4


@dataclass(frozen=True, slots=True)
class ConvolvedSpec(ParallelSpec):
    """One mixer, `inner`, with outputs that are convolved over `taps` tokens (Inkling)."""

    taps: int = 4
