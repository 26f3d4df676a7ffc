"""DFlash: a head that drafts a block of tokens in one pass, all of them at once.

Chen et al. 2026, "DFlash: Block Diffusion for Flash Speculative Decoding" (arXiv 2602.06036). As for EAGLE-3,
the states of some layers become one vector of each token, g. Keys and values of g, in each layer of the head,
are the text that a block attends to. The block is the last token and a mask in the place of each token that
is to be drafted; its rows see each other. A row of a mask gives the logits of the token in its place.

DSpark (DeepSeek 2026) and DFlash2 (z-lab 2026) go on from there: `block_choice` says how one token of a draft
depends on the one before it. In DFlash2, convolutions lie around each part of a layer.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from plait.checkpoint.weights import Weights
from plait.model.block_choice import make_choice
from plait.model.branch import Branch
from plait.model.decoder import Decoder
from plait.model.draft_head import DraftHead
from plait.model.head_tables import HeadTables
from plait.model.layers.layers import Batch, Norm
from plait.model.mixers.block_attention import BlockAttention
from plait.model.token_conv import BlockRows, TokenConv
from plait.ops.rows import take_rows
from plait.spec.draft_heads import DFlashSpec
from plait.spec.model import ModelSpec
from plait.state.store import StateStore


class DFlashHead(DraftHead):
    """A head over what its model's `StateReader` made. `weights`: its own tensors. Raises CheckpointError.

    `trunk`, `model_weights`: see `HeadTables`. Lent tables are taken as they lie: scales are the head's own.
    """

    def __init__(
        self, s: DFlashSpec, weights: Weights, trunk: Decoder | None, model: ModelSpec, model_weights: Weights
    ) -> None:
        self.spec, self.width = s, s.hidden_size
        self.tables = HeadTables(s, weights, trunk, model, model_weights, is_raw=True)
        self.context_norm = Norm(s.norm, weights.scope("hidden_norm"), s.hidden_size)
        self.branches = [Branch(b, weights.scope(name), s.hidden_size) for name, b in s.branches()]
        self.convs = [
            TokenConv(s.conv, weights.scope(f"{name}.conv"), s.hidden_size) if s.conv else None
            for name, _ in s.branches()
        ]
        self.norm = Norm(s.norm, weights.scope("norm"), s.hidden_size)
        self.choice = make_choice(s, weights, self.tables)
        self._take_rows = weights.bind(take_rows)
        super().__init__([branch.states for branch in self.branches])

    def keep(self, batch: Batch, store: StateStore, before: Tensor) -> None:
        """Keep keys and values. before: [T, width], g of each token of `batch`, of which places count."""
        context = self.context_norm(before)
        batch = replace(batch, step={})
        for branch in self.branches:
            if isinstance(branch.mixer, BlockAttention):
                branch.mixer.keep(context, batch, store)

    def compute(self, batch: Batch, store: StateStore, rows: BlockRows) -> Tensor:
        """What the head makes of the requested rows of blocks, [L, width].

        `batch`: each row is a sequence; its slot says how many keys a row sees (`BlockAttention`). `rows`:
        which of them are a block.
        """
        batch = replace(batch, step={})
        x, delta = self.tables.embed(batch.token_ids, batch.positions), None
        for branch, conv in zip(self.branches, self.convs, strict=True):
            x, h = branch.enter(x, delta)
            if conv is None:
                made = branch(h, batch, store)
            else:
                h, taps = conv.enter(h, rows)
                made = conv.leave(branch(h, batch, store), taps, rows)
            x, delta = branch.leave(x, made)
        last: Tensor = self._take_rows(self.norm.add(x, delta)[1], batch.logit_rows)
        return last

    def logits(self, last: Tensor) -> Tensor:
        """last: [L, width] -> [L, vocab] float32, -inf of tokens that the head does not know."""
        return self.tables.logits(last)
