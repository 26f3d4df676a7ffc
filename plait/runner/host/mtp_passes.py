"""Passes of a head that drafts as one native program, recorded here or in an earlier run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol, Self, runtime_checkable

import numpy as np

from plait.runner.host.program import Floats, HostProgram
from plait.runner.host.sampler import HostSampler, is_greedy
from plait.schedule.plan import MOST_STEPS, Chunk, SamplingBatch, SamplingRow, StepPlan
from plait.state.host_store import HostStore

Drafts = list[tuple[int, ...]]


class HiddenRows(Protocol):
    """HiddenRows of numbers, [rows, width]: an array, or a tensor."""

    def __len__(self) -> int: ...
    def __getitem__(self, rows: slice, /) -> Self: ...


class HeadPasses(Protocol):
    """Drafts for the chunks of a plan, each with a row to go on from.

    `most`: tokens of a draft; `ahead`: positions that it needs behind these; `at_once`: whether it makes all
    of a draft in one pass.
    """

    at_once: bool

    @property
    def most(self) -> int: ...
    @property
    def ahead(self) -> int: ...
    def run(
        self, plan: StepPlan, rows: Sequence[HiddenRows], sampling: Sequence[SamplingRow], length: int
    ) -> Drafts:
        """`length` tokens for each chunk. rows: what the model made of its tokens, [its tokens, hidden].

        The chunks have one token with history first, and tables for all positions. Raises EngineError if a
        row has no finite maximum.
        """
        ...


@runtime_checkable
class KeepingPasses(HeadPasses, Protocol):
    """Of a head that can keep what the model made of tokens at once, for next to nothing."""

    def keep(self, plan: StepPlan, rows: Sequence[HiddenRows]) -> None:
        """Keep keys and values of the tokens of chunks. Raises what a pass does."""


class HostPasses:
    """As one native program over buffers that are as long as the largest pass.

    `before`: hidden states that a pass reads, [most tokens, hidden], of which it leaves those to go on from;
    `store`: the keys and values that the head reads. `stays`: see `ChainHead`.
    """

    most, ahead, at_once = MOST_STEPS, 0, False

    def __init__(
        self,
        program: HostProgram,
        before: Floats,
        store: HostStore,
        sampler: HostSampler,
        *,
        stays: bool = False,
    ) -> None:
        self.program, self.before, self.store, self._sampler = program, before, store, sampler
        self._stays = stays
        self._largest = program.results.largest

    def run(
        self, plan: StepPlan, rows: Sequence[HiddenRows], sampling: Sequence[SamplingRow], length: int
    ) -> Drafts:
        """See `HeadPasses`."""
        at = 0
        for row in rows:
            self.before[at : at + len(row)] = np.asarray(row)
            at += len(row)
        own = SamplingBatch(tuple(sampling))
        if self._largest is not None and is_greedy(own) and not self._stays:
            return self._run_greedy(plan, own, length)
        tokens = [a.token_ids[0] for a in self._sampler.sample(self.program(plan), own, self._largest)]
        steps = [tokens]
        for i in range(1, length):
            plan = go_on(plan, tokens, stays=self._stays)
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


def go_on(plan: StepPlan, tokens: Sequence[int], *, stays: bool = False) -> StepPlan:
    """The plan of the tokens that follow, one behind each chunk, or in its place."""
    pairs = zip(plan.chunks, tokens, strict=True)
    placed = ((c, c.start if stays else c.end, token) for c, token in pairs)
    chunks = tuple(Chunk(c.seq_id, at, (token,), c.blocks, 0, 1) for c, at, token in placed)
    return replace(plan, chunks=chunks)


def replace_position(row: SamplingRow, by: int) -> SamplingRow:
    """The row of the token that comes so many later."""
    return SamplingRow(row.params, 1, 1, row.position + by, row.seed)
