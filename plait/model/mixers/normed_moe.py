"""Experts in a latent space of which each one's outputs are normed before they are weighed (Muse Spark)."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from plait.checkpoint.weights import Weights
from plait.errors import UnsupportedModel
from plait.memory import State
from plait.model.layers.expert_layers import bind_experts
from plait.model.layers.layers import Batch, Norm
from plait.model.mixers.moe import divide_moe, share_of
from plait.model.mixers.registry import mixer
from plait.ops.activation import ACTIVATIONS, activate, combine, multiply
from plait.ops.expert_heads import map_choices, spread_heads
from plait.ops.moe import route
from plait.ops.ranks import add_in_tree, sum_ranks
from plait.ops.streams import mix_streams
from plait.partition import Division, Rank
from plait.spec.model import MoeSpec
from plait.spec.moe import NormedMoeSpec
from plait.state.store import StateStore


def _words(m: NormedMoeSpec) -> str:
    sizes = f"{m.top_k} of {m.num_experts} experts × {m.expert.size}, {m.router.score}, latent {m.latent}"
    return f"MoE, {sizes}, each normed"


def _divide(s: NormedMoeSpec, rank: Rank, hidden_size: int) -> Division:
    """A part of each expert's features, also where ranks have whole experts of others; the rest is whole."""
    return divide_moe(s, replace(rank, whole_experts=False), hidden_size)


@mixer(NormedMoeSpec, _words, _divide)
class NormedMoe:
    """Outputs of a token's experts lie side by side, best first, and are summed when all are normed.

    Ranks, and the shares of one, add up what they have of each expert's output before its norm.
    """

    is_summed = True

    def __init__(self, s: NormedMoeSpec, w: Weights) -> None:
        if s.latent is None or s.shared or s.identities or not s.expert.gated or s.expert.norm:
            raise UnsupportedModel(
                "normed experts are implemented with gates and in a latent space, without shared ones, "
                "identities and norms inside"
            )
        if s.expert.activation not in ACTIVATIONS:
            raise UnsupportedModel(f"normed experts with {s.expert.activation} are not implemented")
        self.spec, self.states = s, dict[str, State]()
        hidden, rank = w.target.hidden_size, w.target.comm.rank
        self.router = w.linear("router", in_size=hidden, out_sizes=(s.num_experts,))
        self._bias = w.optional("router_bias", (s.num_experts,), torch.float32)
        self._route = w.bind(route, num_experts=s.num_experts, top_k=s.top_k, router=s.router)
        self._enter = w.linear("enter", in_size=hidden, out_sizes=(s.latent,))
        self._enter_norm = Norm(s.enter_norm, w.scope("enter_norm"), s.latent)
        parts = [share_of(s, w.for_share(n)) for n in rank.own_shares] if rank.shares else [(s, w)]
        self._shares = [Experts(part, view, s.latent) for part, view in parts]
        norm, wide = w.scope("give_norm"), s.top_k * s.latent
        self._give_norm = Norm(s.give_norm, norm, wide, s.top_k, is_same=True)
        self._leave = w.linear("leave", in_size=s.latent, out_sizes=(hidden,))
        self._mix, self._combine = w.bind(mix_streams), w.bind(combine)
        self._ranks = (w.target.comm, w.target.dtype)

    def __call__(self, x: Tensor, batch: Batch, store: StateStore) -> Tensor:
        """x: [T, hidden] -> [T, hidden]."""
        s = self.spec
        weight, index = self._route(self.router(x), self._bias, s.top_k, s.router)
        taken = self._enter_norm(self._enter(x))
        parts = [share(taken, index) for share in self._shares]
        given = sum_ranks(add_in_tree(parts, lambda a, b: self._combine(a, b, 1.0)), *self._ranks)
        normed = self._give_norm(given).unflatten(1, (s.top_k, -1))
        return self._leave(self._mix(normed, weight)[:, 0])


class Experts:
    """A part of each expert's features."""

    def __init__(self, s: MoeSpec, w: Weights, latent: int) -> None:
        self._top_k, self._kind, size = s.top_k, s.expert.activation, s.expert.size
        self._gate = bind_experts(w, spread_heads, "gate", (latent, size), s.num_experts)
        self._up = bind_experts(w, spread_heads, "up", (latent, size), s.num_experts)
        self._down = bind_experts(w, map_choices, "down", (size, latent), s.num_experts)
        self._activate = w.bind(activate, kind=self._kind, gated=False)
        self._multiply = w.bind(multiply)

    def __call__(self, x: Tensor, index: Tensor) -> Tensor:
        """x: [T, latent], index: [T, k] -> what each chosen expert gives, [T, k · latent]."""
        gate, up = (fn(x, index, linears, 1).flatten(1) for fn, linears in (self._gate, self._up))
        inner = self._multiply(self._activate(gate, self._kind, False), up).unflatten(1, (self._top_k, -1))
        fn, linears = self._down
        given: Tensor = fn(inner, index, linears, 1)
        return given.flatten(1)
