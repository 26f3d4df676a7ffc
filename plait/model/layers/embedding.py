"""The two ends of a model: token ids to vectors, vectors to logits."""

from __future__ import annotations

from torch import Tensor

from plait.checkpoint.weights import Weights
from plait.ops.activation import rescale
from plait.ops.linear import Linear
from plait.ops.rows import embed
from plait.spec import ModelSpec


class Embedding:
    """A table of token vectors, read row by row from the weight's own storage."""

    def __init__(self, s: ModelSpec, w: Weights) -> None:
        self.table = w.weight("weight", (s.vocab_size, s.hidden_size))
        self.scale, self.dtype = s.embed_scale, w.target.dtype
        self._embed = w.bind(embed, kind=self.table.format)

    def __call__(self, token_ids: Tensor) -> Tensor:
        """token_ids: [T] -> [T, hidden]."""
        return self._embed(token_ids, self.table, self.scale, self.dtype)  # type: ignore[no-any-return]


class LmHead:
    """Hidden states to logits, in float32. A tied model reads the embedding's table."""

    def __init__(self, s: ModelSpec, w: Weights) -> None:
        self.spec = s
        name = "embed" if s.tied else "head"
        self.linear: Linear = w.linear(name, in_size=s.hidden_size, out_sizes=(s.vocab_size,), split="out")
        self._rescale = w.bind(rescale)

    def __call__(self, x: Tensor) -> Tensor:
        """x: [L, hidden] -> [L, vocab] float32."""
        logits = self.linear(x).float()
        scale, cap = self.spec.logit_scale, self.spec.logit_softcap
        return logits if scale == 1.0 and not cap else self._rescale(logits, scale, cap)
