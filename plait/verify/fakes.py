"""Substitutes for parts of an engine under verification: steps that fail, costs, draft tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from plait.engine.core import Engine
from plait.errors import EngineError
from plait.schedule.costs import StepCosts
from plait.schedule.plan import DraftRequest, Sampled, SamplingBatch, StepPlan

FAILS_EVERY = 5  # steps, where steps fail on purpose
WRONG_EVERY = 4  # tokens, of drafts that are often right


class FailingRunner:
    """A runner with failures: of the steps that several sequences share, one in a few fails after it ran."""

    def __init__(self, engine: Engine) -> None:
        self._runner, self._num_shared, self.num_failed = engine.runner, 0, 0

    def execute(self, plan: StepPlan, sampling: SamplingBatch) -> list[Sampled]:
        answers = self._runner.execute(plan, sampling)
        self._num_shared += len(plan.chunks) > 1
        if len(plan.chunks) > 1 and self._num_shared % FAILS_EVERY == 0:
            self.num_failed += 1
            raise EngineError("this step fails on purpose")
        return answers


class CheapMoves(StepCosts):
    """Moving memory costs nothing, so it always pays."""

    def moved_s(self, nbytes: int) -> float | None:
        return 0.0


class CheapRows(StepCosts):
    """Every step takes as long as any other, so speculation always pays."""

    def step_s(self, num_tokens: float) -> float | None:
        return 1.0


class CheapSteps(StepCosts):
    """A step takes no time, so that there is time for several at once."""

    def step_s(self, num_tokens: float) -> float | None:
        return 1e-6


class KnownReplies:
    """Proposes the tokens of the plain replies, now and then with a wrong one (a `Proposer`)."""

    def __init__(self, sequences: Sequence[Sequence[int]], vocab_size: int) -> None:
        self._sequences, self._vocab_size = [list(ids) for ids in sequences], vocab_size

    def propose(self, wanted: Sequence[DraftRequest]) -> Mapping[int, tuple[int, ...]]:
        return {one.seq_id: self._guess(list(one.token_ids), one.limit) for one in wanted}

    def forget(self, seq_id: int) -> None:
        """Nothing to forget: it has no state of a sequence."""

    def _guess(self, token_ids: list[int], limit: int) -> tuple[int, ...]:
        start = len(token_ids)
        known = next((ids for ids in self._sequences if ids[:start] == token_ids), [])
        ahead = range(start, min(start + limit, len(known)))
        return tuple((known[i] + (i % WRONG_EVERY == 0)) % self._vocab_size for i in ahead)
