"""Steps that were launched and are not committed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from msgspec import Struct

from plait.schedule.drafts.turns import count_decodes
from plait.schedule.plan import Sampled, SamplingBatch, StepPlan, Ticket
from plait.schedule.sequence import MOST_REPLAYED
from plait.schedule.turns import Update


class StepRunner(Protocol):
    """Launches a step, in the order of calls. Its ticket gives one answer for every row of `sampling`."""

    def launch(self, plan: StepPlan, sampling: SamplingBatch) -> Ticket: ...


class Flight(Struct, frozen=True):
    """A plan that was launched and is not committed. `began`: seconds, on the engine's clock."""

    plan: StepPlan
    ticket: Ticket
    began: float


class NotLaunched(Struct, frozen=True):
    """The ticket of a step of which the launch failed: its error comes when it is its turn."""

    error: Exception

    @property
    def can_be_followed(self) -> bool:
        return False

    def wait(self) -> list[Sampled]:
        """Raises the error of the launch."""
        raise self.error


def count_decoded(plan: StepPlan, updates: Sequence[Update]) -> int:
    """The tokens that a plan brought; 0 if it computed part of a prompt, too."""
    # Tokens without logits are of a prompt, or few that are computed again behind a wrong draft.
    reads = (not c.start or len(c.token_ids) - c.num_logits >= MOST_REPLAYED for c in plan.chunks)
    has_prompts = len(updates) < len(plan.chunks) or any(reads)
    return 0 if has_prompts else sum(len(update.event.token_ids) for update in updates)


def count_steps(plan: StepPlan, sampled: Sequence[Sampled]) -> int:
    """The steps in a row that a runner took for a plan: speculative turns, or decodes up to a stop token."""
    turns = max((answer.turns.num_turns for answer in sampled if answer.turns), default=1)
    return turns * count_decodes(plan.num_steps, plan.stops, [one.token_ids for one in sampled])
