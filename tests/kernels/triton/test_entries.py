"""Attention over entries in Triton: the bits of a row, however it is batched, cut and shared by programs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed here")

from plait.kernels.triton.attention.compressed import entries, rows
from plait.kernels.triton.attention.compressed.entries import attend
from plait.ops.compressed import entry_attention

HEADS, DIM, RATE, STEP, WINDOW, TOP_K = 5, 24, 4, 2, 20, 12
LENGTHS = [70, 1, 20]


class Layer:
    """Sequences of LENGTHS of which only rows that are attended are not yet in memory."""

    def __init__(self, has_choice: bool) -> None:
        torch.manual_seed(4)
        self.case: Any = dict(seqs=LENGTHS, heads=HEADS, dim=DIM, window=WINDOW, rate=RATE, step=STEP)
        self.case |= {"top_k": TOP_K} if has_choice else {}
        self.args: list[Any] = list(entry_attention.make(self.case, torch.float32, "cpu")[0])  # type: ignore[misc]
        for cache in self.args[3:5]:
            cache.fill_(torch.nan)
        self.wanted: Tensor = entry_attention.reference(*self.args)  # which stores everything

    def attend(self, parts: list[tuple[int, int]]) -> tuple[Tensor, Tensor]:
        """(rows, what they should be): the last of some sequences, (sequence, count) each."""
        q, latent, packed, cache, store, chosen, near, far, starts, lens, *how = self.args
        some = torch.cat([torch.arange(starts[s + 1] - n, starts[s + 1]) for s, n in parts])
        seqs = torch.tensor([s for s, _ in parts])
        first = torch.tensor([0, *(count for _, count in parts)]).cumsum(0)
        tables = [(table[seqs], slots[some]) for table, slots in (near, far)]
        picked = None if chosen is None else chosen[some]
        given = (q[some], latent[some], packed[some], cache, store, picked, *tables, first, lens[seqs], *how)
        return attend(*given), self.wanted[some]


@pytest.mark.parametrize("has_choice", [False, True])
def test_a_row_has_the_same_bits_in_decodes_and_prompts_by_one_program_or_many(
    has_choice: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(entries, "PART", 16)
    layer = Layer(has_choice)
    alone = torch.cat([layer.attend([(s, 1)])[0] for s in range(3)])
    together, wanted = layer.attend([(0, 1), (1, 1), (2, 1)])
    assert torch.equal(together, alone)
    torch.testing.assert_close(together, wanted, rtol=2e-5, atol=2e-5)
    monkeypatch.setattr(rows, "BUSY", 0)  # one program walks all parts of a row
    found, wanted = layer.attend([(2, 3), (0, 2), (1, 1)])
    torch.testing.assert_close(found, wanted, rtol=2e-5, atol=2e-5)
    assert torch.equal(found[[4, 5, 2]], alone)


def test_padding_changes_no_row() -> None:
    """A row of padding is at position 0 of block 0, or in a sequence without tokens."""
    layer = Layer(has_choice=True)
    q, latent, packed, cache, store, chosen, near, far, _, lens, *how = layer.args
    last = lens.cumsum(0) - 1
    some, zeros = torch.cat([last, last[:2]]), torch.zeros(2, near[0].shape[1], dtype=torch.int64)
    tables = [
        (torch.cat([table, zeros]), torch.cat([slots[last], torch.zeros(2, dtype=torch.int64)]))
        for table, slots in (near, far)
    ]
    picked = torch.cat([chosen[last], torch.full((2, TOP_K), -1, dtype=torch.int32)])
    lengths, starts = torch.cat([lens, torch.tensor([1, 0])]), torch.arange(6)
    given = (q[some], latent[some], packed[some], cache, store, picked, *tables, starts, lengths, *how)
    found = attend(*given)
    assert torch.equal(found[:3], layer.attend([(0, 1), (1, 1), (2, 1)])[0])
