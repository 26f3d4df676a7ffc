"""Experts in planes: which kernel multiplies the pairs of a token and an expert, and the order of launches.

    slots     product (up), product (down), sum_experts
    groups    sort_pairs, and the same

With x in bfloat16 or float16 a product is that of `plane_experts`, codes by matrix units; in float32 that of
`float32_experts`, decoded numbers, and the activation is a launch of its own. Where columns have an order of
their own (act-order GPTQ), rows of x are put in the order of each pair's expert first.
"""

from __future__ import annotations

import torch
from torch import Tensor

from plait.kernels.triton.linear.float32_planes import is_float32
from plait.kernels.triton.moe.experts import MOST_SLOTS
from plait.kernels.triton.moe.float32_experts import multiply_pairs_in_float32
from plait.kernels.triton.moe.grouped_experts import sort_by_expert, sum_rows
from plait.kernels.triton.moe.plane_experts import list_fields, multiply_codes, order_rows
from plait.kernels.triton.moe.sums import SumEnds
from plait.kernels.triton.pointwise.pointwise import activate_rows
from plait.ops.expert_stack import ExpertStack
from plait.quant.planes import Planes


def is_planes(stack: ExpertStack) -> bool:
    """Whether the kernels read these weights."""
    return len(stack.parts) == 1 and isinstance(stack.parts[0].template, Planes)


def by_planes(
    x: Tensor,
    weight: Tensor,
    index: Tensor,
    up: ExpertStack,
    down: ExpertStack,
    activation: tuple[str, bool],
    ends: SumEnds,
    *,
    each: int | None = None,
) -> None:
    """`experts`, with the weights of both products in planes.

    each: pairs of an expert, for which the tile of a step by groups is chosen (`pair_tile`); None: as the
    number of pairs is good for, by slots or by groups.
    """
    (pairs, k), is_few = (index.numel(), index.shape[1]), each is None and index.numel() <= MOST_SLOTS
    where = None if is_few else sort_by_expert(index, up.count)
    each = 0 if is_few else pairs // up.count if each is None else each
    h = multiply_stack(x, up, index, where, k, activation, each)
    y = multiply_stack(h, down, index, where, 1, ("", False), each)
    sum_rows(y, weight, index, ends)


def multiply_stack(
    x: Tensor,
    stack: ExpertStack,
    index: Tensor,
    where: tuple[Tensor, Tensor] | None,
    k: int,
    activation: tuple[str, bool],
    each: int,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """One product, [pairs, outputs]. where: (starts, order) of groups, None for slots; k: pairs of a row.

    each: see `pair_tile`; dtype: of the result, None: as x.
    """
    if stack.parts[0].template.order is not None:
        x, k = order_rows(x, list_fields(stack.parts[0])["order"], index, k), 1
    if not is_float32(x):
        return multiply_codes(x, stack, index, where, k, activation, each, dtype)
    y, (kind, gated) = multiply_pairs_in_float32(x, stack, index, where, k), activation
    return activate_rows(y, kind, gated) if kind else y
