"""Mixture of experts: the router chooses, tokens are grouped by expert, outputs are weighed and summed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from plait.checkpoint.weights import Weights
from plait.memory import State
from plait.model.layers.layers import Batch, Norm
from plait.model.mixers.mlp import Mlp, divide_mlp
from plait.model.mixers.registry import LinearEnds, mixer
from plait.ops.activation import combine, rescale, scale_rows
from plait.ops.expert_stack import ExpertStack
from plait.ops.folded_experts import ChosenExperts, ExpertsLast, Routed, RouterFirst
from plait.ops.linear import Linear
from plait.ops.moe import StackedExperts, experts, route, split_identities
from plait.ops.ranks import add_in_tree, sum_ranks
from plait.ops.registry import Bound
from plait.partition import Cut, Division, Range, Rank, join_ranges, width
from plait.spec.model import MoeSpec
from plait.state.store import StateStore

Experts = Sequence[Linear] | ExpertStack


def _words(m: MoeSpec) -> str:
    shared = "" if m.shared is None else f", shared {m.shared.size}"
    latent = "" if m.latent is None else f", latent {m.latent}"
    return f"MoE, {m.top_k} of {m.num_experts} experts × {m.expert.size}, {m.router.score}{shared}{latent}"


def divide_moe(s: MoeSpec, rank: Rank, hidden_size: int) -> Division:
    """A part of each expert's features; with `whole_experts` some of the experts. The router is whole.

    So are the linear layers of a latent space: what experts give in it is summed before it leaves.
    """
    cuts: dict[str, Cut] = {}
    expert, shared = s.expert, s.shared
    if shared:
        shared, some = divide_mlp(shared, rank)
        cuts |= {f"shared.{name}": cut for name, cut in some.items()}
    if rank.whole_experts:
        first, last = join_ranges(rank.divide(s.num_experts, "experts"))
        others = (e for e in range(s.num_experts) if not first <= e < last)
        cuts |= {f"experts.{e}": Cut(is_dropped=True) for e in others}
    else:
        expert, some = divide_mlp(expert, rank)
        cuts |= {f"experts.*.{name}": cut for name, cut in some.items()}
    sums = int(s.latent is not None and shared is not None)
    return Division(replace(s, expert=expert, shared=shared), cuts, sums)


@mixer(MoeSpec, _words, divide_moe)
class Moe:
    """Several shares of a rank are computed each by itself: sums are then in the order of shares.

    `gives_back`: identities add what they read. `has_router`: logits are made of what it reads.
    """

    gives_back: ClassVar[bool] = True
    has_router: ClassVar[bool] = True

    def __init__(self, s: MoeSpec, w: Weights) -> None:
        self.spec, self.states = s, dict[str, State]()
        hidden = w.target.hidden_size
        scored = s.num_experts + (s.identities or 0)
        if self.has_router:
            self.router: Linear = self._build_router(w, scored)
        self.bias = w.optional("router_bias", (scored,), torch.float32)
        self.shared_gate = w.linear("shared_gate", in_size=hidden, out_sizes=(1,)) if s.shared_gate else None
        self._route = w.bind(route, num_experts=scored, top_k=s.top_k, router=s.router)
        self.shares = build_shares(s, w)
        self._combine, self._split = w.bind(combine), w.bind(split_identities)
        self._rescale = w.bind(rescale) if s.router_softcap else None
        # What identities give is whole on every rank: it is added to the sum over ranks. So is what leaves
        # a latent space.
        self.is_summed = (s.identities is not None and self.gives_back) or s.latent is not None
        self._ranks = (w.target.comm, w.target.dtype)
        self._scale_rows = w.bind(scale_rows) if s.weigh_input or s.identities else None
        self._norms = [
            Norm(norm, w.scope(name), hidden) if norm else None
            for name, norm in (("router_norm", s.router_norm), ("expert_norm", s.expert_norm))
        ]
        self._enter = self._leave = None
        if s.latent:
            self._enter = w.linear("enter", in_size=hidden, out_sizes=(s.latent,))
            self._leave = w.linear("leave", in_size=s.latent, out_sizes=(hidden,))
        self._latent_norm = (
            Norm(s.latent_norm, w.scope("latent_norm"), s.latent) if s.latent and s.latent_norm else None
        )
        self.scale = w.tensor("expert_scale", (s.num_experts,), torch.float32) if s.expert_scale else None

    def _build_router(self, w: Weights, scored: int) -> Linear:
        """What makes logits of x, [T, scored]."""
        return w.linear("router", in_size=w.target.hidden_size, out_sizes=(scored,))

    def __call__(self, x: Tensor, batch: Batch, store: StateStore) -> Tensor:
        """x: [T, hidden] -> [T, hidden]. A token's experts are added in the order of their numbers."""
        read, taken = (norm(x) if norm else x for norm in self._norms)
        return self.choose(self.router(read), x, taken)

    def ends(self) -> LinearEnds:
        """Router and experts, where both read the same rows and one share gives all of the sum."""
        s = self.spec
        is_plain = not (any(self._norms) or s.weigh_input or s.identities or s.latent or s.router_softcap)
        if not is_plain or len(self.shares) > 1:
            return LinearEnds(None, "", None)
        first = RouterFirst(self.router, self.bias, s.top_k, s.router, self.scale)
        return LinearEnds(first, "", self.shares[0].last)

    def begin(self, x: Tensor) -> Routed:
        """Where `ends` has a router: its choice."""
        return Routed(
            x, *self._route(self.router(x), self.bias, self.spec.top_k, self.spec.router, self.scale)
        )

    def middle(self, first: Routed, batch: Batch, store: StateStore) -> ChosenExperts:
        """From the router's choice to what experts are given."""
        x, shared = first.x, self.shares[0].shared
        gate = self.shared_gate(x) if self.shared_gate else None
        return ChosenExperts(*first, shared.forward(x) if shared else None, gate)

    def choose(self, logits: Tensor, x: Tensor, taken: Tensor) -> Tensor:
        """The same, of the router's logits and of what experts read."""
        s = self.spec
        logits = self._rescale(logits, 1.0, s.router_softcap) if self._rescale else logits
        weight, index = self._route(logits, self.bias, s.top_k, s.router, self.scale)
        if (
            s.weigh_input and self._scale_rows
        ):  # of one expert the weight is 1, once it is divided by their sum
            taken = self._scale_rows(x, weight)
            weight, index = self._route(logits, self.bias, s.top_k, replace(s.router, renormalize=True))
        rest = None
        if s.identities:
            weight, index, rest = self._split(weight, index, s.num_experts)
        gate = self.shared_gate(x) if self.shared_gate else None
        taken = self._enter(taken) if self._enter else taken
        y = self.weigh(x, taken, weight, index, gate)
        if rest is not None and self._scale_rows and self.gives_back:
            total: Tensor = self._combine(sum_ranks(y, *self._ranks), self._scale_rows(x, rest), 1.0)
            return total
        return y if self._leave is None else self._leave_latent(y, x, self._leave)

    def weigh(self, x: Tensor, taken: Tensor, weight: Tensor, index: Tensor, gate: Tensor | None) -> Tensor:
        """This rank's part of what the chosen experts give, weighed and summed."""
        parts = [share(x, taken, weight, index, gate) for share in self.shares]
        return add_in_tree(parts, lambda a, b: self._combine(a, b, 1.0))

    def _leave_latent(self, y: Tensor, x: Tensor, leave: Linear) -> Tensor:
        """y: [T, latent], this rank's part of what experts give; the shared one reads x itself.

        Returns the sum over ranks, [T, hidden].
        """
        y = sum_ranks(y, *self._ranks)
        total = leave(self._latent_norm(y) if self._latent_norm else y)
        if parts := [share.shared.forward(x) for share in self.shares if share.shared]:
            shared = sum_ranks(add_in_tree(parts, lambda a, b: self._combine(a, b, 1.0)), *self._ranks)
            total = self._combine(total, shared, 1.0)
        return total


