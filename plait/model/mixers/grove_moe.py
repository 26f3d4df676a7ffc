"""Experts of which each few in a row have one more in common (Grove MoE; Wu et al. 2025)."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from plait.checkpoint.weights import Weights
from plait.model.mixers.moe import Moe, build_shares, divide_moe
from plait.model.mixers.registry import mixer
from plait.ops.moe import group_choice
from plait.ops.ranks import add_in_tree
from plait.partition import Division, Rank
from plait.spec.model import MoeSpec
from plait.spec.moe import GroveMoeSpec

COMMON = "common"


def _words(m: GroveMoeSpec) -> str:
    whole = f"MoE, {m.top_k} of {m.num_experts} experts × {m.expert.size}, {m.router.score}"
    return f"{whole}, each {m.group} with one × {m.common.size} in common"


def _common(s: GroveMoeSpec) -> MoeSpec:
    """The experts in common, as a mixture."""
    return MoeSpec(s.num_experts // s.group, s.top_k, s.common, s.router)


def _divide(s: GroveMoeSpec, rank: Rank, hidden_size: int) -> Division:
    own, others = divide_moe(s, rank, hidden_size), divide_moe(_common(s), rank, hidden_size)
    assert isinstance(own.spec, GroveMoeSpec)
    assert isinstance(others.spec, MoeSpec)
    cuts = {**own.cuts, **{f"{COMMON}.{name}": cut for name, cut in others.cuts.items()}}
    return Division(replace(own.spec, common=others.spec.expert), cuts, own.sums)


@mixer(GroveMoeSpec, _words, _divide)
class GroveMoe(Moe):
    """`common.experts.0` and on: the experts in common."""

    def __init__(self, s: GroveMoeSpec, w: Weights) -> None:
        super().__init__(s, w)
        self.group, self.common_scale = s.group, s.common_scale
        self.common = build_shares(_common(s), w, COMMON)
        self._group = w.bind(group_choice)

    def weigh(self, x: Tensor, taken: Tensor, weight: Tensor, index: Tensor, gate: Tensor | None) -> Tensor:
        """What the chosen experts give, and those they have in common with others, [T, hidden]."""
        by, group = self._group(weight, index, self.group, self.common_scale)
        parts = [
            self._combine(own(x, taken, weight, index, gate), common(x, taken, by, group, None), 1.0)
            for own, common in zip(self.shares, self.common, strict=True)
        ]
        return add_in_tree(parts, lambda a, b: self._combine(a, b, 1.0))
