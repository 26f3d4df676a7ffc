"""Experts of attention on a GPU: a pair of a token and an expert is one product, in the forms of `experts`.

Up to `MOST_SLOTS` pairs of plain numbers go by slots, more by groups; planes by either, through one kernel.
What a step takes follows from shapes alone, so that it can be captured. In one form for any number of tokens
(`--deterministic`) pairs go by groups, in tiles of one size. What heads found is added in the order of the
experts' numbers.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from plait.kernels.triton.forms import KernelForm, split_options, with_float16, with_float32
from plait.kernels.triton.moe.chosen import multiply_changed
from plait.kernels.triton.moe.experts import TYPES, WIDE, expert_up, up_tile
from plait.kernels.triton.moe.grouped_experts import sum_rows
from plait.kernels.triton.moe.moe import pack, why_not
from plait.kernels.triton.moe.one_form import ROWS
from plait.kernels.triton.moe.sums import SumEnds
from plait.ops.expert_heads import StackedHeads, collect_heads, map_choices, spread_heads
from plait.ops.expert_stack import ExpertStack
from plait.ops.registry import OpFacts

NAME, ONE_FORM = "triton", "one form"


def spread(x: Tensor, index: Tensor, stack: ExpertStack, groups: int, rows: int | None = None) -> Tensor:
    """`spread_heads` over a stack. rows: see `multiply_chosen`."""
    x, index = x.contiguous(), index.contiguous()
    made = multiply_changed(x, stack, index, index.shape[1], rows)
    heads = made.view(*index.shape, groups, -1).transpose(1, 2)
    return heads.flatten(1, 2).contiguous()


def collect(
    x: Tensor, weight: Tensor, index: Tensor, stack: ExpertStack, groups: int, rows: int | None = None
) -> Tensor:
    """`collect_heads` over a stack. rows: see `multiply_chosen`."""
    heads = x.unflatten(1, (groups, -1)).transpose(1, 2).reshape(index.numel(), -1)  # [T * k, groups * d]
    weight, index = weight.contiguous(), index.contiguous()
    made = multiply_changed(heads, stack, index, 1, rows)
    ends = SumEnds(made.new_empty(len(index), made.shape[1]))
    sum_rows(made, weight, index, ends)
    return ends.out


def map_chosen(x: Tensor, index: Tensor, stack: ExpertStack, groups: int, rows: int | None = None) -> Tensor:
    """`map_choices` over a stack. rows: see `multiply_chosen`."""
    index = index.contiguous()
    heads = x.unflatten(1, (groups, -1)).transpose(1, 2).reshape(index.numel(), -1)  # [T * k, groups * d]
    return multiply_changed(heads, stack, index, 1, rows).view(*index.shape, -1)


def spread_in_one_form(x: Tensor, index: Tensor, stack: ExpertStack, groups: int) -> Tensor:
    """`spread`, with a form that does not depend on the number of pairs."""
    return spread(x, index, stack, groups, ROWS)


def map_in_one_form(x: Tensor, index: Tensor, stack: ExpertStack, groups: int) -> Tensor:
    """`map_chosen`, with a form that does not depend on the number of pairs."""
    return map_chosen(x, index, stack, groups, ROWS)


def collect_in_one_form(x: Tensor, weight: Tensor, index: Tensor, stack: ExpertStack, groups: int) -> Tensor:
    """`collect`, with a form that does not depend on the number of pairs."""
    return collect(x, weight, index, stack, groups, ROWS)


def _why_not_any(facts: OpFacts) -> str | None:
    if facts.sizes.get("deterministic"):
        return "it has several forms, by the number of pairs: deterministic was asked for"
    return why_not(facts)


def _why_not_one(facts: OpFacts) -> str | None:
    return why_not(facts) if facts.sizes.get("deterministic") else "deterministic was not asked for"


map_choices.variant(NAME, on="cuda", when=_why_not_any)(StackedHeads(pack, map_chosen))
map_choices.variant(ONE_FORM, on="cuda", when=_why_not_one)(StackedHeads(pack, map_in_one_form))
spread_heads.variant(NAME, on="cuda", when=_why_not_any)(StackedHeads(pack, spread))
collect_heads.variant(NAME, on="cuda", when=_why_not_any)(StackedHeads(pack, collect))
spread_heads.variant(ONE_FORM, on="cuda", when=_why_not_one)(StackedHeads(pack, spread_in_one_form))
collect_heads.variant(ONE_FORM, on="cuda", when=_why_not_one)(StackedHeads(pack, collect_in_one_form))


@with_float16
@with_float32
def forms() -> Iterator[KernelForm]:
    """JetMoe's queries and outputs by slots, and clusters of an assistant's tokens. Products by groups are
    forms of `grouped_experts`."""
    for what, k, n_in in (("jetmoe queries", 2, 2048), ("jetmoe outputs", 1, 2048), ("clusters", 32, 256)):
        is_biased = what == "jetmoe outputs"
        constants, fields = split_options(up_tile(n_in, is_biased))
        constants |= {"K": k, "KIND": "", "GATED": False, "BIASED": is_biased, "PICKED": False}
        yield KernelForm(f"expert_up, {what}", expert_up, TYPES, constants, **fields, demands=WIDE)
