"""Native rotation (RoPE): strided heads, long positions, batches, recordings."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from plait.errors import ShapeMismatch
from plait.ops.registry import OpFacts
from plait.ops.rope import rotate


@pytest.fixture
def native(cpu: Any) -> Any:
    fn, row = rotate.bind(OpFacts("cpu", torch.float32, {}, cpu))
    assert row.variant == "native"
    return fn


def inv_freq(dim: int, theta: float = 1e4) -> torch.Tensor:
    return 1.0 / theta ** (torch.arange(0, dim, 2).float() / dim)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("dim", "rotated"), [(8, 8), (8, 2), (24, 12), (64, 64), (66, 66), (128, 96), (80, 32)]
)
def test_views_of_one_projection_at_long_positions(
    native: Any, dim: int, rotated: int, interleaved: bool
) -> None:
    whole = torch.randn(37, 7, dim)
    positions = torch.randint(0, 1_000_000, (37,))
    positions[:2] = torch.tensor([0, 1])
    for x in whole.split([4, 3], 1):
        args = (x, positions, inv_freq(rotated), 1.25, interleaved)
        got = native(*args)
        assert got.is_contiguous()
        torch.testing.assert_close(got, rotate(*args), rtol=2e-6, atol=2e-6)


def test_a_row_alone_has_the_same_bits(native: Any) -> None:
    x, positions = torch.randn(9, 5, 32), torch.arange(100, 109)
    whole = native(x, positions, inv_freq(32), 1.0, False)
    for i in range(9):
        part = slice(i, i + 1)
        assert torch.equal(native(x[part], positions[part], inv_freq(32), 1.0, False), whole[part])


def test_position_0_changes_nothing(native: Any) -> None:
    x = torch.randn(1, 2, 64)
    assert torch.equal(native(x, torch.zeros(1, dtype=torch.int64), inv_freq(64), 1.0, True), x)


def test_a_recording_gives_what_the_call_gives(cpu: Any, native: Any) -> None:
    x, positions = torch.randn(64, 3, 16), torch.arange(64)
    with cpu.record(tokens=64, logits=65) as program:
        out = native(x, positions, inv_freq(16), 1.0, False)
    x.normal_()
    positions += 7
    cpu.run(program, tokens=5, logits=1, seqs=1)
    assert torch.equal(out[:5], native(x[:5], positions[:5], inv_freq(16), 1.0, False))


def test_arguments_that_do_not_fit_are_rejected(native: Any) -> None:
    x, positions = torch.randn(4, 2, 16), torch.arange(4)
    with pytest.raises(ShapeMismatch, match="int64"):
        native(x, positions.int(), inv_freq(16), 1.0, False)
    with pytest.raises(ShapeMismatch, match="half as many"):
        native(x, positions, inv_freq(18), 1.0, False)
    with pytest.raises(ShapeMismatch, match="one position per row"):
        native(x, positions[:3], inv_freq(16), 1.0, False)
