"""The one decoder: a flat list of residual branches between an embedding and a head."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from plait.checkpoint.weights import Weights
from plait.memory import State
from plait.model.branch import Branch, Delta, Unnormed
from plait.model.denoiser import Denoiser
from plait.model.front import read_front
from plait.model.layers.layer_inputs import LayerInputs
from plait.model.layers.layers import EMBEDDINGS, Batch, Embedding, LmHead
from plait.model.layers.streams import build_last_norm, build_streams
from plait.ops.folded_norm import HalfNorm
from plait.ops.rows import take_rows
from plait.spec.model import ModelSpec
from plait.state.store import StateStore


class Decoder:
    """Any model: `spec` says what it is, `weights` gives every tensor. Raises CheckpointError.

    `states` has the state of every mixer, by mixer name: the memory is made from it.
    """

    def __init__(self, s: ModelSpec, weights: Weights) -> None:
        self.spec = s
        self.embed = Embedding(s, weights.scope("embed"))
        self.layer_inputs = LayerInputs(s, weights) if s.layer_inputs else None
        self.streams = build_streams(s, weights)
        self.branches = self._build_branches(weights)
        self.norm = build_last_norm(s, self.streams, weights)
        self.head = LmHead(s, weights)
        self._take_rows, self.adapters = weights.bind(take_rows), weights.target.adapters
        self.states: dict[str, State] = {k: v for branch in self.branches for k, v in branch.states.items()}
        self.denoiser = Denoiser(s, s.canvas_mlp, weights, self.embed.table) if s.canvas_mlp else None
        self.states |= self.denoiser.states if self.denoiser else {}
        self._keeps_embeddings = any(getattr(b.mixer, "reads_embeddings", False) for b in self.branches)
        if s.front:
            read_front(s, [branch.mixer for branch in self.branches], self.states, self.run_branches, weights)

    def _build_branches(self, weights: Weights) -> list[Branch]:
        """Every branch, with the norms between them folded into their linear layers where kernels do that."""
        named = [(weights.scope(name), b) for name, b in self.spec.branches()]
        branches = [Branch(b, w, self.spec.hidden_size) for w, b in named]
        for at in range(1, len(branches) if self.streams is None else 0):
            branches[at - 1].fold_into(named[at - 1][0], branches[at], named[at][0])
        return branches

    def __call__(self, batch: Batch, store: StateStore) -> Tensor:
        """Logits of the requested rows, [L, vocab] float32; the state of every sequence moves on."""
        return self.answer(self.hidden(batch, store), batch, store)

    def hidden(self, batch: Batch, store: StateStore) -> Tensor:
        """What the model makes of every token, after the last norm: [T, hidden]. The states move on."""
        batch = replace(batch, step={})
        if self.adapters:
            self.adapters.step.current = batch.adapters
        x = self.embed(batch.token_ids, batch.positions)
        x = embeddings = self.denoiser.enter(x, batch, store) if self.denoiser and batch.canvas else x
        batch.step.update({EMBEDDINGS: embeddings} if self._keeps_embeddings else {})
        x = self.streams.spread(x) if self.streams else x
        if self.layer_inputs:
            self.layer_inputs.compute(batch, embeddings)
        x, delta = self.run_branches(x, embeddings, batch, store)
        if self.streams:
            x, delta = self.streams.join(x, delta, batch.step), None
        return self.norm.add(x, delta)[1] if self.norm else x

    def run_branches(
        self, x: Tensor, embeddings: Tensor, batch: Batch, store: StateStore
    ) -> tuple[Tensor, Tensor | None]:
        """(x, what is still to be added to it), behind the last branch."""
        delta: Delta = None
        for branch in self.branches:
            x, delta = branch.run(x, delta, embeddings, batch, store)
        assert not isinstance(delta, HalfNorm | Unnormed)  # the last branch leaves nothing to another
        return x, delta

    def logits(self, h: Tensor, batch: Batch) -> Tensor:
        """h: [T, hidden] -> logits of the requested rows, [L, vocab] float32."""
        return self.head(self._take_rows(h, batch.logit_rows), batch.logit_rows)

    def answer(self, h: Tensor, batch: Batch, store: StateStore) -> Tensor:
        """`logits`, and what they make of places of noisy canvases is kept for the next pass."""
        logits = self.logits(h, batch)
        if self.denoiser and batch.canvas:
            self.denoiser.keep(logits, batch, store)
        return logits
