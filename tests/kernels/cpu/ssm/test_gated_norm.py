"""Gated norms and step sizes: strided views, odd widths, extreme numbers, recorded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from plait.errors import ShapeMismatch
from plait.kernels.cpu.ssm.gated_norm import _gated_rms_norm, _step_sizes
from plait.kernels.load import executor
from plait.ops.activation import step_sizes
from plait.ops.norm import gated_rms_norm

EPS = 1e-5


def within(x: Tensor) -> Tensor:
    """x, as a view of something wider that is NaN around it."""
    wide = torch.full((x.shape[0], x.shape[1] + 9), torch.nan)
    wide[:, 3:-6] = x
    return wide[:, 3:-6]


@pytest.mark.parametrize(("n", "groups"), [(1, 1), (15, 1), (16, 1), (51, 3), (64, 2), (600, 1), (514, 2)])
@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_gated_norm_of_any_width(cpu: Any, n: int, groups: int, before: bool, weighted: bool) -> None:
    x, gate = 3 * torch.randn(5, n), 3 * torch.randn(5, n)
    weight = torch.randn(n) if weighted else None
    want = gated_rms_norm(x, gate, weight, EPS, groups, before)
    got = _gated_rms_norm(cpu, x, within(gate), weight, EPS, groups, before)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_batch_composition_and_threads_change_nothing(cpu: Any) -> None:
    x, gate, weight = torch.randn(9, 96), torch.randn(9, 96), torch.randn(96)
    one = executor(1)
    assert one is not None
    for w, groups in ((weight, 3), (None, 1)):
        want = _gated_rms_norm(cpu, x, gate, w, EPS, groups)
        for r in range(9):
            assert torch.equal(
                _gated_rms_norm(one, x[r : r + 1], gate[r : r + 1], w, EPS, groups)[0], want[r]
            )
    one.close()


def test_softplus_keeps_its_digits(cpu: Any) -> None:
    x = torch.cat([torch.linspace(-86, 100, 2001), torch.linspace(-1, 1, 500), torch.tensor([0.0, -0.0])])[
        None
    ]
    want = torch.nn.functional.softplus(x.double(), threshold=1e9)
    got = _step_sizes(cpu, x, None, 0.0, float("inf")).double()
    assert float(((got - want) / want).abs().max()) < 6e-7
    ends = torch.tensor([[-1e30, -200.0, 1e30, torch.inf, -torch.inf]])
    assert _step_sizes(cpu, ends, None, 0.0, float("inf")).tolist() == [
        [0.0, 0.0, float(torch.tensor(1e30)), float("inf"), 0.0]
    ]
    assert _step_sizes(cpu, torch.tensor([[torch.nan]]), None, 0.1, 1.0).isnan().all()


@pytest.mark.parametrize("n", [1, 15, 24, 128])
def test_step_sizes_of_a_view_within_limits(cpu: Any, n: int) -> None:
    dt, bias = 5 * torch.randn(7, n), torch.randn(n)
    got = _step_sizes(cpu, within(dt), bias, 0.01, 2.0)
    torch.testing.assert_close(got, step_sizes(dt, bias, 0.01, 2.0), rtol=1e-6, atol=1e-7)


def test_recorded(cpu: Any) -> None:
    x, gate, weight, bias = torch.randn(64, 48), torch.randn(64, 48), torch.randn(48), torch.randn(48)
    with cpu.record(tokens=64, logits=65) as program:
        dt = _step_sizes(cpu, x, bias, 0.0, 5.0)
        normed = _gated_rms_norm(cpu, dt, gate, weight, EPS, 2)
        out = _gated_rms_norm(cpu, normed, gate, None)
    for rows in (1, 7, 64):
        cpu.run(program, tokens=rows, logits=1, seqs=1)
        steps = _step_sizes(cpu, x[:rows], bias, 0.0, 5.0)
        want = _gated_rms_norm(
            cpu, _gated_rms_norm(cpu, steps, gate[:rows], weight, EPS, 2), gate[:rows], None
        )
        assert torch.equal(out[:rows], want)


def test_what_a_kernel_cannot_read_is_refused(cpu: Any) -> None:
    x, weight = torch.randn(3, 8), torch.randn(8)
    with pytest.raises(ShapeMismatch, match="one shape"):
        _gated_rms_norm(cpu, x, x[:, :4], weight)
    with pytest.raises(ShapeMismatch, match="groups"):
        _gated_rms_norm(cpu, x, x, weight, EPS, 3)
    with pytest.raises(ShapeMismatch, match="weights"):
        _gated_rms_norm(cpu, x, x, weight[:4])
    with pytest.raises(ShapeMismatch, match="bias"):
        _step_sizes(cpu, x, weight[:4], 0.0, 1.0)
