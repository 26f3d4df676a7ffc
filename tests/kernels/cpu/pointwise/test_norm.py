"""Norms: rows and heads that lie apart, any width, and the same bits in any batch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from plait.errors import ShapeMismatch
from plait.kernels.cpu.pointwise.norm import _add_rms_norm, _layer_norm, _rms_norm
from plait.kernels.load import executor
from plait.ops.norm import add_rms_norm, layer_norm, rms_norm

SIZES = (1, 7, 15, 16, 17, 63, 64, 65, 100, 576)
EPS = 1e-5
close = partial(torch.testing.assert_close, rtol=3e-6, atol=2e-6)


def within(x: Tensor) -> Tensor:
    wide = torch.full((*x.shape[:-1], x.shape[-1] + 5), torch.nan)
    wide[..., 2:-3] = x
    return wide[..., 2:-3]


@pytest.mark.parametrize("n", SIZES)
def test_norms_of_rows_that_lie_apart(cpu: Any, n: int) -> None:
    x, delta, weight, bias = 3 * torch.randn(5, n) + 1, torch.randn(5, n), torch.randn(n), torch.randn(n)
    close(_rms_norm(cpu, within(x), weight, EPS), rms_norm(x, weight, EPS))
    for got, want in zip(
        _add_rms_norm(cpu, within(x), within(delta), weight, EPS),
        add_rms_norm(x, delta, weight, EPS),
        strict=True,
    ):
        close(got, want)
    for b in (bias, None):
        want = layer_norm(x.double(), weight, b, EPS).float()
        close(_layer_norm(cpu, within(x), weight, b, EPS), want, atol=1e-5)


def test_heads_have_strides_of_their_own(cpu: Any) -> None:
    x, weight = torch.randn(4, 9, 24)[:, 2:7], torch.randn(24)
    close(_rms_norm(cpu, x, weight, EPS), rms_norm(x, weight, EPS))
    close(_layer_norm(cpu, x, weight, None, EPS), layer_norm(x, weight, None, EPS))


@pytest.mark.parametrize("groups", [2, 3, 8])
def test_groups_are_normed_one_by_one(cpu: Any, groups: int) -> None:
    x, weight = torch.randn(5, groups * 17), torch.randn(groups * 17)
    close(_rms_norm(cpu, within(x), weight, EPS, groups), rms_norm(x, weight, EPS, groups))


@pytest.mark.parametrize("scale", [1e30, 1e15, 1e-30, 1e-42, 0.0])
def test_norms_of_extreme_numbers(cpu: Any, scale: float) -> None:
    x, weight = scale * torch.randn(3, 40), torch.ones(40)
    close(_rms_norm(cpu, x, weight, EPS), rms_norm(x, weight, EPS))
    if scale == 1e30:  # the squares overflow: torch says NaN, a kernel 0
        assert not _layer_norm(cpu, x, weight, None, EPS).any()
    else:
        close(_layer_norm(cpu, x, weight, None, EPS), layer_norm(x, weight, None, EPS))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_broken_stays_broken(cpu: Any, value: float) -> None:
    x = torch.randn(2, 40)
    x[1, 39] = value
    for norm in (_rms_norm(cpu, x, torch.ones(40), EPS), _layer_norm(cpu, x, torch.ones(40), None, EPS)):
        assert norm[0].isfinite().all()
        assert norm[1, 39].isnan()


WEIGHT = torch.linspace(-1, 2, 600)
CALLS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "rms_norm": lambda on, x: _rms_norm(on, x, WEIGHT, EPS),
    "groups": lambda on, x: _rms_norm(on, x, WEIGHT, EPS, 4),
    "add_rms_norm": lambda on, x: torch.cat(_add_rms_norm(on, x, x.sin(), WEIGHT, EPS), -1),
    "layer_norm": lambda on, x: _layer_norm(on, x, WEIGHT, WEIGHT, EPS),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_row_has_the_same_bits_in_any_batch_and_on_any_threads(cpu: Any, call: str) -> None:
    x, run = torch.randn(33, 600), CALLS[call]
    alone = executor(1)
    assert alone is not None
    whole = run(cpu, x)
    assert torch.equal(whole, run(alone, x))
    assert torch.equal(whole, torch.cat([run(cpu, row[None]) for row in x]))
    alone.close()


def test_the_fused_norm_has_the_bits_of_its_parts(cpu: Any) -> None:
    x, delta = torch.randn(3, 600), torch.randn(3, 600)
    summed, normed = _add_rms_norm(cpu, x, delta, WEIGHT, EPS)
    assert torch.equal(summed, x + delta)
    assert torch.equal(normed, _rms_norm(cpu, summed, WEIGHT, EPS))


def test_a_recording_gives_what_the_call_gives(cpu: Any) -> None:
    x = torch.randn(64, 600)
    want = _layer_norm(cpu, _add_rms_norm(cpu, x, x, WEIGHT, EPS)[1], WEIGHT, WEIGHT, EPS)
    with cpu.record(tokens=64, logits=65) as program:
        out = _layer_norm(cpu, _add_rms_norm(cpu, x, x, WEIGHT, EPS)[1], WEIGHT, WEIGHT, EPS)
    out.zero_()
    cpu.run(program, tokens=5, logits=1, seqs=1)
    assert torch.equal(out[:5], want[:5])
    assert not out[5:].any()


def test_what_a_kernel_would_misread_is_refused(cpu: Any) -> None:
    x, weight = torch.randn(4, 8), torch.ones(8)
    for call in (
        lambda: _rms_norm(cpu, x, weight[:7], EPS),
        lambda: _rms_norm(cpu, x, weight.double(), EPS),
        lambda: _rms_norm(cpu, x, weight, EPS, 3),
        lambda: _add_rms_norm(cpu, x, x[:2], weight, EPS),
        lambda: _layer_norm(cpu, x, weight, weight[:1], EPS),
        lambda: _layer_norm(cpu, x.T, weight, None, EPS),
    ):
        with pytest.raises(ShapeMismatch):
            call()
