"""The seconds of work that wait in an engine: what autoscalers read of it, and what they decide by."""

from __future__ import annotations

import time
from collections.abc import Callable

from plait.request import RequestTrace

TOKENS_PER_S = 500.0  # of prompts, of an engine that has measured nothing yet
NEWEST_SHARE = 1 / 16  # of the newest reply in the average of how long replies run


class ReplyDuration:
    """Seconds that a choice runs, from its first token to its end. One that broke off does not count."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._average_s = clock, 0.0
        self._first_s: float | None = None  # the first token of a choice that runs, while none has ended

    @property
    def average_s(self) -> float:
        """Of the latest; before the first end, the seconds that one has run already."""
        if self._average_s or self._first_s is None:
            return self._average_s
        return max(self._clock() - self._first_s, 0.0)

    def begin(self) -> None:
        """Count a choice with its first token."""
        if self._first_s is None:
            self._first_s = self._clock()

    def observe(self, trace: RequestTrace) -> None:
        """Count a choice that has ended."""
        if trace.first_token_s is None:
            return
        if trace.finish_reason not in {"stop", "length"}:
            self._first_s = None  # it may have been this one
            return
        seconds = max(trace.finish_s - trace.first_token_s, 0.0)
        share = NEWEST_SHARE if self._average_s else 1.0
        self._average_s += share * (seconds - self._average_s)


def estimate_waiting_s(
    *, num_tokens: int, tokens_per_s: float, num_waiting: int, num_running: int, places: int, reply_s: float
) -> float:
    """Seconds until what waits now would run: its prompts computed, and a place free for its reply.

    `num_tokens`: of prompts that are not computed; `tokens_per_s`: of prompts, 0: not measured.
    `num_waiting`, `num_running`: choices; `places`: choices that run at once. `reply_s`: seconds that one
    runs, on average.
    """
    prompts = num_tokens / (tokens_per_s or TOKENS_PER_S)
    without_place = max(num_waiting - max(places - num_running, 0), 0)
    return prompts + without_place * reply_s / max(places, 1)
