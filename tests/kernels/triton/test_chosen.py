"""Indexers and attention to what they choose, in Triton: a row depends on its sequence alone.

However a prompt is cut and batched, its rows have the same bits, and its keys are found in later steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed here")

from plait.kernels.triton.attention import attend_chosen, choose, index_scores
from plait.kernels.triton.attention.attend_chosen import attend_blocks, attend_latents
from plait.kernels.triton.attention.index_scores import choose_best_blocks, choose_best_keys
from plait.ops.indexer import NONE

PAGE, LENGTH = 8, 21
TABLE = torch.tensor([[3, 1, 6], [5, 4, 2], [0, 0, 0]])  # of two sequences, and of padding
Step = Callable[[tuple[Tensor, ...], tuple[Tensor, ...]], Tensor]


def run(step: Step, inputs: Sequence[Tensor], seqs: Sequence[tuple[int, int, int]]) -> list[Tensor]:
    """Rows start..stop of each sequence, given as (line of the table, start, stop), in one step."""
    rows = [slice(start, stop) for _, start, stop in seqs]
    table = TABLE[[line for line, _, _ in seqs]]
    slots = [
        table[s, t // PAGE] * PAGE + t % PAGE
        for s, (_, start, stop) in enumerate(seqs)
        for t in range(start, stop)
    ]
    counts = [stop - start for _, start, stop in seqs]
    query_start, lengths = torch.tensor([0, *counts]).cumsum(0), torch.tensor([stop for *_, stop in seqs])
    given = tuple(torch.cat([m[part] for part in rows]) for m in inputs)
    return list(step(given, (table, torch.stack(slots), query_start, lengths)).split(counts))


def check(make: Callable[[], tuple[Step, list[Tensor]]]) -> None:
    """A prompt at once; in chunks next to a prompt of another sequence; and token by token."""
    torch.manual_seed(0)
    step, inputs = make()
    (want,) = run(step, inputs, [(0, 0, LENGTH)])
    step, _ = make()
    first, _ = run(step, inputs, [(0, 0, 9), (1, 0, 4)])
    _, second = run(step, inputs, [(1, 4, 6), (0, 9, LENGTH - 2)])
    last, _, _ = run(step, inputs, [(0, LENGTH - 2, LENGTH - 1), (2, 0, 1), (1, 6, 7)])
    (end,) = run(step, inputs, [(0, LENGTH - 1, LENGTH)])
    assert torch.equal(torch.cat([first, second, last, end]), want)


def garbage(*shape: int, kept: torch.dtype = torch.float32) -> Tensor:
    return (torch.randn(7, PAGE, *shape) * 50).to(kept)


@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16])
def test_chosen_keys_depend_on_no_chunk(kept: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "MOST_SCORES", (24 + 1024) * 15)  # parts of 15 rows
    monkeypatch.setattr(index_scores, "WIDE_KEYS", 16)

    def make() -> tuple[Step, list[Tensor]]:
        cache = garbage(20, kept=kept)

        def step(given: Any, where: Any) -> Tensor:
            return choose_best_keys(*given, cache, *where, 7)

        return step, [torch.randn(LENGTH, 5, 20), torch.randn(LENGTH, 5), torch.randn(LENGTH, 20)]

    check(make)


@pytest.mark.parametrize("size", [4, 5])
def test_chosen_blocks_depend_on_no_chunk(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "MOST_SCORES", (6 + 1024) * 18)
    monkeypatch.setattr(index_scores, "WIDE_KEYS", 16)
    monkeypatch.setattr(index_scores, "PAIRS", 8)  # tiles of two rows and of four

    def make() -> tuple[Step, list[Tensor]]:
        cache = garbage(20)

        def step(given: Any, where: Any) -> Tensor:
            return choose_best_blocks(*given, cache, *where, size, 3, 1)

        return step, [torch.randn(LENGTH, 2, 20), torch.randn(LENGTH, 20)]

    check(make)


@pytest.mark.parametrize("sinks", [None, torch.linspace(-3.0, 3.0, 5)])
def test_sums_over_chosen_latents_depend_on_no_chunk(
    sinks: Tensor | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Splits of few rows are apart, those of the whole prompt are walked."""
    monkeypatch.setattr(attend_chosen, "SPLIT", 4)
    monkeypatch.setattr(attend_chosen, "count_programs", lambda _: 4 * 12)

    def make() -> tuple[Step, list[Tensor]]:
        cache = garbage(26)
        chosen = torch.stack([choose_some(at + 1, 10) for at in range(LENGTH)])

        def step(given: Any, where: Any) -> Tensor:
            q, latent, some = given
            return attend_latents(q, latent, cache, some, *where, 0.2, 20, sinks)

        return step, [torch.randn(LENGTH, 5, 26), torch.randn(LENGTH, 26), chosen]

    check(make)


def test_sums_over_chosen_blocks_depend_on_no_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attend_chosen, "SPLIT", 8)
    monkeypatch.setattr(attend_chosen, "count_programs", lambda _: 4 * 12)

    def make() -> tuple[Step, list[Tensor]]:
        caches = garbage(2, 20), garbage(2, 20)
        blocks = [torch.stack([choose_some(at // 3 + 1, 3) for _ in range(2)]) for at in range(LENGTH)]

        def step(given: Any, where: Any) -> Tensor:
            q, k, v, some = given
            return attend_blocks(q, k, v, *caches, some, *where, 0.2, 3)

        shapes = (6, 20), (2, 20), (2, 20)
        return step, [*(torch.randn(LENGTH, *shape) for shape in shapes), torch.stack(blocks)]

    check(make)


def choose_some(count: int, most: int) -> Tensor:
    """Some of `count` numbers, the last one among them, rising, then NONE."""
    others = torch.randperm(count - 1)[: most - 1].sort().values
    return torch.cat([others, torch.tensor([count - 1]), torch.full((most - 1 - len(others),), NONE)]).int()
