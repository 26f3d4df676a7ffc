"""Multi-token prediction: a head over the model's own hidden states, which predicts the token after the next.

The method and the layout are those of DeepSeek-V3 (section 2.2); GLM-4.5, Qwen3-Next, MiMo and Nemotron 3
differ in names, in the order of the halves and in the layer. A family says so in an `MtpSpec`.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from plait.checkpoint.weights import Weights
from plait.model.branch import Branch
from plait.model.decoder import Decoder
from plait.model.draft_head import ChainHead
from plait.model.layers.layers import Batch, Embedding, LmHead, Norm
from plait.ops.activation import combine
from plait.ops.rows import join
from plait.spec.model import ModelSpec
from plait.state.store import StateStore

FC = "mtp.fc.weight"  # every head has it: where a file has none, it has no head


class MtpHead(ChainHead):
    """The head of a model. `weights` gives its tensors, under `mtp`. Raises CheckpointError.

    `trunk`: the model that lends its embedding, and with `shares_head` its output head; what is not lent is
    read again, whole.
    """

    def __init__(
        self, s: ModelSpec, weights: Weights, trunk: Decoder | None, *, shares_head: bool = True
    ) -> None:
        assert s.mtp is not None
        self.spec, own, w = s.mtp, s.mtp, weights.scope("mtp")
        self.embed = trunk.embed if trunk else Embedding(s, weights.scope("embed"))
        self.head = trunk.head if trunk and shares_head else LmHead(s, weights)
        self.embed_norm = Norm(own.norm, w.scope("embed_norm"), s.hidden_size)
        self.hidden_norm = Norm(own.norm, w.scope("hidden_norm"), s.hidden_size)
        self.fc = w.linear("fc", in_size=2 * s.hidden_size, out_sizes=(s.hidden_size,))
        named = ((f"layers.{i}.{b.name}", b) for i, layer in enumerate(own.layers, own.first) for b in layer)
        self.branches = [Branch(b, w.scope(name), s.hidden_size) for name, b in named]
        self.norm = Norm(own.norm, w.scope("norm"), s.hidden_size)
        self._join, self._combine, self.width = weights.bind(join), weights.bind(combine), s.hidden_size
        super().__init__(weights, [branch.states for branch in self.branches])

    def compute(self, batch: Batch, store: StateStore, before: Tensor) -> Tensor:
        """See `ChainHead`: what is given is behind the head's norm, or in front of it (`passes_normed`)."""
        batch = replace(batch, step={})
        e = self.embed_norm(self.embed(batch.token_ids, batch.positions))
        h = self.hidden_norm(before)
        delta = None
        x = self.fc(self._join(h, e) if self.spec.hidden_first else self._join(e, h))
        for branch in self.branches:
            x, h = branch.enter(x, delta)
            x, delta = branch.leave(x, branch(h, batch, store))
        if self.spec.passes_normed:
            return self.norm.add(x, delta)[1]
        made: Tensor = x if delta is None else self._combine(x, delta, 1.0)
        return made

    def logits(self, last: Tensor) -> Tensor:
        """last: [L, hidden] -> [L, vocab] float32."""
        return self.head(last if self.spec.passes_normed else self.norm(last))
