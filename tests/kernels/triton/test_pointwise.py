"""Triton's pointwise kernels where cases of ops do not go: rows apart, small steps, what is no number."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed here")

from plait.kernels.triton.pointwise.pointwise import (
    KINDS,
    activate_rows,
    compute_step_sizes,
    gate_numbers,
    join_rows,
    multiply_rows,
    rescale_rows,
    take_whole_rows,
)
from plait.kernels.triton.row_views import view_rows
from plait.ops.activation import PAIRS, activate


def test_rows_of_heads_that_lie_apart() -> None:
    wide = torch.randn(3, 5, 40)
    x, y = wide[:, 1:4, :24], wide[:, 2:5, 16:]
    assert torch.equal(multiply_rows(x, y), x * y)
    assert torch.equal(join_rows(x, y), torch.cat([x, y], -1))
    torch.testing.assert_close(gate_numbers(x, y), x * y.sigmoid())
    assert torch.equal(multiply_rows(x.mT, y.mT), x.mT * y.mT)


@pytest.mark.parametrize(
    ("shape", "strides", "per_outer"),
    [
        ((4, 8), (20, 1), 1),
        ((4, 3, 8), (24, 8, 1), 1),
        ((4, 3, 8), (60, 8, 1), 3),
        ((1, 3, 8), (5, 16, 1), 1),
    ],
)
def test_rows_with_one_distance_need_no_division(
    shape: tuple[int, ...], strides: tuple[int, ...], per_outer: int
) -> None:
    rows = view_rows(torch.zeros(500).as_strided(shape, strides))
    assert (rows.per_outer, rows.count) == (per_outer, torch.Size(shape[:-1]).numel())
    step = rows.strides if per_outer > 1 else (*rows.strides[:1], 0)
    assert rows.strides == step


def test_step_sizes_keep_what_is_far_below_one() -> None:
    dt = torch.tensor([[-30.0, -18.0, -5.0, 0.0, 25.0, 90.0]])
    found = compute_step_sizes(dt, None, 0.0, float("inf"))
    torch.testing.assert_close(found, torch.nn.functional.softplus(dt.double()).float(), rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_activations_of_large_numbers_and_of_none(kind: str) -> None:
    x = torch.tensor([[-90.0, -20.0, 0.0, 20.0, 90.0, float("nan"), 1.0, 2.0]])
    gated = kind in PAIRS
    found, wanted = activate_rows(x, kind, gated), activate.reference(x, kind, gated)
    torch.testing.assert_close(found, wanted, equal_nan=True, rtol=1e-5, atol=1e-6)


def test_a_cap_keeps_what_is_no_number() -> None:
    x = torch.tensor([[float("nan"), 1000.0, -1000.0, float("inf")]])
    torch.testing.assert_close(rescale_rows(x, 0.5, 30.0), 30.0 * torch.tanh(x * 0.5 / 30.0), equal_nan=True)


def test_no_rows_are_no_launch() -> None:
    assert take_whole_rows(torch.randn(3, 8), torch.zeros(0, dtype=torch.int64)).shape == (0, 8)
    assert multiply_rows(torch.zeros(0, 8), torch.zeros(0, 8)).shape == (0, 8)
