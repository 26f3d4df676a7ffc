"""Experts of attention on a GPU: a pair of a token and an expert is one product, in the forms of `experts`.

Up to `MOST_SLOTS` pairs of plain numbers go by slots, more by groups; planes by either, through one kernel.
What a step takes follows from shapes alone, so that it can be captured. In one form for any number of tokens
(`--deterministic`) pairs go by groups, in tiles of one size. What heads found is added in the order of the
experts' numbers.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
from torch import Tensor

from plait.kernels.triton.forms import KernelForm, split_options, with_float16, with_float32
from plait.kernels.triton.moe.expert_planes import is_planes, multiply_stack
from plait.kernels.triton.moe.experts import MOST_SLOTS, TYPES, WIDE, SumStart, expert_up, up_tile
from plait.kernels.triton.moe.grouped_experts import add_rows, launch_groups, sort_by_expert, tile_rows
from plait.kernels.triton.moe.moe import SCRATCH, find_plain, pack, pick_all, why_not
from plait.kernels.triton.moe.one_form import ROWS
from plait.ops.expert_heads import StackedHeads, collect_heads, spread_heads
from plait.ops.expert_stack import ExpertStack
from plait.ops.launch import launch
from plait.ops.registry import OpFacts

NAME, ONE_FORM = "triton", "one form"
NO_ACTIVATION = ("", False)


def spread(x: Tensor, index: Tensor, stack: ExpertStack, groups: int, rows: int | None = None) -> Tensor:
    """`spread_heads` over a stack. rows: see `multiply_chosen`."""
    made = multiply_chosen(x.contiguous(), stack, index.contiguous(), index.shape[1], rows)
    heads = made.view(*index.shape, groups, -1).transpose(1, 2)
    return heads.flatten(1, 2).contiguous()


def collect(
    x: Tensor, weight: Tensor, index: Tensor, stack: ExpertStack, groups: int, rows: int | None = None
) -> Tensor:
    """`collect_heads` over a stack. rows: see `multiply_chosen`."""
    heads = x.unflatten(1, (groups, -1)).transpose(1, 2).reshape(index.numel(), -1)  # [T * k, groups * d]
    weight, index = weight.contiguous(), index.contiguous()
    made = multiply_chosen(heads, stack, index, 1, rows)
    return add_rows(made, weight, index, SumStart(None, None))


def spread_in_one_form(x: Tensor, index: Tensor, stack: ExpertStack, groups: int) -> Tensor:
    """`spread`, with a form that does not depend on the number of pairs."""
    return spread(x, index, stack, groups, ROWS)


def collect_in_one_form(x: Tensor, weight: Tensor, index: Tensor, stack: ExpertStack, groups: int) -> Tensor:
    """`collect`, with a form that does not depend on the number of pairs."""
    return collect(x, weight, index, stack, groups, ROWS)


def multiply_chosen(x: Tensor, stack: ExpertStack, index: Tensor, k: int, rows: int | None) -> Tensor:
    """What each pair's expert makes of its row of x, [pairs, n_out]; a pair's row is pair // k.

    rows: of a tile, always by groups; None: by slots or groups, as the number of pairs is good for.
    """
    pairs, is_free = index.numel(), rows is None
    if not pairs:
        return x.new_empty(0, stack.n_out)
    if is_planes(stack):
        where = None if is_free and pairs <= MOST_SLOTS else sort_by_expert(index, stack.count)
        each = rows or (0 if where is None else pairs // stack.count)
        return multiply_stack(x, stack, index, where, k, NO_ACTIVATION, each)
    y, plain = x.new_empty(pairs, stack.n_out), find_plain(stack)
    if is_free and pairs <= (MOST_SLOTS if plain is not None else min(MOST_SLOTS, stack.count)):
        _by_slots(x, stack, plain, index.view(-1), k, y)
        return y
    rows = rows or tile_rows(pairs, stack.count, x.dtype)
    starts, order = sort_by_expert(index, stack.count)
    for first, weights in [(0, plain)] if plain is not None else _decode_chunks(stack):
        tiles = pairs // rows + min(len(weights), pairs)
        bias = None if stack.bias is None else stack.bias[first : first + len(weights)]
        launch_groups(x, weights, bias, y, (starts[first:], order, rows, tiles), k, NO_ACTIVATION)
    return y


def _by_slots(x: Tensor, stack: ExpertStack, plain: Tensor | None, index: Tensor, k: int, y: Tensor) -> None:
    """Multiply each pair by itself. Without plain weights those of some slots at a time are decoded."""
    n_in, size, pairs = stack.n_in, stack.n_out, len(index)
    step = pairs if plain is not None else max(k, SCRATCH // (x.element_size() * n_in * size) // k * k)
    is_biased = stack.bias is not None
    tile = up_tile(n_in, is_biased)
    for at in range(0, pairs, step):
        chosen, out = index[at : at + step], y[at : at + step]
        weights = pick_all(stack, chosen) if plain is None else plain
        launch(
            expert_up, (len(chosen), triton.cdiv(size, tile["BN"])),
            x[at // k :], weights, stack.bias if is_biased else weights, chosen, out, n_in, size, x.stride(0),
            K=k, KIND="", GATED=False, BIASED=is_biased, PICKED=plain is None, **tile,
        )  # fmt: skip


def _decode_chunks(stack: ExpertStack) -> Iterator[tuple[int, Tensor]]:
    """(first expert, weights) of as many experts at a time as scratch memory holds."""
    step = max(1, SCRATCH // (stack.dtype.itemsize * stack.n_in * stack.n_out))
    for first in range(0, stack.count, step):
        which = range(first, min(first + step, stack.count))
        yield first, torch.stack([stack.decode(e) for e in which])


def _why_not_any(facts: OpFacts) -> str | None:
    if facts.sizes.get("deterministic"):
        return "it has several forms, by the number of pairs: deterministic was asked for"
    return why_not(facts)


def _why_not_one(facts: OpFacts) -> str | None:
    return why_not(facts) if facts.sizes.get("deterministic") else "deterministic was not asked for"


spread_heads.variant(NAME, on="cuda", when=_why_not_any)(StackedHeads(pack, spread))
collect_heads.variant(NAME, on="cuda", when=_why_not_any)(StackedHeads(pack, collect))
spread_heads.variant(ONE_FORM, on="cuda", when=_why_not_one)(StackedHeads(pack, spread_in_one_form))
collect_heads.variant(ONE_FORM, on="cuda", when=_why_not_one)(StackedHeads(pack, collect_in_one_form))


@with_float16
@with_float32
def forms() -> Iterator[KernelForm]:
    """JetMoe's queries and outputs by slots. Products by groups are forms of `grouped_experts`."""
    for what, k in (("queries", 2), ("outputs", 1)):
        is_biased = what == "outputs"
        constants, fields = split_options(up_tile(2048, is_biased))
        constants |= {"K": k, "KIND": "", "GATED": False, "BIASED": is_biased, "PICKED": False}
        yield KernelForm(f"expert_up, jetmoe {what}", expert_up, TYPES, constants, **fields, demands=WIDE)
