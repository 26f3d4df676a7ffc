"""EAGLE-3: a head that drafts from what a model makes of a token in some of its layers.

Li et al. 2025, "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test".
Of each token the states of three layers become one, g = fc([low; middle; high]), in the model's own step. A
layer reads [norm(e); norm(g)] and adds to g; e is the embedding of the next token. What comes out is read by
an output head of fewer tokens, and takes the place of g for the next draft token.

P-EAGLE (Hui et al. 2026, "P-EAGLE: Parallel-Drafting EAGLE with Scalable Training", arXiv 2602.01469) makes
all of a draft in one pass: the places behind the last token have the embedding of a mask and a learned g.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import reduce

import torch
from torch import Tensor

from plait.checkpoint.weights import Weights
from plait.errors import ConfigError, ShapeMismatch
from plait.model.branch import Branch
from plait.model.decoder import Decoder
from plait.model.draft_head import ChainHead, check_sizes
from plait.model.head_tables import HeadTables
from plait.model.layers.layers import Batch, Norm
from plait.model.mixers.attention import Attention
from plait.ops.activation import combine
from plait.ops.linear import Linear
from plait.ops.rows import join
from plait.spec.draft_heads import EagleSpec, ReadingSpec
from plait.spec.model import AttentionSpec, ModelSpec
from plait.state.store import StateStore


class StateReader:
    """Makes one vector of a token's states at some layers. `layers`: those before which they are read.

    It is part of a model's step, and all in the head's own tensors. Raises CheckpointError, ConfigError.
    """

    def __init__(self, s: ReadingSpec, w: Weights, model: ModelSpec) -> None:
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
        return self.join([states[layer] for layer in self.layers])

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """parts: [T, model's hidden] for each of `layers`, in order -> [T, head's hidden]."""
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


def check_model(s: ReadingSpec, model: ModelSpec) -> None:
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


class EagleHead(ChainHead):
    """A head over what its model's `StateReader` made. `weights`: its own tensors. Raises CheckpointError.

    `trunk`, `model_weights`: see `HeadTables`.
    """

    def __init__(
        self, s: EagleSpec, weights: Weights, trunk: Decoder | None, model: ModelSpec, model_weights: Weights
    ) -> None:
        self.spec, self.width = s, s.hidden_size
        self.tables = HeadTables(s, weights, trunk, model, model_weights)
        first = s.layers[0][0]
        assert isinstance(first.mixer, AttentionSpec)
        scope = weights.scope("layers.0.attn")
        self.embed_norm = Norm(s.norm, scope.scope("norm"), s.hidden_size)
        self.hidden_norm = Norm(s.norm, weights.scope("hidden_norm"), s.hidden_size)
        self.first = WideAttention(first.mixer, scope)
        named = [*s.branches()][1:]
        self.branches = [Branch(b, weights.scope(name), s.hidden_size) for name, b in named]
        self.norm = Norm(s.norm, weights.scope("norm"), s.hidden_size)
        self._join, self._combine = weights.bind(join), weights.bind(combine)
        self._masked = self._read_mask(weights) if s.mask_token is not None else None
        self.mask: Tensor | None = None
        super().__init__(weights, (self.first.states, *(branch.states for branch in self.branches)))

    def _read_mask(self, weights: Weights) -> Tensor:
        size = (len(self.spec.list_taps(0)) or 1) * self.spec.model_size
        x = weights.tensor("mask").flatten()
        if len(x) != size:
            raise ShapeMismatch(f"mask_hidden has {len(x)} numbers, and the head reads {size}")
        return x

    @torch.inference_mode()
    def make_mask(self, reader: StateReader | None) -> None:
        """Set `mask`, [1, width]: what stands for a model's row where a token of a draft is to be made.

        reader: what the model has; None: the head reads what is behind its last norm.
        """
        if self._masked is not None:
            parts = self._masked[None].split(self.spec.model_size, -1)
            self.mask = reader.join(parts) if reader else parts[0]

    def compute(self, batch: Batch, store: StateStore, before: Tensor) -> Tensor:
        """See `ChainHead`. The state to go on from is not normed, but where the head was trained so."""
        batch = replace(batch, step={})
        h = self.hidden_norm(before)
        e = self.embed_norm(self.tables.embed(batch.token_ids, batch.positions))
        x = h if self.spec.keeps_normed else before
        delta: Tensor | None = self.first(self._join(e, h), batch, store)
        for branch in self.branches:
            x, h = branch.enter(x, delta)
            x, delta = branch.leave(x, branch(h, batch, store))
        x = x if delta is None else self._combine(x, delta, 1.0)
        return self.norm(x) if self.spec.passes_normed else x

    def logits(self, last: Tensor) -> Tensor:
        """last: [L, hidden] -> [L, vocab] float32, -inf of tokens that the head does not know."""
        return self.tables.logits(last if self.spec.passes_normed else self.norm(last))
