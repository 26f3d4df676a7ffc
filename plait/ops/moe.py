"""Mixture of experts: which experts a token goes to, with what weight, and what they make of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from plait.ops.activation import activate, gate_rows
from plait.ops.blocks import random_weight
from plait.ops.case import Case
from plait.ops.expert_stack import ExpertStack, Pack
from plait.ops.linear import Linear, linear
from plait.ops.registry import Arguments, TensorFn, bind_reference, op
from plait.quant.weight import Dense, Weight
from plait.spec.model import RouterSpec

CASES: list[Case] = [
    dict(tokens=1, experts=4, top_k=2, router=RouterSpec()),
    dict(
        tokens=33, experts=8, top_k=3, router=RouterSpec("sigmoid", True, 1e-20, 2.5, 4, 2, "top2"), bias=True
    ),
    dict(tokens=17, experts=8, top_k=2, router=RouterSpec("softmax", False, 0.0, 1.0, 4, 2, "max")),
    dict(tokens=9, experts=6, top_k=3, router=RouterSpec(), factors=True),
    dict(tokens=5, experts=19, top_k=3, router=RouterSpec("sigmoid", by_logits=True), bias=True),
    dict(tokens=11, experts=18, top_k=3, router=RouterSpec(renormalize=False, margin=0.7)),
    dict(tokens=7, experts=19, top_k=3, router=RouterSpec("sqrtsoftplus", True, 1e-20, 1.5), bias=True),
]


SCORES: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda x: x.softmax(-1),
    "sigmoid": torch.sigmoid,
    "sqrtsoftplus": lambda x: F.softplus(x).sqrt(),
}


@op(cases=CASES)
def route(
    logits: Tensor, bias: Tensor | None, top_k: int, router: RouterSpec, factors: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Expert weights [T, k] float32 and indices [T, k] int64, best first.

    logits: [T, experts]; bias: [experts], moves the choice and never the weight (DeepSeek-V3, 2.1.2). With
    groups, only experts of the best `top_groups` groups may be chosen. factors: [experts] float32, what the
    weight of each is multiplied by at last (Gemma 4).
    """
    scores = SCORES[router.score](logits.float())
    choice = logits.float() if router.by_logits or router.margin else scores
    choice = choice if bias is None else choice + bias.float()
    if router.groups > 1:
        grouped = choice.unflatten(-1, (router.groups, -1))
        best = grouped.amax(-1) if router.group_by == "max" else grouped.topk(2, -1).values.sum(-1)
        kept = torch.zeros_like(best, dtype=torch.bool)
        kept.scatter_(-1, best.topk(router.top_groups, -1).indices, True)
        choice = grouped.masked_fill(~kept[..., None], -math.inf).flatten(-2)
    index = choice.topk(top_k, -1).indices
    weight = scores.gather(-1, index)
    if router.margin:
        weight = _weigh_within(logits.float(), index, router.margin)
    if router.renormalize:
        weight = weight / (weight.sum(-1, keepdim=True) + router.renorm_eps)
    weight = weight * router.scale
    return weight if factors is None else weight * factors[index], index


LOOKED_UP: list[dict[str, object]] = [
    dict(tokens=1, experts=4, top_k=2, router=RouterSpec("sqrtsoftplus", True, 1e-20, 1.5)),
    dict(tokens=33, experts=19, top_k=3, router=RouterSpec("sigmoid", False)),
]


@op(cases=LOOKED_UP)
def look_up_experts(
    logits: Tensor, table: Tensor, token_ids: Tensor, router: RouterSpec
) -> tuple[Tensor, Tensor]:
    """`route` to the experts that a table has for each token (DeepSeek-V4): logits say their weights alone.

    logits: [T, experts], table: [vocabulary, k] int64, token_ids: [T] -> as `route` gives it.
    """
    index = table[token_ids]
    weight = SCORES[router.score](logits.float()).gather(-1, index)
    if router.renormalize:
        weight = weight / (weight.sum(-1, keepdim=True) + router.renorm_eps)
    return weight * router.scale, index


@look_up_experts.inputs
def _look_up_inputs(case: Case, dtype: torch.dtype, device: str) -> Arguments:
    logits = torch.randn(case["tokens"], case["experts"], dtype=dtype, device=device)
    table = torch.stack([torch.randperm(case["experts"])[: case["top_k"]] for _ in range(11)]).to(device)
    return (logits, table, torch.randint(0, 11, (case["tokens"],), device=device), case["router"]), {}


