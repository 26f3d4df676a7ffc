"""Attention with a mixture of values (MoVA), and outputs times a function of a projection (K2 Horizon)."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from plait.checkpoint.weights import Weights
from plait.errors import UnsupportedModel
from plait.model.layers.expert_layers import bind_experts
from plait.model.layers.layers import Batch
from plait.model.mixers.attention import Attention, describe_attention, divide_attention
from plait.model.mixers.registry import mixer
from plait.ops.activation import activate, multiply
from plait.ops.expert_heads import spread_heads
from plait.ops.linear import Linear
from plait.ops.moe import route
from plait.ops.rows import join
from plait.ops.streams import activate_scaled, mix_streams
from plait.partition import Division, Rank
from plait.spec.attention import RoutedValuesSpec
from plait.state.store import StateStore


def _words(m: RoutedValuesSpec) -> str:
    parts = [describe_attention(m)]
    parts += [f"values of {m.top_k} of {m.num_experts} experts"] if m.num_experts else []
    parts += [f"gated by {m.activation}"] if m.activation else []
    return ", ".join(parts)


def _divide(s: RoutedValuesSpec, rank: Rank, hidden_size: int) -> Division:
    """As attention; experts go with their key heads, and the router is whole."""
    found = divide_attention(s, rank, hidden_size)
    return replace(found, cuts={**found.cuts, "experts.*.v": found.cuts["v"]})


@mixer(RoutedValuesSpec, _words, _divide)
class RoutedValues(Attention):
    """`experts.{e}.v` are an expert's; `gate` has a row for each number that heads give."""

    def __init__(self, s: RoutedValuesSpec, w: Weights) -> None:
        if s.gate or s.head_gate or s.out_norm or s.clip or s.both_ways:
            raise UnsupportedModel(
                f"{w.prefix}: a mixture of values has no other gates, no clipped values and no norm behind "
                "them, and its tokens see none that are later"
            )
        self._mixture, self.gate = s, None
        super().__init__(s, w)
        hidden = w.target.hidden_size
        if s.activation:
            self.gate = w.linear("gate", in_size=hidden, out_sizes=(s.num_heads * s.head_dim,))
            self._gated = w.bind(activate_scaled, kind=s.activation)
            self._multiply = w.bind(multiply)
            base = math.log(2) if s.activation == "softplus" else 1.0
            self._how = base, s.activation, 1 / base

    def _bind_qkv(self, w: Weights, parts: dict[str, int]) -> Linear:
        s, hidden = self._mixture, w.target.hidden_size
        if s.num_experts is None:
            return super()._bind_qkv(w, parts)
        sizes = (hidden, parts["v"])
        self._spread, self.values = bind_experts(w, spread_heads, "v", sizes, s.num_experts)
        self.router = w.linear("router", in_size=hidden, out_sizes=(s.num_experts,))
        self._bias = w.optional("router_bias", (s.num_experts,), torch.float32)
        self._route = w.bind(route, num_experts=s.num_experts, top_k=s.top_k, router=s.router)
        self._activate, self._mix = w.bind(activate, kind="silu", gated=False), w.bind(mix_streams)
        self._join = w.bind(join)
        return super()._bind_qkv(w, {name: parts[name] for name in "qk"})

    def __call__(self, x: Tensor, batch: Batch, store: StateStore) -> Tensor:
        """x: [T, hidden] -> [T, hidden]."""
        projected = self.qkv(x)
        if self._mixture.num_experts is not None:
            projected = self._join(projected, self._mix_values(x))
        return self.attend(projected, x, batch, store)

    def _mix_values(self, x: Tensor) -> Tensor:
        """x: [T, hidden] -> [T, kv_heads · d]."""
        s = self._mixture
        weight, index = self._route(self.router(x), self._bias, s.top_k, s.router)
        made = self._spread(x, index, self.values, 1)  # [T, k, kv_heads · d]
        found = self._activate(made.flatten(1), "silu", False).unflatten(1, (s.top_k, -1))
        mixed: Tensor = self._mix(found, weight)[:, 0]
        return mixed

    def _close(self, out: Tensor, x: Tensor, closing: list[Tensor]) -> Tensor:
        if self.gate is not None:
            by = self._gated(self.gate(x), *self._how)
            out = self._multiply(out.flatten(1), by).view(out.shape)
        return super()._close(out, x, closing)
