"""Triton's norms: rows that lie apart, wide rows, and bits that depend on no other row."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed here")

from plait.kernels.triton.pointwise.joined_norms import add_normed, norm_added
from plait.kernels.triton.pointwise.norm import add_norm_rms, norm_gated, norm_layer, norm_rms, why_too_wide
from plait.ops.norm import gated_rms_norm, layer_norm, norm_add_norm, rms_norm
from plait.ops.registry import OpFacts


def test_heads_that_lie_apart() -> None:
    heads = torch.randn(3, 7, 24)[:, 2:5]
    weight, bias = torch.randn(24), torch.randn(24)
    found = norm_rms(heads, weight, 1e-6), norm_layer(heads, weight, bias, 1e-5)
    wanted = rms_norm.reference(heads, weight, 1e-6), layer_norm.reference(heads, weight, bias, 1e-5)
    torch.testing.assert_close(found, wanted)


def test_gates_that_lie_apart() -> None:
    x, gate = torch.randn(3, 64), torch.randn(3, 200)[:, 100:164]
    torch.testing.assert_close(
        norm_gated(x, gate, torch.ones(64), 1e-6, 4),
        gated_rms_norm.reference(x, gate, torch.ones(64), 1e-6, 4),
    )


@pytest.mark.parametrize("size", [576, 7000])
def test_a_row_has_the_same_bits_alone_and_in_a_batch(size: int) -> None:
    x, delta, weight = torch.randn(5, size), torch.randn(5, size), torch.randn(size)
    total, out = add_norm_rms(x, delta, weight, 1e-5)
    one = add_norm_rms(x[3:4], delta[3:4], weight, 1e-5)
    assert torch.equal(torch.cat(one), torch.stack([total[3], out[3]]))
    assert torch.equal(norm_rms(total, weight, 1e-5), out)


@pytest.mark.parametrize("size", [576, 7000])
def test_joined_norms_have_the_bits_of_norms_apart(size: int) -> None:
    """In float16, too: what is between them is rounded as two launches round it."""
    before, weight = torch.rand(size) + 0.5, torch.rand(size) + 0.5
    for dtype in (torch.float32, torch.float16):
        x, wide = torch.randn(5, size, dtype=dtype), torch.randn(5, 2 * size, dtype=dtype)
        delta = wide[:, size:]  # rows that lie apart
        total, out = norm_added(x, delta, before, 1e-6, weight, 1e-5)
        wanted = add_norm_rms(x, norm_rms(delta, before, 1e-6), weight, 1e-5)
        assert torch.equal(torch.stack([total, out]), torch.stack(wanted))
        assert torch.equal(add_normed(x, delta, before, 1e-6), total)
        one = norm_added(x[3:4], delta[3:4], before, 1e-6, weight, 1e-5)
        assert torch.equal(torch.cat(one), torch.stack([total[3], out[3]]))
    near = norm_add_norm.reference(x, delta, before, 1e-6, weight, 1e-5)
    torch.testing.assert_close((total, out), near, rtol=4e-3, atol=4e-3)


def test_a_group_that_no_program_holds_is_refused_by_name() -> None:
    def refusal(**sizes: int) -> str | None:
        return why_too_wide(OpFacts("cuda", torch.bfloat16, sizes))

    assert refusal(size=16384) is None
    assert refusal(size=65536, groups=4) is None
    assert "65536" in str(refusal(size=65536))
