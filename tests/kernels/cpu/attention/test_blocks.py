"""Block-sparse attention over several steps: chunks, batches, threads and poisoned memory change no bit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from plait.errors import ShapeMismatch
from plait.kernels.load import executor
from plait.kernels.torch import block_sparse as on_gpus
from plait.ops.block_sparse import block_sparse_attention, choose_blocks
from plait.ops.indexer import NONE
from plait.ops.registry import OpFacts

HEADS, KV, WIDTH, DIM, SIZE, TOP_K, LOCAL, BLOCK = 6, 2, 18, 16, 5, 4, 2, 16
LENGTHS = (40, 1, 23, 300, 9)
SCALE = 0.3
Ops = tuple[Any, Any]


@dataclass
class Text:
    """What one sequence gives to both ops, whole."""

    index_q: Tensor
    index_k: Tensor
    q: Tensor
    k: Tensor
    v: Tensor

    @classmethod
    def of(cls, length: int) -> Text:
        sizes = ((KV, DIM), (DIM,), (HEADS, WIDTH), (KV, WIDTH), (KV, WIDTH))
        return cls(*(torch.randn(length, *size) for size in sizes))


class Memory:
    """The three caches, full of NaN, and the shuffled blocks of sequences."""

    def __init__(self, lengths: Sequence[int], kept: torch.dtype) -> None:
        needs = [-(-n // BLOCK) for n in lengths]
        self.table = torch.zeros(len(lengths), max(needs) + 2, dtype=torch.int64)
        for row, part in zip(self.table, (torch.randperm(sum(needs)) + 1).split(needs), strict=True):
            row[: len(part)] = part
        self.done = [0] * len(lengths)
        self.caches = [
            torch.full((sum(needs) + 1, BLOCK, *entry), float("nan"), dtype=kept)
            for entry in ((DIM,), (KV, WIDTH), (KV, WIDTH))
        ]

    def step(self, texts: Sequence[Text], counts: Sequence[int], ops: Ops) -> list[tuple[Tensor, Tensor]]:
        """The next counts[s] tokens of each sequence -> (chosen, attended) of each that has any."""
        which = [s for s, n in enumerate(counts) if n]
        spans = [slice(self.done[s], self.done[s] + counts[s]) for s in which]
        given = {
            name: torch.cat([getattr(texts[s], name)[span] for s, span in zip(which, spans, strict=True)])
            for name in Text.__dataclass_fields__
        }
        at = [(s, t) for s, span in zip(which, spans, strict=True) for t in range(span.start, span.stop)]
        slots = torch.tensor([int(self.table[s, t // BLOCK]) * BLOCK + t % BLOCK for s, t in at])
        sizes = [counts[s] for s in which]
        for s in which:
            self.done[s] += counts[s]
        lens = torch.tensor([self.done[s] for s in which])
        where = (self.table[which], slots, torch.tensor([0, *sizes]).cumsum(0), lens)
        (choose, attend), (index, keys, values) = ops, self.caches
        chosen = choose(given["index_q"], given["index_k"], index, *where, SIZE, TOP_K, LOCAL)
        heads = (given["q"], given["k"], given["v"], keys, values)
        out = attend(*heads, chosen, *where, SCALE, SIZE)
        return list(zip(chosen.split(sizes), out.split(sizes), strict=True))


def bound(cpu: Any, kept: torch.dtype) -> Ops:
    sizes = {"kv_dtype": str(kept).removeprefix("torch."), "block_size": BLOCK, "index_dim": DIM}
    found = [
        op.bind(OpFacts("cpu", torch.float32, sizes, cpu)) for op in (choose_blocks, block_sparse_attention)
    ]
    assert {row.variant for _, row in found} == {"native"}
    return found[0][0], found[1][0]


def run(texts: Sequence[Text], kept: torch.dtype, ops: Ops) -> list[list[tuple[Tensor, Tensor]]]:
    """All of the texts in one memory: long chunks next to decodes."""
    memory, parts = Memory(LENGTHS, kept), [list[tuple[Tensor, Tensor]]() for _ in LENGTHS]
    while list(LENGTHS) != memory.done:
        left = [n - done for n, done in zip(LENGTHS, memory.done, strict=True)]
        counts = [min(n, 1 if s % 2 else 37 + 5 * len(parts[s])) for s, n in enumerate(left)]
        counts[3] = min(left[3], 90) if len(parts[3]) % 4 == 0 else min(left[3], 1)
        found = iter(memory.step(texts, counts, ops))
        for s, n in enumerate(counts):
            if n:
                parts[s].append(next(found))
    return parts


@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16])
def test_batches_chunks_and_threads_change_no_bit(kept: torch.dtype, cpu: Any) -> None:
    texts, alone = [Text.of(n) for n in LENGTHS], executor(1)
    ops = bound(alone, kept)
    whole = [Memory([n], kept).step([t], [n], ops)[0] for n, t in zip(LENGTHS, texts, strict=True)]
    parts = run(texts, kept, bound(cpu, kept))
    assert alone is not None
    alone.close()
    for want, got in zip(whole, parts, strict=True):
        for a, b in zip(want, (torch.cat(p) for p in zip(*got, strict=True)), strict=True):
            assert torch.equal(a, b)


def test_the_last_blocks_are_always_chosen_and_of_equal_ones_the_earliest(cpu: Any) -> None:
    text = Text.of(40)
    text.index_k = torch.zeros_like(text.index_k)
    chosen, _ = Memory([40], torch.float32).step([text], [40], bound(cpu, torch.float32))[0]
    assert chosen[38, 1].tolist() == [0, 1, 6, 7]
    assert chosen[2, 0].tolist() == [0, *[NONE] * 3]


def test_five_lengths_decode_on_gpus_as_the_references_do() -> None:
    """What runs there is torch's, so this machine can compute it, too."""
    texts = [Text.of(n) for n in (31, 1, 17, 44, 9)]
    found = []
    for ops in (
        (on_gpus.choose, on_gpus.attend),
        (choose_blocks.reference, block_sparse_attention.reference),
    ):
        torch.manual_seed(5)
        memory = Memory([len(t.q) for t in texts], torch.float32)
        memory.step(texts, [len(t.q) - 1 for t in texts], ops)
        found.append(memory.step(texts, [1] * 5, ops))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one[0], other[0])
        torch.testing.assert_close(one[1], other[1], rtol=1e-5, atol=1e-6)


def test_sizes_that_do_not_fit_are_refused(cpu: Any) -> None:
    text, memory = Text.of(4), Memory([4], torch.float32)
    text.k = torch.randn(4, KV, WIDTH + 1)
    with pytest.raises(ShapeMismatch, match=r"q \[4, 6, 18\], k \[4, 2, 19\] .* do not fit caches of 2 kv"):
        memory.step([text], [4], bound(cpu, torch.float32))
