"""The two ends of a model: token ids to vectors, vectors to logits."""

from __future__ import annotations

import torch
from torch import Tensor

from plait.checkpoint.weights import Weights
from plait.ops.linear import Linear
from plait.spec import ModelSpec


class Embedding:
    """A table of token vectors, read row by row from the weight's own storage."""

    def __init__(self, s: ModelSpec, w: Weights) -> None:
        self.table = w.weight("weight", (s.vocab_size, s.hidden_size))
        self.scale, self.dtype = s.embed_scale, w.target.dtype

    def __call__(self, token_ids: Tensor) -> Tensor:
        """token_ids: [T] -> [T, hidden]."""
        x = self.table.gather(token_ids, self.dtype)
        return x if self.scale == 1.0 else x * torch.tensor(self.scale, dtype=self.dtype, device=x.device)


class Head:
    """Hidden states to logits, in float32. A tied model reads the embedding's table."""

    def __init__(self, s: ModelSpec, w: Weights) -> None:
        self.spec = s
        name = "embed" if s.tied else "head"
        self.linear: Linear = w.linear(name, in_size=s.hidden_size, out_sizes=(s.vocab_size,), split="out")

    def __call__(self, x: Tensor) -> Tensor:
        """x: [L, hidden] -> [L, vocab] float32."""
        logits = self.linear(x).float()
        if self.spec.logit_scale != 1.0:
            logits = logits * self.spec.logit_scale
        cap = self.spec.logit_softcap
        return cap * torch.tanh(logits / cap) if cap else logits
