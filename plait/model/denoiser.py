"""What tokens of a noisy canvas read besides themselves: what the last pass made of their place.

The probabilities of that pass, as a mixture of embeddings, go through an MLP and are added to the embedding
of the place's token (self-conditioning; Chen et al. 2022, DiffusionGemma). The mixtures lie in paged memory
next to keys and values, so they go where a sequence goes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from plait.checkpoint.weights import Weights
from plait.memory import PagedState, State, group_name
from plait.model.layers.layers import Batch, Norm
from plait.model.mixers.mlp import Mlp
from plait.ops.activation import combine
from plait.ops.low_rank import AdapterRows
from plait.ops.rows import mix_rows, take_rows
from plait.quant.weight import Weight
from plait.spec.model import AttentionSpec, MlpSpec, ModelSpec, NormSpec
from plait.state.store import StateStore

NAME = "canvas"  # of its weights, and of its state


class Denoiser:
    """`norm`, `mlp` of what was made of a place; a norm without a weight of the sum. Whole on every rank.

    kept: the embedding's table, in whatever form it has that.
    """

    def __init__(self, s: ModelSpec, mlp: MlpSpec, weights: Weights, kept: object) -> None:
        w = weights.scope(NAME)
        self.norm = Norm(NormSpec(s.norm.eps), w.scope("norm"), s.hidden_size)
        self.mlp = Mlp(mlp, w.scope("mlp"))
        self.post_norm = Norm(NormSpec(s.norm.eps, weight=False), w.scope("post_norm"), s.hidden_size)
        # The embedding's own, if it keeps one as it is stored.
        stored = weights.scope("embed")
        self.table = (
            kept if isinstance(kept, Weight) else stored.weight("weight", (s.vocab_size, s.hidden_size))
        )
        self.scale, self.dtype = s.embed_scale, w.target.dtype
        self._mix, self._take, self._combine = w.bind(mix_rows), w.bind(take_rows), w.bind(combine)
        self._adapters = w.target.adapters
        # In blocks of the narrowest window, which are freed soonest.
        windows = [m.window for m in s.mixers_of(AttentionSpec) if m.window]
        window = min(windows, default=None)
        self.states: dict[str, State] = {NAME: PagedState({"mixed": (s.hidden_size,)}, window)}
        self._group = group_name(window)

    def enter(self, x: Tensor, batch: Batch, store: StateStore) -> Tensor:
        """x: embeddings, [T, hidden] -> the same, with what places of canvases read besides."""
        assert batch.canvas is not None
        places = batch.logit_rows  # a canvas has logits of all its places, and nothing else has some
        kept = store[NAME]["mixed"].flatten(0, 1)
        mixed = self._take(kept, batch.paged[self._group].slot_mapping[places])
        mixed = torch.where(batch.canvas.is_fresh[:, None], 0, mixed)  # nothing was made of these
        made = self._read(self.norm(mixed), batch)
        seen = self.post_norm(self._combine(self._take(x, places), made, 1.0))
        return x.index_copy(0, places, seen)

    def _read(self, mixed: Tensor, batch: Batch) -> Tensor:
        """What the MLP makes of places, each with its own token's adapter: linear layers go by row."""
        if self._adapters is None or batch.adapters is None:
            return self.mlp.forward(mixed)
        step = self._adapters.step
        step.current = AdapterRows.of(batch.adapters.slots[batch.logit_rows])
        try:
            return self.mlp.forward(mixed)
        finally:
            step.current = batch.adapters

    def keep(self, logits: Tensor, batch: Batch, store: StateStore) -> None:
        """Mix embeddings by the probabilities of every place, for the next pass. logits: [L, vocab].

        One canvas after the other: the last bits of products depend on how many rows they have.
        """
        assert batch.canvas is not None
        kept, at = store[NAME]["mixed"].flatten(0, 1), batch.paged[self._group].slot_mapping
        places = at[batch.logit_rows].split(batch.canvas.sizes)
        split = logits.split(batch.canvas.sizes)
        for rows, to, by in zip(split, places, batch.canvas.temperatures.unbind(), strict=True):
            shares = (rows / by).softmax(-1)
            kept[to] = self._mix(shares, self.table, self.scale, self.dtype)
