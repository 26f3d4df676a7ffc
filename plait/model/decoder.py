"""The one decoder: a flat list of residual branches between an embedding and a head."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from plait.checkpoint.shared_weights import SharedWeights
from plait.checkpoint.weights import Weights
from plait.memory import State
from plait.model.denoiser import Denoiser
from plait.model.front import read_front
from plait.model.layers.layer_inputs import LayerInputs
from plait.model.layers.layers import EMBEDDINGS, Batch, CanvasRows, Embedding, LmHead, Norm
from plait.model.layers.streams import build_last_norm, build_streams
from plait.model.mixers.registry import build
from plait.model.shared_block import SharedBlockUse
from plait.ops.activation import combine, rescale, scale_rows
from plait.ops.ranks import sum_ranks
from plait.ops.rows import take_rows
from plait.spec.model import BranchSpec, ModelSpec
from plait.state.store import StateStore


class Branch:
    """One residual addition: x += scale * post_norm(mixer(norm(x))); what stays may be keep * norm(x).

    An *aside*, a block that branches share, reads x and the embeddings. Only the norm sees its output.
    """

    def __init__(self, s: BranchSpec, w: Weights, hidden_size: int) -> None:
        w, self.scale, self.keep = SharedWeights.of(w, s.source), s.scale, s.keep
        self.norm = Norm(s.norm, w.scope("norm"), hidden_size) if s.norm else None
        self.mixer = build(s.mixer, w)
        self.aside = SharedBlockUse(s.aside, w.scope("aside")) if s.aside else None
        self.states: dict[str, State] = {**self.mixer.states, **(self.aside.states if self.aside else {})}
        self.post_norm = Norm(s.post_norm, w.scope("post_norm"), hidden_size) if s.post_norm else None
        self._combine, self._rescale = w.bind(combine), w.bind(rescale)
        self._ranks = None if getattr(self.mixer, "is_summed", False) else (w.target.comm, w.target.dtype)
        self.factor = w.tensor("factor", (1,), torch.float32) if s.factor else None
        has_own = s.factor == "canvas"
        self._canvas_factor = w.tensor("canvas_factor", (1,), torch.float32) if has_own else None
        self._scale_rows = w.bind(scale_rows) if s.factor else None

    def enter(self, x: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor]:
        """Add what the last branch gave, and norm it: (x that stays, h), both [T, hidden]."""
        if self.norm:
            x, h = self.norm.add(x, delta)
        else:
            h = x = x if delta is None else self._combine(x, delta, 1.0)
        return self._residual(x, h), h

    def enter_beside(
        self, x: Tensor, delta: Tensor | None, embeddings: Tensor, batch: Batch, store: StateStore
    ) -> tuple[Tensor, Tensor]:
        """`enter` with an aside, of which the output is added to what is normed: (x that stays, h)."""
        if self.aside is None:
            return self.enter(x, delta)
        x = x if delta is None else self._combine(x, delta, 1.0)
        seen = self.aside(x, embeddings, batch, store)
        h = self.norm.add(x, seen)[1] if self.norm else self._combine(x, seen, 1.0)
        return self._residual(x, h), h

    def _residual(self, x: Tensor, h: Tensor) -> Tensor:
        if self.keep is None:
            return x
        return h if self.keep == 1.0 else self._rescale(h, self.keep, None)

    def leave(
        self, x: Tensor, delta: Tensor, canvas: CanvasRows | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """(x, what is to be added to it): both in one, times the factor, if there is one."""
        if self.factor is None or self._scale_rows is None:
            return x, delta
        by = self.factor.expand(len(x), 1)
        if canvas and self._canvas_factor is not None:
            by = torch.where(canvas.is_place[:, None], self._canvas_factor, by)
        return self._scale_rows(self._combine(x, delta, 1.0), by), None

    def __call__(self, h: Tensor, batch: Batch, store: StateStore) -> Tensor:
        """What is to be added to x, [T, hidden]."""
        h = self.mixer(h, batch, store)
        h = sum_ranks(h, *self._ranks) if self._ranks else h
        h = self.post_norm(h) if self.post_norm else h
        return h if self.scale == 1.0 else self._rescale(h, self.scale, None)


class Decoder:
    """Any model: `spec` says what it is, `weights` gives every tensor. Raises CheckpointError.

    `states` has the state of every mixer, by mixer name: the memory is made from it.
    """

    def __init__(self, s: ModelSpec, weights: Weights) -> None:
        self.spec = s
        self.embed = Embedding(s, weights.scope("embed"))
        self.layer_inputs = LayerInputs(s, weights) if s.layer_inputs else None
        self.streams = build_streams(s, weights)
        self.branches = [Branch(b, weights.scope(name), s.hidden_size) for name, b in s.branches()]
        self.norm = build_last_norm(s, self.streams, weights)
        self.head = LmHead(s, weights)
        self._take_rows, self.adapters = weights.bind(take_rows), weights.target.adapters
        self.states: dict[str, State] = {k: v for branch in self.branches for k, v in branch.states.items()}
        self.denoiser = Denoiser(s, s.canvas_mlp, weights, self.embed.table) if s.canvas_mlp else None
        self.states |= self.denoiser.states if self.denoiser else {}
        self._keeps_embeddings = any(getattr(b.mixer, "reads_embeddings", False) for b in self.branches)
        if s.front:
            read_front(s, [branch.mixer for branch in self.branches], self.states, self.run_branches, weights)

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
        delta = None
        for branch in self.branches:
            x, h = branch.enter_beside(x, delta, embeddings, batch, store)
            x, delta = branch.leave(x, branch(h, batch, store), batch.canvas)
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
