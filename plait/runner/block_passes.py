"""Passes of a head that drafts a block at once: recorded as two native programs, or op by op."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from plait.errors import CannotRecord
from plait.model.dflash import DFlashHead
from plait.runner.batches.inputs import build_batch
from plait.runner.host.block_passes import HostBlockPasses, plan_blocks, sample_blocks
from plait.runner.host.mtp import HiddenOnHost
from plait.runner.host.mtp_passes import Drafts, HiddenRows
from plait.runner.host.program import HostProgram, StepResults
from plait.runner.host.static_batch import Capacity, StaticBatch
from plait.runner.mtp_passes import HeadRunner, HiddenOnDevice
from plait.runner.program import NativeExecutor, ViewsOnly, view_as_batch
from plait.runner.sampler import Sampler
from plait.schedule.plan import SamplingRow, StepPlan
from plait.state.store import StateStore


class EagerBlockPasses:
    """Op by op, on any device. `most`: see `HeadPasses`."""

    ahead = 1

    def __init__(
        self, head: DFlashHead, store: StateStore, sampler: Sampler, device: torch.device, most: int
    ) -> None:
        self.most, self._head, self._store, self._sampler, self._device = most, head, store, sampler, device

    @torch.inference_mode()
    def run(
        self, plan: StepPlan, rows: Sequence[HiddenRows], sampling: Sequence[SamplingRow], length: int
    ) -> Drafts:
        """See `HeadPasses`."""
        head, store = self._head, self._store
        batch = build_batch(plan, head.groups, store.block_size, self._device)
        head.keep(batch, store, torch.cat([torch.as_tensor(row) for row in rows]))
        blocks = plan_blocks(plan, length, head.spec.mask_token)
        batch = build_batch(blocks, head.groups, store.block_size, self._device)
        logits = head.logits(head.compute(batch, store))
        answers = self._sampler.sample(logits, sample_blocks(sampling, length))
        return [answer.token_ids for answer in answers]


def record_block_passes(
    head: DFlashHead,
    store: StateStore,
    sampler: Sampler,
    threads: NativeExecutor,
    capacity: Capacity,
    most: int,
) -> tuple[HostBlockPasses, int]:
    """A head's passes as native programs, and their launches. Raises CannotRecord.

    capacity: of a pass over what is known; most: tokens of a draft.
    """
    known = StaticBatch(capacity, head.groups, store.block_size)
    before = torch.zeros(capacity.tokens, head.width)
    with threads.record(capacity.tokens, capacity.logits) as keeping, ViewsOnly():
        head.keep(view_as_batch(known, head.groups), store, before)
    keeper = HostProgram(threads, keeping, known, StepResults(before.numpy(), before.numpy(), None))
    rows = capacity.seqs * (1 + most)
    blocks = StaticBatch(
        Capacity(rows, capacity.seqs * most, rows, capacity.blocks), head.groups, store.block_size
    )
    largest = sampler.plain_largest
    with threads.record(rows, capacity.seqs * most) as drafting, ViewsOnly():
        last = head.compute(view_as_batch(blocks, head.groups), store)
        logits = head.logits(last)
        found = largest(logits) if largest else None
    likeliest = (found[0].numpy(), found[1].numpy()) if found else None
    drafter = HostProgram(threads, drafting, blocks, StepResults(last.numpy(), logits.numpy(), likeliest))
    assert store.host is not None
    own = keeper, before.numpy(), store.host, drafter
    passes = HostBlockPasses(*own, sampler.host, head.spec.mask_token)
    return passes, len(keeping.names) + len(drafting.names)


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

    most: tokens of a draft.
    """
    (device, dtype), why = target, "there is no executor of native kernels"
    if threads is not None:
        try:
            passes, launches = record_block_passes(head, store, sampler, threads, capacity, most)
            kind = f"{launches} launches, two calls"
            return HeadRunner(passes, HiddenOnHost(capacity.seqs, head.width), kind)
        except CannotRecord as error:
            why = str(error)
    kept = HiddenOnDevice(capacity.seqs, head.width, dtype, device)
    return HeadRunner(EagerBlockPasses(head, store, sampler, device, most), kept, f"op by op: {why}")
