"""The indexer's kernels over several steps: chunks, batches, threads and poisoned memory change no bit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from plait.errors import ShapeMismatch
from plait.kernels.load import executor
from plait.ops.indexer import NONE, choose_keys, sparse_latent_attention
from plait.ops.registry import OpFacts

HEADS, DIM, RANK, ROPE, TOP_K, BLOCK = 3, 16, 18, 6, 7, 16
LENGTHS = (40, 1, 23, 300, 9)
SCALE = 0.2


@dataclass
class Text:
    """What one sequence gives to both ops, whole."""

    q: Tensor
    weights: Tensor
    k: Tensor
    queries: Tensor
    latent: Tensor

    @classmethod
    def of(cls, length: int) -> Text:
        sizes = ((HEADS, DIM), (HEADS,), (DIM,), (HEADS, RANK + ROPE), (RANK + ROPE,))
        return cls(*(torch.randn(length, *size) for size in sizes))


class Memory:
    """Both caches, full of NaN, and the shuffled blocks of sequences."""

    def __init__(self, lengths: Sequence[int], kept: torch.dtype) -> None:
        needs = [-(-n // BLOCK) for n in lengths]
        self.table = torch.zeros(len(lengths), max(needs) + 2, dtype=torch.int64)
        for row, part in zip(self.table, (torch.randperm(sum(needs)) + 1).split(needs), strict=True):
            row[: len(part)] = part
        self.done = [0] * len(lengths)
        self.keys, self.latents = (
            torch.full((sum(needs) + 1, BLOCK, n), float("nan"), dtype=kept) for n in (DIM, RANK + ROPE)
        )

    def step(self, texts: Sequence[Text], counts: Sequence[int], cpu: Any) -> list[tuple[Tensor, Tensor]]:
        """The next counts[s] tokens of each sequence -> (chosen, attended) of each that has any."""
        which = [s for s, n in enumerate(counts) if n]
        spans = [slice(self.done[s], self.done[s] + counts[s]) for s in which]
        given = {
            name: torch.cat([getattr(texts[s], name)[span] for s, span in zip(which, spans, strict=True)])
            for name in ("q", "weights", "k", "queries", "latent")
        }
        at = [(s, t) for s, span in zip(which, spans, strict=True) for t in range(span.start, span.stop)]
        slots = torch.tensor([int(self.table[s, t // BLOCK]) * BLOCK + t % BLOCK for s, t in at])
        sizes = [counts[s] for s in which]
        for s in which:
            self.done[s] += counts[s]
        lens = torch.tensor([self.done[s] for s in which])
        where = (self.table[which], slots, torch.tensor([0, *sizes]).cumsum(0), lens)
        choose, attend = bound(cpu, self.keys.dtype)
        chosen = choose(given["q"], given["weights"], given["k"], self.keys, *where, TOP_K)
        out = attend(given["queries"], given["latent"], self.latents, chosen, *where, SCALE, RANK)
        return list(zip(chosen.split(sizes), out.split(sizes), strict=True))


def bound(cpu: Any, kept: torch.dtype) -> list[Any]:
    sizes = {"kv_dtype": str(kept).removeprefix("torch."), "block_size": BLOCK, "index_dim": DIM}
    found = [
        op.bind(OpFacts("cpu", torch.float32, sizes, cpu)) for op in (choose_keys, sparse_latent_attention)
    ]
    assert {row.variant for _, row in found} == {"native"}
    return [fn for fn, _ in found]


@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16])
def test_batches_chunks_and_threads_change_no_bit(kept: torch.dtype, cpu: Any) -> None:
    texts, alone = [Text.of(n) for n in LENGTHS], executor(1)
    whole = [Memory([n], kept).step([t], [n], alone)[0] for n, t in zip(LENGTHS, texts, strict=True)]
    memory, parts = Memory(LENGTHS, kept), [list[tuple[Tensor, Tensor]]() for _ in LENGTHS]
    while list(LENGTHS) != memory.done:
        left = [n - done for n, done in zip(LENGTHS, memory.done, strict=True)]
        counts = [min(n, 1 if s % 2 else 37 + 5 * len(parts[s])) for s, n in enumerate(left)]
        counts[3] = min(left[3], 90) if len(parts[3]) % 4 == 0 else min(left[3], 1)
        found = iter(memory.step(texts, counts, cpu))
        for s, n in enumerate(counts):
            if n:
                parts[s].append(next(found))
    assert alone is not None
    alone.close()
    for want, got in zip(whole, parts, strict=True):
        for a, b in zip(want, (torch.cat(p) for p in zip(*got, strict=True)), strict=True):
            assert torch.equal(a, b)


def test_of_equal_keys_the_earliest_are_chosen(cpu: Any) -> None:
    """Keys that no head likes all have the score 0."""
    text = Text.of(40)
    text.k, text.q, text.weights = -text.k.abs(), text.q.abs(), text.weights.abs()
    chosen, _ = Memory([40], torch.float32).step([text], [40], cpu)[0]
    assert chosen[30].tolist() == [*range(TOP_K)]
    assert chosen[2].tolist() == [0, 1, 2, *[NONE] * (TOP_K - 3)]


def test_sizes_that_do_not_fit_are_refused(cpu: Any) -> None:
    text, memory = Text.of(4), Memory([4], torch.float32)
    text.weights = torch.randn(4, HEADS + 1)
    with pytest.raises(ShapeMismatch, match=r"an indexer of 7 keys: q \[4, 3, 16\], weights \[4, 4\]"):
        memory.step([text], [4], cpu)
