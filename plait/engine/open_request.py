"""An open request and its choices: where their events go, and the times of what happened to them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from plait.request import Event, FinishReason, Request, RequestTrace
from plait.schedule.sequence import TokenSequence

OnEvent = Callable[[Event], None]


@dataclass(slots=True)
class OpenRequest:
    """A request with choices that have not ended. `open`: those choices, by their index."""

    request: Request
    on_event: OnEvent
    open: dict[int, OpenChoice] = field(default_factory=dict)


@dataclass(slots=True)
class OpenChoice:
    """A choice that has not ended. Times are seconds on the engine's clock.

    `sequence`: the scheduler's own, read only here. `num_failures`: steps since its last token that failed
    and had no other sequence in them.
    """

    entry: OpenRequest
    sequence: TokenSequence
    arrival_s: float
    first_scheduled_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float = 0.0
    num_steps: int = 0
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0
    num_failures: int = 0

    @property
    def misguided_by(self) -> Exception | None:
        """Why the choice's guide cannot be followed any more; None while it can."""
        return None if self.sequence.guide is None else self.sequence.guide.error

    def trace(self, finish_s: float, finish_reason: FinishReason) -> RequestTrace:
        """The trace of the choice at its end."""
        seq = self.sequence
        return RequestTrace(
            request_id=seq.request_id,
            index=seq.index,
            arrival_s=self.arrival_s,
            first_scheduled_s=self.first_scheduled_s,
            first_token_s=self.first_token_s,
            finish_s=finish_s,
            finish_reason=finish_reason,
            num_prompt_tokens=seq.prompt_len,
            num_cached_tokens=seq.num_cached_tokens,
            miss_cause=seq.miss_cause,
            num_output_tokens=seq.num_output_tokens,
            num_preemptions=seq.num_preemptions,
            num_steps=self.num_steps,
            num_drafted_tokens=self.num_drafted_tokens,
            num_accepted_tokens=self.num_accepted_tokens,
        )

    def overdue(self) -> str:
        """The error text of a choice past its deadline: the limit, and how far the choice got until then."""
        limit, num_tokens = self.entry.request.timeout_s, self.sequence.num_output_tokens
        if num_tokens:
            so_far = f"{num_tokens} tokens were generated until then, and reach those who stream"
        elif self.first_scheduled_s is not None:
            so_far = f"its prompt of {self.sequence.prompt_len} tokens was still being computed"
        else:
            so_far = "it was still waiting for its turn"
        return f"not done within timeout_s ({limit:g} s): {so_far}; ask for less, or allow it more time"
