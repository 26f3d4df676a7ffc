"""Specs of mixtures of experts that few families have. They are plain data."""

from __future__ import annotations

from dataclasses import dataclass, field

from plait.spec.model import MlpSpec, MoeSpec, NormSpec, ParallelSpec


@dataclass(frozen=True, slots=True)
class StateMoeSpec(MoeSpec):
    """A mixture with a router of `router_size` numbers, which each layer adds to those of the last (ZAYA).

    A norm and three linear layers make logits of them. Of its `identities`, nothing is added. `first`: there
    are none to be added to.
    """

    router_size: int = 256
    norm: NormSpec = NormSpec()
    first: bool = False


@dataclass(frozen=True, slots=True)
class NormedMoeSpec(MoeSpec):
    """A mixture in a latent space of which each expert's outputs are normed, then weighed (Muse Spark).

    `enter_norm`: of what experts read; `give_norm`: of what each gives.
    """

    enter_norm: NormSpec = NormSpec()
    give_norm: NormSpec = NormSpec(kind="scaled")


@dataclass(frozen=True, slots=True)
class TableMoeSpec(MoeSpec):
    """A mixture of which a table has the experts of each of `vocab_size` tokens (DeepSeek-V4)."""

    vocab_size: int = 1


@dataclass(frozen=True, slots=True)
class EarlyRouterSpec(ParallelSpec):
    """One mixer, `inner`, that reads norm(x). Logits of `num_experts`, made of x itself, wait for the next
    mixture, which is an `EarlyMoeSpec` (SmallThinker; Song et al. 2025)."""

    num_experts: int = 0
    norm: NormSpec = NormSpec()


@dataclass(frozen=True, slots=True)
class EarlyMoeSpec(MoeSpec):
    """A mixture without a router of its own: an `EarlyRouterSpec` before it made the logits."""


@dataclass(frozen=True, slots=True)
class GroveMoeSpec(MoeSpec):
    """Of each `group` experts in a row one more, `common`, that is computed with the weight of every chosen
    one of them, times `common_scale` (Grove MoE; Wu et al. 2025)."""

    group: int = 2
    common: MlpSpec = field(default_factory=lambda: MlpSpec(128))
    common_scale: float = 0.05
