"""Linear layers that compute the norm between them: bits of rows, shares, storages, launches."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed here")

from plait.kernels.load import load_for_gpu
from plait.ops.blocks import random_weight
from plait.ops.chip import EXAMPLES
from plait.ops.folded_norm import add_linear, finish_norm, norm_glu, norm_linear
from plait.ops.linear import Linear
from plait.ops.registry import OpFacts
from plait.quant.weight import Dense, Weight
from plait.runner.device.capture import StepCapture

load_for_gpu()
OURS: Any = importlib.import_module("plait.kernels.triton.linear.folded_norm")
EPS = 1e-5


def bind(op: Any, **sizes: Any) -> Any:
    """What a GPU would bind; sizes alone decide."""
    return op.bind(OpFacts("cuda", torch.float32, sizes, chip=EXAMPLES[90]))[0]


def make_layer(n_out: int, n_in: int, kind: str = "dense", bias: bool = False) -> Linear:
    """As a GPU would bind it, planes in float16: the interpreter's bfloat16 is wrong."""
    dtype = torch.float32 if kind == "dense" else torch.float16
    weight: Weight = (
        Dense(torch.randn(n_out, n_in) / 16) if kind == "dense" else random_weight(kind, n_out, n_in)
    )

    return Linear([weight], [torch.randn(n_out, dtype=dtype) if bias else None], bind, dtype)


def run_both(last: Linear, first: Linear, h: Tensor, x: Tensor, weight: Tensor, kind: str) -> list[Tensor]:
    added, rows, squares = OURS.add_few(h, last, x, 0.5, weight)
    if kind:
        return [added, rows, squares, OURS.join_normed(rows, squares, first, EPS, kind)]
    return [added, rows, squares, OURS.multiply_normed(rows, squares, first, EPS)]


@pytest.mark.parametrize("kind", ["", "silu"])
def test_a_row_alone_has_the_bits_of_the_row_in_a_batch(kind: str) -> None:
    """Of up to 8 rows: the interpreter's products of other widths have other orders."""
    last, first = make_layer(208, 512), make_layer(96, 208, bias=True)
    h, x, weight = torch.randn(8, 512), torch.randn(8, 208), torch.rand(208) + 0.5
    whole = run_both(last, first, h, x, weight, kind)
    for some in (slice(5, 6), slice(2, 7)):
        found = run_both(last, first, h[some], x[some], weight, kind)
        assert all(torch.equal(a, b[some]) for a, b in zip(found, whole, strict=True))


def test_shares_leave_their_counters_at_zero() -> None:
    last, first = make_layer(64, 2048), make_layer(48, 2048)
    h, x, weight = torch.randn(3, 2048), torch.randn(3, 64), torch.rand(64) + 0.5
    rows, squares = torch.randn(3, 2048), torch.rand(3, 128)
    for _ in range(2):
        OURS.add_few(h, last, x, 1.0, weight)
        OURS.multiply_normed(rows, squares, first, EPS)
        assert not any(layer.parts[0][0].counters.any() for layer in (last, first))


@pytest.mark.parametrize("rows", [3, 11])
@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K", "Q3_K", "fp8_b128"])
def test_planes_of_every_width_of_codes(kind: str, rows: int) -> None:
    last, first = make_layer(80, 512, kind), make_layer(80, 512, kind)
    h, x = torch.randn(rows, 512).half(), torch.randn(rows, 80).half()
    weight = torch.rand(80) + 0.5
    near = add_linear.tolerance[torch.float16]
    found, wanted = OURS.add_few(h, last, x, 1.0, weight), add_linear.reference(h, last, x, 1.0, weight)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a.float(), b.float(), atol=near, rtol=near)
    normed, squares = torch.randn(rows, 512).half(), torch.rand(rows, 32) * 16
    a = OURS.multiply_normed(normed, squares, first, EPS)
    torch.testing.assert_close(a, norm_linear.reference(normed, squares, first, EPS), atol=near, rtol=near)


def test_each_end_is_one_launch_for_each_weight() -> None:
    last, first = make_layer(64, 64), make_layer(96, 64)
    mixed = Linear(
        [Dense(torch.randn(48, 64)), Dense(torch.randn(32, 64))], [None, torch.randn(32)], bind, torch.float32
    )  # fmt: skip
    h, x, weight, squares = torch.randn(2, 64), torch.randn(2, 64), torch.rand(64), torch.rand(2, 4)
    packed = [part[0] for layer in (last, first, mixed) for part in layer.parts]
    held = [t for one in packed for t in (one.weight, one.counters)]
    bias = mixed.parts[1][1]
    assert bias is not None
    with StepCapture([h, x, weight, squares, bias, *held], is_dry=True) as capture:
        OURS.add_few(h, last, x, 1.0, weight)
        OURS.multiply_normed(h, squares, mixed, EPS)
        OURS.join_normed(h, squares, first, EPS, "silu")
    assert [name for name in capture.launches if name != "fill_"] == ["fold_dense"] * 4
    wanted = mixed(finish_norm(h, squares, EPS))
    torch.testing.assert_close(OURS.multiply_normed(h, squares, mixed, EPS), wanted, atol=1e-5, rtol=1e-5)


def test_what_kernels_do_not_read_is_refused_or_computed_by_the_reference() -> None:
    def refusal(dtype: torch.dtype = torch.bfloat16, **sizes: Any) -> str:
        return str(OURS.why_not_folded(OpFacts("cuda", dtype, sizes)))

    dense, planes = make_layer(64, 64), make_layer(64, 256, "Q4_K")
    ordered = make_layer(64, 128, "int4_g64+zeros+order")
    assert refusal(hidden=64, layer=dense, kind="silu") == refusal(hidden=64, layer=planes) == "None"
    assert "float16" in refusal(torch.float16, layer=dense)
    assert "multiples of 16" in refusal(hidden=100)
    assert "not in float32" in refusal(torch.float32, layer=planes)
    assert "in order" in refusal(layer=ordered)
    assert "swiglu_7" in refusal(layer=dense, kind="swiglu_7")
    assert "deterministic" in refusal(deterministic=True)
    h, squares = torch.randn(17, 64), torch.rand(17, 4)  # more rows than the kernels take
    assert torch.equal(
        OURS.multiply_normed(h, squares, dense, EPS), norm_linear.reference(h, squares, dense, EPS)
    )
    wanted = norm_glu.reference(h[:2], squares[:2], dense, EPS, "swiglu_7")
    assert torch.equal(OURS.join_normed(h[:2], squares[:2], dense, EPS, "swiglu_7"), wanted)
