"""Specs of attention of rarer kinds, over all keys; `plait.spec.sparse` has those that choose keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from plait.spec.model import AttentionSpec, NormSpec, Recurrent, RouterSpec
from plait.spec.recurrent import Mamba1Spec


@dataclass(frozen=True, slots=True)
class SharedKeysSpec(AttentionSpec):
    """Attention without keys and values of its own: it reads those of the mixer `source` (Gemma 4)."""

    source: str = ""


@dataclass(frozen=True, slots=True)
class BlockAttentionSpec(AttentionSpec):
    """Attention of a block of tokens that are drafted at once, over what a model made of those before it.

    `sees_ahead`: each token of a block sees all of it (DFlash).
    """

    sees_ahead: bool = True


@dataclass(frozen=True, slots=True)
class ScaledQueriesSpec(AttentionSpec):
    """Queries times learned factors, behind the rotation; `out_norm` is of gated outputs (Dory)."""


@dataclass(frozen=True, slots=True)
class NormedHeadsSpec(AttentionSpec):
    """Each head's outputs are normed, before a gate (Muse Spark)."""

    each_norm: NormSpec = NormSpec(weight=False)


@dataclass(frozen=True, slots=True)
class NearFarSpec(AttentionSpec):
    """Two attentions of the same queries: over keys of its own within `window`, and over all keys of the
    mixer `source`. A sigmoid of a number that each head makes of its query is the latter's share (IQuest)."""

    source: str = ""


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
class CcaSpec(AttentionSpec, Recurrent):
    """Attention over convolved queries and keys, half of the values being the last token's (CCA; ZAYA).

    `taps`: of the convolution of each channel, and of the one in each head that follows it. `value_sizes`:
    numbers of a value that are of this token, and of the last; None: as many of both.
    """

    taps: tuple[int, int] = (2, 2)
    value_sizes: tuple[int, int] | None = None


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
class KeyBiasSpec(AttentionSpec):
    """Every score gains exp(A · softplus(dt(v))): a number of its key and key head, from the values of all
    heads (Doge; Shi et al. 2024).

    `value_heads`: of how many heads dt reads values, those of other ranks included; None: of its own.
    """

    value_heads: int | None = None


@dataclass(frozen=True, slots=True)
class ExpertHeadsSpec(AttentionSpec):
    """A mixture of attention heads (JetMoe): a token's `top_k` experts make queries, and read heads' outputs.

    Each expert has as many heads as there are key heads; `num_heads` are those of all chosen ones.
    """

    num_experts: int = 8
    top_k: int = 2
    router: RouterSpec = RouterSpec()


@dataclass(frozen=True, slots=True)
class RoutedValuesSpec(AttentionSpec):
    """Attention with outputs times a function of a projection, and a mixture of values (K2 Horizon).

    A token's value is Σ w · silu(E x) over the `top_k` experts E that it chooses among `num_experts`; None:
    values are of one matrix. `activation`: of what outputs are multiplied by; "softplus": log2(1 + 2^x).
    """

    num_experts: int | None = None
    top_k: int = 1
    router: RouterSpec = RouterSpec()
    activation: Literal["silu", "softplus"] | None = None


@dataclass(frozen=True, slots=True)
class RootBiasSpec(AttentionSpec):
    """A score loses a head's slope times the root of its key's distance, not the distance (Step 1)."""


@dataclass(frozen=True, slots=True)
class LowRankSpec(AttentionSpec):
    """Queries of `q_rank` numbers of a token, normed by `q_a_norm`: factorised attention (MFA; Step 3)."""

    q_rank: int = 1
    q_a_norm: NormSpec = NormSpec()


@dataclass(frozen=True, slots=True)
class RelativeSpec(AttentionSpec, Recurrent):
    """Attention with a bias that each query makes for each distance up to `extent`: of `rank` profiles over
    distances it mixes one (Inkling). Keys and values are convolved over `taps` tokens.

    `temperature`: of what is mixed, too. Inkling 2 has the rest. `lengths`: the most that queries and keys
    may have, and what is mixed; queries and what is mixed are multiplied by learned numbers before.
    `token_sinks`: a logit of no token, which each query makes for a head. `apart`: x has three parts, which
    queries, keys and values read, and each token makes taps for the heads of the latter two. `split`: x
    may have three such parts, or one that all three read (Inkling 2 Mini).
    """

    rank: int = 16
    extent: int = 1024
    taps: int = 4
    lengths: tuple[float, float] | None = None
    token_sinks: bool = False
    apart: bool = False
    split: bool = False
