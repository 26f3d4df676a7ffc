"""Draws of Triton's kernels in its interpreter: the CPU's, whatever is drawn in the same batch."""

from __future__ import annotations

import importlib
import itertools
import random
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed here")

import triton
import triton.language as tl

from plait.ops.sample import sample_at, uniforms
from plait.ops.seed import uniform

EDGE = 1e-8  # of the mass: nearer to an edge, a draw may be the neighbour's


@pytest.fixture(scope="module")
def kernels() -> Any:
    """The kernels, interpreted: see `conftest.py`."""
    return importlib.import_module("plait.kernels.triton.sampling.sample")


def random_rows(rows: int, vocab: int, seed: int) -> tuple[Tensor, ...]:
    """Logits, flat and steep, with ties and forbidden tokens, and settings of every kind."""
    made = torch.Generator().manual_seed(seed)

    def one_of(values: list[float], *shape: int) -> Tensor:
        return torch.tensor(values)[torch.randint(len(values), shape or (rows,), generator=made)]

    logits = torch.randn(rows, vocab, generator=made) * one_of([0.1, 1.0, 3.0, 10.0], rows, 1)
    is_coarse = torch.rand(rows, 1, generator=made) < 0.3
    logits = torch.where(is_coarse, logits.round(decimals=1), logits)
    logits[torch.rand(rows, vocab, generator=made) < 0.05] = -torch.inf
    logits[:, 0] = 0.0
    return (
        logits,
        one_of([0.7, 1.0, 0.1, 2.0, 1e-6, 0.0]).double(),
        one_of([40, 0, 1, 3, -1, vocab, vocab - 1, 2000]).long(),
        one_of([0.9, 1.0, 0.0, 0.5, 0.999]).double(),
        one_of([0.0, 0.1, 0.0, 1.0, 1e-3]).double(),
        torch.randint(-(2**63), 2**63 - 1, (rows,), generator=made),
        torch.randint(0, 2**40, (rows,), generator=made),
    )


def assert_same_draws(found: Tensor, arguments: tuple[Tensor, ...]) -> int:
    """How many draws differ: each must be the reference's for settings that are `EDGE` away."""
    wanted = sample_at.reference(*arguments)[0]
    different = (found != wanted).nonzero()[:, 0].tolist()
    for at in different:
        logits, heat, top_k, top_p, min_p, seed, position = (a[at : at + 1] for a in arguments)
        point = uniforms(seed, position)
        near = {
            sample_near(logits, heat, top_k, top_p + a * EDGE, min_p + b * EDGE, point + c * EDGE)
            for a, b, c in itertools.product((-1, 0, 1), repeat=3)
        }
        assert int(found[at]) in near, [a[at] for a in arguments[1:]]
    return len(different)


def sample_near(logits: Tensor, *settings: Tensor) -> int:
    from plait.ops.sample import sample

    return int(sample.reference(logits, *settings))


@triton.jit
def hash_rows(seeds, positions, out, N: tl.constexpr, MAKE: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(out + at, MAKE(tl.load(seeds + at), tl.load(positions + at)))


def test_random_numbers_are_those_of_python(kernels: Any) -> None:
    rng = random.Random(1)
    seeds = [0, 1, -1, 2**63 - 1, -(2**63), *(rng.randrange(-(2**63), 2**63) for _ in range(251))]
    positions = [0, 2**20, 2**40, 2**62, 1, *(rng.randrange(2 ** rng.randrange(1, 62)) for _ in range(251))]
    out = torch.empty(256, dtype=torch.float64)
    hash_rows[(1,)](torch.tensor(seeds), torch.tensor(positions), out, N=256, MAKE=kernels._uniform)
    wanted = [uniform(seed, position) for seed, position in zip(seeds, positions, strict=True)]
    assert out.tolist() == wanted
    assert uniforms(torch.tensor(seeds), torch.tensor(positions)).tolist() == wanted


@triton.jit
def weigh_row(values, top, heat, weights, N: tl.constexpr, RATE: tl.constexpr, WEIGH: tl.constexpr):
    at = tl.arange(0, N)
    weight, _ = WEIGH(tl.load(values + at), tl.load(top), RATE(tl.load(heat)))
    tl.store(weights + at, weight)


@pytest.mark.parametrize("temperature", [1e-6, 0.3, 1.0, 7.0, 1e9])
def test_weights_are_exact_but_for_rounding(kernels: Any, temperature: float) -> None:
    values = torch.randn(1024, generator=torch.Generator().manual_seed(3)) * 5
    values[5:9] = torch.tensor([-torch.inf, -3e38, float(values.max()), 0.0])
    top, heat = values.max().view(1), torch.tensor([temperature], dtype=torch.float64)
    found = torch.empty(1024, dtype=torch.int64)
    weigh_row[(1,)](values, top, heat, found, N=1024, RATE=kernels._rate, WEIGH=kernels._weigh)
    exact = ((values.double() - top) / temperature).exp() * 2.0**44
    assert (found - exact).abs().max() < 0.65  # half by rounding, the rest by the series
    assert found.max() == 2**44


def test_draws_are_the_references(kernels: Any) -> None:
    arguments = random_rows(8, 300, 1)
    found, values = kernels.draw_at(*arguments)
    assert assert_same_draws(found, arguments) == 0  # none of these is near an edge
    assert torch.equal(values, sample_at.reference(*arguments)[1])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40))
def test_thousands_of_draws_are_the_references(kernels: Any, seed: int) -> None:
    arguments = random_rows(50, 40 + 25 * seed, 100 + seed)
    assert assert_same_draws(kernels.draw_at(*arguments)[0], arguments) == 0


