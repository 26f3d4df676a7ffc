"""Passes of a head that drafts a block at once, as two native programs: of what is known, and of blocks.

Nothing here needs torch: `runner.block_passes` records them, and has what runs op by op.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from plait.runner.host.mtp_passes import Drafts, HiddenRows, HostPasses
from plait.runner.host.program import Floats, HostProgram
from plait.runner.host.sampler import HostSampler
from plait.schedule.plan import Chunk, SamplingBatch, SamplingRow, StepPlan
from plait.state.host_store import HostStore


class HostBlockPasses:
    """`program` stores keys and values of rows in `before`, [most tokens, width]; `blocks` computes blocks.

    `store`: the keys and values; `mask_token`: what stands for each token of a draft. Blocks are made as
    `plan_blocks` says.
    """

    ahead = 1

    def __init__(
        self,
        program: HostProgram,
        before: Floats,
        store: HostStore,
        blocks: HostProgram,
        sampler: HostSampler,
        mask_token: int,
    ) -> None:
        self.program, self.before, self.store, self.blocks = program, before, store, blocks
        self.mask_token, self._sampler = mask_token, sampler
        rows = blocks.static.capacity
        self.most = rows.logits // (rows.seqs - rows.logits)  # a block has one row more than a draft

    def run(
        self, plan: StepPlan, rows: Sequence[HiddenRows], sampling: Sequence[SamplingRow], length: int
    ) -> Drafts:
        """See `HeadPasses`."""
        at = 0
        for row in rows:
            self.before[at : at + len(row)] = np.asarray(row)
            at += len(row)
        self.program(plan)
        logits = self.blocks(plan_blocks(plan, length, self.mask_token))
        largest = self.blocks.results.largest
        answers = self._sampler.sample(logits, sample_blocks(sampling, length), largest)
        return [answer.token_ids for answer in answers]


RecordedPasses = HostPasses | HostBlockPasses


def plan_blocks(plan: StepPlan, length: int, mask_token: int) -> StepPlan:
    """The pass behind that of `plan`: of each chunk its last token, and masks in `length` places behind it.

    Each row is a chunk, of one token, and the slot of a chunk is the end of its block: so many tokens are
    there to be seen. Masks get logits.
    """
    chunks = []
    for chunk in plan.chunks:
        end = chunk.end + length + 1
        ids = (chunk.token_ids[-1], *(mask_token,) * length)
        for i, token in enumerate(ids):
            chunks.append(Chunk(chunk.seq_id, chunk.end + i, (token,), chunk.blocks, end, int(i > 0)))
    return replace(plan, chunks=tuple(chunks))


def sample_blocks(sampling: Sequence[SamplingRow], length: int) -> SamplingBatch:
    """What the sampler must know of blocks: as many rows of each sequence, each with a number of its own."""
    return SamplingBatch(
        tuple(SamplingRow(row.params, length, length, row.position, row.seed) for row in sampling)
    )