class ExpertShare:
    """A part of each expert's features, or the experts `own` as a whole; of the shared expert a part."""

    def __init__(self, s: MoeSpec, w: Weights, own: Range) -> None:
        self._first, self._count = own[0], width(own)
        self._is_part = self._count < s.num_experts
        self._activation, self._latent = (s.expert.activation, s.expert.gated), s.latent
        self.shared = Mlp(s.shared, w.scope("shared")) if s.shared else None
        self._is_wide = False
        self._sizes: dict[str, object] = {}  # that `experts` is bound for
        self._experts, self.up, self.down = self._build_experts(s, w)

    @property
    def last(self) -> ExpertsLast:
        """The experts as the end of a mixer that has this share alone."""
        return ExpertsLast(self._experts, self.up, self.down, self._activation, self._sizes)

    def _build_experts(self, s: MoeSpec, w: Weights) -> tuple[Bound, Experts, Experts]:
        """(what is bound for `experts`, up, down): a stack each for a variant that takes these."""
        numbers = range(self._first, self._first + self._count)
        hidden, size, each = s.latent or w.target.hidden_size, s.expert.size, w.scope("experts")
        names = ("gate", "up") if s.expert.gated else ("up",)
        sizes: dict[str, object] = {"num_experts": self._count, "top_k": s.top_k, "gated": s.expert.gated}
        sizes["stored"] = {
            *each.list_storages((f"{e}.{name}" for e in numbers for name in names), hidden),
            *each.list_storages((f"{e}.down" for e in numbers), size),
        }
        self._sizes = {**sizes, "kind": s.expert.activation, "activations": w.target.activations}
        fn = w.bind(experts, **self._sizes)
        if not isinstance(fn, StackedExperts):
            parts = [Mlp(s.expert, w.scope(f"experts.{e}"), s.latent) for e in numbers]
            return fn, [part.up for part in parts], [part.down for part in parts]
        self._is_wide = fn.widens and w.target.comm.rank.shares > 0
        sizes_up, pack = (size,) * len(names), fn.pack
        up = each.linear_stack(numbers, *names, in_size=hidden, out_sizes=sizes_up, pack=pack)
        down = each.linear_stack(numbers, "down", in_size=size, out_sizes=(hidden,), pack=pack)
        return fn.apply, up, down

    def __call__(
        self, x: Tensor, taken: Tensor, weight: Tensor, index: Tensor, gate: Tensor | None
    ) -> Tensor:
        """x, and what the chosen experts take of it: [T, hidden]; weight and index: [T, k], gate: [T, 1].

        Returns what `taken` is like, or in float32. Where the experts' space is another: no shared expert.
        """
        if self._is_part:  # other ranks have the other experts: here they weigh nothing
            index = index - self._first
            is_own = (index >= 0) & (index < self._count)
            weight, index = weight * is_own, index.where(is_own, 0)
        shared = self.shared.forward(x) if self.shared and not self._latent else None
        how = self.up, self.down, self._activation
        wide = {"out": torch.empty_like(taken, dtype=torch.float32)} if self._is_wide else {}
        y: Tensor = self._experts(taken, weight, index, *how, shared, gate, **wide)
        return y


