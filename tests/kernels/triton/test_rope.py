"""Triton's rotation: sines and cosines at large positions, compared with float64."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed here")

from plait.kernels.triton.attention.rope import rotate_rows
from plait.ops.rope import rotate


@pytest.mark.parametrize("position", [0, 3, 4095, 131_071, 1_048_575])
def test_rotation_is_exact_at_large_positions(position: int) -> None:
    pairs = 64
    inv_freq = 1.0 / 1e4 ** (torch.arange(pairs) / pairs)
    x = torch.cat([torch.ones(1, 1, pairs), torch.zeros(1, 1, pairs)], -1)  # turned: cosines, then sines
    positions = torch.tensor([position])
    found = rotate_rows(x, positions, inv_freq, 1.0, False)[0, 0].double()
    angle = (positions.float() * inv_freq).double()  # the op rounds the angle, models are trained with that
    wanted = torch.cat([angle.cos(), angle.sin()])
    assert (found - wanted).abs().max() < 1.5e-7
    reference = rotate.reference(x, positions, inv_freq, 1.0, False)[0, 0].double()
    assert (found - reference).abs().max() < 2.5e-7


def test_rows_and_heads_may_lie_apart() -> None:
    wide, positions = torch.randn(3, 7, 24), torch.tensor([5, 0, 77])
    part, inv_freq = wide[:, 2:5], 1.0 / 1e4 ** (torch.arange(6) / 6)
    found = rotate_rows(part, positions, inv_freq, 1.25, True)
    torch.testing.assert_close(
        found, rotate.reference(part, positions, inv_freq, 1.25, True), rtol=2e-6, atol=2e-6
    )
