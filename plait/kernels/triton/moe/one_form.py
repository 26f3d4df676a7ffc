"""Experts in one form for any number of tokens, for `--deterministic`.

By groups always, with tiles of 16 pairs: `grouped_experts` for plain numbers, `plane_experts` for planes. A
row of a tile is multiplied by one instruction in one order of the inputs, whatever the other rows are. So a
token's result depends on its row, its experts and their weights, and on nothing else: not on the other
tokens, and not on which of the experts a rank has. A storage without planes is decoded, a number at a time.

A token's sum goes through its experts in the order of their numbers. Where a model's sums have shares, each
share of the experts' features writes its sum in float32, and shares are added in the tree of all sums
(`plait.ops.ranks`).

The price: pairs of few tokens are sorted, too, and a large prompt decodes an expert once for each 16 pairs.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from plait.kernels.triton.forms import KernelForm
from plait.kernels.triton.moe.chosen import find_plain, run_changed
from plait.kernels.triton.moe.expert_planes import by_planes, is_planes
from plait.kernels.triton.moe.experts import SUM_TYPES
from plait.kernels.triton.moe.grouped_experts import BLOCK, by_groups, sum_experts
from plait.kernels.triton.moe.moe import decode_chunks, pack, why_not
from plait.kernels.triton.moe.sums import SumEnds, end_constants
from plait.ops.expert_stack import ExpertStack
from plait.ops.moe import StackedExperts, experts
from plait.ops.registry import OpFacts

NAME = "one form"
ROWS = 16  # of a tile


def run_in_one_form(
    x: Tensor,
    weight: Tensor,
    index: Tensor,
    up: ExpertStack,
    down: ExpertStack,
    activation: tuple[str, bool],
    shared: Tensor | None,
    gate: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """`experts`, of which `up` and `down` are stacks. out: [T, hidden], like x or float32."""
    out = torch.empty_like(x) if out is None else out
    if not len(x):
        return out
    x, weight, index = (t.contiguous() for t in (x, weight, index))
    ends = SumEnds.of(out, shared, gate)
    if up.is_changed or down.is_changed:
        run_changed(x, weight, index, up, down, activation, ends, ROWS)
        return out
    if is_planes(up) and is_planes(down):
        by_planes(x, weight, index, up, down, activation, ends, each=ROWS)
        return out
    first, second = find_plain(up), find_plain(down)
    chunks = decode_chunks(up, down)
    if first is not None and second is not None:
        chunks = iter([(0, first, second)])
    sizes = (up.count, down.n_in, down.n_out)
    biases = (up.bias, down.bias)
    by_groups(x, weight, index, chunks, biases, activation, ends, sizes, rows=ROWS)
    return out


def _why_not(facts: OpFacts) -> str | None:
    return why_not(facts) if facts.sizes.get("deterministic") else "deterministic was not asked for"


experts.variant(NAME, on="cuda", when=_why_not)(StackedExperts(pack, run_in_one_form, widens=True))


def forms() -> Iterator[KernelForm]:
    """A sum in float32. The products are forms of `grouped_experts` and `plane_experts`."""
    constants = {"K": 8, "KP": 8, "BN": BLOCK, **end_constants(SHARED=True)}
    yield KernelForm("sum_experts, one form", sum_experts, SUM_TYPES | {"out": "fp32*"}, constants)
