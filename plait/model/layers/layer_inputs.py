"""What each layer reads of a token besides x: a table of the token, and a projection of its embedding."""

from __future__ import annotations

from torch import Tensor

from plait.checkpoint.weights import Weights
from plait.model.layers.layers import Batch, Norm
from plait.ops.activation import combine
from plait.ops.rows import bind_table
from plait.spec.model import ModelSpec

NAME = "layer inputs"  # in `Batch.step`


class LayerInputs:
    """Of all layers at once, once in a step: `weight` [vocab, count * size], `project`, `norm` [size]."""

    def __init__(self, model: ModelSpec, weights: Weights) -> None:
        assert model.layer_inputs is not None
        s, w = model.layer_inputs, weights.scope("layer_inputs")
        self.spec, self._dtype = s, w.target.dtype
        table = w.weight("weight", (s.vocab_size, s.count * s.size))
        self._embed, self.table = bind_table(w.bind, table)
        self.project = w.linear("project", in_size=model.hidden_size, out_sizes=(s.count * s.size,))
        self.norm = Norm(s.norm, w.scope("norm"), s.size)
        self._combine = w.bind(combine)

    def compute(self, batch: Batch, embeddings: Tensor) -> None:
        """embeddings: [T, hidden]. Leaves [T, count * size] in the step of `batch`."""
        s = self.spec
        known = self._embed(batch.token_ids, self.table, s.scale, self._dtype)
        made = self.norm(self.project(embeddings).view(-1, s.count, s.size)).view(known.shape)
        batch.step[NAME] = self._combine(made, known, 1.0)
