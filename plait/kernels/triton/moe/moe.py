"""Experts on a GPU: stacks of weights, and which kernels a step takes for them.

What a step takes follows from shapes alone, so that it can be captured: up to `MOST_SLOTS` pairs of a token
and an expert go by slots (`experts`), more of them by groups (`grouped_experts`).

Plain numbers are read where they lie. A storage that the kernels do not read is decoded into scratch memory
of `SCRATCH` bytes at most: by slots the chosen experts, of some tokens at a time; by groups all experts, some
at a time. The host never learns which are chosen.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from plait.kernels.triton.moe.chosen import SCRATCH, find_plain, pick_all, run_changed
from plait.kernels.triton.moe.expert_planes import by_planes, is_planes
from plait.kernels.triton.moe.experts import MOST_SLOTS, by_slots
from plait.kernels.triton.moe.grouped_experts import by_groups
from plait.kernels.triton.moe.sums import SumEnds
from plait.kernels.triton.pointwise.pointwise import KINDS
from plait.ops.expert_stack import ExpertStack
from plait.ops.moe import StackedExperts, experts
from plait.ops.registry import OpFacts
from plait.quant.plane_parts import pack_planes
from plait.quant.weight import Dense, Weight

NAME = "triton"


def pack(weight: Weight, dtype: torch.dtype) -> object:
    """Plain numbers in the dtype of the model; what is quantized in planes, or as it is stored."""
    if isinstance(weight, Dense):
        return weight.tensor.to(dtype).contiguous()
    return pack_planes(weight) or weight


def run_experts(
    x: Tensor,
    weight: Tensor,
    index: Tensor,
    up: ExpertStack,
    down: ExpertStack,
    activation: tuple[str, bool],
    shared: Tensor | None,
    gate: Tensor | None = None,
) -> Tensor:
    """`experts`, of which `up` and `down` are stacks."""
    ends = SumEnds.of(torch.empty_like(x), shared, gate)
    run_between(x, weight, index, up, down, activation, ends)
    return ends.out


def run_between(
    x: Tensor,
    weight: Tensor,
    index: Tensor,
    up: ExpertStack,
    down: ExpertStack,
    activation: tuple[str, bool],
    ends: SumEnds,
) -> None:
    """`experts`, from and to where `ends` has the sums."""
    if not len(x):
        return
    x, weight, index = (t.contiguous() for t in (x, weight, index))
    how = x, weight, index, up, down, activation, ends
    if up.is_changed or down.is_changed:
        run_changed(*how)
    elif is_planes(up) and is_planes(down):
        by_planes(*how)
    else:
        _run_numbers(*how)


def _run_numbers(
    x: Tensor,
    weight: Tensor,
    index: Tensor,
    up: ExpertStack,
    down: ExpertStack,
    activation: tuple[str, bool],
    ends: SumEnds,
) -> None:
    """The same over plain numbers, or what is decoded to these."""
    plain = find_plain(up), find_plain(down)
    first, second = plain
    if first is not None and second is not None:
        if index.numel() <= MOST_SLOTS:
            by_slots(x, weight, index, (first, up.bias), (second, down.bias), activation, ends)
            return
        chunks: Iterator[tuple[int, Tensor, Tensor]] = iter([(0, first, second)])
    elif index.numel() <= min(MOST_SLOTS, up.count):
        _by_picked(x, weight, index, up, down, activation, ends)
        return
    else:
        chunks = decode_chunks(up, down)
    sizes = (up.count, down.n_in, down.n_out)
    by_groups(x, weight, index, chunks, (up.bias, down.bias), activation, ends, sizes)


def _by_picked(
    x: Tensor,
    weight: Tensor,
    index: Tensor,
    up: ExpertStack,
    down: ExpertStack,
    activation: tuple[str, bool],
    ends: SumEnds,
) -> None:
    """By slots, with the weights of each slot decoded into scratch memory."""
    k = index.shape[1]
    each = x.element_size() * (up.n_in * up.n_out + down.n_in * down.n_out)
    step = max(1, SCRATCH // (k * each))
    for t in range(0, len(x), step):
        some = slice(t, t + step)
        chosen = index[some].reshape(-1)
        first, second = ((pick_all(stack, chosen), stack.bias) for stack in (up, down))
        own = ends.rows(some)
        by_slots(x[some], weight[some], index[some], first, second, activation, own, is_picked=True)


def decode_chunks(up: ExpertStack, down: ExpertStack) -> Iterator[tuple[int, Tensor, Tensor]]:
    """(first expert, up, down) of as many experts at a time as scratch memory holds."""
    each = up.dtype.itemsize * (up.n_in * up.n_out + down.n_in * down.n_out)
    step = max(1, SCRATCH // each)
    for first in range(0, up.count, step):
        which = range(first, min(first + step, up.count))
        decoded = [torch.stack([stack.decode(e) for e in which]) for stack in (up, down)]
        yield first, decoded[0], decoded[1]


def why_not(facts: OpFacts) -> str | None:
    """What the kernels need: inputs that are not rounded, and an activation that they compute."""
    rounding, kind = facts.sizes.get("activations", "float32"), facts.sizes.get("kind")
    if kind is not None and kind not in KINDS:
        return f"no kernel computes {kind}"
    return None if rounding == "float32" else f"it does not round inputs to {rounding}"


def _why_not_any(facts: OpFacts) -> str | None:
    """The `when` of the forms that are chosen by the number of pairs."""
    if facts.sizes.get("deterministic"):
        return "it has several forms, by the number of pairs: deterministic was asked for"
    return why_not(facts)


experts.variant(NAME, on="cuda", when=_why_not_any)(StackedExperts(pack, run_experts))
