"""Linear layers: quantized weights stay quantized in every variant."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from plait.ops import linear as maps
from plait.ops.blocks import random_weight
from plait.ops.linear import Linear, linear
from plait.ops.registry import OpFacts


def bind(op: Any, **sizes: Any) -> Any:
    """As without native kernels."""
    fn, row = op.bind(OpFacts("cpu", torch.float32, sizes))
    assert row.variant in ("reference", "dense")
    return fn


@pytest.mark.parametrize("kind", ["Q4_K", "IQ2_XXS", "int4_g128+zeros", "fp8_b128", "mxfp4", "bnb_nf4"])
def test_a_quantized_matrix_keeps_its_bytes_where_there_is_no_kernel(kind: str) -> None:
    weight = random_weight(kind, 96, 512)
    made = Linear([weight], [None], bind, torch.float32, "int8")
    assert made.nbytes == weight.nbytes < 96 * 512 * 2
    x = torch.randn(3, 512)
    rounding = made.only_part[2] if made.only_part else "float32"
    assert rounding == ("float32" if kind in ("fp8_b128", "bnb_nf4") else "int8")
    torch.testing.assert_close(made(x), linear(x, weight, None, rounding))


def test_the_choice_says_why_no_plain_copy_is_kept() -> None:
    _, row = linear.bind(OpFacts("cpu", torch.float32, {"kind": "Q4_K", "n_in": 256, "n_out": 8}))
    assert row.variant == "reference"
    assert any(name == "dense" and "decodes them at each use" in why for name, why in row.skipped)
    for kind in ("float32", "bfloat16", "float16"):
        _, row = linear.bind(OpFacts("cpu", torch.float32, {"kind": kind, "n_in": 256, "n_out": 8}))
        assert row.variant == "dense"


def test_the_reference_decodes_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(maps, "piece_of", lambda device: 256 * 128)
    sizes: list[int] = []
    weight, x, bias = random_weight("fp8_b128", 300, 256), torch.randn(2, 5, 256), torch.randn(300)
    kind = type(weight)
    decode = kind.dequantize

    def watched(self: Any, dtype: torch.dtype) -> torch.Tensor:
        sizes.append(self.shape[0])
        return decode(self, dtype)

    want = x @ weight.dequantize(torch.float32).T + bias
    monkeypatch.setattr(kind, "dequantize", watched)
    torch.testing.assert_close(linear(x, weight, bias), want, rtol=1e-5, atol=1e-5)
    assert sizes == [128, 128, 44]


def test_inputs_that_are_no_whole_blocks_are_not_rounded() -> None:
    weight = random_weight("int8", 8, 40)
    made = Linear([weight], [None], bind, torch.float32, "int8")
    x = torch.randn(2, 40)
    torch.testing.assert_close(made(x), x @ weight.dequantize(torch.float32).T)
