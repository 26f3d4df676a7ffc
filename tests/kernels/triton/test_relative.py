"""Attention with a bias for each distance: bits of a row, parts of a step, blocks that left the window."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed here")

from plait.kernels.triton.attention import relative
from plait.kernels.triton.attention.relative import attend_by_distance
from plait.ops.attention import BLOCK, paged_case
from plait.ops.relative import relative_attention

HEADS, KV_HEADS, DIM, RANK, EXTENT = 4, 2, 16, 3, 40
LENGTHS = [270, 1, 40]


class Layer:
    """Sequences of LENGTHS in one cache, in which everything is placed but the rows that are attended."""

    def __init__(self) -> None:
        torch.manual_seed(4)
        (self.table, self.slots, self.starts, self.lens), blocks = paged_case(LENGTHS, "cpu")
        total = sum(LENGTHS)
        self.q, self.mixed = torch.randn(total, HEADS, DIM), torch.randn(total, HEADS, RANK)
        self.sinks: Tensor | None = None
        self.new = [torch.randn(total, KV_HEADS, DIM) for _ in "kv"]
        self.profiles = torch.randn(EXTENT, RANK)
        self.caches = [torch.zeros(blocks, BLOCK, KV_HEADS, DIM) for _ in "kv"]
        for cache, new in zip(self.caches, self.new, strict=True):
            cache.view(-1, KV_HEADS, DIM)[self.slots] = new

    def attend(self, parts: list[tuple[int, int]], window: int | None, reference: bool = False) -> Tensor:
        """The last rows of some sequences, (sequence, count) each, one behind the other."""
        rows = torch.cat([torch.arange(self.starts[s + 1] - n, self.starts[s + 1]) for s, n in parts])
        seqs = torch.tensor([s for s, _ in parts])
        starts = torch.tensor([0, *(count for _, count in parts)]).cumsum(0)
        where = (self.table[seqs], self.slots[rows], starts, self.lens[seqs])
        given = (self.q[rows], *(new[rows] for new in self.new), self.mixed[rows], self.profiles)
        fn = relative_attention.reference if reference else attend_by_distance
        sinks = None if self.sinks is None else self.sinks[rows]
        out: Tensor = fn(*given, *self.caches, *where, DIM**-0.5, window, sinks)
        return out


@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("window", [30, pytest.param(None, marks=pytest.mark.slow)])
def test_a_row_has_the_same_bits_in_a_decode_and_in_parts_of_a_prompt(
    window: int | None, has_sinks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = Layer()
    if has_sinks:
        layer.sinks = 2 * torch.randn(sum(LENGTHS), HEADS)
    alone = torch.cat([layer.attend([(s, 1)], window) for s in range(3)])
    assert torch.equal(layer.attend([(0, 1), (1, 1), (2, 1)], window), alone)
    wanted = layer.attend([(2, 4), (0, 9), (1, 1)], window, reference=True)
    whole = layer.attend([(2, 4), (0, 9), (1, 1)], window)
    torch.testing.assert_close(whole, wanted, rtol=1e-5, atol=1e-5)
    assert torch.equal(whole[[12, 13, 3]], alone)
    monkeypatch.setattr(relative, "MOST_BIASES", 5 * HEADS * EXTENT)  # parts of five rows
    assert torch.equal(layer.attend([(2, 4), (0, 9), (1, 1)], window), whole)


def test_what_lies_in_front_of_a_window_may_be_no_number() -> None:
    layer = Layer()
    want = layer.attend([(0, 3)], 30)
    layer.table[0, : (LENGTHS[0] - 3 - 30 + 1) // BLOCK] = 0
    for cache in layer.caches:
        cache[0] = torch.nan
    assert torch.equal(layer.attend([(0, 3)], 30), want)
