"""Builds the batch tensors that the model reads from the scheduler's plan."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from plait.memory import BlockGroup
from plait.model.layers.layers import Batch, PagedIndex
from plait.schedule.plan import Chunk, StepPlan


def build_batch(plan: StepPlan, groups: Sequence[BlockGroup], block_size: int, device: torch.device) -> Batch:
    """The tensors of one step on `device`. A table entry a sequence does not have is 0, the garbage block."""
    chunks = plan.chunks

    def ints(values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    starts = [0, *accumulate(len(c.token_ids) for c in chunks)]
    positions = [p for c in chunks for p in range(c.start, c.end)]
    decodes = [len(c.token_ids) == 1 and c.start > 0 for c in chunks]
    num_decodes = decodes.index(False) if False in decodes else len(decodes)
    return Batch(
        token_ids=ints([t for c in chunks for t in c.token_ids]),
        positions=ints(positions),
        query_start=ints(starts),
        seq_lens=ints([c.end for c in chunks]),
        num_decodes=num_decodes,
        max_query_len=max(len(c.token_ids) for c in chunks),
        max_seq_len=max(c.end for c in chunks),
        paged={
            group.name: _paged_index([c.blocks[g] for c in chunks], chunks, block_size, device)
            for g, group in enumerate(groups)
        },
        state_slots=ints([c.slot for c in chunks]),
        has_history=torch.tensor([c.start > 0 for c in chunks], device=device),
        logit_rows=ints([row for c, end in zip(chunks, starts[1:], strict=True) for row in _last(c, end)]),
    )


def _last(chunk: Chunk, end: int) -> range:
    return range(end - chunk.num_logits, end)


def _paged_index(
    tables: Sequence[tuple[int, ...]], chunks: Sequence[Chunk], block_size: int, device: torch.device
) -> PagedIndex:
    width = max(map(len, tables))
    padded = torch.tensor([[*t, *[0] * (width - len(t))] for t in tables], dtype=torch.int64, device=device)
    mapping = [
        table[p // block_size] * block_size + p % block_size
        for table, c in zip(tables, chunks, strict=True)
        for p in range(c.start, c.end)
    ]
    return PagedIndex(padded, torch.tensor(mapping, dtype=torch.int64, device=device))
