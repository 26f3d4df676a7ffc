"""The request table: the open requests of an engine that can end at any moment, and how they go on.

It records what was delivered, so that a new engine can go on with the rest. Requests that may have ended an
engine are tried one after the other at first, until each is past the place. Not thread-safe.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from functools import partial

from plait.engine.admission import OnEvent
from plait.errors import EngineError, EngineKilled, InvalidField
from plait.request import Request
from plait.worker.open_stream import OpenStream, begin_choices
from plait.worker.protocol import EventMessage, decode_event

MAX_DEATHS = 4  # engines that end with a request in their last step, others being there as well
TRIAL_TOKENS = 2  # of each choice: the step that ended the engine, and a first one of another kind


@dataclass(slots=True, eq=False)
class RequestEntry(OpenStream):
    """An open request. `is_sent`: the engine that runs now has it, as the `number`th that it was sent.

    `num_deaths`: engines that ended in a step with it. `is_suspect`: it must show, alone, that it does not
    end another one. `num_to_pass`: tokens of each choice after which it is past the place where an engine
    ended. `has_lost_adapter`: its engine computes it with an adapter that the next one does not know by name.
    """

    is_sent: bool = False
    number: int = 0
    is_suspect: bool = False
    num_deaths: int = 0
    num_to_pass: dict[int, int] = field(default_factory=dict)
    has_lost_adapter: bool = False


class RequestTable:
    """Every open request, by key. Events are delivered on the caller's thread; a reader that raises has its
    request ended.
    """

    def __init__(self) -> None:
        self._entries: dict[int, RequestEntry] = {}  # in order of arrival
        self._unsent: dict[int, RequestEntry] = {}  # of these, those that the engine has not got
        self._keys: dict[str, int] = {}
        self._on_trial: RequestEntry | None = None
        self._num_added = self._num_sent = 0  # sent: to the engine that runs now
        self.num_ended: Counter[str] = Counter()  # choices, by their finish reason
        self.unread: list[int] = []  # keys of requests with failed readers: the engine must end them

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, request: Request, on_event: OnEvent, arrival_s: float) -> None:
        """Record a new request. One with the id of an open request is refused, by events."""
        self._num_added += 1
        entry = RequestEntry(self._num_added, request, on_event, arrival_s, begin_choices(request))
        entry.num_ended = self.num_ended
        if request.id in self._keys:
            entry.end(InvalidField(f"request id {request.id!r} is in use by an open request", "id"))
            return
        self._entries[entry.key] = self._unsent[entry.key] = entry
        self._keys[request.id] = entry.key
        entry.release = partial(self._forget, entry)

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
            self._num_sent += 1
            entry.is_sent, entry.number = True, self._num_sent
            del self._unsent[entry.key]
            yield entry

    def count_unseen(self, num_seen: int) -> int:
        """Choices that wait for an engine, or for a look of the one that has seen `num_seen` requests.

        Those that were cancelled wait for nothing. From any thread: the copies are made in one step.
        """
        unseen = [e for e in self._entries.copy().values() if not e.is_sent or e.number > num_seen]
        parts = [part for entry in unseen for part in entry.parts.copy().values()]
        return sum(part.cancelled_as is None for part in parts)

    def deliver(self, message: EventMessage, now: float) -> None:
        """Pass an event of the engine on, and record what it brought. `now`: on the common clock."""
        entry = self._entries.get(message.key)
        if entry is None or message.index not in entry.parts:  # ended here, while this was on its way
            return
        entry.deliver(decode_event(entry.request.id, message), now)
        self._settle(entry)
        if entry is self._on_trial and all(
            part.num_on_trial >= entry.num_to_pass.get(i, TRIAL_TOKENS) for i, part in entry.parts.items()
        ):
            entry.is_suspect, self._on_trial = False, None

    def cancel(self, request_id: str, index: int | None) -> int | None:
        """The key that the engine needs to end a request or its choice; None: no engine has it.

        A request that no engine runs ends at once.
        """
        entry = self._entries.get(self._keys.get(request_id, 0))
        if entry is None:
            return None
        entry.cancel(index)
        if entry.is_sent:
            return entry.key
        entry.end_cancelled()
        self._settle(entry)
        return None

    def record_end(
        self, planned: Collection[int], arriving: int, *, is_foreign: bool = False
    ) -> tuple[str, ...]:
        """Record that the engine has ended. `planned` and `arriving`: what it was doing, see `SharedStatus`.

        `is_foreign`: it was killed from outside. Every request must go to the next engine; those in the last
        step are suspects. Returns their ids. A request fails that was in two of these steps, and
        alone in this one. One that was never alone may be innocent and is tried again, until `MAX_DEATHS`.
        """
        # Those that may have ended it: one arriving, one on trial, or all of the last step.
        charged = [self._entries[k] for k in ((arriving,) if arriving else planned) if k in self._entries]
        if self._on_trial is not None and self._on_trial in charged:
            charged = [self._on_trial]
        is_alone = len(charged) == 1 and not is_foreign and (bool(arriving) or len({*planned}) == 1)
        self._on_trial, self._unsent, self._num_sent = None, {**self._entries}, 0
        for entry in self._unsent.copy().values():
            kept = entry.request.interval - 1 if entry.is_sent and not entry.is_resumed else 0
            entry.is_sent, entry.is_resumed = False, entry.is_resumed or entry.is_sent
            for i, part in entry.parts.items():
                # After its first token an engine may have had this many that it had not reported.
                part.num_on_trial = 0
                entry.num_to_pass[i] = TRIAL_TOKENS + (kept if part.token_ids else 0)
            entry.end_cancelled()
            self._settle(entry)
            self._check_adapter(entry)
        for entry in charged:
            entry.num_deaths += 1
            entry.is_suspect = True
            if entry.key in self._entries and entry.num_deaths >= (2 if is_alone else MAX_DEATHS):
                text = f"{entry.num_deaths} engines have ended in a step with this request; it is not tried"
                more = "again. What it had generated was delivered. The server's log says how they ended"
                self.fail(entry, EngineKilled(f"{text} {more}"))
        return tuple(entry.request.id for entry in charged)

    def lose_adapter(self, name: str) -> None:
        """An adapter was unloaded. The engine goes on with it where it has begun; another one could not."""
        for entry in self._entries.values():
            if entry.is_sent and entry.request.adapter == name:
                entry.has_lost_adapter = True

    def _check_adapter(self, entry: RequestEntry) -> None:
        """End a request that would go on with other numbers: its adapter's name may be another's by now."""
        if entry.has_lost_adapter and entry.num_tokens:
            text = f"the engine ended, and the adapter {entry.request.adapter!r} that had begun this reply"
            self.fail(entry, EngineError(f"{text} was unloaded meanwhile; send the request again"))
        entry.has_lost_adapter = False

    def expire(self, now: float) -> None:
        """End requests that wait for an engine past their time limit; the engine ends those that it has."""
        for entry in [*self._unsent.values()]:
            meanwhile = ", in which the engine had to be replaced" if entry.num_deaths else ""
            if (error := entry.overdue(now, meanwhile)) is not None:
                self.fail(entry, error)

    def end_all(self, error: Exception | None) -> None:
        """End every open request: with this error, or as cancelled."""
        for entry in [*self._entries.values()]:
            self.fail(entry, error)

    def fail(self, entry: RequestEntry, error: Exception | None) -> None:
        """End a request with this error; None: as cancelled."""
        entry.end(error)
        self._settle(entry)

    def _settle(self, entry: RequestEntry) -> None:
        """Have the engine end a request with a failed reader."""
        if entry.has_failed:
            entry.has_failed = False
            self.unread.append(entry.key)

    def _forget(self, entry: RequestEntry) -> None:
        """A request ends with the event that its reader gets next."""
        del self._entries[entry.key], self._keys[entry.request.id]
        self._unsent.pop(entry.key, None)
        if entry is self._on_trial:
            entry.is_suspect, self._on_trial = False, None
