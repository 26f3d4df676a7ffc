"""Experts in one form: a token has the same bits alone and in a prompt, and shares are added in float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed here")

from plait.kernels.load import load_for_gpu
from plait.kernels.triton.moe import moe, one_form
from plait.loading.kernel_trials.plan import TrialNeeds, plan_trials
from plait.ops.blocks import random_weight
from plait.ops.chip import EXAMPLES
from plait.ops.expert_stack import ExpertStack
from plait.ops.moe import StackedExperts, experts
from plait.ops.registry import OpFacts
from plait.quant.weight import Dense, Weight

HIDDEN, SIZE, EXPERTS, K = 64, 32, 4, 2
SILU = ("silu", True)
MANY = moe.MOST_SLOTS // K + 3  # tokens: more pairs than go by slots otherwise


def stacks(storage: str) -> tuple[ExpertStack, ExpertStack]:
    """Up and down of all experts."""

    def one(rows: int, columns: int) -> Weight:
        if storage == "plain":
            return Dense(torch.randn(rows, columns) / columns**0.5)
        return random_weight(storage, rows, columns)

    found = []
    for rows, columns in ((2 * SIZE, HIDDEN), (HIDDEN, SIZE)):
        stack = ExpertStack(EXPERTS, torch.float32, moe.pack)
        for e in range(EXPERTS):
            stack.put(e, [one(rows, columns)], [None])
        found.append(stack)
    return found[0], found[1]


def step(tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(x, weight, index, shared)."""
    index = torch.stack([torch.randperm(EXPERTS)[:K] for _ in range(tokens)])
    return torch.randn(tokens, HIDDEN) / 2, torch.rand(tokens, K), index, torch.randn(tokens, HIDDEN)


@pytest.mark.parametrize(
    ("storage", "tokens"),
    [
        ("plain", 19),
        *(pytest.param(s, MANY, marks=pytest.mark.slow) for s in ("plain", "Q8_0", "mxfp4", "int4_g8")),
    ],
)
def test_a_token_has_the_same_bits_alone_in_a_batch_and_in_a_prompt(storage: str, tokens: int) -> None:
    """A storage without planes (groups of 8) is decoded."""
    torch.manual_seed(3)
    up, down = stacks(storage)
    x, weight, index, shared = step(tokens)
    whole = one_form.run_in_one_form(x, weight, index, up, down, SILU, shared)
    for some in (slice(0, 1), slice(tokens - 1, tokens), slice(5, 14)):
        part = x[some], weight[some], index[some], up, down, SILU, shared[some]
        assert torch.equal(one_form.run_in_one_form(*part), whole[some])
    wanted = moe.run_experts(x, weight, index, up, down, SILU, shared)
    torch.testing.assert_close(whole, wanted, atol=1e-5, rtol=1e-5)


def test_a_share_is_written_in_float32_whatever_the_model_computes_in() -> None:
    torch.manual_seed(4)
    up, down = stacks("plain")
    for stack in (up, down):
        stack.parts[0].tensors[0] = stack.parts[0].tensors[0].half()
    x, weight, index, shared = step(5)
    given = x.half(), weight, index, up, down, SILU, shared.half()
    wide = one_form.run_in_one_form(*given, out=torch.empty(5, HIDDEN))
    assert torch.equal(one_form.run_in_one_form(*given), wide.half())
    assert not torch.equal(wide, wide.half().float())


def test_the_option_decides_what_is_bound_and_tried() -> None:
    load_for_gpu()

    def bind(**sizes: Any) -> tuple[Any, str]:
        fn, row = experts.bind(OpFacts("cuda", torch.bfloat16, sizes, chip=EXAMPLES[90]))
        return fn, row.variant

    fn, name = bind(deterministic=True)
    assert name == "one form"
    assert isinstance(fn, StackedExperts)
    assert fn.widens
    fn, name = bind()
    assert name == "triton"
    assert not fn.widens
    for flag, wanted in ((True, "one form"), (False, "triton")):
        trials = plan_trials(TrialNeeds(EXAMPLES[90], [torch.float32], ["Q8_0"], flag))
        assert {trial.variant for trial in trials if trial.op == "experts"} == {wanted}
