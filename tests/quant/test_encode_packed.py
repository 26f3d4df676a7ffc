"""Quantizing to packed storage: errors no more than the formats must have, edges, refusals."""

from __future__ import annotations

import pytest
import torch

from plait.errors import BadFile, ShapeMismatch
from plait.quant.encode_packed import encode_fp8, encode_groups

ROWS = torch.randn(64, 512, generator=torch.Generator().manual_seed(3))


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).square().mean().sqrt() / want.square().mean().sqrt())


# Normal numbers rounded to the best even grid of a group lose this much of their size.
@pytest.mark.parametrize(
    ("bits", "group", "lost"), [(4, 128, 0.106), (4, 32, 0.088), (8, 128, 0.0068), (3, 64, 0.2)]
)
def test_errors_of_groups(bits: int, group: int, lost: float) -> None:
    for scale in (torch.float16, torch.bfloat16, torch.float32):
        made = encode_groups(ROWS, group, bits, scale)
        assert made.scales.dtype is scale
        assert bool((made.scales > 0).all())
        assert relative(made.dequantize(torch.float32), ROWS) < lost
    plain = (ROWS.unflatten(1, (-1, group)).abs().amax(2, keepdim=True) / (2 ** (bits - 1) - 1)).expand(
        -1, -1, group
    )
    rounded = (ROWS / plain.flatten(1)).round() * plain.flatten(1)
    assert relative(made.dequantize(torch.float32), ROWS) < relative(
        rounded, ROWS
    )  # better than the obvious scale


@pytest.mark.parametrize("block", [(128, 128), (1, 512), (64, 512), (7, 100)])
def test_errors_of_eight_bit_floats(block: tuple[int, int]) -> None:
    made = encode_fp8(ROWS[:50], block)
    got = made.dequantize(torch.float32)
    assert relative(got, ROWS[:50]) < 0.028
    largest = ROWS[:50].abs().amax()
    assert float(got.abs().amax()) == pytest.approx(float(largest), rel=1e-6)  # 448 times a scale


def test_numbers_on_the_grid_come_back() -> None:
    grid = torch.randint(-8, 8, (5, 64)).float()
    grid[:, ::32] = -8
    assert torch.equal(encode_groups(grid * 0.25, 32).dequantize(torch.float32), grid * 0.25)
    eights = torch.arange(256, dtype=torch.uint8)
    eights[[0x7F, 0xFF]] = 0
    numbers = eights.view(torch.float8_e4m3fn).float().view(2, 128)
    assert torch.equal(encode_fp8(numbers).dequantize(torch.float32), numbers)


def test_zeros_and_edges() -> None:
    assert not encode_groups(torch.zeros(3, 64), 32).dequantize(torch.float32).any()
    assert not encode_fp8(torch.zeros(3, 70)).dequantize(torch.float32).any()
    assert encode_groups(torch.zeros(0, 64), 32).shape == (0, 64)
    tiny = encode_groups(torch.full((1, 32), 1e-9), 32)
    assert bool(tiny.dequantize(torch.float32).isfinite().all())
    assert encode_fp8(ROWS[:5, :70].bfloat16(), (128, 128)).shape == (5, 70)


def test_pieces_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, eights = encode_groups(ROWS, 64), encode_fp8(ROWS, (16, 128))
    monkeypatch.setattr("plait.quant.encode_packed._PIECE", 512 * 20)
    assert torch.equal(encode_groups(ROWS, 64).codes, whole.codes)
    assert torch.equal(
        encode_fp8(ROWS, (16, 128)).dequantize(torch.float32), eights.dequantize(torch.float32)
    )


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e6])
def test_what_is_no_number_is_refused(bad: float) -> None:
    weight = ROWS.clone()
    weight[3, 3] = bad
    for encode in (encode_groups, encode_fp8):
        with pytest.raises(BadFile, match="w0: its largest number"):
            encode(weight, name="w0")
    with pytest.raises(ShapeMismatch, match="whole groups of 128"):
        encode_groups(ROWS[:, :64])
    with pytest.raises(ShapeMismatch, match="rows and columns"):
        encode_fp8(ROWS[0])
