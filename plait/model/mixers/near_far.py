"""Attention within a window, mixed with that of its queries over all keys of an earlier layer (IQuest)."""

from __future__ import annotations

import torch
from torch import Tensor

from plait.checkpoint.weights import Weights
from plait.memory import group_name
from plait.model.layers.layers import Batch
from plait.model.mixers.attention import Attention, describe_attention, divide_attention
from plait.model.mixers.registry import mixer
from plait.ops.activation import activate, combine, scale_rows
from plait.ops.attention import paged_attention
from plait.ops.linear import Linear
from plait.quant.weight import Dense
from plait.spec.attention import NearFarSpec
from plait.state.store import StateStore


def _words(m: NearFarSpec) -> str:
    return f"{describe_attention(m)}, mixed with that over all keys of {m.source}"


@mixer(NearFarSpec, _words, divide_attention)
class NearFar(Attention):
    """`mix` [heads, d] and its bias are applied as a matrix [heads, heads · d] of which the row of a head
    is 0 for all others. The step's far keys are in its source's cache before it runs."""

    def __init__(self, s: NearFarSpec, w: Weights) -> None:
        super().__init__(s, w)
        self._source, self._far_group = s.source, group_name(None)
        sizes: dict[str, object] = dict(heads=s.num_heads, kv_heads=s.num_kv_heads, dim=s.head_dim)
        sizes |= dict(window=None, softcap=None, sinks=False, activations=w.target.activations)
        self._attend_far = w.bind(paged_attention, **sizes)
        rows, bias = w.tensor("mix.weight", (s.num_heads, s.head_dim)), w.tensor("mix.bias", (s.num_heads,))
        apart = Dense(torch.block_diag(*rows).contiguous())
        self.mix = Linear([apart], [bias], w.bind, w.target.dtype, w.target.activations)
        w.target.weights_nbytes += apart.nbytes - rows.nbytes
        self._sigmoid = w.bind(activate, kind="sigmoid", gated=False)
        self._combine, self._scale = w.bind(combine), w.bind(scale_rows)

    def attend_heads(self, projected: Tensor, batch: Batch, store: StateStore) -> tuple[Tensor, list[Tensor]]:
        """As attention's; what is mixed is [T, heads, d], too."""
        heads = projected.unflatten(-1, (-1, self.spec.head_dim))
        q, k, v = heads.split(self._parts, 1)
        cache, index = store[self.name], batch.paged[self._group]
        caches, how = (cache["k"], cache["v"]), (self.spec.scale, self.spec.window, None, None)
        where = (index.block_table, index.slot_mapping, batch.query_start, batch.seq_lens)
        if self._place:
            to = (*caches, index.slot_mapping, batch.positions)
            q = self._place(q, k, v, *to, None, self.rope.rotation if self.rope else None)
            near = self._attend(q, None, None, *caches, *where, *how, batch.step)
        else:
            q, k = self._norm_and_rotate(heads, q, k, batch)
            near = self._attend(q, k, v, *caches, *where, *how)
        far = self._attend_all(q, batch, store)
        share = self._sigmoid(self.mix(q.flatten(1)), "sigmoid", False)
        more = self._combine(far.flatten(1), near.flatten(1), -1.0).view(near.shape)
        added = self._scale(more, share).flatten(1)
        return self._combine(near.flatten(1), added, 1.0).view(near.shape), []

    def _attend_all(self, q: Tensor, batch: Batch, store: StateStore) -> Tensor:
        cache, index = store[self._source], batch.paged[self._far_group]
        where = (index.block_table, index.slot_mapping, batch.query_start, batch.seq_lens)
        out: Tensor = self._attend_far(
            q, None, None, cache["k"], cache["v"], *where, self.spec.scale, None, None
        )
        return out
