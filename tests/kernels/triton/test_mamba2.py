"""Triton's Mamba2 scan: any cut, any batch, views as lightning attention has them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed here")

from plait.kernels.triton.ssm.mamba2 import scan_from_dt, scan_given_steps
from plait.ops.ssm import mamba2_scan
from tests.kernels.triton.ragged import SLOTS, RecurrentLayer, Where, check_composition, check_cuts

HEADS = 2


def layer(tokens: int, dim: int, size: int, groups: int) -> RecurrentLayer:
    torch.manual_seed(1)
    x, dt = torch.randn(tokens, HEADS, dim), torch.randn(tokens, HEADS)
    B, C = (torch.randn(tokens, groups, size) for _ in "BC")
    A, D, bias = -torch.rand(HEADS), torch.randn(HEADS), torch.randn(HEADS)

    def run(rows: tuple[Tensor, ...], state: Tensor, where: Where) -> Tensor:
        x, dt, B, C = rows
        return scan_from_dt(x, dt, bias, (0.0, math.inf), A, B, C, D, state, *where, 0)

    return RecurrentLayer((x, dt, B, C), torch.randn(SLOTS, HEADS, dim, size), run)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("dim", "size", "groups"), [(5, 7, 1), (3, 16, 2)])
def test_cuts_of_a_prompt_change_no_bit(dim: int, size: int, groups: int) -> None:
    check_cuts(layer(9, dim, size, groups), [[1] * 9, [2, 7], [8, 1]])


def test_batch_composition_changes_no_bit() -> None:
    check_composition(layer(12, 4, 8, 1))


def test_views_of_one_projection_serve_without_copies() -> None:
    torch.manual_seed(2)
    tokens, dim = 5, 8
    q, k, v = torch.randn(tokens, HEADS, 3, dim).unbind(2)
    step, A = torch.ones(1, HEADS).expand(tokens, -1), -torch.rand(HEADS)
    state = torch.randn(SLOTS, HEADS, dim, dim)
    where = torch.tensor([3, 1]), torch.tensor([0, 1, 5]), torch.tensor([True, False])
    want = mamba2_scan.reference(v, step, A, k, q, None, want_state := state.clone(), *where, 1)
    got = scan_given_steps(v, step, A, k, q, None, state, *where, 1)
    torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(state, want_state, rtol=2e-5, atol=2e-5)


def test_step_of_no_rows_launches_nothing() -> None:
    made = layer(1, 4, 8, 1)
    where = (
        torch.zeros(0, dtype=torch.int64),
        torch.zeros(1, dtype=torch.int64),
        torch.zeros(0, dtype=torch.bool),
    )
    assert made.run(tuple(m[:0] for m in made.inputs), made.state, where).shape == (0, HEADS, 4)