def build_shares(s: MoeSpec, w: Weights, name: str = "") -> list[ExpertShare]:
    """The shares of a rank, each with its part of the experts below `name`."""
    rank = w.target.comm.rank
    own, here = rank.own_shares, w.scope(name) if name else w
    views = [share_of(s, here.for_share(number)) for number in own] if rank.shares else [(s, here)]
    return [
        ExpertShare(part, view, _experts_of(s, rank, number))
        for number, (part, view) in zip(own, views, strict=True)
    ]


def _experts_of(s: MoeSpec, rank: Rank, share: int) -> Range:
    """The experts that a share has, of features a part or all."""
    if not rank.whole_experts:
        return 0, s.num_experts
    return s.num_experts * share // rank.num_shares, s.num_experts * (share + 1) // rank.num_shares


def share_of(s: MoeSpec, w: Weights) -> tuple[MoeSpec, Weights]:
    """The spec with the sizes of the share that `w` has the weights of."""
    sizes = {name: w.find_cut(f"{name}.down") for name in ("experts.0", "shared")}
    found = {name: width(cut.cols[0][0]) for name, cut in sizes.items() if cut and cut.cols}
    expert = replace(s.expert, size=found.get("experts.0", s.expert.size))
    shared = s.shared and replace(s.shared, size=found["shared"])
    return replace(s, expert=expert, shared=shared), w
