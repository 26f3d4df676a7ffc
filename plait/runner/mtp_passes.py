"""Passes of a head that drafts: recorded once as a native program, or op by op."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from plait.errors import CannotRecord
from plait.model.draft_head import ChainHead
from plait.runner.host.mtp import MOST_KEPT, HiddenOnHost, KeptRows
from plait.runner.host.mtp_passes import Drafts, HeadPasses, HiddenRows, HostPasses, go_on, replace_position
from plait.runner.host.program import HostProgram, StepResults
from plait.runner.host.static_batch import Capacity, StaticBatch
from plait.runner.program import NativeExecutor, ViewsOnly, view_as_batch
from plait.runner.sampling.sampler import Sampler
from plait.runner.steps.inputs import build_batch
from plait.schedule.plan import MOST_STEPS, SamplingBatch, SamplingRow, StepPlan
from plait.state.store import StateStore


class HiddenOnDevice:
    """Hidden states that wait for the head, up to `most` of each place, on its device (a `KeptRows`)."""

    def __init__(
        self, places: int, size: int, dtype: torch.dtype, device: torch.device, most: int = MOST_KEPT
    ) -> None:
        self._rows = torch.empty(places, most, size, dtype=dtype, device=device)

    def put(self, place: int, at: int, rows: HiddenRows) -> None:
        """See `KeptRows`."""
        self._rows[place, at : at + len(rows)] = torch.as_tensor(rows)

    def drop(self, place: int, spare: int, count: int) -> None:
        """See `KeptRows`."""
        self._rows[place, : count - spare] = self._rows[place, spare:count].clone()

    def first(self, place: int, count: int) -> Tensor:
        """See `KeptRows`."""
        return self._rows[place, :count]


class EagerPasses:
    """Op by op, on any device."""

    most, ahead, at_once = MOST_STEPS, 0, False

    def __init__(self, head: ChainHead, store: StateStore, sampler: Sampler, device: torch.device) -> None:
        self._head, self._store, self._sampler, self._device = head, store, sampler, device

    @torch.inference_mode()
    def run(
        self, plan: StepPlan, rows: Sequence[HiddenRows], sampling: Sequence[SamplingRow], length: int
    ) -> Drafts:
        """See `HeadPasses`."""
        before = torch.cat([torch.as_tensor(row) for row in rows])
        drafts: Drafts = [()] * len(rows)
        for i in range(length):
            batch = build_batch(plan, self._head.groups, self._store.block_size, self._device)
            last = self._head.keep_last(self._head.compute(batch, self._store, before), batch, before)
            own = SamplingBatch(tuple(replace_position(row, i) for row in sampling))
            found = [answer.token_ids[0] for answer in self._sampler.sample(self._head.logits(last), own)]
            drafts = [
                (*draft, token) for draft, token in zip(drafts or [()] * len(found), found, strict=True)
            ]
            plan, before = go_on(plan, found, stays=self._head.stays), before[: len(found)]
        return drafts


def record_passes(
    head: ChainHead,
    store: StateStore,
    sampler: Sampler,
    threads: NativeExecutor,
    capacity: Capacity,
) -> tuple[HostPasses, int]:
    """A head's passes as one native program, and its launches. Raises CannotRecord."""
    static = StaticBatch(capacity, head.groups, store.block_size)
    batch, largest = view_as_batch(static, head.groups), sampler.plain_largest
    before = torch.zeros(max(capacity.tokens, capacity.logits), head.width)
    with threads.record(capacity.tokens, capacity.logits) as table, ViewsOnly():
        hidden = head.compute(batch, store, before[: capacity.tokens])
        logits = head.logits(head.keep_last(hidden, batch, before))
        found = largest(logits) if largest else None
    likeliest = (found[0].numpy(), found[1].numpy()) if found else None
    program = HostProgram(threads, table, static, StepResults(hidden.numpy(), logits.numpy(), likeliest))
    assert store.host is not None
    passes = HostPasses(program, before.numpy(), store.host, sampler.host, stays=head.stays)
    return passes, len(table.names)


@dataclass(frozen=True, slots=True)
class HeadRunner:
    """What runs a head, memory for hidden states that wait for it, and how it runs, in words."""

    passes: HeadPasses
    kept: KeptRows
    kind: str


def make_passes(
    head: ChainHead,
    store: StateStore,
    sampler: Sampler,
    target: tuple[torch.device, torch.dtype],
    threads: NativeExecutor | None,
    capacity: Capacity,
    most: int = MOST_KEPT,
) -> HeadRunner:
    """Recorded where there are native kernels for all of it. target: the device, and the model's dtype.

    most: hidden states that are kept of each sequence.
    """
    (device, dtype), size, why = target, head.width, "there is no executor of native kernels"
    if threads is not None:
        try:
            passes, launches = record_passes(head, store, sampler, threads, capacity)
            return HeadRunner(
                passes, HiddenOnHost(capacity.seqs, size, most), f"{launches} launches, one call"
            )
        except CannotRecord as error:
            why = str(error)
    eager = EagerPasses(head, store, sampler, device)
    return HeadRunner(eager, HiddenOnDevice(capacity.seqs, size, dtype, device, most), f"op by op: {why}")