@pytest.mark.slow
def test_a_draw_differs_at_an_edge_alone(kernels: Any) -> None:
    """top_p is the exact mass of some first tokens, min_p an exact weight, the point one of an edge."""
    logits, heat, top_k, top_p, min_p, seed, position = random_rows(12, 40, 7)
    heat = heat.clamp_min(0.1)
    weights = (logits.double() / heat[:, None]).softmax(-1).sort(descending=True).values
    top_p[:4] = weights[:4, :3].sum(-1).clamp_max(1.0)
    min_p[4:8] = weights[4:8, 2] / weights[4:8, 0]
    top_k[:8], min_p[:4], top_p[4:8] = 0, 0.0, 1.0
    point = uniforms(seed, position)[8:].clamp(1e-3, 1 - 1e-3)
    logits[8:] = -torch.inf
    logits[8:, 0], logits[8:, 1] = 0.0, ((1 - point) / point).log().mul(heat[8:]).float()
    top_k[8:], top_p[8:], min_p[8:] = 0, 1.0, 0.0
    arguments = (logits, heat, top_k, top_p, min_p, seed, position)
    assert assert_same_draws(kernels.draw_at(*arguments)[0], arguments) < 12


def test_a_row_is_drawn_alone_as_in_a_batch_and_on_any_grid(
    kernels: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = random_rows(9, 1100, 5)
    whole, values = kernels.draw_at(*arguments)
    for at in (0, 8):
        alone, value = kernels.draw_at(*(a[at : at + 1].clone() for a in arguments))
        assert alone[0] == whole[at]
        assert value[0] == values[at]
    monkeypatch.setattr(kernels, "PART", 512)
    monkeypatch.setattr(kernels, "TILE", 256)
    monkeypatch.setattr(kernels, "WAYS", 8)
    assert kernels.part_constants(9, 1100) == {"PART": 512, "PARTS": 4}
    assert torch.equal(kernels.draw_at(*arguments)[0], whole)
    assert torch.equal(kernels.find_largest(arguments[0])[0], arguments[0].argmax(-1))


@pytest.mark.slow
def test_rows_with_more_candidates_than_memory_are_drawn_as_all_others(
    kernels: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = random_rows(6, 600, 9)
    whole, _ = kernels.draw_at(*arguments)
    monkeypatch.setattr(kernels, "LISTED", 16)
    monkeypatch.setattr(kernels, "LIST_NBYTES", 0)
    assert kernels.list_capacity(6, 600) == 16
    assert torch.equal(kernels.draw_at(*arguments)[0], whole)


def test_lists_have_memory_for_whole_rows_of_a_small_batch_and_less_for_a_large_one(kernels: Any) -> None:
    assert kernels.list_capacity(1, 128256) == 128256
    for rows in (1, 16, 32, 64, 256, 512):
        capacity = kernels.list_capacity(rows, 262144)
        assert capacity % 16 == 0
        assert capacity >= kernels.LISTED
        assert capacity * rows * kernels.ENTRY_NBYTES <= kernels.LIST_NBYTES


@pytest.mark.parametrize(
    ("values", "best"),
    [
        ([-0.0, 0.0, -1.0], 0),
        ([1.0, 3.0, 3.0], 1),
        ([1.0, float("nan"), torch.inf], 1),
        ([-torch.inf, -torch.inf, -torch.inf], 0),
        ([-5.0, -torch.inf, -4.0], 2),
        ([torch.inf, 1.0, torch.inf], 0),
    ],
)
def test_the_largest_is_found_among_broken_and_equal_logits(
    kernels: Any, values: list[float], best: int
) -> None:
    logits = torch.tensor([values, [0.0, 1.0, 2.0]])
    one, zero = torch.ones(2, dtype=torch.float64), torch.zeros(2, dtype=torch.int64)
    found, tops = kernels.find_largest(logits)
    assert found.tolist() == [best, 2]
    torch.testing.assert_close(tops, torch.tensor([values[best], 2.0]), equal_nan=True, rtol=0, atol=0)
    # Drawing from a broken row ends, and reports what is broken.
    _, tops = kernels.draw_at(logits, one, zero, one, 0 * one, zero, zero)
    torch.testing.assert_close(tops, torch.tensor([values[best], 2.0]), equal_nan=True, rtol=0, atol=0)


def test_logits_are_read_where_they_lie(kernels: Any) -> None:
    arguments = random_rows(3, 90, 11)
    wide = torch.full((3, 100), 99.0)
    wide[:, :90] = arguments[0]
    parts = (wide[:, :90], wide.T.contiguous().T[:, :90])
    for logits in parts:
        for found, wanted in zip(
            kernels.draw_at(logits, *arguments[1:]), kernels.draw_at(*arguments), strict=True
        ):
            assert torch.equal(found, wanted)
        assert torch.equal(kernels.find_largest(logits)[0], arguments[0].argmax(-1))


def test_no_rows_give_no_tokens(kernels: Any) -> None:
    nothing = tuple(a[:0] for a in random_rows(1, 20, 0))
    assert [len(found) for found in kernels.draw_at(*nothing)] == [0, 0]
    assert [len(found) for found in kernels.find_largest(nothing[0])] == [0, 0]


def test_a_vocabulary_that_sums_would_not_fit_is_refused(kernels: Any) -> None:
    from plait.ops.registry import OpFacts

    assert kernels.why_unread(OpFacts("cuda", torch.float32, {"vocab_size": 1 << 18})) is None
    assert "more than" in kernels.why_unread(OpFacts("cuda", torch.float32, {"vocab_size": (1 << 18) + 1}))
