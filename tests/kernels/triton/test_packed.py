"""Triton's products with packed weights: in its interpreter against the reference, and compiled for a GPU.

Triton comes with torch for GPUs; without it there is nothing to test.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

from plait.ops.blocks import random_weight
from plait.ops.linear import linear
from plait.ops.registry import OpFacts

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed here"
)
READ = ("Q4_0", "Q8_0", "Q4_K", "Q6_K", "int4_g128", "int4_g32+bfloat16+zeros", "int8", "fp8", "fp8_b128")


@pytest.fixture(scope="module")
def packed() -> Any:
    """The kernels, interpreted: see `conftest.py`."""
    return importlib.import_module("plait.kernels.triton.packed")


@pytest.mark.parametrize("kind", READ)
@pytest.mark.parametrize(("rows", "n_out", "n_in"), [(1, 50, 512), (3, 96, 768), (16, 33, 256)])
def test_few_rows_times_a_packed_weight(packed: Any, kind: str, rows: int, n_out: int, n_in: int) -> None:
    torch.manual_seed(1)
    weight, bias = random_weight(kind, n_out, n_in), torch.randn(n_out)
    assert packed.reads(weight)
    for dtype in (torch.float32, torch.float16):
        x = torch.randn(1, rows, n_in).to(dtype)
        found = packed.multiply(x, weight, bias.to(dtype))
        wanted = linear.reference(x, weight, bias.to(dtype))
        bound = linear.tolerance[dtype]
        assert found.dtype is dtype
        torch.testing.assert_close(found, wanted, atol=bound, rtol=bound)


def test_parts_of_weights_are_read_where_they_lie(packed: Any) -> None:
    x = torch.randn(2, 256)
    for kind in ("Q4_K", "int4_g128", "int4_g64+zeros", "fp8_b128"):
        whole = random_weight(kind, 64, 512)
        part = whole.rows(7, 40).cols(256, 512)
        torch.testing.assert_close(
            packed.multiply(x, part, None), linear.reference(x, part, None), atol=5e-5, rtol=5e-5
        )


def test_what_the_kernel_does_not_read_goes_to_the_reference(
    packed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed, "launch", None)
    for kind, rows in (("int4_g64+zeros+order", 1), ("int3_g128", 1), ("mxfp4", 1), ("Q4_K", 17)):
        weight, x = random_weight(kind, 48, 256), torch.randn(rows, 256)
        assert torch.equal(packed.multiply(x, weight, None), linear.reference(x, weight, None))


@pytest.mark.parametrize(("n_out", "steps"), [(32, 16), (4096, 16), (100, 7), (131072, 56)])
def test_shares_of_the_inputs_are_whole_and_fill_a_device(packed: Any, n_out: int, steps: int) -> None:
    shares = packed.shares_of(n_out, steps)
    assert steps % shares == 0
    assert shares == 1 or shares * -(-n_out // packed.ROWS) <= packed.PROGRAMS


def test_the_choice_is_made_from_format_and_sizes(packed: Any) -> None:
    def refusal(kind: str, n_in: int) -> str | None:
        reason: str | None = packed.why_unreadable(
            OpFacts("cuda", torch.float16, {"kind": kind, "n_in": n_in})
        )
        return reason

    for kind in ("Q4_K", "Q8_0", "int4", "int4_g32", "int8", "fp8", "fp8_b128"):
        assert refusal(kind, 512) is None
    for kind in ("Q5_K", "int3_g128", "mxfp4", "bfloat16"):
        assert "not" in str(refusal(kind, 512))
    assert "no whole blocks" in str(refusal("Q4_K", 384))
    assert "no whole blocks" in str(refusal("fp8", 100))
