"""A step that was recorded once, run over host memory: one native call for all layers, then the tokens.

Nothing here needs torch. `program` records a step, `loading.image` brings one back that an earlier process
recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from plait.runner.host.pooling import add_pooled
from plait.runner.host.sampler import HostSampler, is_greedy
from plait.runner.host.static_batch import Found, NativeThreads, StaticBatch
from plait.schedule.drafts.turns import MOST_STOPS
from plait.schedule.plan import MOST_STEPS, Done, Sampled, SamplingBatch, SamplingRow, StepPlan

Floats = npt.NDArray[np.float32]


class StepResults(Struct, frozen=True):
    """Where a step leaves what it computes: memory that the next step overwrites.

    hidden: [most tokens, hidden]; logits: [most rows, vocab]; largest: ids and values of the largest logit of
    each row, None if the step does not find them. observed: [most tokens, its own size], what a head for
    drafts reads; None: it reads `hidden`.
    """

    hidden: Floats
    logits: Floats
    largest: Found | None
    observed: Floats | None = None

    @property
    def for_head(self) -> Floats:
        """What a head for drafts reads of each row."""
        return self.hidden if self.observed is None else self.observed


class Described(Protocol):
    """What a recording says of itself, in `str`, and the names of its kernels, in order."""

    @property
    def names(self) -> Sequence[str]: ...


class TurnRunner(Protocol):
    """Runs the speculative turns of a plan (`turns.NativeTurns`)."""

    def run(self, plan: StepPlan, row: SamplingRow) -> list[Sampled] | None:
        """The answers; None: the plan's first turn is to run as a single step."""


class HostProgram:
    """A recorded step as one native call. `table`: its launches, as `threads` run them.

    `keeps_rows`: it keeps recurrent state behind the rows for which a chunk has slots.
    """

    def __init__(
        self,
        threads: NativeThreads,
        table: Any,
        static: StaticBatch,
        results: StepResults,
        *,
        keeps_rows: bool = False,
    ) -> None:
        self.keeps_rows = keeps_rows
        self.threads, self.table, self.static, self.results = threads, table, static, results
        if results.largest is not None:
            rows = (MOST_STEPS, static.capacity.seqs)
            self._kept = np.zeros(rows, np.int64), np.zeros(rows, np.float32)
            self._step = np.zeros(1, np.int64)
            self._between = static.make_between(threads, results.largest, self._kept, self._step)
            self._stops, self._num_stops = np.zeros(MOST_STOPS, np.int64), np.zeros(1, np.int64)
            self._stopping = threads.make_ending(table, results.largest[0], self._stops, self._num_stops)

    def __call__(self, plan: StepPlan) -> Floats:
        """Logits of the requested rows, [L, vocab] float32: memory that the next call overwrites."""
        tokens, logits = self.static.fill(plan)
        return self._run(tokens, logits, len(plan.chunks))

    def follow(self, token_ids: Sequence[int]) -> Floats:
        """Logits of the step after a call of decodes. The block of each next token is in its table."""
        count = self.static.follow(token_ids)
        return self._run(count, count, count)

    def several(self, plan: StepPlan) -> Found:
        """Run the steps of a plan of decodes in one call: ids and values of `largest`, which must exist.

        Both are [steps, sequences]: memory that the next call overwrites. The steps end behind a stop token.
        """
        largest = self.results.largest
        assert largest is not None
        count, _ = self.static.fill(plan)
        self._step[0], table = 0, self.table
        if plan.stops:
            self._num_stops[0], table = len(plan.stops), self._stopping
            self._stops[: len(plan.stops)] = plan.stops
        sizes = {"tokens": count, "logits": count, "seqs": count}
        last = self.threads.run(table, **sizes, steps=plan.num_steps, between=self._between) - 1
        ids, values = self._kept
        ids[last, :count], values[last, :count] = (found[:count] for found in largest)
        return ids[: last + 1, :count], values[: last + 1, :count]

    def _run(self, tokens: int, logits: int, seqs: int) -> Floats:
        self.threads.run(self.table, tokens=tokens, logits=logits, seqs=seqs)
        return self.results.logits[:logits]


class ProgramReplay:
    """Replays a program for every plan that fits it, and samples from what it computes (a `Replay`)."""

    def __init__(self, program: HostProgram, sampler: HostSampler, description: Described) -> None:
        self.program, self._sampler, self._description = program, sampler, description
        self._observe: Callable[[StepPlan, Floats], None] | None = None
        self.turns: TurnRunner | None = None

    @property
    def launches(self) -> Sequence[str]:
        """The names of the kernels of a step, in order."""
        return tuple(self._description.names)

    def describe(self) -> str:
        """What was recorded, in a line."""
        return str(self._description)

    def show(self, observe: Callable[[StepPlan, Floats], None]) -> None:
        """Show the hidden states of every step from now on, in memory that the next step overwrites."""
        self._observe = observe

    def fits(self, plan: StepPlan) -> bool:
        """Whether the plan is no larger than the program."""
        return self.program.static.fits(plan)

    def forget(self) -> None:
        """A step failed: nothing to do, because `fill` writes all that a step reads."""

    def launch(self, plan: StepPlan, sampling: SamplingBatch) -> Done:
        """Run the steps of a plan that fits. What it made of tokens stays in `program.results`."""
        if plan.num_steps > 1:
            return Done(self._several(plan, sampling))
        if plan.turns and self.turns and (found := self.turns.run(plan, sampling.rows[0])) is not None:
            return Done(found)
        logits, results = self.program(plan), self.program.results
        if self._observe:
            self._observe(plan, results.for_head)
        answers = self._sampler.sample(logits, sampling, results.largest)
        return Done(add_pooled(plan, results.hidden, answers))

    def _several(self, plan: StepPlan, sampling: SamplingBatch) -> list[Sampled]:
        """Run several decode steps of one plan, each of which computes what the last one sampled."""
        program, largest = self.program, self.program.results.largest
        if largest is not None and is_greedy(sampling):
            return self._sampler.likeliest(*program.several(plan))
        tokens = [a.token_ids[0] for a in self._sampler.sample(program(plan), sampling, largest)]
        steps, ends = [tokens], frozenset(plan.stops)
        for i in range(1, plan.num_steps):
            if not ends.isdisjoint(tokens):
                break
            tokens = self._sampler.follow(program.follow(tokens), sampling, i, largest)
            steps.append(tokens)
        return [Sampled(ids) for ids in zip(*steps, strict=True)]
