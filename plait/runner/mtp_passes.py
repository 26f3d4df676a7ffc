"""Passes of a head for multi-token prediction: recorded once as a native program, or op by op."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from plait.errors import CannotRecord
from plait.memory import block_groups
from plait.model.mtp import MtpHead
from plait.runner.batches.inputs import build_batch
from plait.runner.host.program import HostProgram, StepResults
from plait.runner.host.sampler import is_greedy
from plait.runner.host.static_batch import Capacity, StaticBatch
from plait.runner.program import NativeExecutor, ViewsOnly, view_as_batch
from plait.runner.sampler import Sampler
from plait.schedule.plan import Chunk, SamplingBatch, SamplingRow, StepPlan
from plait.state.store import StateStore

Drafts = list[tuple[int, ...]]


class HeadPasses(Protocol):
    """Drafts for the chunks of a plan, each with a row to go on from."""

    def run(
        self, plan: StepPlan, rows: Sequence[Tensor], sampling: Sequence[SamplingRow], length: int
    ) -> Drafts:
        """`length` tokens for each chunk. rows: what the model made of its tokens, [its tokens, hidden].

        The chunks have one token with history first, and tables for all positions. Raises EngineError if a
        row has no finite maximum.
        """
        ...


class EagerPasses:
    """Op by op, on any device."""

    def __init__(self, head: MtpHead, store: StateStore, sampler: Sampler, device: torch.device) -> None:
        self._head, self._store, self._sampler, self._device = head, store, sampler, device
        self._groups = block_groups(head.states)

    @torch.inference_mode()
    def run(
        self, plan: StepPlan, rows: Sequence[Tensor], sampling: Sequence[SamplingRow], length: int
    ) -> Drafts:
        """See `HeadPasses`."""
        before = torch.cat(list(rows))
        drafts: Drafts = [()] * len(rows)
        for i in range(length):
            batch = build_batch(plan, self._groups, self._store.block_size, self._device)
            last = self._head.keep_last(self._head.hidden(batch, self._store, before), batch, before)
            own = SamplingBatch(tuple(replace_position(row, i) for row in sampling))
            found = [answer.token_ids[0] for answer in self._sampler.sample(self._head.logits(last), own)]
            drafts = [
                (*draft, token) for draft, token in zip(drafts or [()] * len(found), found, strict=True)
            ]
            plan, before = go_on(plan, found), last
        return drafts


class RecordedPasses:
    """As one native program over buffers that are as long as the largest pass. Raises CannotRecord."""

    def __init__(
        self,
        head: MtpHead,
        store: StateStore,
        sampler: Sampler,
        threads: NativeExecutor,
        capacity: Capacity,
    ) -> None:
        groups = block_groups(head.states)
        static = StaticBatch(capacity, groups, store.block_size)
        batch, largest = view_as_batch(static, groups), sampler.plain_largest
        self.before = torch.zeros(capacity.tokens, head.fc.n_out)
        with threads.recording(capacity.tokens, capacity.logits) as table, ViewsOnly():
            hidden = head.hidden(batch, store, self.before)
            logits = head.logits(head.keep_last(hidden, batch, self.before))
            found = largest(logits) if largest else None
        self._largest = (found[0].numpy(), found[1].numpy()) if found else None
        results = StepResults(hidden.numpy(), logits.numpy(), self._largest)
        self.program, self._sampler = HostProgram(threads, table, static, results), sampler.host
        self.launches = tuple(table.names)

    def run(
        self, plan: StepPlan, rows: Sequence[Tensor], sampling: Sequence[SamplingRow], length: int
    ) -> Drafts:
        """See `HeadPasses`."""
        at = 0
        for row in rows:
            self.before[at : at + len(row)] = row
            at += len(row)
        own = SamplingBatch(tuple(sampling))
        if self._largest is not None and is_greedy(own):
            return self._run_greedy(plan, own, length)
        tokens = [a.token_ids[0] for a in self._sampler.sample(self.program(plan), own, self._largest)]
        steps = [tokens]
        for i in range(1, length):
            plan = go_on(plan, tokens)
            tokens = self._sampler.follow(self.program(plan), own, i, self._largest)
            steps.append(tokens)
        return [*zip(*steps, strict=True)]

    def _run_greedy(self, plan: StepPlan, own: SamplingBatch, length: int) -> Drafts:
        """All passes in two native calls, in one where the first has one token of each sequence, too."""
        if all(len(chunk.token_ids) == 1 for chunk in plan.chunks):
            found = self._sampler.likeliest(*self.program.several(replace(plan, num_steps=length)))
            return [answer.token_ids for answer in found]
        first = self._sampler.sample(self.program(plan), own, self._largest)
        tokens = [answer.token_ids[0] for answer in first]
        if length == 1:
            return [(token,) for token in tokens]
        plan = replace(go_on(plan, tokens), num_steps=length - 1)
        found = self._sampler.likeliest(*self.program.several(plan))
        return [(token, *answer.token_ids) for token, answer in zip(tokens, found, strict=True)]


def make_passes(
    head: MtpHead,
    store: StateStore,
    sampler: Sampler,
    device: torch.device,
    threads: NativeExecutor | None,
    capacity: Capacity,
) -> tuple[HeadPasses, str]:
    """What runs a head, and how: recorded where there are native kernels for all of it."""
    if threads is None:
        return EagerPasses(head, store, sampler, device), "op by op: there is no executor of native kernels"
    try:
        made = RecordedPasses(head, store, sampler, threads, capacity)
    except CannotRecord as error:
        return EagerPasses(head, store, sampler, device), f"op by op: {error}"
    return made, f"{len(made.launches)} launches, one call"


def go_on(plan: StepPlan, tokens: Sequence[int]) -> StepPlan:
    """The plan of the tokens that follow, one behind each chunk."""
    chunks = zip(plan.chunks, tokens, strict=True)
    return replace(
        plan, chunks=tuple(Chunk(c.seq_id, c.end, (token,), c.blocks, 0, 1) for c, token in chunks)
    )


def replace_position(row: SamplingRow, by: int) -> SamplingRow:
    """The row of the token that comes so many later."""
    return SamplingRow(row.params, 1, 1, row.position + by, row.seed)
