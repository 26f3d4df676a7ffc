"""Pointwise kernels: what the walk over all variants cannot see."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from plait.errors import ShapeMismatch
from plait.kernels.cpu.pointwise.activation import KINDS, _activate, _gate_rows
from plait.kernels.cpu.pointwise.elementwise import _combine, _gate, _rescale
from plait.kernels.load import executor, load_kernels
from plait.ops.activation import PAIRS, activate, combine, gate, gate_rows, rescale

OF_ONE = [kind for kind in KINDS if kind not in PAIRS]
SIZES = (1, 7, 15, 16, 17, 100, 256, 600)
close = partial(torch.testing.assert_close, rtol=2e-6, atol=1e-7)


@pytest.fixture(scope="module")
def alone() -> Iterator[Any]:
    """One thread."""
    load_kernels()
    made = executor(1)
    assert made is not None
    yield made
    made.close()


def within(x: Tensor) -> Tensor:
    """The same rows out of a wider tensor: they lie apart."""
    wide = torch.full((*x.shape[:-1], x.shape[-1] + 5), torch.nan)
    wide[..., 2:-3] = x
    return wide[..., 2:-3]


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize(
    ("kind", "gated"), [*((kind, True) for kind in KINDS), *((kind, False) for kind in OF_ONE)]
)
def test_activations_of_rows_that_lie_apart(cpu: Any, n: int, kind: str, gated: bool) -> None:
    x = 4 * torch.randn(5, n * (1 + gated))
    close(_activate(cpu, within(x), kind, gated), activate(x.double(), kind, gated).float())


def test_heads_have_strides_of_their_own(cpu: Any) -> None:
    x = torch.randn(3, 9, 20)[:, 2:7]
    close(_activate(cpu, x, "silu", True), activate(x, "silu", True))
    y = torch.randn(3, 5, 20)
    close(_combine(cpu, x, y, 0.3), combine(x, y, 0.3))
    close(_rescale(cpu, x, 0.3, 2.0), rescale(x, 0.3, 2.0))


@pytest.mark.parametrize("kind", OF_ONE)
def test_an_activation_is_right_to_the_last_bits(cpu: Any, kind: str) -> None:
    x = torch.cat([torch.linspace(-13, 40, 20_001), torch.linspace(-1e-3, 1e-3, 301)])[None]
    z = x.double()
    want = activate(z, kind, False)
    # torch's own 1 + erf and 1 + tanh cancel below 0, even in float64.
    if kind == "gelu":
        want = 0.5 * z * torch.erfc(-z / math.sqrt(2))
    if kind == "gelu_pytorch_tanh":
        want = z * torch.sigmoid(math.sqrt(8 / math.pi) * (z + 0.044715 * z**3))
    got = _activate(cpu, x, kind, False).double()
    normal = want.abs() > 1e-36
    # The exponent of the others is rounded, and up to 88.
    bound = 1e-6 if kind == "gelu" else 1.5e-5
    assert ((got - want).abs()[normal] / want.abs()[normal]).max() < bound


@pytest.mark.parametrize("kind", [kind for kind in OF_ONE if kind != "sigmoid"])
def test_activations_of_extreme_numbers(cpu: Any, kind: str) -> None:
    x = torch.tensor([[1e30, 3e38, math.inf, -1e30, -3e38, -math.inf, 1e-40, -1e-40, 0.0, -0.0, math.nan]])
    up = kind.removesuffix("2") == "relu" and kind.endswith("2")
    high = [math.inf] * 3 if up else [1e30, 3e38, math.inf]
    (got,) = _activate(cpu, x, kind, False).tolist()
    assert got[:3] == pytest.approx(high)
    assert got[3:6] == [0.0] * 3
    near = math.log(2) if kind == "softplus" else 0.0
    assert got[6:10] == pytest.approx([near] * 4, rel=1e-6, abs=1.1e-40)
    assert math.isnan(got[10])


@pytest.mark.parametrize("kind", ["swiglu_oai", "swiglu_cut_7", "swiglu_cut_10"])
def test_a_gated_activation_is_clamped(kind: str, cpu: Any) -> None:
    numbers = [-math.inf, -1e30, -100.0, -10.5, -7.0, -1.0, 0.0, 1.0, 7.0, 10.5, 1e30, math.inf, math.nan]
    x = torch.tensor([[a, b] for a in numbers for b in numbers]).T.reshape(1, -1)
    finite = torch.where(x == -math.inf, -1e30, x)  # -inf · sigmoid(-inf) is 0 here
    want = activate(finite.double(), kind, True).float()
    torch.testing.assert_close(_activate(cpu, x, kind, True), want, rtol=1e-5, atol=1e-7, equal_nan=True)
    with pytest.raises(ShapeMismatch):
        _activate(cpu, x, kind, False)


def test_what_closes_an_output_may_lie_in_a_wider_row(cpu: Any) -> None:
    x, wide = torch.randn(6, 600), 30 * torch.randn(6, 900)
    wide[2, 300:303] = torch.tensor([math.inf, -math.inf, math.nan])
    got = _gate(cpu, x, wide[:, 300:])
    torch.testing.assert_close(got, gate(x, wide[:, 300:]), rtol=2e-6, atol=1e-7, equal_nan=True)


def test_a_sigmoid_of_extreme_numbers(cpu: Any) -> None:
    x = torch.tensor([[1e30, math.inf, -1e30, -math.inf, 1e-40, -0.0, math.nan]])
    got = _activate(cpu, x, "sigmoid", False)
    torch.testing.assert_close(got, x.sigmoid(), equal_nan=True)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("scale", [1.0, 0.22])
def test_a_residual_has_the_bits_of_the_reference(cpu: Any, n: int, scale: float) -> None:
    x, y = torch.randn(7, n), torch.randn(7, n)
    assert torch.equal(_combine(cpu, within(x), within(y), scale), combine(x, y, scale))


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize(("scale", "cap"), [(0.5, None), (1.0, 30.0), (3.0, 2.0)])
def test_scales_and_caps(cpu: Any, n: int, scale: float, cap: float | None) -> None:
    x = 10 * torch.randn(4, n)
    close(_rescale(cpu, within(x), scale, cap), rescale(x.double(), scale, cap).float())


def test_a_cap_of_extreme_numbers(cpu: Any) -> None:
    x = torch.tensor([[1e30, math.inf, -1e30, -math.inf, 1e-40, math.nan, -1e-3]])
    got = _rescale(cpu, x, 1.0, 30.0)
    torch.testing.assert_close(got, rescale(x, 1.0, 30.0), equal_nan=True)


@pytest.mark.parametrize("n", SIZES)
def test_gates(cpu: Any, n: int) -> None:
    x, gate = torch.randn(6, n), torch.tensor([[0.3], [-200.0], [200.0], [-5.0], [0.0], [-math.inf]])
    close(_gate_rows(cpu, within(x), within(gate)), gate_rows(x, gate))
    gate[2] = math.nan
    assert _gate_rows(cpu, x, gate)[2].isnan().all()


CALLS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    **{kind: (lambda on, x, kind=kind: _activate(on, x, kind, True)) for kind in KINDS},
    "combine": lambda on, x: _combine(on, x, x, 0.3),
    "rescale": lambda on, x: _rescale(on, x, 0.5, 3.0),
    "gate": lambda on, x: _gate(on, x, x[:, :]),
    "gate_rows": lambda on, x: _gate_rows(on, x, x[:, :1]),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_row_has_the_same_bits_in_any_batch_on_any_threads_and_recorded(
    cpu: Any, alone: Any, call: str
) -> None:
    x, run = torch.randn(64, 600), CALLS[call]
    whole = run(cpu, x)
    assert torch.equal(whole, run(alone, x))
    assert torch.equal(whole, torch.cat([run(cpu, row[None]) for row in x]))
    with cpu.record(tokens=64, logits=65) as program:
        out = run(cpu, x)
    out.zero_()
    cpu.run(program, tokens=5, logits=1, seqs=1)
    assert torch.equal(out[:5], whole[:5])
    assert not out[5:].any()


def test_what_a_kernel_would_misread_is_refused(cpu: Any) -> None:
    x = torch.randn(4, 8)
    for call in (
        lambda: _activate(cpu, x[:, :7], "silu", True),
        lambda: _activate(cpu, x.double(), "silu", False),
        lambda: _combine(cpu, x, x[:2], 1.0),
        lambda: _rescale(cpu, x.T, 1.0, None),
        lambda: _gate_rows(cpu, x, x[:, :2]),
    ):
        with pytest.raises(ShapeMismatch):
            call()
