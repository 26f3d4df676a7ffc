"""Triton's gated delta rule: any cut, any batch, decays per head and per channel."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed here")

from plait.kernels.triton.ssm.delta import scan_from_gates
from tests.kernels.triton.ragged import SLOTS, RecurrentLayer, Where, check_composition, check_cuts

HEADS, KEY_HEADS = 4, 2


def layer(tokens: int, size: int, dim: int, *, channels: bool, tiled: bool = False) -> RecurrentLayer:
    torch.manual_seed(1)
    q, k = (torch.randn(tokens, KEY_HEADS, size) for _ in "qk")
    v, beta = torch.randn(tokens, HEADS, dim), torch.randn(tokens, HEADS)
    steps = HEADS * (size if channels else 1)
    decay, bias, A = torch.randn(tokens, steps), torch.randn(steps), -torch.rand(HEADS)

    def run(rows: tuple[Tensor, ...], state: Tensor, where: Where) -> Tensor:
        q, k, v, decay, beta = rows
        return scan_from_gates(q, k, v, decay, bias, A, beta, state, *where, 0, 2.0, tiled)

    return RecurrentLayer((q, k, v, decay, beta), torch.randn(SLOTS, HEADS, size, dim), run)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("channels", [False, True])
def test_cuts_of_a_prompt_change_no_bit(channels: bool) -> None:
    check_cuts(layer(7, 7, 5, channels=channels), [[1] * 7, [2, 5], [6, 1]])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("channels", [False, True])
def test_batch_composition_changes_no_bit(channels: bool) -> None:
    check_composition(layer(12, 8, 4, channels=channels, tiled=True))
