"""An RMS norm in front of a router, and one behind experts, without launches of their own.

    norm_route     the second half of the norm that `add_linear` begins, and the router's choice
    add_experts    what experts give, added to the residual, and the first half of the norm behind it

Between them the router is `norm_linear`. Experts read a row that `norm_route` has divided: several of them
read it, so it is divided once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from plait.ops.activation import combine
from plait.ops.case import Case
from plait.ops.expert_stack import ExpertStack
from plait.ops.folded_norm import GROUP, TOLERANCE, finish_norm, halve_norm
from plait.ops.linear import Linear
from plait.ops.moe import EXPERT_CASES, experts, make_expert_inputs, make_route_inputs, route
from plait.ops.registry import Arguments, Bound, TensorFn, op
from plait.spec.model import RouterSpec

MOST_SUMS = 1024  # of a row, that the layer behind experts adds
OWN_GROUP = 4  # numbers of which the squares are one sum, behind experts: the least rows of a program
Experts = Sequence[Linear] | ExpertStack

ROUTE_CASES: list[Case] = [
    dict(tokens=1, hidden=64, experts=4, top_k=2, router=RouterSpec()),
    dict(tokens=5, hidden=2080, experts=19, top_k=3, router=RouterSpec("sigmoid"), bias=True),
    dict(
        tokens=16, hidden=336, experts=8, top_k=3, router=RouterSpec("softmax", False, 0.0, 1.0, 4, 2, "max")
    ),
    dict(tokens=3, hidden=96, experts=6, top_k=3, router=RouterSpec(), factors=True),
]
ADD_CASES: list[Case] = [Case(**case, scale=0.5 if n % 2 else 1.0) for n, case in enumerate(EXPERT_CASES)]


class Routed(NamedTuple):
    """Rows that experts read, x [T, hidden], and of each its experts: weight and number [T, k]."""

    x: Tensor
    weight: Tensor
    number: Tensor


class ChosenExperts(NamedTuple):
    """The same, and what the sum of a row's experts starts from: shared [T, hidden], its gate [T, 1]."""

    x: Tensor
    weight: Tensor
    number: Tensor
    shared: Tensor | None
    gate: Tensor | None


@dataclass(frozen=True, slots=True)
class RouterFirst:
    """A router as the beginning of a mixer, with what `route` takes besides its logits."""

    layer: Linear
    bias: Tensor | None
    top_k: int
    router: RouterSpec
    factors: Tensor | None

    @property
    def rest(self) -> tuple[Tensor | None, int, RouterSpec, Tensor | None]:
        """The arguments of `route` behind the logits."""
        return self.bias, self.top_k, self.router, self.factors


@dataclass(frozen=True, slots=True)
class ExpertsLast:
    """Experts as the end of a mixer: the bound `experts`, its weights, and the sizes it is bound for."""

    run: Bound
    up: Experts
    down: Experts
    activation: tuple[str, bool]
    sizes: dict[str, object]

    def join(self, chosen: ChosenExperts) -> tuple[object, ...]:
        """The arguments of `experts`."""
        return *chosen[:3], self.up, self.down, self.activation, *chosen[3:]

    def __call__(self, chosen: ChosenExperts) -> Tensor:
        y: Tensor = self.run(*self.join(chosen))
        return y


@op(cases=ROUTE_CASES)
def norm_route(
    rows: Tensor,
    squares: Tensor,
    eps: float,
    logits: Tensor,
    bias: Tensor | None,
    top_k: int,
    router: RouterSpec,
    factors: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(the normed rows [T, hidden], weight [T, k] float32, index [T, k] int64) of half a norm and logits.

    rows: [T, hidden], squares: [T, sums] float32, of as many numbers each; the others as of `route`.
    """
    return finish_norm(rows, squares, eps), *route.reference(logits, bias, top_k, router, factors)


@norm_route.replaces(route)
def _norm_then_route(
    route: TensorFn, rows: Tensor, squares: Tensor, eps: float, logits: Tensor, *rest: object
) -> tuple[Tensor, Tensor, Tensor]:
    return finish_norm(rows, squares, eps), *route(logits, *rest)


@norm_route.inputs
def _route_inputs(case: Case, dtype: torch.dtype, device: str) -> Arguments:
    x = torch.randn(case["tokens"], case["hidden"], dtype=dtype, device=device)
    half = halve_norm(x, torch.rand(case["hidden"], device=device) + 0.5, GROUP)
    return (*half, 1e-5, *make_route_inputs(case, dtype, device)[0]), {}


@op(cases=ADD_CASES, tolerance=TOLERANCE, is_product=True)
def add_experts(
    x: Tensor,
    weight: Tensor,
    index: Tensor,
    up: Experts,
    down: Experts,
    activation: tuple[str, bool],
    shared: Tensor | None,
    gate: Tensor | None,
    residual: Tensor,
    scale: float,
    norm: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """The end of a residual branch of experts and the first half of the norm behind it.

    x' = residual + scale · experts(x, …); rows = x' · norm; squares = sums of x'², of 4 numbers each.
    The first eight arguments are those of `experts`; residual: [T, n], norm: [n] float32
    -> x' and rows [T, n] in the residual's dtype, squares [T, n / 4] float32.
    """
    delta = experts.reference(x, weight, index, up, down, activation, shared, gate)
    added = residual + (delta if scale == 1.0 else delta * scale)
    return added, *halve_norm(added, norm, OWN_GROUP)


@add_experts.replaces(combine, experts)
def _experts_then_combine(
    combine: TensorFn,
    experts: TensorFn,
    x: Tensor,
    weight: Tensor,
    index: Tensor,
    up: Experts,
    down: Experts,
    activation: tuple[str, bool],
    shared: Tensor | None,
    gate: Tensor | None,
    residual: Tensor,
    scale: float,
    norm: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    y = experts(x, weight, index, up, down, activation, shared, gate)
    added = combine(residual, y, scale)
    return added, *halve_norm(added, norm, OWN_GROUP)


@add_experts.inputs
def _add_inputs(case: Case, dtype: torch.dtype, device: str) -> Arguments:
    (x, *rest), _ = make_expert_inputs(case, dtype, device)
    norm = torch.rand(case["hidden"], device=device) + 0.5
    return (x, *rest, torch.randn_like(x), case["scale"], norm), {}
