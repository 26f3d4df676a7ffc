"""The largest numbers of rows in Triton: what a stable sort chooses, for rows of any length."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed here")

from plait.kernels.triton.attention import choose
from plait.kernels.triton.attention.choose import choose_from
from plait.ops.indexer import NONE

INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize(("listed", "tile"), [(8192, 4096), (64, 1024), (2048, 1024)])
def test_the_best_are_those_of_a_stable_sort(listed: int, tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ties, zeros of both signs, infinities; rows without numbers, with few, and of many tiles."""
    torch.manual_seed(0)
    monkeypatch.setattr(choose, "LONG_TILE", {"TILE": tile, "LISTED": listed})
    most, top_k = 9008, 100
    scores = torch.randn(8, most)
    scores[1] = scores[1].round()
    scores[2] = torch.where(scores[2] > 0, 0.0, -0.0)
    scores[3, ::3], scores[3, 5000:5050], scores[3, 1::3] = -INF, INF, 1e-42
    scores[7] = 1.0 + torch.randint(0, 5, (most,)) * 2.0**-23  # all alike but for their last bits
    ends = torch.tensor([most, most, most, most, 0, 99, 101, 8999], dtype=torch.int32)
    for row, end in zip(scores, ends.tolist(), strict=True):
        row[end:] = NAN
    found = choose_from(scores, ends, top_k)
    for row, end, got in zip(scores, ends.tolist(), found, strict=True):
        want = row[:end].sort(descending=True, stable=True).indices[:top_k].sort().values
        assert got[: len(want)].tolist() == want.tolist()
        assert (got[len(want) :] == NONE).all()


def test_short_rows_have_the_choice_of_long_ones() -> None:
    torch.manual_seed(1)
    scores, ends = torch.randn(3, 5008), torch.tensor([3008, 7, 1025], dtype=torch.int32)
    assert torch.equal(choose_from(scores, ends, 16), choose_from(scores[:, :3008].contiguous(), ends, 16))
