"""Routing and experts: sorted rows, unusual shares, one order of additions, recordings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from plait.errors import CannotRecord, ShapeMismatch
from plait.kernels.load import executor, load_kernels
from plait.ops.blocks import random_weight
from plait.ops.linear import Linear
from plait.ops.moe import experts, route
from plait.ops.registry import Op, OpFacts
from plait.quant.weight import Dense, Weight
from plait.runner.program import ViewsOnly
from plait.spec.model import RouterSpec
from tests.common_storages import marks_of

load_kernels()
TOKENS, HIDDEN, SIZE = 23, 64, 48
DEEPSEEK = RouterSpec("sigmoid", True, 1e-20, 2.5, 8, 3, "top2")


@pytest.fixture(scope="module")
def alone() -> Iterator[Any]:
    made = executor(1)
    assert made is not None
    yield made
    made.close()


def bound(op: Op, cpu: Any, **sizes: Any) -> Any:
    fn, row = op.bind(OpFacts("cpu", torch.float32, sizes, cpu))
    assert row.variant.startswith("native")
    return fn


def close(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-5)


def maps(
    cpu: Any,
    count: int,
    n_in: int,
    n_out: int,
    dtype: torch.dtype = torch.float32,
    kind: str | None = None,
    biased: bool = False,
) -> list[Linear]:
    def weight() -> Weight:
        if kind:
            return random_weight(kind, n_out, n_in)
        return Dense((torch.randn(n_out, n_in) / n_in**0.5).to(dtype))

    def bind(op: Op, **sizes: Any) -> Any:
        return bound(op, cpu, **sizes)

    rounding: Any = "int8" if kind else "float32"
    biases = [torch.randn(n_out) if biased else None for _ in range(count)]
    return [Linear([weight()], [bias], bind, torch.float32, rounding) for bias in biases]


def chosen(tokens: int, count: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    weight, index = torch.rand(tokens, count).topk(k, -1)
    return weight, index


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize(("count", "k"), [(4, 1), (8, 8), (64, 6), (1, 1), (3, 2)])
def test_experts_are_weighed_and_summed(cpu: Any, count: int, k: int, gated: bool) -> None:
    up, down = maps(cpu, count, HIDDEN, SIZE * (1 + gated)), maps(cpu, count, SIZE, HIDDEN)
    x, (weight, index) = torch.randn(TOKENS, HIDDEN), chosen(TOKENS, count, k)
    fn = bound(experts, cpu)
    for kind in ("silu", "gelu", "gelu_pytorch_tanh", "relu", "relu2"):
        for shared in (None, torch.randn_like(x)):
            args = (x, weight, index, up, down, (kind, gated), shared)
            close(fn(*args), experts.reference(*args))


@pytest.mark.parametrize(("count", "k"), [(4, 1), (8, 8), (33, 4), (1, 1)])
def test_every_expert_adds_its_own_biases(cpu: Any, alone: Any, count: int, k: int) -> None:
    up, down = maps(cpu, count, HIDDEN, 2 * SIZE, biased=True), maps(cpu, count, SIZE, HIDDEN, biased=True)
    x, (weight, index) = torch.randn(TOKENS, HIDDEN), chosen(TOKENS, count, k)
    args = (x, weight, index, up, down, ("swiglu_oai", True), None)
    together = bound(experts, cpu)(*args)
    close(together, experts.reference(*args))
    for i in range(3):
        one = (x[i : i + 1], weight[i : i + 1], index[i : i + 1], *args[3:])
        assert torch.equal(bound(experts, alone)(*one)[0], together[i])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_experts_in_half_the_width(cpu: Any, dtype: torch.dtype) -> None:
    up, down = maps(cpu, 8, HIDDEN, 2 * SIZE, dtype), maps(cpu, 8, SIZE, HIDDEN, dtype)
    x, (weight, index) = torch.randn(TOKENS, HIDDEN), chosen(TOKENS, 8, 3)
    args = (x, weight, index, up, down, ("silu", True), None)
    close(bound(experts, cpu)(*args), experts.reference(*args))


STORED = [("Q8_0", 64), ("Q4_K", 256), ("int4_g128", 128), ("mxfp4", 64), ("fp8_b128", 64)]
MORE = [("int4_g64+zeros+order", 128), ("nvfp4", 64), ("bnb_nf4", 64)]


@pytest.mark.parametrize(
    ("kind", "size"),
    [
        *(pytest.param(*one, marks=marks_of(one[0])) for one in STORED),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in MORE),
    ],
)
def test_experts_that_are_quantized(cpu: Any, kind: str, size: int) -> None:
    up, down = maps(cpu, 4, 256, 2 * size, kind=kind), maps(cpu, 4, size, 256, kind=kind)
    x, (weight, index) = torch.randn(TOKENS, 256), chosen(TOKENS, 4, 2)
    args, fn = (up, down, ("silu", True), torch.randn_like(x)), bound(experts, cpu)
    y = fn(x, weight, index, *args)
    # An activation may round to the next of 127 steps, once in a while.
    torch.testing.assert_close(y, experts.reference(x, weight, index, *args), rtol=1e-2, atol=1e-2)
    assert torch.equal(y[:1], fn(x[:1], weight[:1], index[:1], *args[:-1], args[-1][:1]))


def test_every_expert_empty_but_one(cpu: Any) -> None:
    up, down = maps(cpu, 16, HIDDEN, 2 * SIZE), maps(cpu, 16, SIZE, HIDDEN)
    x, weight, fn = torch.randn(TOKENS, HIDDEN), torch.rand(TOKENS, 1), bound(experts, cpu)
    for e in (0, 7, 15):
        args = (x, weight, torch.full((TOKENS, 1), e), up, down, ("silu", True), None)
        close(fn(*args), experts.reference(*args))


def test_a_token_is_the_same_alone_in_a_batch_and_on_one_thread(cpu: Any, alone: Any) -> None:
    up, down = maps(cpu, 8, HIDDEN, 2 * SIZE), maps(cpu, 8, SIZE, HIDDEN)
    x, (weight, index) = torch.randn(TOKENS, HIDDEN), chosen(TOKENS, 8, 3)
    shared, fn, rest = torch.randn_like(x), bound(experts, cpu), (up, down, ("silu", True))
    y = fn(x, weight, index, *rest, shared)
    assert torch.equal(y, bound(experts, alone)(x, weight, index, *rest, shared))
    rows = [slice(t, t + 1) for t in range(TOKENS)]
    each = [fn(x[r], weight[r], index[r], *rest, shared[r]) for r in rows]
    assert torch.equal(y, torch.cat(each))
    turned = fn(x, weight.flip(1), index.flip(1), *rest, shared)  # the same pairs in another order
    assert torch.equal(y, turned)


def test_experts_of_rows_that_lie_apart(cpu: Any) -> None:
    up, down = maps(cpu, 5, HIDDEN, 2 * SIZE), maps(cpu, 5, SIZE, HIDDEN)
    x, shared = torch.randn(TOKENS, 3 * HIDDEN), torch.randn(TOKENS, 2 * HIDDEN)
    weight, index = chosen(TOKENS, 5, 4)
    args = (x[:, 5 : 5 + HIDDEN], weight[:, ::2], index[:, 1:3], up, down, ("silu", True), shared[:, :HIDDEN])
    close(bound(experts, cpu)(*args), experts.reference(*args))


def test_experts_that_share_no_kernel_are_called_one_by_one_but_not_recorded(cpu: Any) -> None:
    up = [*maps(cpu, 1, HIDDEN, SIZE), *maps(cpu, 1, HIDDEN, SIZE, torch.bfloat16)]
    down = maps(cpu, 2, SIZE, HIDDEN)
    x, (weight, index) = torch.randn(TOKENS, HIDDEN), chosen(TOKENS, 2, 1)
    args, fn = (x, weight, index, up, down, ("silu", False), None), bound(experts, cpu)
    close(fn(*args), experts.reference(*args))
    with cpu.record(tokens=TOKENS, logits=65), pytest.raises(CannotRecord, match="stored in several ways"):
        fn(*args)


def test_experts_of_another_size_are_refused(cpu: Any) -> None:
    up, down = maps(cpu, 2, HIDDEN, SIZE), maps(cpu, 2, SIZE, HIDDEN)
    weight, index = chosen(TOKENS, 2, 1)
    with pytest.raises(ShapeMismatch, match="do not fit"):
        bound(experts, cpu)(torch.randn(TOKENS, 32), weight, index, up, down, ("silu", False), None)
    with pytest.raises(ShapeMismatch, match="do not match"):
        bound(experts, cpu)(torch.randn(3, HIDDEN), weight, index, up, down, ("silu", False), None)


def test_a_recorded_mixture_serves_any_number_of_tokens(cpu: Any) -> None:
    up, down = maps(cpu, 8, HIDDEN, 2 * SIZE), maps(cpu, 8, SIZE, HIDDEN)
    logits, x, bias = torch.randn(64, 8), torch.randn(64, HIDDEN), torch.randn(8)
    choose, fn, router = bound(route, cpu), bound(experts, cpu), RouterSpec("sigmoid", scale=2.0)

    def step() -> torch.Tensor:
        y: torch.Tensor = fn(x, *choose(logits, bias, 3, router), up, down, ("silu", True), x)
        return y

    with cpu.record(tokens=64, logits=65) as program, ViewsOnly():
        y = step()
    for tokens in (5, 64, 1):
        logits.copy_(torch.randn(64, 8))
        x.copy_(torch.randn(64, HIDDEN))
        cpu.run(program, tokens=tokens, logits=1, seqs=1)
        assert torch.equal(y[:tokens], step()[:tokens])


@pytest.mark.parametrize(
    ("count", "k", "router"),
    [
        (8, 2, RouterSpec()),
        (60, 4, RouterSpec("softmax", False)),
        (64, 8, DEEPSEEK),
        (256, 8, DEEPSEEK),
        (17, 17, RouterSpec("sigmoid", True, 1e-6)),
        (24, 6, RouterSpec("softmax", False, 0.0, 16.0, 8, 3, "max")),
        (1, 1, RouterSpec()),
    ],
)
def test_the_same_experts_as_torch(cpu: Any, alone: Any, count: int, k: int, router: RouterSpec) -> None:
    wide = 3 * torch.randn(40, 2 * count)
    logits, fn = wide[:, :count], bound(route, cpu)
    for bias in (None, torch.randn(count)):
        weight, index = fn(logits, bias, k, router)
        wanted, order = route.reference(logits, bias, k, router)
        assert torch.equal(index, order)
        close(weight, wanted)
        one = bound(route, alone)(logits, bias, k, router)
        assert torch.equal(one[0], weight)
        each = [fn(row, bias, k, router)[0] for row in logits.split(1)]
        assert torch.equal(torch.cat(each), weight)


def test_among_equals_the_lower_number_comes_first(cpu: Any) -> None:
    _, index = bound(route, cpu)(torch.zeros(3, 6), None, 4, RouterSpec())
    assert index.tolist() == [[0, 1, 2, 3]] * 3
    _, index = bound(route, cpu)(torch.zeros(1, 8), None, 2, RouterSpec("softmax", groups=4, top_groups=2))
    assert index.tolist() == [[0, 1]]


def test_no_number_chooses_no_expert_that_is_not_there(cpu: Any) -> None:
    logits = torch.full((2, 5), float("nan"))
    for router in (RouterSpec(), RouterSpec("sigmoid")):
        weight, index = bound(route, cpu)(logits, None, 3, router)
        assert bool(weight.isnan().all())
        assert bool(((index >= 0) & (index < 5)).all())
