"""Kernels that copy rows (gather and concatenate): every byte arrives, from wherever it lay."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from plait.errors import ShapeMismatch
from plait.kernels.cpu.pointwise.copy_rows import _join, _pick_columns, _scatter_logits, _take_rows

SIZES = (1, 7, 15, 16, 17, 100)
LISTED = torch.arange(16).view(2, 8)  # tokens of clusters


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("heads", [(), (3,)])
def test_rows_are_taken_as_they_are(cpu: Any, n: int, heads: tuple[int, ...]) -> None:
    x = torch.randn(9, *heads, n + 4)[..., 1:-3]
    index = torch.tensor([8, 0, 3, 3, 7])
    assert torch.equal(_take_rows(cpu, x, index), x[index])
    assert _take_rows(cpu, x, index[:0]).shape == (0, *heads, n)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("m", [1, 16, 24])
def test_joined_rows_lie_side_by_side(cpu: Any, n: int, m: int) -> None:
    a, b = torch.randn(5, 7, n + 2)[:, 1:4, :-2], torch.randn(3, 5, m).transpose(0, 1)
    assert torch.equal(_join(cpu, a, b), torch.cat([a, b], -1))
    assert torch.equal(_join(cpu, a[:, 0], b[:, 1]), torch.cat([a[:, 0], b[:, 1]], -1))


@pytest.mark.parametrize("n", SIZES)
def test_columns_that_are_not_there_are_endless(cpu: Any, n: int) -> None:
    x, columns = torch.randn(5, n + 3)[:, 1:-2], torch.randint(-1, n, (3 * n + 1,))
    made = _pick_columns(cpu, x, columns)
    for c, column in enumerate(columns.tolist()):
        wanted = torch.full((5,), float("-inf")) if column < 0 else x[:, column]
        assert torch.equal(made[:, c], wanted)


@pytest.mark.parametrize(("k", "n"), [(1, 1), (3, 5), (7, 16)])
def test_logits_of_clusters_lie_where_their_tokens_are(cpu: Any, k: int, n: int) -> None:
    """With what was in memory before: a recording for more rows is run for fewer of them."""
    x, tokens = torch.randn(9, k, n), torch.randperm(7 * n).view(7, n)
    index = torch.zeros(9, k, dtype=torch.int64)
    with cpu.record(tokens=64, logits=9) as program:
        made = _scatter_logits(cpu, x, index, tokens)
    for rows in (9, 2):
        index.copy_(torch.rand(9, 7).topk(k, -1).indices)
        made.fill_(5.0)
        cpu.run(program, tokens=5, logits=rows, seqs=rows)
        for row in range(rows):
            wanted = torch.full((7 * n,), float("-inf"))
            wanted[tokens[index[row]].flatten()] = x[row].flatten()
            assert torch.equal(made[row], wanted)
        assert torch.all(made[rows:] == 5.0)


def test_a_recording_takes_what_the_index_says_by_then(cpu: Any) -> None:
    x, index = torch.randn(64, 33), torch.zeros(65, dtype=torch.int64)
    with cpu.record(tokens=64, logits=65) as program:
        joined = _join(cpu, x, x[:, 3:20])
        taken = _take_rows(cpu, joined, index)
    joined.zero_(), taken.zero_()
    index[:2] = torch.tensor([4, 1])
    cpu.run(program, tokens=5, logits=2, seqs=2)
    assert torch.equal(joined[:5], torch.cat([x, x[:, 3:20]], -1)[:5])
    assert torch.equal(taken[:2], joined[[4, 1]])
    assert not joined[5:].any()
    assert not taken[2:].any()


def test_what_a_kernel_would_misread_is_refused(cpu: Any) -> None:
    x = torch.randn(4, 8)
    for call in (
        lambda: _take_rows(cpu, x, torch.zeros(2, dtype=torch.int32)),
        lambda: _take_rows(cpu, x, torch.zeros(2, 1, dtype=torch.int64)),
        lambda: _take_rows(cpu, x.double(), torch.zeros(2, dtype=torch.int64)),
        lambda: _join(cpu, x, x[:3]),
        lambda: _join(cpu, x, x.T),
        lambda: _pick_columns(cpu, x, torch.zeros(2, dtype=torch.int32)),
        lambda: _pick_columns(cpu, x.T, torch.zeros(2, dtype=torch.int64)),
        lambda: _scatter_logits(cpu, x[:, None], torch.zeros(4, 2, dtype=torch.int64), LISTED),
        lambda: _scatter_logits(cpu, x[:, None], torch.zeros(4, 1, dtype=torch.int32), LISTED),
        lambda: _scatter_logits(cpu, x[:, None], torch.zeros(4, 1, dtype=torch.int64), LISTED[:, ::2]),
    ):
        with pytest.raises(ShapeMismatch):
            call()
