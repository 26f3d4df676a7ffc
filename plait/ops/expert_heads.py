"""A mixture of attention heads (Zhang et al. 2022; JetMoe): experts make queries and read what heads found.

Heads of a token lie so that those over the same keys are neighbours: [T, groups · k, d], number g · k + j
being head g of the token's expert j. A reference goes through the experts one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from plait.ops.blocks import random_weight
from plait.ops.case import Case
from plait.ops.expert_stack import ExpertStack, Pack
from plait.ops.linear import Linear
from plait.ops.registry import Arguments, bind_reference, op
from plait.quant.weight import Dense, Weight

CASES: list[Case] = [
    dict(tokens=1, experts=4, top_k=2, hidden=32, groups=2, dim=16),
    dict(tokens=19, experts=5, top_k=3, hidden=40, groups=3, dim=10, bias=True),
    dict(tokens=70, experts=3, top_k=1, hidden=64, groups=1, dim=24, bias=True),
    *(
        Case(tokens=tokens, experts=3, top_k=2, hidden=256, groups=2, dim=128, stored="Q4_K")
        for tokens in (2, 67)
    ),
]


@op(cases=CASES)
def spread_heads(x: Tensor, index: Tensor, linears: Sequence[Linear], groups: int) -> Tensor:
    """What each chosen expert's linear layer makes of a token, as heads.

    x: [T, hidden], index: [T, k] int64, linears: [hidden] -> [groups · d] each -> [T, groups · k, d].
    """
    made = x.new_empty(*index.shape, linears[0].n_out)
    for e in index.unique().tolist():
        token, j = torch.where(index == e)
        made[token, j] = linears[e](x[token], token)
    heads: Tensor = made.unflatten(-1, (groups, -1)).transpose(1, 2)
    return heads.flatten(1, 2).contiguous()


@op(cases=CASES)
def map_choices(x: Tensor, index: Tensor, linears: Sequence[Linear], groups: int) -> Tensor:
    """What each chosen expert's linear layer makes of its heads: as `collect_heads`, none of it summed.

    x: [T, groups · k, d], index: [T, k] int64, linears: [groups · d] -> [n] each -> [T, k, n].
    """
    heads = x.unflatten(1, (groups, -1)).transpose(1, 2).flatten(2)  # [T, k, groups · d]
    out = x.new_empty(*index.shape, linears[0].n_out)
    for e in index.unique().tolist():
        token, j = torch.where(index == e)
        out[token, j] = linears[e](heads[token, j], token)
    return out


@op(cases=CASES)
def collect_heads(x: Tensor, weight: Tensor, index: Tensor, linears: Sequence[Linear], groups: int) -> Tensor:
    """What each chosen expert's linear layer makes of its heads, weighed and summed by number of expert.

    x: [T, groups · k, d], weight: [T, k] float32, index: [T, k] int64, linears: [groups · d] -> [hidden] each
    -> [T, hidden] in x's dtype.
    """
    heads = x.unflatten(1, (groups, -1)).transpose(1, 2).flatten(2)  # [T, k, groups · d]
    out = torch.zeros(len(x), linears[0].n_out, device=x.device)
    for e in index.unique().tolist():
        token, j = torch.where(index == e)
        out.index_add_(0, token, linears[e](heads[token, j], token).float() * weight[token, j, None])
    return out.to(x.dtype)


def _linears(case: Case, sizes: tuple[int, int], dtype: torch.dtype, device: str) -> list[Linear]:
    n_in, n_out = sizes
    made = []
    for _ in range(case["experts"]):
        weight: Weight = (
            random_weight(case["stored"], n_out, n_in).to(torch.device(device))
            if "stored" in case
            else Dense(torch.randn(n_out, n_in, dtype=dtype, device=device) / n_in**0.5)
        )
        bias = torch.randn(n_out, dtype=dtype, device=device) if "bias" in case else None
        made.append(Linear([weight], [bias], bind_reference, dtype))
    return made


@spread_heads.inputs
def _spread_inputs(case: Case, dtype: torch.dtype, device: str) -> Arguments:
    x = torch.randn(case["tokens"], case["hidden"], dtype=dtype, device=device)
    index = torch.rand(case["tokens"], case["experts"], device=device).topk(case["top_k"], -1).indices
    sizes = (case["hidden"], case["groups"] * case["dim"])
    return (x, index, _linears(case, sizes, dtype, device), case["groups"]), {}


@map_choices.inputs
def _map_inputs(case: Case, dtype: torch.dtype, device: str) -> Arguments:
    (x, _, *rest), _ = _collect_inputs(case, dtype, device)
    return (x, *rest), {}


@collect_heads.inputs
def _collect_inputs(case: Case, dtype: torch.dtype, device: str) -> Arguments:
    shape = (case["tokens"], case["groups"] * case["top_k"], case["dim"])
    x = torch.randn(*shape, dtype=dtype, device=device)
    weight, index = torch.rand(case["tokens"], case["experts"], device=device).topk(case["top_k"], -1)
    sizes = (case["groups"] * case["dim"], case["hidden"])
    return (x, weight, index, _linears(case, sizes, dtype, device), case["groups"]), {}


@dataclass(frozen=True, slots=True)
class StackedHeads:
    """A variant of these ops over a stack: `pack` prepares each weight at construction, `apply` runs a step.

    `apply` is the op with an `ExpertStack` for its linear layers. Called as the op, it makes the stack first.
    """

    pack: Pack
    apply: Callable[..., Tensor]

    def __call__(self, x: Tensor, *given: object) -> Tensor:
        *before, linears, groups = given
        stack = ExpertStack.from_linears(linears, x.dtype, self.pack)  # type: ignore[arg-type]
        return self.apply(x, *before, stack, groups)
