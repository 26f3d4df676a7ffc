"""Experts on a GPU: by slots and by groups, in Triton's interpreter, against sums in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed here")

import triton
import triton.language as tl

from plait.kernels.triton.linear.plane_forms import LAYOUTS
from plait.kernels.triton.maths import apply_activation, apply_gated
from plait.kernels.triton.moe import expert_planes, grouped_experts, moe, plane_experts
from plait.kernels.triton.pointwise.pointwise import KINDS
from plait.ops.activation import ACTIVATIONS, PAIRS
from plait.ops.blocks import random_weight
from plait.ops.expert_stack import ExpertStack
from plait.ops.launch import launch
from plait.quant.weight import Dense, Weight
from plait.runner.device.capture import StepCapture

HIDDEN, SIZE, EXPERTS, K = 40, 24, 6, 3
SILU = ("silu", True)


def stack(weights: list[Weight], bias: Tensor | None = None) -> ExpertStack:
    made = ExpertStack(len(weights), torch.float32, moe.pack)
    for e, weight in enumerate(weights):
        made.put(e, [weight], [None if bias is None else bias[e]])
    return made


def layer(bias: bool = False) -> tuple[ExpertStack, ExpertStack]:
    up = torch.randn(EXPERTS, 2 * SIZE, HIDDEN) / HIDDEN**0.5
    down = torch.randn(EXPERTS, HIDDEN, SIZE) / SIZE**0.5
    biases = [torch.randn(EXPERTS, 2 * SIZE), torch.randn(EXPERTS, HIDDEN)] if bias else [None, None]
    return tuple(stack([Dense(w) for w in all_], b) for all_, b in zip((up, down), biases, strict=True))  # type: ignore[return-value]


def pairs(tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(x, weight, index, shared)."""
    index = torch.stack([torch.randperm(EXPERTS)[:K] for _ in range(tokens)])
    return torch.randn(tokens, HIDDEN), torch.rand(tokens, K), index, torch.randn(tokens, HIDDEN)


def exact(
    x: Tensor, weight: Tensor, index: Tensor, shared: Tensor, up: ExpertStack, down: ExpertStack
) -> Tensor:
    """The sum in float64."""
    out = shared.double().clone()
    for t in range(len(x)):
        for j in range(index.shape[1]):
            e = int(index[t, j])
            both = up.decode(e).double() @ x[t].double()
            both += up.bias[e].double() if up.bias is not None else 0
            gate, more = both.chunk(2)
            y = down.decode(e).double() @ (torch.nn.functional.silu(gate) * more)
            y += down.bias[e].double() if down.bias is not None else 0
            out[t] += weight[t, j].double() * y
    return out


