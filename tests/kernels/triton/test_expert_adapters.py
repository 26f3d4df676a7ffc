"""Adapters of experts: a step's tokens each have their own adapter, and others' bits stay as they are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed here")

from plait.kernels.triton.moe import moe, one_form
from plait.kernels.triton.moe.low_rank import add_to_pairs
from plait.ops.blocks import random_weight
from plait.ops.expert_low_rank import AddedToExperts, ExpertSite
from plait.ops.expert_stack import ExpertStack
from plait.ops.linear import Linear
from plait.ops.low_rank import AdapterLimits, AdapterRows, LowRankFactors, StepRows
from plait.ops.moe import experts
from plait.ops.registry import bind_reference
from plait.quant.weight import Dense, Weight

HIDDEN, SIZE, EXPERTS, K, SLOTS = 64, 32, 4, 2, 2
SILU = ("silu", True)
MANY = moe.MOST_SLOTS // K + 3  # tokens: more pairs than go by slots otherwise
Run = Callable[..., Tensor]


def make(
    storage: str, dtype: torch.dtype
) -> tuple[list[list[Weight]], list[ExpertStack], list[list[Weight]], StepRows]:
    """Of up and down: each expert's weight, the stack with adapters, and the weights with slot 1 merged."""
    step, weights, stacks, merged = StepRows(), [], [], []
    limits = AdapterLimits(SLOTS, 8, dtype, stacked_on=torch.device("cpu"))
    for outs, columns in (((SIZE, SIZE), HIDDEN), ((HIDDEN,), SIZE)):
        rows, stack = sum(outs), ExpertStack(EXPERTS, dtype, moe.pack)
        some: list[Weight] = [
            Dense(torch.randn(rows, columns) / columns**0.5)
            if storage == "plain"
            else random_weight(storage, rows, columns)
            for _ in range(EXPERTS)
        ]
        for e, weight in enumerate(some):
            stack.put(e, [weight], [None])
        site = ExpertSite(columns, outs, limits, 8, EXPERTS)
        changed = [weight.dequantize(torch.float32).clone() for weight in some]
        for part in range(EXPERTS * len(outs)):
            if part != 1:  # one weight stays as it is
                e, own = divmod(part, len(outs))
                down, up = torch.randn(5, columns) / columns**0.5, torch.randn(outs[own], 5)
                site.put(1, part, factors := LowRankFactors(down, up, 0.5))
                changed[e][own * SIZE : own * SIZE + outs[own]] += factors.product()
        stack.added = AddedToExperts(site, step, lambda op, **_: add_to_pairs)
        weights.append(some)
        stacks.append(stack)
        merged.append([Dense(weight) for weight in changed])
    return weights, stacks, merged, step


def reference(given: tuple[Tensor, ...], weights: list[list[Weight]], shared: Tensor) -> Tensor:
    up, down = (
        [Linear([weight], [None], bind_reference, given[0].dtype) for weight in some] for some in weights
    )
    return experts(*given, up, down, SILU, shared)  # type: ignore[no-any-return]


@pytest.mark.parametrize("run", [moe.run_experts, one_form.run_in_one_form], ids=["triton", "one form"])
@pytest.mark.parametrize(
    ("storage", "tokens", "dtype"),
    [
        ("plain", 9, torch.float32),
        *(
            pytest.param(storage, tokens, dtype, marks=pytest.mark.slow)
            for dtype in (torch.float32, torch.float16)
            for storage, tokens in (
                *(("plain", MANY), ("Q8_0", 9), ("Q8_0", MANY)),
                *(("int4_g64+zeros+order", MANY), ("int4_g8", MANY)),
            )
        ),
    ],
)
def test_tokens_with_an_adapter_have_its_experts_and_others_their_bits(
    storage: str, tokens: int, dtype: torch.dtype, run: Run
) -> None:
    torch.manual_seed(5)
    weights, stacks, merged, step = make(storage, dtype)
    index = torch.stack([torch.randperm(EXPERTS)[:K] for _ in range(tokens)])
    given = torch.randn(tokens, HIDDEN, dtype=dtype) / 2, torch.rand(tokens, K), index
    shared = torch.randn(tokens, HIDDEN, dtype=dtype)
    near = 2e-5 if dtype == torch.float32 else 1e-2
    calm = run(*given, *stacks, SILU, shared)
    slots = torch.arange(tokens) % 3  # of slot 2 nothing is loaded
    step.current = AdapterRows.of(slots)
    found = run(*given, *stacks, SILU, shared)
    step.current = None
    wanted, changed = reference(given, weights, shared), reference(given, merged, shared)
    own = slots == 1
    torch.testing.assert_close(found[own], changed[own], rtol=near, atol=near)
    torch.testing.assert_close(found[~own], wanted[~own], rtol=near, atol=near)
    assert not torch.allclose(changed[own], wanted[own], atol=0.1)
    if storage != "plain" or run is one_form.run_in_one_form:
        assert torch.equal(found[~own], calm[~own])
    for stack in stacks:
        assert stack.added is not None
        stack.added.site.clear(1)
    step.current = AdapterRows.of(slots)
    torch.testing.assert_close(run(*given, *stacks, SILU, shared), calm, rtol=near, atol=near)


def test_a_slot_is_of_one_adapter_and_one_expert() -> None:
    site = ExpertSite(8, (4, 4), AdapterLimits(3, 4, stacked_on=torch.device("cpu")), 4, EXPERTS)
    site.put(2, 5, LowRankFactors(torch.ones(2, 8), torch.ones(4, 2), 1.5))  # expert 2, the second part
    slots = torch.tensor([0, 2, 1])
    index = torch.tensor([[0, 1], [2, 3], [2, 0]])
    assert site.find_slots(AdapterRows.of(slots), index).tolist() == [0, 0, 7, 8, 3, 1]
    assert site.stacked.scales.nonzero().tolist() == [[6, 1]]
    assert site.stacked.scales[6, 1] == 1.5
    site.clear(2)
    assert not site.stacked.scales.any()
    assert not site.stacked.up.any()
