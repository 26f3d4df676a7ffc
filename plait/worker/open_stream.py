"""An open stream: what was sent of each choice of a request, so that another engine can go on with the rest.

The request table of one engine process and the lease table of a cluster keep the same record. They differ in
which engine has a request, and in how its end is judged. Not thread-safe.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from msgspec import Struct, structs

from plait.engine.admission import OnEvent
from plait.errors import DeadlineExceeded
from plait.request import Event, FinishReason, Request, RequestTrace

log = logging.getLogger("plait.engine")


class ChoiceEntry(Struct):
    """One choice that has not ended: its output tokens so far, and what else its reader has received."""

    token_ids: list[int] = []
    num_cached_tokens: int = 0
    first_token_s: float | None = None
    last_token_s: float = 0.0
    cancelled_as: FinishReason | None = None  # the reason that its engine was to end it with
    num_on_trial: int = 0  # tokens since an engine last received its request
    mirostat_mu: float | None = None


def begin_choices(request: Request) -> dict[int, ChoiceEntry]:
    """The choices of a request that are to be computed, by index, with the output tokens that it came with.

    A replica of a cluster gets requests that began elsewhere: what is missing when its own engine ends is
    missing after those tokens, and a choice that has ended stays ended.
    """
    num_choices = request.params.n
    so_far = request.resumed[:num_choices] or ((),) * num_choices
    bounds = request.resumed_mu or (None,) * num_choices
    return {
        i: ChoiceEntry([*token_ids], mirostat_mu=mu)
        for i, (token_ids, mu) in enumerate(zip(so_far, bounds, strict=False))
        if token_ids is not None
    }


@dataclass(slots=True, eq=False)
class OpenStream:
    """A request and its reader. `parts`: its choices that have not ended, by index.

    `arrival_s`: on the clock of its table. `is_resumed`: an engine that had it has ended. `has_failed`: its
    reader raised; it gets no more events, and the engine must end the request. `release`: gives its place
    back, before the reader gets the last event, because the reader may send another request at once.
    `num_ended`: counts choices, of all streams that share it, by their finish reason.
    """

    key: int
    request: Request
    on_event: OnEvent
    arrival_s: float
    parts: dict[int, ChoiceEntry]
    is_resumed: bool = False
    has_failed: bool = False
    release: Callable[[], None] = lambda: None
    num_ended: Counter[str] = field(default_factory=Counter)

    @property
    def num_tokens(self) -> int:
        """Output tokens that the reader has, of choices that have not ended."""
        return sum(len(part.token_ids) for part in self.parts.values())

    def so_far(self) -> Request:
        """The request for the tokens that are missing."""
        if not self.is_resumed:
            return self.request
        known = [self.parts.get(i) for i in range(self.request.params.n)]
        resumed = tuple(None if p is None else tuple(p.token_ids) for p in known)
        bounds: tuple[float | None, ...] = ()
        if self.request.params.mirostat:
            bounds = tuple(None if p is None else p.mirostat_mu for p in known)
        return replace(
            self.request, resumed=resumed, resumed_mu=bounds, interval=1
        )  # what it brings shows that it is sound

    def deliver(self, event: Event, now: float) -> None:
        """Record what an event of an open choice brings, and pass it to the reader. `now`: as `arrival_s`."""
        part = self.parts[event.index]
        if part.token_ids and event.num_cached_tokens != part.num_cached_tokens:
            # What the first engine found counts: a later one finds the reply's own tokens.
            event = structs.replace(event, num_cached_tokens=part.num_cached_tokens)
        part.num_cached_tokens = event.num_cached_tokens
        if event.trace is not None and self.is_resumed:
            event = structs.replace(event, trace=_whole_trace(event.trace, part))
        if event.token_ids:
            part.first_token_s, part.last_token_s = part.first_token_s or now, now
        part.token_ids += event.token_ids
        if event.mirostat_mu is not None:
            part.mirostat_mu = event.mirostat_mu
        part.num_on_trial += len(event.token_ids)
        self.emit(event)

    def emit(self, event: Event) -> None:
        """Pass an event to the reader as it is; the last one of a choice ends it."""
        if event.finish_reason is not None:
            self.parts.pop(event.index, None)
            self.num_ended[event.finish_reason] += 1
            if not self.parts:
                self.release()
        try:
            self.on_event(event)
        except Exception:
            # Its reader is broken and gets no event. No other request may suffer, and the fault must be seen.
            log.exception("the reader of %s failed, and its request is ended", self.request.id)
            self.on_event = lambda _: None
            self.has_failed = True
            for part in self.parts.values():
                part.cancelled_as = "cancelled"

    def cancel(self, index: int | None) -> None:
        """Note that every open choice is to end, or one: that one by a stop string, as engines take it."""
        for i, part in self.parts.items():
            if index is None or i == index:
                part.cancelled_as = part.cancelled_as or ("cancelled" if index is None else "stop")

    def end(self, error: Exception | None = None, index: int | None = None) -> None:
        """End every open choice, or one: with this error, or as cancelled.

        No engine reports of it, so its trace, for the log and the key's limits, is what is known here.
        """
        reason: FinishReason = "cancelled" if error is None else "error"
        for i in [*self.parts]:
            if index is None or i == index:
                self._end_choice(i, reason, error)

    def _end_choice(self, index: int, reason: FinishReason, error: Exception | None = None) -> None:
        trace = self._trace_of(index, reason) if self.parts[index].token_ids else None
        self.emit(Event(self.request.id, index, finish_reason=reason, error=error, trace=trace))

    def _trace_of(self, index: int, reason: FinishReason) -> RequestTrace:
        part = self.parts[index]
        return RequestTrace(
            request_id=self.request.id,
            index=index,
            arrival_s=self.arrival_s,
            first_scheduled_s=part.first_token_s,
            first_token_s=part.first_token_s,
            finish_s=part.last_token_s or self.arrival_s,
            finish_reason=reason,
            num_prompt_tokens=len(self.request.prompt_token_ids),
            num_cached_tokens=part.num_cached_tokens,
            num_output_tokens=len(part.token_ids),
        )

    def end_cancelled(self) -> None:
        """End the choices that were cancelled: the engine that was to end them has ended itself."""
        for i, part in [*self.parts.items()]:
            if part.cancelled_as is not None:
                self._end_choice(i, part.cancelled_as)

    def overdue(self, now: float, meanwhile: str) -> DeadlineExceeded | None:
        """The error of a request that is past its time limit. `meanwhile`: what else happened, or ""."""
        timeout_s = self.request.timeout_s
        if timeout_s is None or now < self.arrival_s + timeout_s:
            return None
        text = f"not done within timeout_s ({timeout_s:g} s){meanwhile}"
        return DeadlineExceeded(f"{text}: {self.num_tokens} tokens were generated until then")


def _whole_trace(trace: RequestTrace, part: ChoiceEntry) -> RequestTrace:
    """The trace of a choice that went on in another engine: its first token may be from an earlier one."""
    first = part.first_token_s if part.first_token_s is not None else trace.first_token_s
    scheduled = [s for s in (trace.first_scheduled_s, first) if s is not None]
    return replace(
        trace,
        first_token_s=first,
        first_scheduled_s=min(scheduled, default=None),
        num_cached_tokens=part.num_cached_tokens,
    )
