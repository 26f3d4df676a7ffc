"""Adapters behind packed weights: what is fetched ahead, and who else is in the batch, changes no bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from plait.kernels.load import allocate_packed
from plait.ops.blocks import random_weight
from plait.ops.linear import Linear
from plait.ops.low_rank import (
    AdapterLimits,
    AdapterRows,
    AdapterSite,
    AddedAdapters,
    LowRankFactors,
    StepRows,
)
from plait.ops.registry import Op, OpFacts

N_IN, OUTS = 96, (80, 16, 48)


@pytest.fixture(scope="module")
def layers(request: pytest.FixtureRequest) -> dict[bool, tuple[Linear, StepRows]]:
    """A layer of three parts and four slots, of which 1, 3 and 4 are filled; by whether it fetches them."""
    cpu = request.getfixturevalue("cpu")

    def bind(op: Op, **sizes: Any) -> Any:
        return op.bind(OpFacts("cpu", torch.float32, sizes, cpu), "", "auto")[0]

    torch.manual_seed(0)
    weights = [random_weight("Q4_1", n_out, N_IN) for n_out in OUTS]
    site = AdapterSite(N_IN, OUTS, AdapterLimits(4, 32, torch.bfloat16, allocate=allocate_packed))
    for slot, rank in ((1, 16), (3, 5), (4, 32)):
        for part, n_out in enumerate(OUTS):
            if (slot, part) != (3, 1):
                site.put(slot, part, LowRankFactors(torch.randn(rank, N_IN), torch.randn(n_out, rank), 0.5))
    found = {}
    for fetches in (False, True):
        step = StepRows()
        linear = Linear(weights, [None] * 3, bind, torch.float32, "int8")
        linear.add(AddedAdapters(site, step, bind))
        found[fetches] = linear, step
    return found


@pytest.mark.parametrize(
    "slots", [[0, 0, 0], [1], [0, 4, 2, 3, 3, 1, 4, 0, 4, 4, 4], [4] * 16, [1, 3] * 8, [3] * 9 + [0] * 61]
)
def test_a_row_has_the_bits_that_it_has_alone(
    layers: dict[bool, tuple[Linear, StepRows]], slots: list[int]
) -> None:
    x = torch.randn(len(slots), N_IN)
    made = {}
    for fetches, (linear, step) in layers.items():
        step.current = AdapterRows.of(torch.tensor(slots))
        made[fetches] = linear(x, None if fetches else torch.arange(len(slots)))
    assert torch.equal(made[False], made[True])
    linear, step = layers[True]
    for i, slot in list(enumerate(slots))[:12]:
        step.current = AdapterRows.of(torch.tensor([slot]))
        assert torch.equal(linear(x[i : i + 1])[0], made[True][i])


def test_rows_of_later_tokens_alone_have_the_same_bits(layers: dict[bool, tuple[Linear, StepRows]]) -> None:
    """As a head's are: few rows, of a step with more tokens, or fewer adapted ones than rows."""
    linear, step = layers[True]
    step.current = AdapterRows.of(torch.tensor([1] * 19 + [4, 0]))
    x = torch.randn(21, N_IN)
    whole = linear(x)
    for tokens in ([19], [20], [3, 19], list(range(21))):
        assert torch.equal(linear(x[tokens], torch.tensor(tokens)), whole[tokens])
    many = torch.tensor([20, 19] * 20)
    assert torch.equal(linear(x[many], many), whole[many])


def test_a_row_without_adapter_is_the_models_own(layers: dict[bool, tuple[Linear, StepRows]]) -> None:
    linear, step = layers[True]
    x = torch.randn(7, N_IN)
    step.current = None
    plain = linear(x)
    step.current = AdapterRows.of(torch.tensor([0, 2, 0, 1, 0, 3, 0]))
    changed = (linear(x) != plain).any(-1)
    assert changed.tolist() == [False, False, False, True, False, True, False]


def test_a_slot_is_filled_and_cleared_between_steps() -> None:
    site = AdapterSite(N_IN, OUTS, AdapterLimits(2, 16, torch.bfloat16, allocate=allocate_packed))
    site.put(2, 0, LowRankFactors(torch.randn(4, N_IN), torch.randn(OUTS[0], 4), 1.0))
    at, nbytes = site.ranges[1].tolist()
    assert at == min(site.table[1, 0, :2].tolist())
    assert site.nbytes <= nbytes < site.nbytes + 64
    site.clear(2)
    assert not site.ranges.any()
    assert not site.table.any()
    assert site.nbytes == 0
