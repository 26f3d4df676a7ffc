"""Mixture of experts: the router chooses, tokens are grouped by expert, outputs are weighed and summed."""

from __future__ import annotations

import torch
from torch import Tensor

from plait import spec
from plait.checkpoint.weights import Weights
from plait.memory import State
from plait.model.layers.layers import Batch
from plait.model.mixers.mlp import Mlp
from plait.model.mixers.registry import mixer
from plait.ops.activation import gate_rows
from plait.ops.moe import experts, route
from plait.state.store import StateStore


def _words(m: spec.MoeSpec) -> str:
    shared = "" if m.shared is None else f", shared {m.shared.size}"
    return f"MoE, {m.top_k} of {m.num_experts} experts × {m.expert.size}, {m.router.score}{shared}"


@mixer(spec.MoeSpec, _words)
class Moe:
    def __init__(self, s: spec.MoeSpec, w: Weights) -> None:
        self.spec, self.states = s, dict[str, State]()
        hidden = w.target.hidden_size
        self.router = w.linear("router", in_size=hidden, out_sizes=(s.num_experts,))
        self.bias = w.optional("router_bias", (s.num_experts,), torch.float32)
        parts = [Mlp(s.expert, w.scope(f"experts.{e}")) for e in range(s.num_experts)]
        self.up, self.down = [part.up for part in parts], [part.down for part in parts]
        self.activation = (s.expert.activation, s.expert.gated)
        self.shared = Mlp(s.shared, w.scope("shared")) if s.shared else None
        self.shared_gate = w.linear("shared_gate", in_size=hidden, out_sizes=(1,)) if s.shared_gate else None
        self._route = w.bind(route, num_experts=s.num_experts, top_k=s.top_k, router=s.router)
        self._experts = w.bind(experts, num_experts=s.num_experts, top_k=s.top_k, gated=s.expert.gated)
        self._gate_rows = w.bind(gate_rows) if s.shared_gate else None

    def __call__(self, x: Tensor, batch: Batch, store: StateStore) -> Tensor:
        """x: [T, hidden] -> [T, hidden]. A token's experts are added in the order of their numbers."""
        weight, index = self._route(self.router(x), self.bias, self.spec.top_k, self.spec.router)
        y: Tensor = self._experts(x, weight, index, self.up, self.down, self.activation, self._shared(x))
        return y

    def _shared(self, x: Tensor) -> Tensor | None:
        if not self.shared:
            return None
        out = self.shared.forward(x)
        return self._gate_rows(out, self.shared_gate(x)) if self.shared_gate and self._gate_rows else out