def _weigh_within(logits: Tensor, index: Tensor, margin: float) -> Tensor:
    """Softmaxes over logits within a margin of each chosen one: see `RouterSpec.margin`. [T, k]."""
    left, weights = logits, []
    for chosen in index.unbind(-1):
        best = logits.gather(-1, chosen[:, None])
        far = (best - logits) > margin * torch.maximum(logits.abs(), best)
        weights.append((left.masked_fill(far, -math.inf) - best).exp().sum(-1).reciprocal())
        left = left.scatter(-1, chosen[:, None], -math.inf)
    return torch.stack(weights, -1)


@route.inputs
def make_route_inputs(case: Case, dtype: torch.dtype, device: str) -> Arguments:
    logits = torch.randn(case["tokens"], case["experts"], dtype=dtype, device=device)
    bias = torch.randn(case["experts"], device=device) if case.get("bias") else None
    factors = torch.randn(case["experts"], device=device) if case.get("factors") else None
    return (logits, bias, case["top_k"], case["router"], factors), {}


@op(cases=[dict(tokens=1, experts=4, top_k=2), dict(tokens=19, experts=6, top_k=5)])
def split_identities(weight: Tensor, index: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Weights and indices of the first `count` experts, and the weight of all others together, [T, 1].

    weight: [T, k] float32, index: [T, k] int64. In place of another expert comes the first, of no weight.
    """
    is_own = index < count
    rest = weight.masked_fill(is_own, 0.0).sum(-1, keepdim=True)
    return weight.masked_fill(~is_own, 0.0), index.masked_fill(~is_own, 0), rest


@split_identities.inputs
def _split_inputs(case: Case, dtype: torch.dtype, device: str) -> Arguments:
    tokens, top_k = case["tokens"], case["top_k"]
    index = torch.randint(0, 2 * case["experts"], (tokens, top_k), device=device)
    return (torch.rand(tokens, top_k, device=device), index, case["experts"]), {}


@op(cases=[dict(tokens=1, experts=4, top_k=2), dict(tokens=19, experts=9, top_k=5)])
def group_choice(weight: Tensor, index: Tensor, group: int, scale: float) -> tuple[Tensor, Tensor]:
    """Which group of `group` experts in a row each choice is of, and its weight times `scale` (Grove MoE).

    weight: [T, k] float32, index: [T, k] int64. A group may be there several times.
    """
    return weight * scale, index // group


@group_choice.inputs
def _group_inputs(case: Case, dtype: torch.dtype, device: str) -> Arguments:
    tokens, top_k = case["tokens"], case["top_k"]
    index = torch.randint(0, case["experts"], (tokens, top_k), device=device)
    return (torch.rand(tokens, top_k, device=device), index, 3, 0.05), {}


EXPERT_CASES: list[Case] = [
    dict(tokens=1, experts=4, top_k=2, hidden=64, size=32, gated=True, kind="silu"),
    dict(tokens=6, experts=4, top_k=1, hidden=32, size=64, gated=False, kind="silu"),
    dict(tokens=3, experts=4, top_k=2, hidden=32, size=16, gated=True, gate=True, kind="silu"),
    dict(tokens=19, experts=8, top_k=3, hidden=64, size=96, gated=True, kind="silu"),
    dict(tokens=67, experts=4, top_k=2, hidden=64, size=96, gated=True, kind="silu"),
    dict(tokens=13, experts=5, top_k=2, hidden=64, size=40, gated=True, bias=True, kind="swiglu_oai"),
    dict(tokens=70, experts=4, top_k=2, hidden=96, size=48, gated=True, bias=True, kind="gelu"),
    dict(tokens=3, experts=3, top_k=2, hidden=64, size=32, gated=False, kind="relu2"),
    dict(tokens=2, experts=3, top_k=2, hidden=64, size=32, gated=True, kind="gelu_pytorch_tanh"),
    *(
        Case(tokens=2, experts=3, top_k=2, hidden=256, size=256, gated=True, stored=stored, kind="silu")
        for stored in ("Q4_K", "Q6_K", "IQ4_XS", "fp8_b128", "int4_g128+zeros")
    ),
    dict(tokens=67, experts=3, top_k=2, hidden=256, size=256, gated=True, stored="Q4_K", kind="silu"),
    *(
        Case(tokens=tokens, experts=3, top_k=2, hidden=128, size=64, gated=True, stored=stored, kind="silu")
        for stored in ("Q8_0", "Q4_0", "mxfp4", "int4_g64+zeros+order")
        for tokens in (2, 67)
    ),
]


@op(cases=EXPERT_CASES, is_product=True)
def experts(
    x: Tensor,
    weight: Tensor,
    index: Tensor,
    up: Sequence[Linear],
    down: Sequence[Linear],
    activation: tuple[str, bool],
    shared: Tensor | None,
    gate: Tensor | None = None,
) -> Tensor:
    """What the chosen experts make of each token, weighed and summed in the order of their numbers.

    x: [T, hidden], weight: [T, k] float32, index: [T, k] int64; up and down: one linear layer for each expert
    (up: [gate, up] side by side if gated); activation: (kind, gated); shared: [T, hidden] or None, what the
    sum starts from, times sigmoid(gate) if there is a gate, [T, 1] -> [T, hidden] in x's dtype. Rows are
    grouped by expert: an expert is read once.
    """
    bound = activate.reference, gate_rows.reference
    y: Tensor = _each_expert(*bound, x, weight, index, up, down, activation, shared, gate)
    return y


@experts.replaces(activate, gate_rows, given=(linear,))
def _each_expert(
    activate: TensorFn,
    gate_rows: TensorFn,
    x: Tensor,
    weight: Tensor,
    index: Tensor,
    up: Sequence[Linear],
    down: Sequence[Linear],
    activation: tuple[str, bool],
    shared: Tensor | None,
    gate: Tensor | None = None,
) -> Tensor:
    if shared is not None and gate is not None:
        shared = gate_rows(shared, gate)
    out = torch.zeros_like(x, dtype=torch.float32) if shared is None else shared.to(torch.float32, copy=True)
    for e in index.unique().tolist():
        token, k = torch.where(index == e)
        h = down[e](activate(up[e](x[token], token), *activation), token)
        out.index_add_(0, token, h.float() * weight[token, k, None])
    return out.to(x.dtype)


@experts.inputs
def make_expert_inputs(case: Case, dtype: torch.dtype, device: str) -> Arguments:
    x = torch.randn(case["tokens"], case["hidden"], dtype=dtype, device=device)
    # The sums shall be of order 1: where squares and biases make them larger, bfloat16 rounds the reference
    # itself by as much as a kernel may be off.
    x *= 0.5
    chances = torch.rand(case["tokens"], case["experts"], device=device)
    weight, index = chances.topk(case["top_k"], -1)

    def one(n_in: int, n_out: int) -> Weight:
        if "stored" in case:
            return random_weight(case["stored"], n_out, n_in).to(torch.device(device))
        return Dense(torch.randn(n_out, n_in, dtype=dtype, device=device) / n_in**0.5)

    def maps(n_in: int, n_out: int) -> list[Linear]:
        added: list[Tensor | None] = [None] * case["experts"]
        if "bias" in case:
            added = [*(0.5 * torch.randn(case["experts"], n_out, dtype=dtype, device=device))]
        return [Linear([one(n_in, n_out)], [b], bind_reference, dtype) for b in added]

    up, down = maps(case["hidden"], case["size"] * (1 + case["gated"])), maps(case["size"], case["hidden"])
    shared = torch.randn_like(x) if case["tokens"] > 1 else None
    gate = torch.randn(len(x), 1, dtype=dtype, device=device) if "gate" in case else None
    return (x, weight, index, up, down, (case["kind"], case["gated"]), shared, gate), {}


@dataclass(frozen=True, slots=True)
class StackedExperts:
    """A variant of `experts` over stacks: `pack` prepares each weight at construction, `apply` runs a step.

    `apply` is `experts` with an `ExpertStack` for `up` and one for `down`. Called as the op, with one linear
    layer for each expert, it makes these stacks first. `widens`: it takes `out`, too, [T, hidden], where the
    result is written, in float32 whatever x is.
    """

    pack: Pack
    apply: Callable[..., Tensor]
    widens: bool = False

    def __call__(
        self,
        x: Tensor,
        weight: Tensor,
        index: Tensor,
        up: Sequence[Linear],
        down: Sequence[Linear],
        activation: tuple[str, bool],
        shared: Tensor | None,
        gate: Tensor | None = None,
    ) -> Tensor:
        first, second = (ExpertStack.from_linears(some, x.dtype, self.pack) for some in (up, down))
        return self.apply(x, weight, index, first, second, activation, shared, gate)
