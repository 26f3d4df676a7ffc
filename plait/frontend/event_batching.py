"""Joins events of several steps into one, and counts the tokens after which one is due.

The engine process, the side that wakes the reader and the reader count by the same rule. So an event is made
of the same tokens however far one of them has fallen behind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from plait.request import Event

AT_ONCE = 256  # events that are read as one: some milliseconds
MOST_AT_ONCE = 64  # tokens that an engine process keeps of a reply that is read only at its end


class TokenInterval:
    """Counts the tokens of one choice: `interval` of them are emitted together."""

    def __init__(self, interval: int) -> None:
        self._interval, self._missing = interval, 1

    def is_due(self, event: Event) -> bool:
        """Whether the events gathered so far are due, now that this event has come."""
        if event.prompt_progress is not None:
            return True  # it has no tokens: nothing has gathered, and the first one still comes at once
        self._missing -= len(event.token_ids)
        is_last = event.finish_reason is not None
        if self._missing > 0 and not is_last and event.prompt_logprobs is None:
            return False
        self._missing = self._interval
        return True


def join_events(events: Sequence[Event]) -> list[Event]:
    """The same tokens in fewer events, each choice's in order: up to AT_ONCE become one, not the end."""
    runs: list[list[Event]] = []
    open_runs: dict[int, list[Event]] = {}
    for event in events:
        run = open_runs.get(event.index)
        if run and len(run) < AT_ONCE and _goes_on(run[-1], event):
            run.append(event)
        else:
            open_runs[event.index] = run = [event]
            runs.append(run)
    return [_one(run) if len(run) > 1 else run[0] for run in runs]


def _goes_on(last: Event, event: Event) -> bool:
    is_end = last.finish_reason is not None or event.finish_reason is not None
    return (
        not is_end and (last.logprobs is None) == (event.logprobs is None) and event.prompt_logprobs is None
    )


def _one(run: Sequence[Event]) -> Event:
    scores = None if run[0].logprobs is None else tuple(lp for event in run for lp in event.logprobs or ())
    tokens = tuple(token_id for event in run for token_id in event.token_ids)
    return replace(run[-1], token_ids=tokens, logprobs=scores, prompt_logprobs=run[0].prompt_logprobs)
