"""Joins deltas until a number of tokens of their choice is reached, as `TokenInterval` counts them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING

from plait.frontend.event_batching import TokenInterval
from plait.request import Event
from plait.text.output import Content, Reasoning
from plait.text.output.deltas import merge_deltas

if TYPE_CHECKING:
    from plait.frontend.delta import Delta


class Gathered:
    """Deltas of one choice until they are due; then they are one, with all that each of them carries."""

    def __init__(self, interval: int) -> None:
        self._pace = TokenInterval(interval)
        self._held: list[Delta] = []
        self.has_told = False

    def push(self, event: Event, delta: Delta | None) -> list[Delta]:
        """The deltas that are due now that this event has come, which brought this delta.

        The first with any text or part does not wait: it may come with a later token than the first.
        """
        is_due = self._pace.is_due(event) or not self.has_told
        ready: list[Delta] = []
        if delta is not None:
            if self._held and not _goes_on(self._held[-1], delta):
                ready.append(self._told())
            self._held.append(delta)
            is_due = is_due or delta.finish_reason is not None
        return [*ready, self._told()] if is_due and self._held else ready

    def _told(self) -> Delta:
        held, self._held, self.has_told = self._held, [], True
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