# Tokens that go by slots, by groups of one tile, and by groups with several tiles of an expert.
COUNTS = [2, pytest.param(moe.MOST_SLOTS // K + 1, marks=pytest.mark.slow), 60]


@pytest.mark.parametrize("tokens", [2, 50])  # by slots, and by groups
def test_gates_and_shared_rows_that_lie_apart_are_read_where_they_are(tokens: int) -> None:
    x, weight, index, shared = pairs(tokens)
    (up, down), gate = layer(), torch.randn(tokens, 5)[:, 2:3]
    found = moe.run_experts(x, weight, index, up, down, SILU, shared.T.contiguous().T, gate)
    wanted = exact(x, weight, index, shared * gate.sigmoid(), up, down)
    assert (found.double() - wanted).norm() / wanted.norm() < 1e-6


@pytest.mark.sampled(2)
@pytest.mark.parametrize("tokens", COUNTS)
@pytest.mark.parametrize("bias", [pytest.param(False, marks=pytest.mark.slow), True])
def test_sum_of_experts_is_that_of_float64(tokens: int, bias: bool) -> None:
    up, down = layer(bias)
    x, weight, index, shared = pairs(tokens)
    got = moe.run_experts(x, weight, index, up, down, SILU, shared)
    want = exact(x, weight, index, shared, up, down)
    assert (got.double() - want).norm() / want.norm() < 1e-6


@pytest.mark.sampled(2)
@pytest.mark.parametrize("tokens", COUNTS[:2])
def test_order_of_the_router_changes_no_bit(tokens: int) -> None:
    up, down = layer()
    x, weight, index, shared = pairs(tokens)
    got = moe.run_experts(x, weight, index, up, down, SILU, shared)
    back = weight.flip(1), index.flip(1)
    assert torch.equal(got, moe.run_experts(x, *back, up, down, SILU, shared))


def test_a_token_alone_has_the_bits_that_it_has_in_a_batch() -> None:
    up, down = layer(True)
    x, weight, index, shared = pairs(5)
    got = moe.run_experts(x, weight, index, up, down, SILU, shared)
    for t in range(5):
        one = (tensor[t : t + 1] for tensor in (x, weight, index))
        assert torch.equal(got[t : t + 1], moe.run_experts(*one, up, down, SILU, shared[t : t + 1]))


@pytest.mark.slow
def test_a_token_of_a_prompt_has_the_same_bits_next_to_others() -> None:
    up, down = layer()
    x, weight, index, shared = pairs(50)
    got = moe.run_experts(x, weight, index, up, down, SILU, shared)
    order = torch.randperm(50)[:45]
    some = (tensor[order] for tensor in (x, weight, index))
    assert torch.equal(got[order], moe.run_experts(*some, up, down, SILU, shared[order]))


def test_tokens_that_all_choose_the_same_experts() -> None:
    up, down = layer()
    x, weight, index, shared = pairs(48)
    index[:] = torch.tensor([4, 0, 5])
    got = moe.run_experts(x, weight, index, up, down, SILU, shared)
    want = exact(x, weight, index, shared, up, down)
    assert (got.double() - want).norm() / want.norm() < 1e-6


def test_pairs_are_sorted_by_expert_and_then_by_number() -> None:
    index = torch.randint(0, 5, (1100,))
    index[index == 2] = 3  # an expert that no pair chose
    starts, order = torch.full((6,), -1, dtype=torch.int32), torch.full((1100,), -1, dtype=torch.int32)
    launch(grouped_experts.sort_pairs, (5,), index, starts, order, 1100, BLOCK=grouped_experts.BLOCK)
    assert torch.equal(order.long(), index.argsort(stable=True))
    counts = index.bincount(minlength=5)
    assert starts.tolist() == [0, *counts.cumsum(0).tolist()]


@pytest.mark.parametrize("rows", [16, 64])
def test_there_are_never_more_tiles_than_the_grid_has(rows: int) -> None:
    for counts in ([1] * 40, [rows + 1] * 3, [0, 0, 129], [rows] * 4, [1, 0, 2 * rows - 1]):
        tiles = sum(-(-count // rows) for count in counts)
        assert tiles <= sum(counts) // rows + min(len(counts), sum(counts))


def without_planes(n_out: int, n_in: int) -> list[Weight]:
    """Experts in a storage that no kernel reads: groups of eight columns."""
    return [random_weight("int4_g8", n_out, n_in) for _ in range(EXPERTS)]


@pytest.mark.parametrize("tokens", [1, pytest.param(43, marks=pytest.mark.slow)])
def test_decoded_experts_have_the_bits_of_plain_ones(tokens: int, monkeypatch: Any) -> None:
    """Also where scratch memory holds only one token's, or one expert, at a time."""
    up, down = (stack(without_planes(*shape)) for shape in ((32, 16), (16, 16)))
    x, weight, index, shared = torch.randn(tokens, 16), *pairs(tokens)[1:3], torch.randn(tokens, 16)
    plain = tuple(stack([Dense(s.decode(e)) for e in range(EXPERTS)]) for s in (up, down))
    want = moe.run_experts(x, weight, index, *plain, SILU, shared)
    assert torch.equal(want, moe.run_experts(x, weight, index, up, down, SILU, shared))
    monkeypatch.setattr(moe, "SCRATCH", 1)
    assert torch.equal(want, moe.run_experts(x, weight, index, up, down, SILU, shared))


def test_a_gate_weighs_the_shared_expert() -> None:
    up, down = layer()
    gate = torch.tensor([[0.0], [-3.0]])
    x, weight, index, shared = pairs(2)
    got = moe.run_experts(x, weight, index, up, down, SILU, shared, gate)
    want = exact(x, weight, index, shared * gate.sigmoid(), up, down)
    assert (got.double() - want).norm() / want.norm() < 1e-6


@pytest.mark.sampled(2)
@pytest.mark.parametrize("tokens", [2, 50])
@pytest.mark.parametrize("kind", ["float32", "Q8_0", "int4_g32+zeros+order"])
def test_a_step_with_experts_can_be_captured(kind: str, tokens: int) -> None:
    """Nothing waits, and what a step launches depends on shapes alone."""
    plain = (
        [Dense(torch.randn(64, 64)) for _ in range(EXPERTS)],
        [Dense(torch.randn(64, 32)) for _ in range(EXPERTS)],
    )
    up, down = map(stack, plain) if kind == "float32" else planes_layer(kind)

    def stream() -> list[Any]:
        _, weight, index, _ = pairs(tokens)
        x = torch.randn(tokens, 64)
        held = [t for s in (up, down) for part in s.parts for t in part.tensors]
        with torch.inference_mode(), StepCapture([x, weight, index, *held], is_dry=True) as capture:
            moe.run_experts(x, weight, index, up, down, SILU, None)
        return [name for name in capture.launches if name != "fill_"]  # tests fill what is allocated

    first = stream()
    assert first == stream()
    assert len(first) == {"float32": (2, 4), "Q8_0": (4, 5), "int4_g32+zeros+order": (6, 7)}[kind][tokens > 2]


@pytest.mark.parametrize("name", LAYOUTS)
def test_rows_of_a_tile_of_pairs_fit_into_the_memory_of_small_gpus(name: str) -> None:
    """Of 99 KiB; what is compiled has some more than them. There are forms of some of these storages only."""
    layout, _, _ = LAYOUTS[name]
    columns = plane_experts.UNITS * layout.unit
    for each in (0, 16, 64):
        tile = plane_experts.pair_tile(layout, each)
        assert 2 * columns * tile["BM"] * (tile["num_stages"] - 1) <= 80 << 10


def test_no_tokens_are_no_launch() -> None:
    up, down = layer()
    assert moe.run_experts(*(t[:0] for t in pairs(1)[:3]), up, down, SILU, None).shape == (0, HIDDEN)


@triton.jit
def _activate(x, y, out, KIND: tl.constexpr, GATED: tl.constexpr):
    i = tl.arange(0, 64)
    if GATED:
        tl.store(out + i, apply_gated(tl.load(x + i), tl.load(y + i), KIND))
    else:
        tl.store(out + i, apply_activation(tl.load(x + i), KIND))


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_every_activation_has_a_kernel(kind: str) -> None:
    x, y = torch.linspace(-12, 12, 64), torch.randn(64) * (6 if kind in PAIRS else 1)
    for gated in (True,) if kind in PAIRS else (False, True):
        out = torch.empty(64)
        launch(_activate, (1,), x, y, out, KIND=kind, GATED=gated)
        want = PAIRS[kind](x, y) if kind in PAIRS else ACTIVATIONS[kind](x) * (y if gated else 1)
        torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-6)


def planes_layer(kind: str, size: int = 32) -> tuple[ExpertStack, ExpertStack]:
    up = [random_weight(kind, 2 * size, 64) for _ in range(EXPERTS)]
    return stack(list(up)), stack([random_weight(kind, 64, size) for _ in range(EXPERTS)])


@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 1e-5), (torch.float16, 1e-3)])
@pytest.mark.parametrize("kind", ["mxfp4", pytest.param("int4_g32+zeros+order", marks=pytest.mark.slow)])
def test_quantized_experts_have_the_same_bits_by_slots_and_by_groups(
    kind: str, dtype: torch.dtype, near: float, monkeypatch: Any
) -> None:
    """A token alone, next to others, and in tiles of pairs of one expert."""
    up, down = planes_layer(kind)
    _, weight, index, _ = pairs(2)
    x, shared = torch.randn(2, 64, dtype=dtype), torch.randn(2, 64, dtype=dtype)
    got = moe.run_experts(x, weight, index, up, down, SILU, shared)
    want = exact(x, weight, index, shared, up, down)
    assert (got.double() - want).norm() / want.norm() < near
    one = (tensor[1:2] for tensor in (x, weight, index))
    assert torch.equal(got[1:2], moe.run_experts(*one, up, down, SILU, shared[1:2]))
    monkeypatch.setattr(expert_planes, "MOST_SLOTS", 0)
    assert torch.equal(got, moe.run_experts(x, weight.flip(1), index.flip(1), up, down, SILU, shared))


