"""The request table: the open requests of an engine that can end at any moment, and how they go on.

It records what was delivered, so that a new engine can go on with the rest. Requests that may have ended an
engine are tried one after the other at first, until each is past the place. Not thread-safe.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace

from plait.engine.admission import OnEvent
from plait.errors import DeadlineExceeded, EngineKilled, InvalidField
from plait.request import Event, Request, RequestTrace
from plait.worker.protocol import EventMessage, decode_event

MAX_DEATHS = 4  # engines that end with a request in their last step, others being there as well
TRIAL_TOKENS = 2  # of each choice: the step that ended the engine, and a first one of another kind
log = logging.getLogger("plait.engine")


@dataclass(slots=True)
class ChoiceEntry:
    """One choice that has not ended: its output tokens so far, and what else its reader has received."""

    token_ids: list[int] = field(default_factory=list)
    num_cached_tokens: int = 0
    first_token_s: float | None = None
    is_cancelled: bool = False
    num_on_trial: int = 0  # tokens since the engine last received its request
    mirostat_mu: float | None = None
    num_to_pass: int = TRIAL_TOKENS  # such tokens after which it is past the place where an engine ended


@dataclass(slots=True, eq=False)
class RequestEntry:
    """An open request. `parts`: its choices that have not ended, by index.

    `is_sent`: the engine that runs now has it. `num_deaths`: engines that ended in a step with it.
    `is_suspect`: it must show, alone, that it does not end another one.
    """

    key: int
    request: Request
    on_event: OnEvent
    arrival_s: float
    parts: dict[int, ChoiceEntry]
    is_sent: bool = False
    is_resumed: bool = False
    is_suspect: bool = False
    num_deaths: int = 0

    def so_far(self) -> Request:
        """The request for the tokens that are missing."""
        if not self.is_resumed:
            return self.request
        parts = (self.parts.get(i) for i in range(self.request.params.n))
        resumed = tuple(None if p is None else tuple(p.token_ids) for p in parts)
        bounds: tuple[float | None, ...] = ()
        if self.request.params.mirostat:
            known = [self.parts.get(i) for i in range(self.request.params.n)]
            bounds = tuple(None if p is None else p.mirostat_mu for p in known)
        return replace(
            self.request, resumed=resumed, resumed_mu=bounds, interval=1
        )  # what it brings shows that it is sound


class RequestTable:
    """Every open request, by key. Events are delivered on the caller's thread; a reader that raises has its
    request ended.
    """

    def __init__(self) -> None:
        self._entries: dict[int, RequestEntry] = {}  # in order of arrival
        self._unsent: dict[int, RequestEntry] = {}  # of these, those that the engine has not got
        self._keys: dict[str, int] = {}
        self._on_trial: RequestEntry | None = None
        self._num_added = 0
        self.unread: list[int] = []  # keys of requests with failed readers: the engine must end them

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, request: Request, on_event: OnEvent, arrival_s: float) -> None:
        """Record a new request. One with the id of an open request is refused, by events."""
        self._num_added += 1
        parts = {i: ChoiceEntry() for i in range(request.params.n)}
        entry = RequestEntry(self._num_added, request, on_event, arrival_s, parts)
        if request.id in self._keys:
            error = InvalidField(f"request id {request.id!r} is in use by an open request", "id")
            for i in parts:
                self._tell(entry, Event(request.id, i, finish_reason="error", error=error))
            return
        self._entries[entry.key] = self._unsent[entry.key] = entry
        self._keys[request.id] = entry.key

    def due(self) -> Iterator[RequestEntry]:
        """Requests that the engine should receive now: suspects one at a time, then all others.

        A suspect's trial is over after some tokens; from the second one on, those acquitted run as well.
        """
        if self._on_trial is not None or not self._unsent:
            return
        suspects = (e for e in self._unsent.values() if e.is_suspect)
        # The first is alone: the one with most deaths, or else the newest, as the others had run before.
        self._on_trial = max(suspects, key=lambda e: (e.num_deaths, e.key), default=None)
        for entry in [self._on_trial] if self._on_trial else [*self._unsent.values()]:
            entry.is_sent = True
            del self._unsent[entry.key]
            yield entry

    def deliver(self, message: EventMessage, now: float) -> None:
        """Pass an event of the engine on, and record what it brought. `now`: on the common clock."""
        entry = self._entries.get(message.key)
        if entry is None or message.index not in entry.parts:  # ended here, while this was on its way
            return
        part = entry.parts[message.index]
        event = decode_event(entry.request.id, message)
        if part.token_ids and event.num_cached_tokens != part.num_cached_tokens:
            # What the first engine found counts: a later one finds the reply's own tokens.
            event = replace(event, num_cached_tokens=part.num_cached_tokens)
        part.num_cached_tokens = event.num_cached_tokens
        if event.trace is not None and entry.is_resumed:
            event = replace(event, trace=_whole_trace(event.trace, part))
        if event.token_ids and part.first_token_s is None:
            part.first_token_s = now
        part.token_ids += event.token_ids
        if event.mirostat_mu is not None:
            part.mirostat_mu = event.mirostat_mu
        part.num_on_trial += len(event.token_ids)
        self._pass(entry, event)
        parts = entry.parts.values()
        if entry is self._on_trial and all(part.num_on_trial >= part.num_to_pass for part in parts):
            entry.is_suspect, self._on_trial = False, None

    def cancel(self, request_id: str, index: int | None) -> int | None:
        """The key that the engine needs to end a request or its choice; None: no engine has it.

        A request that no engine runs ends at once.
        """
        entry = self._entries.get(self._keys.get(request_id, 0))
        if entry is None:
            return None
        for i, part in [*entry.parts.items()]:
            if index is None or i == index:
                part.is_cancelled = True
                if not entry.is_sent:
                    self._pass(entry, Event(request_id, i, finish_reason="cancelled"))
        return entry.key if entry.is_sent else None

    def record_end(self, planned: Collection[int], arriving: int, *, is_foreign: bool = False) -> bool:
        """Record that the engine has ended. `planned` and `arriving`: what it was doing, see `SharedStatus`.

        `is_foreign`: it was killed from outside. Every request must go to the next engine; those in the last
        step are suspects. Returns whether there were any. A request fails that was in two of these steps, and
        alone in this one. One that was never alone may be innocent and is tried again, until `MAX_DEATHS`.
        """
        # Those that may have ended it: one arriving, one on trial, or all of the last step.
        charged = [self._entries[k] for k in ((arriving,) if arriving else planned) if k in self._entries]
        if self._on_trial is not None and self._on_trial in charged:
            charged = [self._on_trial]
        is_alone = len(charged) == 1 and not is_foreign and (bool(arriving) or len({*planned}) == 1)
        self._on_trial, self._unsent = None, {**self._entries}
        for entry in self._unsent.copy().values():
            kept = entry.request.interval - 1 if entry.is_sent and not entry.is_resumed else 0
            entry.is_sent, entry.is_resumed = False, entry.is_resumed or entry.is_sent
            for i, part in [*entry.parts.items()]:
                # After its first token an engine may have had this many that it had not reported.
                part.num_on_trial, part.num_to_pass = 0, TRIAL_TOKENS + (kept if part.token_ids else 0)
                if part.is_cancelled:
                    self._pass(entry, Event(entry.request.id, i, finish_reason="cancelled"))
        for entry in charged:
            entry.num_deaths += 1
            entry.is_suspect = True
            if entry.key in self._entries and entry.num_deaths >= (2 if is_alone else MAX_DEATHS):
                text = f"{entry.num_deaths} engines have ended in a step with this request; it is not tried"
                more = "again. What it had generated was delivered. The server's log says how they ended"
                self.fail(entry, EngineKilled(f"{text} {more}"))
        return bool(charged)

    def expire(self, now: float) -> None:
        """End requests that wait for an engine past their time limit; the engine ends those that it has."""
        for entry in [*self._unsent.values()]:
            timeout_s = entry.request.timeout_s
            if timeout_s is not None and now >= entry.arrival_s + timeout_s:
                so_far = sum(len(part.token_ids) for part in entry.parts.values())
                text = f"not done within timeout_s ({timeout_s:g} s)"
                if entry.num_deaths:
                    text += ", in which the engine had to be replaced"
                self.fail(entry, DeadlineExceeded(f"{text}: {so_far} tokens were generated until then"))

    def end_all(self, error: Exception | None) -> None:
        """End every open request: with this error, or as cancelled."""
        for entry in [*self._entries.values()]:
            if error is not None:
                self.fail(entry, error)
                continue
            for i in [*entry.parts]:
                self._pass(entry, Event(entry.request.id, i, finish_reason="cancelled"))

    def fail(self, entry: RequestEntry, error: Exception) -> None:
        """End a request with this error."""
        for i in [*entry.parts]:
            self._pass(entry, Event(entry.request.id, i, finish_reason="error", error=error))

    def _pass(self, entry: RequestEntry, event: Event) -> None:
        if event.finish_reason is not None:
            del entry.parts[event.index]
            if not entry.parts:
                del self._entries[entry.key], self._keys[entry.request.id]
                self._unsent.pop(entry.key, None)
                if entry is self._on_trial:
                    entry.is_suspect, self._on_trial = False, None
        self._tell(entry, event)

    def _tell(self, entry: RequestEntry, event: Event) -> None:
        try:
            entry.on_event(event)
        except Exception:
            # Its reader is broken and gets no event. No other request may suffer, and the fault must be seen.
            log.exception("the reader of %s failed, and its request is ended", entry.request.id)
            entry.on_event = lambda _: None
            self.unread.append(entry.key)
            for part in entry.parts.values():
                part.is_cancelled = True


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
