"""Triton's short convolution: any cut, any batch, weights and rows with strides."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed here")

from plait.kernels.triton.ssm import conv, dynamic_conv
from plait.ops.conv import causal_conv
from tests.kernels.triton.ragged import SLOTS, RecurrentLayer, Where, check_composition, check_cuts


def layer(tokens: int, channels: int, taps: int) -> RecurrentLayer:
    torch.manual_seed(1)
    weight, bias = torch.randn(taps, channels).T, torch.randn(channels)

    def run(rows: tuple[Tensor, ...], tail: Tensor, where: Where) -> Tensor:
        return conv.convolve_ragged(rows[0], weight, bias, tail, *where)

    return RecurrentLayer((torch.randn(tokens, channels),), torch.randn(SLOTS, taps - 1, channels), run)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("channels", "taps"), [(5, 2), pytest.param(300, 4, marks=pytest.mark.slow), (7, 5)])
def test_cuts_of_a_prompt_change_no_bit(channels: int, taps: int) -> None:
    check_cuts(layer(21, channels, taps), [[1] * 21, [2, 1, 18], [9, 12], [20, 1]])


def with_own_taps(tokens: int, channels: int, heads: int) -> RecurrentLayer:
    """Each token has three taps: of every channel, or with heads of each of these."""
    torch.manual_seed(4)
    rows, fixed = (
        (torch.randn(tokens, channels), torch.randn(tokens, 3 * (heads or channels))),
        torch.randn(3, channels),
    )

    def run(rows: tuple[Tensor, ...], tail: Tensor, where: Where) -> Tensor:
        if heads:
            return dynamic_conv.convolve_heads(*rows, fixed, tail, *where, 0.4)
        return dynamic_conv.convolve_by_own_taps(*rows, tail, *where)

    return RecurrentLayer(rows, torch.randn(SLOTS, 2, channels), run)


@pytest.mark.parametrize("heads", [0, 2])
def test_cuts_and_batches_change_no_bit_of_rows_with_taps_of_their_own(heads: int) -> None:
    check_cuts(with_own_taps(12, 6, heads), [[1] * 12, [2, 1, 9]])
    check_composition(with_own_taps(12, 6, heads))


def test_batch_composition_changes_no_bit() -> None:
    check_composition(layer(12, 37, 4))


def test_programs_share_the_tiles_of_a_long_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    made = layer(70, 3, 4)
    state = made.state.clone()
    want = made.step(state, [(1, slice(0, 70), True)])
    monkeypatch.setattr(conv, "MOST_PROGRAMS", 2)
    fewer = made.state.clone()
    assert torch.equal(made.step(fewer, [(1, slice(0, 70), True)])[0], want[0])
    assert torch.equal(fewer, state)


def test_rows_apart_in_memory_are_not_copied_and_agree_with_the_reference() -> None:
    torch.manual_seed(2)
    wide, weight = torch.randn(6, 50), torch.randn(20, 3)
    x, tail = wide[:, 11:31], torch.randn(SLOTS, 2, 20)
    where = torch.tensor([3, 1]), torch.tensor([0, 2, 6]), torch.tensor([True, False])
    want = causal_conv.reference(x, weight, None, want_tail := tail.clone(), *where, None)
    got = conv.convolve_ragged(x, weight, None, tail, *where, None)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
    assert torch.equal(tail, want_tail)


def test_tail_in_another_dtype_keeps_what_it_can() -> None:
    torch.manual_seed(3)
    x, weight, tail = torch.randn(1, 9), torch.randn(9, 4), torch.randn(SLOTS, 3, 9).half()
    where = torch.tensor([2]), torch.tensor([0, 1]), torch.tensor([True])
    want = causal_conv.reference(x, weight, None, want_tail := tail.clone(), *where)
    torch.testing.assert_close(conv.convolve_ragged(x, weight, None, tail, *where), want)
    assert torch.equal(tail, want_tail)
