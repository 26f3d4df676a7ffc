"""Steps that were launched and are not committed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from plait.schedule.plan import Sampled, SamplingBatch, StepPlan, Ticket


class StepRunner(Protocol):
    """Launches a step, in the order of calls. Its ticket gives one answer for every row of `sampling`."""

    def launch(self, plan: StepPlan, sampling: SamplingBatch) -> Ticket: ...


@dataclass(frozen=True, slots=True)
class Flight:
    """A plan that was launched and is not committed. `began`: seconds, on the engine's clock."""

    plan: StepPlan
    ticket: Ticket
    began: float


@dataclass(frozen=True, slots=True)
class NotLaunched:
    """The ticket of a step of which the launch failed: its error comes when it is its turn."""

    error: Exception

    @property
    def can_be_followed(self) -> bool:
        return False

    def wait(self) -> list[Sampled]:
        """Raises the error of the launch."""
        raise self.error
