"""The spec of a head that drafts from what a model makes of tokens in its inner layers. Plain data."""

from __future__ import annotations

from dataclasses import dataclass

from plait.spec.model import ModelSpec


@dataclass(frozen=True, slots=True)
class EagleSpec(ModelSpec):
    """A head for drafts in a file of its own (EAGLE-3; Li et al. 2025): see `model.eagle`.

    What a model of this shape has, `layers` to `max_len`, is the head's; `vocab_size` is the model's.
    `num_drafted`: the tokens that the head knows. `model_size`: the model's hidden size. `taps`: the layers
    before which states are read; None: the usual three of `list_taps`; empty: what is behind the last norm.
    `norms_states`: each on its own, or all as one vector. `keeps_normed`: the first layer adds to the normed
    state. `passes_normed`: the next draft token is made of a normed state, too.
    """

    num_drafted: int = 0
    model_size: int = 0
    taps: tuple[int, ...] | None = None
    norms_states: str | None = None  # "each", "all"
    keeps_normed: bool = False
    passes_normed: bool = False

    def list_taps(self, num_layers: int) -> tuple[int, ...]:
        """The layers of a model with so many before which states are read: one near each end, one between."""
        return (2, num_layers // 2, num_layers - 3) if self.taps is None else self.taps
