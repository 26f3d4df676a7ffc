"""Specs of heads that come in files of their own and draft from what a model makes of tokens. Plain data."""

from __future__ import annotations

from dataclasses import dataclass

from plait.spec.model import ModelSpec


@dataclass(frozen=True, slots=True)
class DraftHeadSpec(ModelSpec):
    """A head for drafts in a file of its own. What a model of this shape has, `layers` to `max_len`, is the
    head's; `vocab_size` is the model's. `model_size`: the model's hidden size."""

    model_size: int = 0

    @property
    def title(self) -> str:
        """What it is, for messages."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class ReadingSpec(DraftHeadSpec):
    """A head that reads states of inner layers of its model: see `model.eagle`.

    `num_drafted`: the tokens that the head knows. `taps`: the layers before which states are read; None: the
    usual three of `list_taps`; empty: what is behind the last norm. `norms_states`: each on its own, or all
    as one vector.
    """

    num_drafted: int = 0
    taps: tuple[int, ...] | None = None
    norms_states: str | None = None  # "each", "all"

    def list_taps(self, num_layers: int) -> tuple[int, ...]:
        """The layers of a model with so many before which states are read: one near each end, one between."""
        return (2, num_layers // 2, num_layers - 3) if self.taps is None else self.taps


@dataclass(frozen=True, slots=True)
class EagleSpec(ReadingSpec):
    """EAGLE-3 (Li et al. 2025): see `model.eagle`.

    `keeps_normed`: the first layer adds to the normed state. `passes_normed`: the next draft token is made of
    a normed state, too. `mask_token`: what stands for a token of the draft where one pass makes all of them
    (P-EAGLE); None: each has a pass of its own.
    """

    keeps_normed: bool = False
    passes_normed: bool = False
    mask_token: int | None = None

    @property
    def title(self) -> str:
        """See `DraftHeadSpec`."""
        return "a head of EAGLE-3" if self.mask_token is None else "a head of P-EAGLE"


@dataclass(frozen=True, slots=True)
class BlockConvSpec:
    """Convolutions over the rows of a block, around each part of a layer: `kernel` taps, of which `group`
    channels share what a token makes (DFlash2)."""

    kernel: int
    group: int


@dataclass(frozen=True, slots=True)
class SelectorSpec:
    """What chooses among the `top` likeliest tokens by the one before: `rank` numbers of each (DFlash2)."""

    rank: int
    top: int


@dataclass(frozen=True, slots=True)
class DFlashSpec(ReadingSpec):
    """DFlash (Chen et al. 2026): see `model.dflash`. Its layers attend as `BlockAttentionSpec` says.

    `block_size`: rows of a block, at most. `mask_token`: what stands for a token of the draft. `from_last`:
    the row of the last token gives the first token of a draft, and each mask the one behind it. Of DSpark:
    `markov_rank`, of what a token adds to the logits behind it. Of DFlash2: `conv` and `selector`.
    """

    block_size: int = 16
    mask_token: int = 0
    from_last: bool = False
    markov_rank: int | None = None
    conv: BlockConvSpec | None = None
    selector: SelectorSpec | None = None

    @property
    def title(self) -> str:
        """See `DraftHeadSpec`."""
        kind = "DSpark" if self.markov_rank else "DFlash2" if self.selector else "DFlash"
        return f"a head of {kind}"

    @property
    def most(self) -> int:
        """Tokens of a draft, at most."""
        return self.block_size - (not self.from_last)


@dataclass(frozen=True, slots=True)
class ClustersSpec:
    """Clusters of `size` tokens each, and how many of them a head computes the logits of."""

    count: int
    chosen: int
    size: int


@dataclass(frozen=True, slots=True)
class AssistantSpec(DraftHeadSpec):
    """Gemma 4's assistant: see `model.assistant`. Its layers name no `source` of keys before they are bound
    to a model. `clusters`: see `model.centroids`; None: it computes all logits."""

    clusters: ClustersSpec | None = None

    @property
    def title(self) -> str:
        """See `DraftHeadSpec`."""
        return "an assistant of Gemma 4"
