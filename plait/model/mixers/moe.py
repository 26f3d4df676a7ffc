"""Mixture of experts: the router chooses, tokens are grouped by expert, outputs are weighed and summed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from plait import spec
from plait.checkpoint.weights import Weights
from plait.memory import State
from plait.model.layers.layers import Batch
from plait.model.mixers.mlp import Mlp
from plait.model.mixers.registry import mixer
from plait.ops.activation import scale_rows
from plait.ops.expert_stack import ExpertStack
from plait.ops.linear import Linear
from plait.ops.moe import StackedExperts, experts, route
from plait.ops.registry import Bound
from plait.state.store import StateStore

Experts = Sequence[Linear] | ExpertStack


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
        self.activation = (s.expert.activation, s.expert.gated)
        self.shared = Mlp(s.shared, w.scope("shared")) if s.shared else None
        self.shared_gate = w.linear("shared_gate", in_size=hidden, out_sizes=(1,)) if s.shared_gate else None
        self._route = w.bind(route, num_experts=s.num_experts, top_k=s.top_k, router=s.router)
        self._scale_rows = w.bind(scale_rows) if s.weigh_input else None
        self._experts, self.up, self.down = self._build_experts(s, w)

    def _build_experts(self, s: spec.MoeSpec, w: Weights) -> tuple[Bound, Experts, Experts]:
        """(what is bound for `experts`, up, down): a stack each for a variant that takes these."""
        sizes = {"num_experts": s.num_experts, "top_k": s.top_k, "gated": s.expert.gated}
        fn = w.bind(experts, **sizes, activations=w.target.activations)
        if not isinstance(fn, StackedExperts):
            parts = [Mlp(s.expert, w.scope(f"experts.{e}")) for e in range(s.num_experts)]
            return fn, [part.up for part in parts], [part.down for part in parts]
        hidden, size, each = w.target.hidden_size, s.expert.size, w.scope("experts")
        names = ("gate", "up") if s.expert.gated else ("up",)
        sizes_up, pack = (size,) * len(names), fn.pack
        up = each.linear_stack(s.num_experts, *names, in_size=hidden, out_sizes=sizes_up, pack=pack)
        down = each.linear_stack(s.num_experts, "down", in_size=size, out_sizes=(hidden,), pack=pack)
        return fn.apply, up, down

    def __call__(self, x: Tensor, batch: Batch, store: StateStore) -> Tensor:
        """x: [T, hidden] -> [T, hidden]. A token's experts are added in the order of their numbers."""
        logits, taken, s = self.router(x), x, self.spec
        weight, index = self._route(logits, self.bias, s.top_k, s.router)
        if self._scale_rows:  # of one expert the weight is 1, once it is divided by their sum
            taken = self._scale_rows(x, weight)
            weight, index = self._route(logits, self.bias, s.top_k, replace(s.router, renormalize=True))
        shared = self.shared.forward(x) if self.shared else None
        gate = self.shared_gate(x) if self.shared_gate else None
        how = self.up, self.down, self.activation
        y: Tensor = self._experts(taken, weight, index, *how, shared, gate)
        return y
