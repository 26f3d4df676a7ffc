"""A head that drafts: a small model which goes on from what a large one made of its tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor

from plait.checkpoint.weights import Weights
from plait.errors import ConfigError
from plait.memory import BlockGroup, State, block_groups, has_slots
from plait.model.layers.layers import Batch
from plait.ops.rows import put_rows
from plait.spec.draft_heads import DraftHeadSpec
from plait.spec.model import ModelSpec
from plait.state.store import StateStore


def check_sizes(s: DraftHeadSpec, model: ModelSpec) -> None:
    """Raises ConfigError if a head in files of its own was trained for a model of other sizes, or reads none
    like this."""
    if model.hidden_size != s.model_size:
        raise ConfigError(
            f"speculate: the head reads states of {s.model_size} numbers, and this model's have "
            f"{model.hidden_size}: it was trained for another model"
        )
    if model.vocab_size != s.vocab_size:
        raise ConfigError(
            f"speculate: the head drafts for a vocabulary of {s.vocab_size} tokens, and this model has "
            f"{model.vocab_size}: it was trained for another model"
        )
    what = "several residual streams" if model.streams else "learned positions" if model.positions else None
    if what := "learned tokens before each text" if model.front else what:
        raise ConfigError(f"speculate: {s.title} reads no models with {what}; try ngram")


class DraftHead:
    """What drafts from rows that a model made of tokens.

    `width`: the numbers of such a row. `states`: the head's own, by mixer name. `groups`: of the blocks that
    it reads.
    """

    width: int

    def __init__(self, states: Iterable[Mapping[str, State]]) -> None:
        self.states: dict[str, State] = {name: one for each in states for name, one in each.items()}
        assert not has_slots(self.states), "a head with recurrent state"
        self.groups: tuple[BlockGroup, ...] = block_groups(self.states)

    def logits(self, last: Tensor) -> Tensor:
        """last: [L, width], rows of what the head made -> [L, vocab] float32."""
        raise NotImplementedError


class ChainHead(DraftHead):
    """Drafts a token in each pass. Position i is computed from h[i], which the model made of it, and from
    token i + 1.

    `stays`: every draft token has the place of the first one.
    """

    stays = False

    def __init__(self, weights: Weights, states: Iterable[Mapping[str, State]]) -> None:
        self._put_rows = weights.bind(put_rows)
        super().__init__(states)

    def compute(self, batch: Batch, store: StateStore, before: Tensor) -> Tensor:
        """before: [T, width], h of every row; `batch.token_ids` are the tokens behind them.

        What the head makes of every row: [T, width]. Of its last row it can go on.
        """
        raise NotImplementedError

    def keep_last(self, h: Tensor, batch: Batch, before: Tensor) -> Tensor:
        """h: [T, width] -> its requested rows [L, width], which are the first of `before` from now on.

        So the next pass, of one row for each of these, reads what this one made.
        """
        kept: Tensor = self._put_rows(h, batch.logit_rows, before)
        return kept
