"""EAGLE-3: a head that drafts from what a model makes of a token in some of its layers.

Li et al. 2025, "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test".
Of each token the states of three layers become one, g = fc([low; middle; high]), in the model's own step. A
layer reads [norm(e); norm(g)] and adds to g; e is the embedding of the next token. What comes out is read by
an output head of fewer tokens, and takes the place of g for the next draft token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import reduce

import torch
from torch import Tensor

from plait.checkpoint.weights import Weights
from plait.errors import ConfigError, ShapeMismatch
from plait.model.decoder import Branch, Decoder
from plait.model.draft_head import DraftHead, check_sizes
from plait.model.layers.layers import Batch, Embedding, LmHead, Norm
from plait.model.mixers.attention import Attention
from plait.ops.activation import combine
from plait.ops.linear import Linear
from plait.ops.rows import join, pick_columns
from plait.spec.draft_heads import EagleSpec
from plait.spec.model import AttentionSpec, ModelSpec
from plait.state.store import StateStore


class StateReader:
    """Makes one vector of a token's states at some layers. `layers`: those before which they are read.

    It is part of a model's step, and all in the head's own tensors. Raises CheckpointError, ConfigError.
    """

    def __init__(self, s: EagleSpec, w: Weights, model: ModelSpec) -> None:
        check_model(s, model)
        self.layers, size = s.list_taps(len(model.layers)), s.model_size
        self.fc = w.linear("fc", in_size=len(self.layers) * size, out_sizes=(s.hidden_size,))
        count = len(self.layers)
        norms = {
            "all": [("input_norm", count * size)],
            "each": [(f"fc_norm.{i}", size) for i in range(count)],
        }
        own = norms.get(s.norms_states or "", [])
        self._norms = [Norm(s.norm, w.scope(name), width) for name, width in own]
        self._norms_all = s.norms_states == "all"
        self._join = w.bind(join)

    def __call__(self, states: Mapping[int, Tensor]) -> Tensor:
        """states: [T, model's hidden] before each of `layers` -> [T, head's hidden]."""
        parts = [states[layer] for layer in self.layers]
        if self._norms and not self._norms_all:
            parts = [norm(part) for norm, part in zip(self._norms, parts, strict=True)]
        x = reduce(self._join, parts)
        return self.fc(self._norms[0](x) if self._norms_all else x)


class ObservedDecoder(Decoder):
    """A model with inner layers that a head reads. `layers`: states before these are kept (`take_states`).

    `reader`: what makes one vector of them, set once its own weights are there.
    """

    layers: tuple[int, ...] = ()
    reader: StateReader | None = None

    def __init__(self, s: ModelSpec, weights: Weights) -> None:
        super().__init__(s, weights)
        self._combine = weights.bind(combine)
        self._states: dict[int, Tensor] = {}

    def __call__(self, batch: Batch, store: StateStore) -> Tensor:
        """See `Decoder`. Logits alone: no head reads on."""
        logits = super().__call__(batch, store)
        self._states = {}
        return logits

    def take_states(self) -> dict[int, Tensor]:
        """Of the last pass, once: [T, hidden] before each of `layers`."""
        states, self._states = self._states, {}
        return states

    def run_branches(
        self, x: Tensor, embeddings: Tensor, batch: Batch, store: StateStore
    ) -> tuple[Tensor, Tensor | None]:
        """See `Decoder`."""
        branches, delta, self._states = iter(self.branches), None, {}
        for number, layer in enumerate((*self.spec.layers, ())):
            if number in self.layers:
                x, delta = x if delta is None else self._combine(x, delta, 1.0), None
                self._states[number] = x
            for _, branch in zip(layer, branches, strict=False):  # `layer` ends first
                x, h = branch.enter_beside(x, delta, embeddings, batch, store)
                x, delta = branch.leave(x, branch(h, batch, store))
        return x, delta


def take_observed(decoder: Decoder, h: Tensor) -> Tensor:
    """What a head reads of each row, once, of what `decoder.hidden` gave last: [T, `row_size`]."""
    if not isinstance(decoder, ObservedDecoder) or decoder.reader is None:
        return h
    return decoder.reader(decoder.take_states())


def row_size(decoder: Decoder) -> int:
    """How many numbers of a row `take_observed` gives."""
    reader = decoder.reader if isinstance(decoder, ObservedDecoder) else None
    return reader.fc.n_out if reader else decoder.spec.hidden_size


def check_model(s: EagleSpec, model: ModelSpec) -> None:
    """Raises ConfigError if a head is not made for a model of this shape."""
    count, layers = len(model.layers), s.list_taps(len(model.layers))
    check_sizes(s, model)
    if not layers and s.hidden_size != s.model_size:
        raise ConfigError(
            f"speculate: the head goes on from states of {s.hidden_size} numbers, and the model's have "
            f"{s.model_size}: it lacks the product between them"
        )
    if outside := [layer for layer in layers if not 0 <= layer <= count]:
        raise ConfigError(f"speculate: the head reads states before layer {outside[0]}, of {count} layers")


class WideAttention(Attention):
    """Attention over two vectors of a token, one behind the other."""

    def _bind_qkv(self, w: Weights, parts: dict[str, int]) -> Linear:
        return w.linear(*parts, in_size=2 * w.target.hidden_size, out_sizes=tuple(parts.values()))


class EagleHead(DraftHead):
    """A head over what its model's `StateReader` made. `weights`: its own tensors. Raises CheckpointError.

    `trunk` lends its embedding, and its output head, where the file has none. They are read again from
    `model_weights` where `trunk` is None, as of a model on several ranks.
    """

    def __init__(
        self, s: EagleSpec, weights: Weights, trunk: Decoder | None, model: ModelSpec, model_weights: Weights
    ) -> None:
        self.spec, self.width = s, s.hidden_size
        self.embed = self._find_embedding(weights, trunk, model, model_weights)
        self.head = self._find_output(weights, trunk, model, model_weights)
        first = s.layers[0][0]
        assert isinstance(first.mixer, AttentionSpec)
        scope = weights.scope("layers.0.attn")
        self.embed_norm = Norm(s.norm, scope.scope("norm"), s.hidden_size)
        self.hidden_norm = Norm(s.norm, weights.scope("hidden_norm"), s.hidden_size)
        self.first = WideAttention(first.mixer, scope)
        named = [*s.branches()][1:]
        self.branches = [Branch(b, weights.scope(name), s.hidden_size) for name, b in named]
        self.norm = Norm(s.norm, weights.scope("norm"), s.hidden_size)
        self.columns = self._read_columns(weights)
        self._join, self._combine, self._pick = (weights.bind(op) for op in (join, combine, pick_columns))
        super().__init__(weights, (self.first.states, *(branch.states for branch in self.branches)))

    def _find_embedding(
        self, own: Weights, trunk: Decoder | None, model: ModelSpec, model_weights: Weights
    ) -> Embedding:
        if "embed.weight" in own:
            return Embedding(self.spec, own.scope("embed"))
        if model.hidden_size != self.spec.hidden_size:
            raise ShapeMismatch(
                f"the head has no embedding, and its model's have {model.hidden_size} numbers, not "
                f"{self.spec.hidden_size}"
            )
        return trunk.embed if trunk else Embedding(model, model_weights.scope("embed"))

    def _find_output(
        self, own: Weights, trunk: Decoder | None, model: ModelSpec, model_weights: Weights
    ) -> LmHead:
        if self.spec.tied:
            return LmHead(self.spec, own)
        if "head.weight" in own:
            return LmHead(replace(self.spec, vocab_size=self.spec.num_drafted), own)
        if (model.hidden_size, model.vocab_size) != (self.spec.hidden_size, self.spec.num_drafted):
            raise ShapeMismatch("the head has no lm_head, and its model's is of another shape")
        return trunk.head if trunk else LmHead(model, model_weights)

    def _read_columns(self, own: Weights) -> Tensor | None:
        """For each token of the model its column among the head's logits, or -1; None: they have them all.

        A file has `tokens` themselves, or `d2t`: how far behind its column each is. Raises ShapeMismatch for
        tokens that there are not.
        """
        count, size = self.spec.num_drafted, self.spec.vocab_size
        name = next((name for name in ("tokens", "d2t") if name in own), None)
        if name is None:
            if count != size:
                raise ShapeMismatch(
                    f"the head has logits of {count} tokens and no d2t, which says what they are"
                )
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

    def compute(self, batch: Batch, store: StateStore, before: Tensor) -> Tensor:
        """See `DraftHead`. The state to go on from is not normed, but where the head was trained so."""
        batch = replace(batch, step={})
        h = self.hidden_norm(before)
        e = self.embed_norm(self.embed(batch.token_ids, batch.positions))
        x = h if self.spec.keeps_normed else before
        delta: Tensor | None = self.first(self._join(e, h), batch, store)
        for branch in self.branches:
            x, h = branch.enter(x, delta)
            x, delta = branch.leave(x, branch(h, batch, store))
        x = x if delta is None else self._combine(x, delta, 1.0)
        return self.norm(x) if self.spec.passes_normed else x

    def logits(self, last: Tensor) -> Tensor:
        """last: [L, hidden] -> [L, vocab] float32, -inf of tokens that the head does not know."""
        logits = self.head(last if self.spec.passes_normed else self.norm(last))
        return logits if self.columns is None else self._pick(logits, self.columns)
