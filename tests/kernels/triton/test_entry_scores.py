"""Entries that are chosen in Triton: the same ones in decodes and in prompts, stored or new in the step."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed here")

from plait.kernels.triton.attention.compressed import scores
from plait.kernels.triton.attention.compressed.scores import choose
from plait.ops.compressed import choose_entries
from tests.ops.test_variants import copied

LENGTHS = [90, 1, 40]
CASE = dict(seqs=LENGTHS, heads=19, index_dim=20, top_k=5, rate=4, step=2)


class Layer:
    """Sequences of LENGTHS. What is not stored of them is no number."""

    def __init__(self) -> None:
        torch.manual_seed(4)
        assert choose_entries.make
        self.args = list(choose_entries.make(CASE, torch.float32, "cpu")[0])
        self.args[3].fill_(torch.nan)
        self.whole = copied(self.args)
        self.wanted: Tensor = choose_entries.reference(*self.whole)

    def choose(self, parts: list[tuple[int, int]]) -> tuple[Tensor, Tensor, bool]:
        """(what is chosen, what should be, whether the cache is right): of the last rows of some sequences,
        (sequence, count) each, before which all is stored."""
        q, weights, entries, cache, table, slots, starts, lens, *how = copied(self.args)
        rows = [torch.arange(starts[s + 1] - n, starts[s + 1]) for s, n in parts]
        some, seqs = torch.cat(rows), torch.tensor([s for s, _ in parts])
        first = torch.tensor([0, *(count for _, count in parts)]).cumsum(0)
        cache.copy_(self.whole[3])
        new = slots[some][(some - starts[seqs].repeat_interleave(first.diff()) + 1) % 4 == 0] // 2
        cache.view(-1, 20)[new] = torch.nan
        where = table[seqs], slots[some], first, lens[seqs]
        found = choose(q[some], weights[some], entries[some], cache, *where, *how)
        return found, self.wanted[some], torch.equal(cache.nan_to_num(7.0), self.whole[3].nan_to_num(7.0))


def test_decodes_and_cut_prompts_choose_the_same_entries_in_parts_of_a_step_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layer = Layer()
    for parts in ([(0, 1), (1, 1), (2, 1)], [(2, 6), (0, 3), (1, 1)]):
        found, wanted, is_stored = layer.choose(parts)
        assert torch.equal(found, wanted)
        assert is_stored
    monkeypatch.setattr(scores, "part_rows", lambda rows, most: 4)
    assert torch.equal(layer.choose(parts)[0], found)


def test_of_equal_scores_the_earlier_entries_are_chosen_and_padding_chooses_none() -> None:
    layer = Layer()
    layer.args[0].zero_()
    layer.args[7][1] = 0  # a sequence without tokens
    found, _, _ = layer.choose([(0, 1), (1, 1), (2, 1)])
    assert found.tolist() == [[0, 1, 2, 3, 4], [-1] * 5, [0, 1, 2, 3, 4]]
