"""What makes tokens of a drafted block depend on one another: each is chosen knowing the one before it."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from plait.checkpoint.weights import Weights
from plait.model.head_tables import HeadTables
from plait.ops.rows import bind_table
from plait.spec.draft_heads import DFlashSpec, SelectorSpec


class BlockChoice(Protocol):
    """Logits of one place of blocks, once the token before it is known."""

    def adjust(self, logits: Tensor, last: Tensor, previous: Tensor) -> Tensor:
        """logits: [n, vocab] float32; last: [n, width], of which they were made; previous: [n] int64 -> what
        takes the place of the logits."""


class MarkovChoice:
    """DSpark: logits += W2 W1[previous], of low rank. `weights`: `markov.prev` and `markov.next`."""

    def __init__(self, s: DFlashSpec, rank: int, weights: Weights, tables: HeadTables) -> None:
        table = weights.weight("markov.prev.weight", (s.vocab_size, rank))
        self._embed, self.table = bind_table(weights.bind, table)
        self.next = weights.linear("markov.next", in_size=rank, out_sizes=(s.num_drafted,))
        self._tables, self._dtype = tables, weights.target.dtype

    def adjust(self, logits: Tensor, last: Tensor, previous: Tensor) -> Tensor:
        """See `BlockChoice`."""
        made = self.next(self._embed(previous, self.table, 1.0, self._dtype)).float()
        return logits + self._tables.spread(made)


class CandidateChoice:
    """DFlash2: of the likeliest tokens, logit + ⟨A[previous] * W h, B[token]⟩; no others.

    `weights`: `selector.prev`, `selector.next`, `selector.hidden`.
    """

    def __init__(self, s: SelectorSpec, weights: Weights, vocab_size: int, hidden: int) -> None:
        shape, self._top = (vocab_size, s.rank), s.top
        self.prev, self.next = (
            bind_table(weights.bind, weights.weight(f"selector.{name}.weight", shape))
            for name in ("prev", "next")
        )
        self.hidden = weights.linear("selector.hidden", in_size=hidden, out_sizes=(s.rank,))

    def adjust(self, logits: Tensor, last: Tensor, previous: Tensor) -> Tensor:
        """See `BlockChoice`."""
        values, tokens = logits.topk(self._top, -1, sorted=False)
        (embed_prev, prev), (embed_next, following) = self.prev, self.next
        wanted = embed_prev(previous, prev, 1.0, torch.float32) * self.hidden(last).float()
        codes = embed_next(tokens.flatten(), following, 1.0, torch.float32).view(*tokens.shape, -1)
        scores = values + (codes @ wanted[:, :, None])[..., 0]
        return torch.full_like(logits, float("-inf")).scatter_(-1, tokens, scores)


def make_choice(s: DFlashSpec, weights: Weights, tables: HeadTables) -> BlockChoice | None:
    """What a head has of this; None: all tokens of a block are drawn at once. Raises CheckpointError."""
    if s.markov_rank:
        return MarkovChoice(s, s.markov_rank, weights, tables)
    return CandidateChoice(s.selector, weights, s.vocab_size, s.hidden_size) if s.selector else None
