"""Experts that are chosen before attention, by what it reads (SmallThinker; Song et al. 2025)."""

from __future__ import annotations

from torch import Tensor

from plait.checkpoint.weights import Weights
from plait.model.layers.layers import Batch, Norm
from plait.model.mixers.moe import Moe, divide_moe
from plait.model.mixers.registry import INNER, build, describe, divide_inside, mixer
from plait.ops.ranks import sum_ranks
from plait.spec.moe import EarlyMoeSpec, EarlyRouterSpec
from plait.state.store import StateStore

LOGITS = "logits of experts"  # in `Batch.step`


def _router_words(m: EarlyRouterSpec) -> str:
    return f"{describe(m.parts[INNER])}, next to a router of {m.num_experts} experts"


def _words(m: EarlyMoeSpec) -> str:
    return f"MoE, {m.top_k} of {m.num_experts} experts × {m.expert.size} chosen before, {m.router.score}"


@mixer(EarlyRouterSpec, _router_words, divide_inside)
class EarlyRouter:
    """`router` reads x, and `inner` norm(x)."""

    is_summed = True

    def __init__(self, s: EarlyRouterSpec, w: Weights) -> None:
        hidden = w.target.hidden_size
        self.inner = build(s.parts[INNER], w.scope(INNER))
        self.states = self.inner.states
        self.norm = Norm(s.norm, w.scope("norm"), hidden)
        self.router = w.linear("router", in_size=hidden, out_sizes=(s.num_experts,))
        self._ranks = (w.target.comm, w.target.dtype)

    def __call__(self, x: Tensor, batch: Batch, store: StateStore) -> Tensor:
        """x: [T, hidden] -> [T, hidden]."""
        batch.step[LOGITS] = self.router(x)
        y = self.inner(self.norm(x), batch, store)
        return y if getattr(self.inner, "is_summed", False) else sum_ranks(y, *self._ranks)


@mixer(EarlyMoeSpec, _words, divide_moe)
class EarlyMoe(Moe):
    has_router = False

    def __call__(self, x: Tensor, batch: Batch, store: StateStore) -> Tensor:
        """x: [T, hidden] -> [T, hidden]."""
        return self.choose(batch.step.pop(LOGITS), x, x)
