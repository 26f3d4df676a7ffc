"""Compressed entries in Triton: a row depends on its history only, however prompts are cut and batched."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed here")

from plait.kernels.triton.ssm.compress import compress
from tests.kernels.triton.ragged import SLOTS, RecurrentLayer, Where, check_composition, check_cuts

RATE, SIZE, TOKENS = 4, 37, 12


def layer(parts: int) -> RecurrentLayer:
    """Two windows and a half, from the second token of one on."""
    wide = parts * SIZE
    kv, gate, bias = torch.randn(TOKENS, wide), torch.randn(TOKENS, wide), torch.randn(RATE, wide)
    state = torch.randn(SLOTS, 2 * parts - 1, 3, SIZE)
    state[:, :, 1].abs_()

    def run(rows: tuple[Tensor, ...], state: Tensor, where: Where) -> Tensor:
        k, g, positions = rows
        entries, firsts = compress(k, g, bias, state, *where, positions, RATE)
        assert torch.equal(firsts, positions // RATE * RATE)
        assert not entries[positions % RATE != RATE - 1].any()
        return entries

    return RecurrentLayer((kv, gate, torch.arange(TOKENS)), state, run)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("parts", [1, 2])
def test_a_prompt_that_is_cut_anywhere_gives_the_same_bits(parts: int) -> None:
    torch.manual_seed(parts)
    check_cuts(layer(parts), [(1, 5, 6), [1] * TOKENS])


def test_a_row_has_the_bits_that_it_has_alone() -> None:
    torch.manual_seed(0)
    check_composition(layer(2))
