"""Compressed keys over several steps: chunks, batches and threads change no bit, and memory may hold NaN."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from plait.errors import ShapeMismatch
from plait.kernels.load import executor
from plait.ops.compressed import FOLDED, choose_entries, compress_tokens, entry_attention
from plait.ops.registry import OpFacts

HEADS, DIM, INDEX, RATE, STEP, TOP_K, WINDOW, BLOCK = 3, 20, 16, 8, 4, 3, 9, 16
LENGTHS = (90, 1, 41, 7)
SIZES = {"kv": (2 * DIM,), "gate": (2 * DIM,), "q": (HEADS, DIM), "latent": (DIM,)}
SIZES |= {"index_q": (2, INDEX), "index_k": (INDEX,), "weights": (2,)}
Text = dict[str, Tensor]


def bound(cpu: Any, kept: torch.dtype) -> list[Any]:
    sizes = {"kv_dtype": str(kept).removeprefix("torch."), "block_size": BLOCK, "index_dim": INDEX}
    ops = (compress_tokens, choose_entries, entry_attention)
    found = [op.bind(OpFacts("cpu", torch.float32, sizes, cpu)) for op in ops]
    assert {row.variant for _, row in found} == {"native"}
    return [fn for fn, _ in found]


def run(texts: Sequence[Text], steps: Sequence[Sequence[int]], kept: torch.dtype, cpu: Any) -> list[Tensor]:
    """What attention finds for each text, `steps` saying how many tokens of each a step computes."""
    ops, done, bias = bound(cpu, kept), [0] * len(texts), torch.linspace(-1, 1, RATE * 2 * DIM).view(RATE, -1)
    needs = [-(-len(t["q"]) // BLOCK) for t in texts]
    table = torch.zeros(len(texts), max(needs), dtype=torch.int64)
    for row, part in zip(table, (torch.randperm(sum(needs)) + 1).split(needs), strict=True):
        row[: len(part)] = part
    state = torch.full((len(texts) + 1, 3, FOLDED, DIM), float("nan"))
    places = ((BLOCK, DIM), (BLOCK // STEP, DIM), (BLOCK // STEP, INDEX))
    latents, packed, keys = (torch.full((sum(needs) + 1, *p), float("nan"), dtype=kept) for p in places)
    out: list[list[Tensor]] = [[] for _ in texts]
    for counts in steps:
        which = [s for s, n in enumerate(counts) if n]
        at = [(s, t) for s in which for t in range(done[s], done[s] + counts[s])]
        x = {n: torch.stack([texts[s][n][t] for s, t in at]) for n in SIZES}
        positions = torch.tensor([t for _, t in at])
        slots = torch.tensor([int(table[s, t // BLOCK]) * BLOCK + t % BLOCK for s, t in at])
        starts = torch.tensor([0, *(counts[s] for s in which)]).cumsum(0)
        lens, history = (torch.tensor([done[s] + n for s in which]) for n in (0, 0))
        lens, history = lens + torch.tensor([counts[s] for s in which]), history > 0
        where = (torch.tensor(which) + 1, starts, history, positions)
        made, first = ops[0](x["kv"], x["gate"], bias, state, *where, RATE)
        assert first.tolist() == [t // RATE * RATE for _, t in at]
        seqs, tables = (starts, lens), (table[which], slots)
        index = (x["index_q"], x["weights"], x["index_k"], keys, *tables, *seqs)
        chosen = ops[1](*index, TOP_K, RATE, STEP)
        heads = (x["q"], x["latent"], made, latents, packed, chosen, tables, tables, *seqs)
        found = ops[2](*heads, 0.3, WINDOW, torch.linspace(-1, 1, HEADS), RATE, STEP)
        for s, part in zip(which, found.split([counts[s] for s in which]), strict=True):
            out[s].append(part)
            done[s] += counts[s]
    return [torch.cat(parts) for parts in out]


@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16])
def test_batches_chunks_and_threads_change_no_bit(kept: torch.dtype, cpu: Any) -> None:
    texts = [{name: torch.randn(n, *size) for name, size in SIZES.items()} for n in LENGTHS]
    alone = executor(1)
    whole = [run([text], [[n]], kept, alone)[0] for text, n in zip(texts, LENGTHS, strict=True)]
    assert alone is not None
    alone.close()
    steps = [[37, 0, 1, 5], [1, 1, 17, 1], [1, 0, 1, 1], [30, 0, 20, 0], [21, 0, 2, 0]]
    assert [sum(counts) for counts in zip(*steps, strict=True)] == list(LENGTHS)
    for want, got in zip(whole, run(texts, steps, kept, cpu), strict=True):
        assert torch.equal(want, got)
        assert got.isfinite().all()


def test_sizes_that_do_not_fit_are_refused(cpu: Any) -> None:
    text = {name: torch.randn(4, *size) for name, size in SIZES.items()}
    with pytest.raises(ShapeMismatch, match=r"q \[4, 3, 20\] and latent \[4, 19\] do not fit"):
        run([{**text, "latent": torch.randn(4, DIM - 1)}], [[4]], torch.float32, cpu)
