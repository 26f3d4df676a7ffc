"""The deltas of a stream: how events and deltas are joined, and which choices are the best.

The engine process, the side that wakes the reader and the reader count tokens by the same rule. So an event
is made of the same tokens however far one of them has fallen behind.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain

from msgspec import Struct
from msgspec.structs import replace

from plait.request import Event, FinishReason
from plait.text.output import Content, OutputDelta, Reasoning
from plait.text.output.deltas import merge_deltas


class TextLogprob(Struct, frozen=True):
    """A token as a client sees it: its text, its true bytes, its log-probability and the alternatives."""

    token: str
    token_id: int
    bytes: bytes
    logprob: float
    top: tuple[TextLogprob, ...] = ()


class Delta(Struct, frozen=True):
    """New text of one choice; the last one of a choice carries `finish_reason`.

    `logprobs` are of exactly the tokens with text that starts in this delta. `stop_reason`: the stop string
    or the token id that ended it. `num_tokens`: output tokens so far, end-of-generation not counted.
    `embedding`: the hidden state, in the one delta of a request for embeddings. `parts`: content, thinking
    and calls in their order, of a stream with a reader; `text` is the content. `num_reasoning_tokens`: how
    many of the output tokens so far were thinking. `prompt_progress`: the event's, of a delta without text.
    """

    index: int
    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TextLogprob, ...] | None = None
    prompt_logprobs: tuple[TextLogprob, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    num_cached_tokens: int = 0
    num_tokens: int = 0
    error: Exception | None = None
    embedding: tuple[float, ...] | None = None
    parts: tuple[OutputDelta, ...] = ()
    num_reasoning_tokens: int = 0
    prompt_progress: tuple[int, float] | None = None


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
        if run and len(run) < AT_ONCE and _may_join(run[-1], event):
            run.append(event)
        else:
            open_runs[event.index] = run = [event]
            runs.append(run)
    return [_as_one_event(run) if len(run) > 1 else run[0] for run in runs]


def _may_join(last: Event, event: Event) -> bool:
    is_end = last.finish_reason is not None or event.finish_reason is not None
    return (
        not is_end and (last.logprobs is None) == (event.logprobs is None) and event.prompt_logprobs is None
    )


def _as_one_event(run: Sequence[Event]) -> Event:
    scores = None if run[0].logprobs is None else tuple(lp for event in run for lp in event.logprobs or ())
    tokens = tuple(token_id for event in run for token_id in event.token_ids)
    return replace(run[-1], token_ids=tokens, logprobs=scores, prompt_logprobs=run[0].prompt_logprobs)


class Gathered:
    """Deltas of one choice until they are due; then they are one, with all that each of them carries."""

    def __init__(self, interval: int) -> None:
        self._pace = TokenInterval(interval)
        self._held: list[Delta] = []
        self.has_emitted = False

    def push(self, event: Event, delta: Delta | None) -> list[Delta]:
        """The deltas that are due now that this event has come, which brought this delta.

        The first with any text or part does not wait: it may come with a later token than the first.
        """
        is_due = self._pace.is_due(event) or not self.has_emitted
        ready: list[Delta] = []
        if delta is not None:
            if self._held and not _goes_on(self._held[-1], delta):
                ready.append(self._emit())
            self._held.append(delta)
            is_due = is_due or delta.finish_reason is not None
        return [*ready, self._emit()] if is_due and self._held else ready

    def _emit(self) -> Delta:
        held, self._held, self.has_emitted = self._held, [], True
        return _as_one(held) if len(held) > 1 else held[0]


def _goes_on(last: Delta, delta: Delta) -> bool:
    """Whether two deltas may become one.

    A failure is raised where it is read, and would drop the text that came before. Log-probabilities and ids
    belong to the text of their delta, so content, thinking and calls stay apart.
    """
    kind, fails = _kind(delta), delta.finish_reason in ("error", "cancelled")
    return kind is not None and kind == _kind(last) and not fails


def _kind(delta: Delta) -> str | None:
    """The kind of all parts of a delta; None: they are of several kinds."""
    kinds = {
        "content" if isinstance(p, Content) else "thinking" if isinstance(p, Reasoning) else "call"
        for p in delta.parts
    }
    return None if len(kinds) > 1 else next(iter(kinds), "content")


def _as_one(held: Sequence[Delta]) -> Delta:
    scores = [delta.logprobs for delta in held if delta.logprobs is not None]
    return replace(
        held[-1],
        text="".join(delta.text for delta in held),
        token_ids=tuple(chain.from_iterable(delta.token_ids for delta in held)),
        logprobs=tuple(chain.from_iterable(scores)) if scores else None,
        num_cached_tokens=max(delta.num_cached_tokens for delta in held),
        parts=tuple(merge_deltas(chain.from_iterable(delta.parts for delta in held))),
    )


class ChoiceScore:
    """The log-probability per token of one choice, as it grows."""

    def __init__(self) -> None:
        self.total, self.count = 0.0, 0

    def add(self, logprobs: Sequence[TextLogprob] | None) -> None:
        for lp in logprobs or ():
            self.total += lp.logprob
            self.count += 1

    @property
    def mean(self) -> float:
        """The sum over the number of tokens; -inf for a choice without any, which says nothing."""
        mean = self.total / self.count if self.count else -math.inf
        return -math.inf if math.isnan(mean) else mean


def best_of(scores: Sequence[ChoiceScore], n: int) -> list[int]:
    """The indices of the `n` choices with the highest mean, best first; of equal ones the earlier one."""
    return sorted(range(len(scores)), key=lambda i: -scores[i].mean)[:n]