def test_quantized_experts_with_biases_and_without_a_gate() -> None:
    up = stack([random_weight("Q8_0", 32, 64) for _ in range(EXPERTS)], torch.randn(EXPERTS, 32))
    down = stack([random_weight("Q8_0", 64, 32) for _ in range(EXPERTS)], torch.randn(EXPERTS, 64))
    _, weight, index, _ = pairs(1)
    x = torch.randn(1, 64)
    got = moe.run_experts(x, weight, index, up, down, ("relu2", False), None)
    plain = [stack([Dense(s.decode(e)) for e in range(EXPERTS)], s.bias) for s in (up, down)]
    want = moe.run_experts(x, weight, index, *plain, ("relu2", False), None)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_gate_and_up_of_two_storages_are_decoded() -> None:
    up = ExpertStack(EXPERTS, torch.float32, moe.pack)
    for e in range(EXPERTS):
        up.put(e, [random_weight(kind, 32, 64) for kind in ("Q4_0", "Q8_0")], [None, None])
    _, down = planes_layer("Q8_0")
    _, weight, index, _ = pairs(1)
    x, shared = torch.randn(1, 64), torch.randn(1, 64)
    got = moe.run_experts(x, weight, index, up, down, SILU, shared)
    want = exact(x, weight, index, shared, up, down)
    assert (got.double() - want).norm() / want.norm() < 1e-5
