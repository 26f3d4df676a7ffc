"""Norms around experts in the launches of router and experts: bits, launches, what is refused."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed here")

from plait.kernels.load import load_for_gpu
from plait.kernels.triton.moe import moe
from plait.ops.activation import combine
from plait.ops.expert_stack import ExpertStack
from plait.ops.folded_experts import OWN_GROUP, ChosenExperts
from plait.ops.folded_norm import finish_norm, halve_norm
from plait.ops.moe import route
from plait.ops.registry import OpFacts
from plait.quant.weight import Dense
from plait.runner.device.capture import StepCapture
from plait.spec.model import RouterSpec
from tests.kernels.triton.test_experts import EXPERTS, SILU, K, planes_layer, stack, without_planes

load_for_gpu()
OURS: Any = importlib.import_module("plait.kernels.triton.moe.folded_experts")
HIDDEN, SIZE = 64, 32
KINDS = ["plain", "Q8_0", "int4_g8"]  # experts by slots, planes, and what is decoded


def make_stacks(kind: str) -> tuple[ExpertStack, ExpertStack]:
    if kind == "plain":
        return tuple(  # type: ignore[return-value]
            stack([Dense(torch.randn(*shape) / 8) for _ in range(EXPERTS)])
            for shape in ((2 * SIZE, HIDDEN), (HIDDEN, SIZE))
        )
    if kind == "int4_g8":
        return stack(without_planes(2 * SIZE, HIDDEN)), stack(without_planes(HIDDEN, SIZE))
    return planes_layer(kind)


def make_rows(tokens: int) -> tuple[ChosenExperts, Any]:
    """(what experts are given, a residual)."""
    number = torch.stack([torch.randperm(EXPERTS)[:K] for _ in range(tokens)])
    shared, gate = torch.randn(tokens, HIDDEN), torch.randn(tokens, 1)
    return ChosenExperts(
        torch.randn(tokens, HIDDEN), torch.rand(tokens, K), number, shared, gate
    ), torch.randn(tokens, HIDDEN)


def take_rows(chosen: ChosenExperts, some: slice) -> ChosenExperts:
    return ChosenExperts(*(None if t is None else t[some] for t in chosen))  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scale", [1.0, 0.22])
def test_a_sum_that_begins_a_norm_has_the_bits_of_the_sum_and_the_addition(
    kind: str, scale: float, monkeypatch: Any
) -> None:
    monkeypatch.setattr(moe, "SCRATCH", 1)  # decoded experts: one token at a time
    (up, down), (chosen, x), weight = make_stacks(kind), make_rows(5), torch.rand(HIDDEN) + 0.5
    found = OURS.run_and_add(*chosen[:3], up, down, SILU, *chosen[3:], x, scale, weight)
    y = moe.run_experts(*chosen[:3], up, down, SILU, *chosen[3:])
    added = combine(x, y, scale)
    rows, squares = halve_norm(added, weight, OWN_GROUP)
    assert torch.equal(found[0], added)
    assert torch.equal(found[1], rows)
    torch.testing.assert_close(found[2], squares, rtol=1e-6, atol=0)


@pytest.mark.parametrize("kind", KINDS[:2])
def test_a_row_alone_has_the_bits_of_the_row_in_a_batch(kind: str) -> None:
    (up, down), (chosen, x), weight = make_stacks(kind), make_rows(7), torch.rand(HIDDEN) + 0.5
    whole = OURS.run_and_add(*chosen[:3], up, down, SILU, *chosen[3:], x, 1.0, weight)
    for some in (slice(4, 5), slice(1, 6)):
        part = take_rows(chosen, some)
        found = OURS.run_and_add(*part[:3], up, down, SILU, *part[3:], x[some], 1.0, weight)
        assert all(torch.equal(a, b[some]) for a, b in zip(found, whole, strict=True))


def test_more_pairs_than_slots_are_added_by_groups(monkeypatch: Any) -> None:
    (up, down), (chosen, x), weight = make_stacks("plain"), make_rows(3), torch.rand(HIDDEN) + 0.5
    near = OURS.run_and_add(*chosen[:3], up, down, SILU, *chosen[3:], x, 1.0, weight)
    monkeypatch.setattr(moe, "MOST_SLOTS", 0)
    found = OURS.run_and_add(*chosen[:3], up, down, SILU, *chosen[3:], x, 1.0, weight)
    for a, b in zip(found, near, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_a_choice_has_the_bits_of_the_router_and_its_row_those_of_the_norm() -> None:
    x, logits, bias = torch.randn(3, 1040), torch.randn(3, 8), torch.randn(8)
    half, rule = halve_norm(x, torch.rand(1040) + 0.5), RouterSpec("sigmoid")
    facts = OpFacts("cuda", torch.float32, {"experts": 8, "router": rule})
    weight, number = route.bind(facts)[0](logits, bias, 2, rule, None)
    found = OURS.route_normed(*half, 1e-6, logits, bias, 2, rule, None)
    torch.testing.assert_close(found[0], finish_norm(*half, 1e-6), rtol=1e-6, atol=1e-6)
    assert torch.equal(found[1], weight)
    assert torch.equal(found[2], number)
    alone = OURS.route_normed(half[0][1:2], half[1][1:2], 1e-6, logits[1:2], bias, 2, rule, None)
    assert all(torch.equal(a, b[1:2]) for a, b in zip(alone, found, strict=True))


def test_launches_of_router_and_experts() -> None:
    (up, down), (chosen, x), weight = make_stacks("plain"), make_rows(2), torch.rand(HIDDEN)
    squares, logits = torch.rand(2, 4), torch.randn(2, EXPERTS)
    held = [t for s in (up, down) for part in s.parts for t in part.tensors]
    given = [t for t in (*chosen, x, weight, squares, logits) if t is not None]
    with StepCapture([*given, *held], is_dry=True) as capture:
        OURS.route_normed(x, squares, 1e-5, logits, None, K, RouterSpec(), None)
        OURS.run_and_add(*chosen[:3], up, down, SILU, *chosen[3:], x, 1.0, weight)
    wanted = ["choose_and_divide", "expert_up", "expert_down"]
    assert [name for name in capture.launches if name != "fill_"] == wanted


def test_no_tokens_are_no_launch() -> None:
    (up, down), (chosen, x) = make_stacks("plain"), make_rows(1)
    none = take_rows(chosen, slice(0))
    added, rows, squares = OURS.run_and_add(
        *none[:3], up, down, SILU, *none[3:], x[:0], 1.0, torch.rand(HIDDEN)
    )
    assert added.shape == rows.shape == (0, HIDDEN)
    assert squares.shape == (0, HIDDEN // OWN_GROUP)
    made = OURS.route_normed(rows, squares, 1e-5, torch.empty(0, EXPERTS), None, K, RouterSpec(), None)
    assert [t.shape for t in made] == [(0, HIDDEN), (0, K), (0, K)]


@pytest.mark.parametrize(
    ("dtype", "sizes", "words"),
    [
        (torch.float16, {}, "float16"),
        (torch.bfloat16, {"hidden": 72}, "multiples of 16"),
        (torch.bfloat16, {"hidden": 7168}, "up to 4096"),
        (torch.bfloat16, {"deterministic": True}, "deterministic"),
        (torch.bfloat16, {"kind": "softsign"}, "no kernel computes softsign"),
        (torch.bfloat16, {"hidden": 2048, "kind": "silu"}, "None"),
    ],
)
def test_what_is_refused(dtype: torch.dtype, sizes: dict[str, object], words: str) -> None:
    variant = next(v for v in OURS.add_experts.variants if v.on == "cuda")
    assert words in str(variant.refusal(OpFacts("cuda", dtype, sizes)))
