"""Passes of a head that drafts all tokens at once: recorded as native programs, or op by op."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from plait.errors import CannotRecord
from plait.model.block_choice import BlockChoice
from plait.model.dflash import DFlashHead
from plait.model.eagle import EagleHead
from plait.model.token_conv import BlockRows
from plait.runner.host.block_passes import (
    BlockForm,
    HostBlockPasses,
    HostMaskedPasses,
    MaskForm,
    plan_blocks,
    plan_masks,
    sample_blocks,
)
from plait.runner.host.mtp import HiddenOnHost
from plait.runner.host.mtp_passes import Drafts, HiddenRows, replace_position
from plait.runner.host.program import Floats, HostProgram, StepResults
from plait.runner.host.sampler import HostSampler
from plait.runner.host.static_batch import Capacity, StaticBatch
from plait.runner.mtp_passes import HeadRunner, HiddenOnDevice
from plait.runner.program import NativeExecutor, ViewsOnly, view_as_batch
from plait.runner.sampling.sampler import Sampler
from plait.runner.steps.inputs import build_batch
from plait.schedule.plan import Sampled, SamplingBatch, SamplingRow, StepPlan
from plait.state.store import StateStore

Draw = Callable[[Tensor, SamplingBatch], list[Sampled]]


class EagerBlockPasses:
    """Op by op, on any device."""

    ahead, at_once = 1, True

    def __init__(
        self, head: DFlashHead, store: StateStore, sampler: Sampler, device: torch.device, form: BlockForm
    ) -> None:
        self._head, self._store, self._sampler, self._device = head, store, sampler, device
        self._form, self.most = form, form.most
        self._banned = list_banned(sampler.host).to(device)

    @torch.inference_mode()
    def run(
        self, plan: StepPlan, rows: Sequence[HiddenRows], sampling: Sequence[SamplingRow], length: int
    ) -> Drafts:
        """See `HeadPasses`."""
        self.keep(plan, rows)
        head, store, form = self._head, self._store, self._form
        batch = build_batch(plan_blocks(plan, length, form), head.groups, store.block_size, self._device)
        size = form.count_rows(length)
        starts = torch.arange(0, (len(rows) + 1) * size, size, device=self._device)
        last = head.compute(batch, store, BlockRows.of(starts))
        logits, draw = head.logits(last), self._sampler.sample
        if head.choice:
            logits[:, self._banned] = float("-inf")
            return choose_in_turn(head.choice, (logits, last), plan, sampling, draw)
        return [answer.token_ids for answer in draw(logits, sample_blocks(sampling, length))]

    @torch.inference_mode()
    def keep(self, plan: StepPlan, rows: Sequence[HiddenRows]) -> None:
        """See `KeepingPasses`."""
        batch = build_batch(plan, self._head.groups, self._store.block_size, self._device)
        self._head.keep(batch, self._store, torch.cat([torch.as_tensor(row) for row in rows]))


class EagerMaskedPasses:
    """Of a head that needs one pass over what is known and masks, op by op, on any device."""

    ahead, at_once = 0, True

    def __init__(
        self, head: EagleHead, store: StateStore, sampler: Sampler, device: torch.device, form: MaskForm
    ) -> None:
        self._head, self._store, self._sampler, self._device = head, store, sampler, device
        self._form, self.most = form, form.most

    @torch.inference_mode()
    def run(
        self, plan: StepPlan, rows: Sequence[HiddenRows], sampling: Sequence[SamplingRow], length: int
    ) -> Drafts:
        """See `HeadPasses`."""
        head, mask = self._head, self._head.mask
        assert mask is not None
        masks = mask.expand(length - 1, -1)
        before = torch.cat([part for row in rows for part in (torch.as_tensor(row), masks)])
        plan = plan_masks(plan, length, self._form.token)
        batch = build_batch(plan, head.groups, self._store.block_size, self._device)
        last = head.keep_last(head.compute(batch, self._store, before), batch, before)
        answers = self._sampler.sample(head.logits(last), sample_blocks(sampling, length))
        return [answer.token_ids for answer in answers]


class ChosenBlockPasses(HostBlockPasses):
    """Recorded passes of a head that chooses each token knowing the one before it.

    `rows`: which of a pass are a block, as `blocks` reads it. Not of a startup image: it draws with torch.
    """

    def __init__(
        self, passes: HostBlockPasses, sampler: HostSampler, choice: BlockChoice, rows: BlockRows
    ) -> None:
        program, store = passes.program, passes.store
        super().__init__(program, passes.before, store, passes.blocks, sampler, passes.form)
        self._choice, self._starts = choice, rows.starts.numpy()
        self._banned = list_banned(sampler)

    def _compute(self, plan: StepPlan, length: int) -> Floats:
        count, size = len(plan.chunks), self.form.count_rows(length)
        self._starts[:] = count * size
        self._starts[: count + 1] = range(0, (count + 1) * size, size)
        return super()._compute(plan, length)

    @torch.inference_mode()
    def _draw(self, logits: Floats, plan: StepPlan, sampling: Sequence[SamplingRow], length: int) -> Drafts:
        def draw(rows: Tensor, batch: SamplingBatch) -> list[Sampled]:
            return self._sampler.sample(rows.numpy(), batch)

        logits[:, self._banned.numpy()] = -np.inf
        parts = torch.from_numpy(logits), torch.from_numpy(self.blocks.results.hidden[: len(logits)])
        return choose_in_turn(self._choice, parts, plan, sampling, draw)


def list_banned(sampler: HostSampler) -> Tensor:
    """The tokens that are never drawn: a choice among a few must not be one of these."""
    behind = torch.arange(sampler.limit, sampler.vocab_size)
    return torch.cat([torch.from_numpy(sampler.holes), behind])


def choose_in_turn(
    choice: BlockChoice,
    parts: tuple[Tensor, Tensor],
    plan: StepPlan,
    sampling: Sequence[SamplingRow],
    draw: Draw,
) -> Drafts:
    """A draft for each chunk of a plan, token by token. parts: logits, and what they were made of, of all
    places, those of a chunk one behind the other. Tokens that are never drawn have -inf."""
    logits, last = (part.unflatten(0, (len(plan.chunks), -1)) for part in parts)
    tokens, steps = [chunk.token_ids[-1] for chunk in plan.chunks], list[list[int]]()
    for i in range(logits.shape[1]):
        previous = torch.tensor(tokens, device=logits.device)
        rows = choice.adjust(logits[:, i], last[:, i].contiguous(), previous)
        answers = draw(rows, SamplingBatch(tuple(replace_position(row, i) for row in sampling)))
        tokens = [answer.token_ids[0] for answer in answers]
        steps.append(tokens)
    return [*zip(*steps, strict=True)]


def record_block_passes(
    head: DFlashHead,
    store: StateStore,
    sampler: Sampler,
    threads: NativeExecutor,
    capacity: Capacity,
    form: BlockForm,
) -> tuple[HostBlockPasses, int]:
    """A head's passes as native programs, and their launches. Raises CannotRecord.

    capacity: of a pass over what is known.
    """
    known = StaticBatch(capacity, head.groups, store.block_size)
    before = torch.zeros(capacity.tokens, head.width)
    with threads.record(capacity.tokens, capacity.logits) as keeping, ViewsOnly():
        head.keep(view_as_batch(known, head.groups), store, before)
    keeper = HostProgram(threads, keeping, known, StepResults(before.numpy(), before.numpy(), None))
    tokens, logits = capacity.seqs * form.count_rows(form.most), capacity.seqs * form.most
    logits += logits == tokens  # a recording distinguishes tokens and rows of logits by their number
    blocks = StaticBatch(Capacity(tokens, logits, tokens, capacity.blocks), head.groups, store.block_size)
    rows, largest = BlockRows.of(torch.zeros(tokens + 1, dtype=torch.int64)), sampler.plain_largest
    with threads.record(tokens, logits) as drafting, ViewsOnly():
        last = head.compute(view_as_batch(blocks, head.groups), store, rows)
        made = head.logits(last)
        found = largest(made) if largest and not head.choice else None
    likeliest = (found[0].numpy(), found[1].numpy()) if found else None
    drafter = HostProgram(threads, drafting, blocks, StepResults(last.numpy(), made.numpy(), likeliest))
    assert store.host is not None
    passes = HostBlockPasses(keeper, before.numpy(), store.host, drafter, sampler.host, form)
    if head.choice:
        passes = ChosenBlockPasses(passes, sampler.host, head.choice, rows)
    return passes, len(keeping.names) + len(drafting.names)


def record_masked_passes(
    head: EagleHead,
    store: StateStore,
    sampler: Sampler,
    threads: NativeExecutor,
    capacity: Capacity,
    form: MaskForm,
) -> tuple[HostMaskedPasses, int]:
    """A head's pass as a native program, and its launches. Raises CannotRecord.

    capacity: of a pass over what is known.
    """
    tokens, logits = capacity.tokens + capacity.seqs * (form.most - 1), capacity.seqs * form.most
    logits += logits == tokens  # a recording distinguishes tokens and rows of logits by their number
    most = Capacity(tokens, logits, capacity.seqs, capacity.blocks)
    static, before = StaticBatch(most, head.groups, store.block_size), torch.zeros(tokens, head.width)
    batch, largest = view_as_batch(static, head.groups), sampler.plain_largest
    with threads.record(tokens, logits) as table, ViewsOnly():
        hidden = head.compute(batch, store, before)
        made = head.logits(head.keep_last(hidden, batch, before))
        found = largest(made) if largest else None
    likeliest = (found[0].numpy(), found[1].numpy()) if found else None
    program = HostProgram(threads, table, static, StepResults(hidden.numpy(), made.numpy(), likeliest))
    assert store.host is not None
    return HostMaskedPasses(program, before.numpy(), store.host, sampler.host, form), len(table.names)


def make_masked_passes(
    head: EagleHead,
    store: StateStore,
    sampler: Sampler,
    target: tuple[torch.device, torch.dtype],
    threads: NativeExecutor | None,
    capacity: Capacity,
    most: int,
) -> HeadRunner:
    """See `make_block_passes`, of a head that needs one pass for a draft."""
    (device, dtype), why = target, "there is no executor of native kernels"
    assert head.mask is not None
    assert head.spec.mask_token is not None
    form = MaskForm(most, head.spec.mask_token, head.mask.float().cpu().numpy().tobytes())
    if threads is not None:
        try:
            passes, launches = record_masked_passes(head, store, sampler, threads, capacity, form)
            kept = HiddenOnHost(capacity.seqs, head.width)
            return HeadRunner(passes, kept, f"{launches} launches, one call")
        except CannotRecord as error:
            why = str(error)
    kept_there = HiddenOnDevice(capacity.seqs, head.width, dtype, device)
    eager = EagerMaskedPasses(head, store, sampler, device, form)
    return HeadRunner(eager, kept_there, f"op by op: {why}")


def make_block_passes(
    head: DFlashHead,
    store: StateStore,
    sampler: Sampler,
    target: tuple[torch.device, torch.dtype],
    threads: NativeExecutor | None,
    capacity: Capacity,
    most: int,
) -> HeadRunner:
    """Recorded where there are native kernels for all of it. target: the device, and the model's dtype.

    most: tokens of a draft, if the head makes as many.
    """
    (device, dtype), why = target, "there is no executor of native kernels"
    form = BlockForm(min(most, head.spec.most), head.spec.mask_token, head.spec.from_last)
    if threads is not None:
        try:
            passes, launches = record_block_passes(head, store, sampler, threads, capacity, form)
            one_by_one = ", then token by token with torch" if head.choice else ""
            kind = f"{launches} launches, two calls{one_by_one}"
            return HeadRunner(passes, HiddenOnHost(capacity.seqs, head.width), kind)
        except CannotRecord as error:
            why = str(error)
    kept = HiddenOnDevice(capacity.seqs, head.width, dtype, device)
    return HeadRunner(EagerBlockPasses(head, store, sampler, device, form), kept, f"op by op: {why}")
