"""Embedding and output head of a head for drafts: of its own file, or those of its model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from plait.checkpoint.weights import Weights
from plait.errors import ShapeMismatch
from plait.model.decoder import Decoder
from plait.model.layers.layers import Embedding, LmHead
from plait.ops.rows import pick_columns
from plait.spec.draft_heads import ReadingSpec
from plait.spec.model import ModelSpec


class HeadTables:
    """`weights`: of the head. `trunk` lends what they have not; where it is None, as of a model on several
    ranks, that is read again from `model_weights`. `is_raw`: numbers of a lent table are taken as they are,
    and what the head's spec says of scales holds, not what the model's says.

    Raises CheckpointError, of tables of other sizes, too.
    """

    def __init__(
        self,
        s: ReadingSpec,
        weights: Weights,
        trunk: Decoder | None,
        model: ModelSpec,
        model_weights: Weights,
        *,
        is_raw: bool = False,
    ) -> None:
        self._spec, self._model, self._is_raw = s, model, is_raw
        self.embed = self._find_embedding(weights, trunk, model_weights)
        self.head = self._find_output(weights, trunk, model_weights)
        self.columns = _read_columns(s, weights)
        self._pick: Callable[..., Tensor] = weights.bind(pick_columns)

    def logits(self, x: Tensor) -> Tensor:
        """x: [L, hidden] -> [L, vocab] float32, -inf of tokens that the head does not know."""
        return self.spread(self.head(x))

    def spread(self, known: Tensor) -> Tensor:
        """known: [L, tokens that the head knows] -> [L, vocab], -inf of all others."""
        return known if self.columns is None else self._pick(known, self.columns)

    def _find_embedding(self, own: Weights, trunk: Decoder | None, model_weights: Weights) -> Embedding:
        s, model = self._spec, self._model
        if "embed.weight" in own:
            return Embedding(s, own.scope("embed"))
        if model.hidden_size != s.hidden_size:
            raise ShapeMismatch(
                f"the head has no embedding, and its model's have {model.hidden_size} numbers, not "
                f"{s.hidden_size}"
            )
        if self._is_raw:
            model = replace(model, embed_scale=s.embed_scale, embed_norm=None)
        if trunk is None:
            return Embedding(model, model_weights.scope("embed"))
        if not self._is_raw:
            return trunk.embed
        lent = copy.copy(trunk.embed)
        lent.scale, lent.norm = s.embed_scale, None
        return lent

    def _find_output(self, own: Weights, trunk: Decoder | None, model_weights: Weights) -> LmHead:
        s, model = self._spec, self._model
        if s.tied:
            if s.num_drafted != s.vocab_size:
                raise ShapeMismatch(
                    f"the head's embedding of {s.vocab_size} tokens cannot be its lm_head of {s.num_drafted}"
                )
            return LmHead(s, own)
        if "head.weight" in own:
            return LmHead(replace(s, vocab_size=s.num_drafted), own)
        if (model.hidden_size, model.vocab_size) != (s.hidden_size, s.num_drafted):
            raise ShapeMismatch(
                f"the head has no lm_head, and needs one of {s.num_drafted} tokens by {s.hidden_size} "
                f"numbers; its model's is of {model.vocab_size} by {model.hidden_size}"
            )
        if self._is_raw:
            model = replace(model, logit_scale=s.logit_scale, logit_softcap=s.logit_softcap)
        if trunk is None:
            return LmHead(model, model_weights)
        lent = copy.copy(trunk.head)
        lent.spec = model
        return lent


def _read_columns(s: ReadingSpec, own: Weights) -> Tensor | None:
    """For each token of the model its column among the head's logits, or -1; None: they have them all.

    A file has `tokens` themselves, or `d2t`: how far behind its column each is. Raises ShapeMismatch for
    tokens that there are not.
    """
    count, size = s.num_drafted, s.vocab_size
    name = next((name for name in ("tokens", "d2t") if name in own), None)
    if name is None:
        if count != size:
            raise ShapeMismatch(f"the head has logits of {count} tokens and no d2t, which says what they are")
        return None
    stored = own.tensor(name, (count,), torch.int64)
    if stored.is_meta:
        return torch.empty(size, dtype=torch.int64, device="meta")
    tokens = stored.cpu() + (torch.arange(count) if name == "d2t" else 0)
    if bool(((tokens < 0) | (tokens >= size)).any()) or len(tokens.unique()) < count:
        raise ShapeMismatch(f"d2t does not name {count} different tokens of {size}")
    columns = torch.full((size,), -1)
    columns[tokens] = torch.arange(count)
    return columns.to(own.target.device)
