"""Passes of a head that drafts all tokens at once, as native programs.

Heads of blocks have two: of what is known, and of blocks. P-EAGLE has one: masks follow what is known.

Nothing here needs torch: `runner.block_passes` records them, and has what runs op by op.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from msgspec import Struct

from plait.runner.host.mtp_passes import Drafts, HiddenRows, HostPasses
from plait.runner.host.program import Floats, HostProgram
from plait.runner.host.sampler import HostSampler
from plait.schedule.plan import Chunk, SamplingBatch, SamplingRow, StepPlan
from plait.state.host_store import HostStore


class BlockForm(Struct, frozen=True):
    """What blocks are made of. `most`: tokens of a draft; `mask_token`: what stands for one; `from_last`: the
    last token gives the first of a draft, so it needs one mask less."""

    most: int
    mask_token: int
    from_last: bool

    def count_rows(self, length: int) -> int:
        """Rows of a block with so many draft tokens."""
        return length + (not self.from_last)


class HostBlockPasses:
    """`program` stores keys and values of rows in `before`, [most tokens, width]; `blocks` computes blocks.

    `store`: the keys and values; `form`: of blocks.
    """

    ahead, at_once = 1, True

    def __init__(
        self,
        program: HostProgram,
        before: Floats,
        store: HostStore,
        blocks: HostProgram,
        sampler: HostSampler,
        form: BlockForm,
    ) -> None:
        self.program, self.before, self.store, self.blocks = program, before, store, blocks
        self.form, self._sampler = form, sampler

    @property
    def most(self) -> int:
        """See `HeadPasses`."""
        return self.form.most

    def run(
        self, plan: StepPlan, rows: Sequence[HiddenRows], sampling: Sequence[SamplingRow], length: int
    ) -> Drafts:
        """See `HeadPasses`."""
        self.keep(plan, rows)
        return self._draw(self._compute(plan, length), plan, sampling, length)

    def keep(self, plan: StepPlan, rows: Sequence[HiddenRows]) -> None:
        """See `KeepingPasses`."""
        at = 0
        for row in rows:
            self.before[at : at + len(row)] = np.asarray(row)
            at += len(row)
        self.program(plan)

    def _compute(self, plan: StepPlan, length: int) -> Floats:
        """Logits of the draft's places, those of a chunk one behind the other."""
        return self.blocks(plan_blocks(plan, length, self.form))

    def _draw(self, logits: Floats, plan: StepPlan, sampling: Sequence[SamplingRow], length: int) -> Drafts:
        largest = self.blocks.results.largest
        answers = self._sampler.sample(logits, sample_blocks(sampling, length), largest)
        return [answer.token_ids for answer in answers]


class MaskForm(Struct, frozen=True):
    """What stands for tokens of a draft that one pass makes. `most`: how many, at most; `token`: in the place
    of each; `row`: in the place of what the model made of the token before it, float32."""

    most: int
    token: int
    row: bytes


class HostMaskedPasses:
    """One native program, over what is known of a sequence and masks behind it.

    `before`: what the model made of rows, [most tokens, width]; `store`: keys and values; `form`: of masks.
    """

    ahead, at_once = 0, True

    def __init__(
        self, program: HostProgram, before: Floats, store: HostStore, sampler: HostSampler, form: MaskForm
    ) -> None:
        self.program, self.before, self.store, self.form = program, before, store, form
        self._row, self._sampler = np.frombuffer(form.row, np.float32), sampler

    @property
    def most(self) -> int:
        """See `HeadPasses`."""
        return self.form.most

    def run(
        self, plan: StepPlan, rows: Sequence[HiddenRows], sampling: Sequence[SamplingRow], length: int
    ) -> Drafts:
        """See `HeadPasses`."""
        at = 0
        for row in rows:
            end = at + len(row)
            self.before[at:end] = np.asarray(row)
            at = end + length - 1
            self.before[end:at] = self._row
        logits = self.program(plan_masks(plan, length, self.form.token))
        answers = self._sampler.sample(logits, sample_blocks(sampling, length), self.program.results.largest)
        return [answer.token_ids for answer in answers]


RecordedPasses = HostPasses | HostBlockPasses | HostMaskedPasses


def plan_masks(plan: StepPlan, length: int, token: int) -> StepPlan:
    """The pass of `plan` with masks behind each chunk; its last token and they give the tokens of a draft."""
    masks = (token,) * (length - 1)
    chunks = (Chunk(c.seq_id, c.start, (*c.token_ids, *masks), c.blocks, c.slot, length) for c in plan.chunks)
    return replace(plan, chunks=tuple(chunks))


def plan_blocks(plan: StepPlan, length: int, form: BlockForm) -> StepPlan:
    """The pass behind that of `plan`: of each chunk its last token, and masks in the places behind it.

    Each row is a chunk, of one token, and the slot of a chunk is the end of its block: so many tokens are
    there to be seen. Rows that give a token of the draft get logits.
    """
    chunks, count = [], form.count_rows(length)
    for chunk in plan.chunks:
        end = chunk.end + count
        for i, token in enumerate((chunk.token_ids[-1], *(form.mask_token,) * (count - 1))):
            is_drafted = int(i > 0 or form.from_last)
            chunks.append(Chunk(chunk.seq_id, chunk.end + i, (token,), chunk.blocks, end, is_drafted))
    return replace(plan, chunks=tuple(chunks))


def sample_blocks(sampling: Sequence[SamplingRow], length: int) -> SamplingBatch:
    """What the sampler must know of blocks: as many rows of each sequence, each with a number of its own."""
    return SamplingBatch(
        tuple(SamplingRow(row.params, length, length, row.position, row.seed) for row in sampling)
    )
