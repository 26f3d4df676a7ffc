"""Attention over keys in front in Triton: the bits of a row, however it is batched, cut and shared."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed here")

from plait.kernels.triton.attention.compressed import front, rows
from plait.kernels.triton.attention.compressed.front import attend
from plait.ops.front import front_attention

LENGTHS = [50, 1, 20]


class Layer:
    """Sequences of LENGTHS of which only rows that are attended are not yet in memory."""

    def __init__(self, window: int | None) -> None:
        torch.manual_seed(4)
        case = dict(seqs=LENGTHS, heads=4, kv_heads=2, dim=10, v_dim=20, window=window, front=21)
        assert front_attention.make
        self.args = list(front_attention.make(case, torch.float32, "cpu")[0])
        for cache in self.args[3:5]:
            cache.fill_(torch.nan)
        self.wanted: Tensor = front_attention.reference(*self.args)

    def attend(self, parts: list[tuple[int, int]], is_stored: bool = False) -> tuple[Tensor, Tensor]:
        """(rows, what they should be): the last of some sequences, (sequence, count) each."""
        q, k, v, k_cache, v_cache, before, table, slots, starts, lens, *how = self.args
        some = torch.cat([torch.arange(starts[s + 1] - n, starts[s + 1]) for s, n in parts])
        seqs, new = torch.tensor([s for s, _ in parts]), (None, None) if is_stored else (k[some], v[some])
        first = torch.tensor([0, *(count for _, count in parts)]).cumsum(0)
        where = table[seqs], slots[some], first, lens[seqs]
        return attend(q[some], *new, k_cache, v_cache, before, *where, *how), self.wanted[some]


@pytest.mark.parametrize("window", [None, pytest.param(30, marks=pytest.mark.slow)])
def test_a_row_has_the_same_bits_in_decodes_and_prompts_by_one_program_or_many(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(front, "PART", 16)
    layer = Layer(window)
    alone = torch.cat([layer.attend([(s, 1)])[0] for s in range(3)])
    together, wanted = layer.attend([(0, 1), (1, 1), (2, 1)], is_stored=True)
    assert torch.equal(together, alone)
    torch.testing.assert_close(together, wanted, rtol=2e-5, atol=2e-5)
    monkeypatch.setattr(rows, "BUSY", 0)  # one program walks all parts of a row
    found, wanted = layer.attend([(2, 3), (0, 2), (1, 1)])
    torch.testing.assert_close(found, wanted, rtol=2e-5, atol=2e-5)
    assert torch.equal(found[[4, 5, 2]], alone)
