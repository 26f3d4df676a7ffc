"""The lease table of a gateway: its open streams, which replica computes each, and how they move on a loss.

A *lease* is one replica's share of a request. It ends with the request, or is revoked: then the request goes
on elsewhere from what its reader has, as the same request would have gone on. Every lease has a new key, so
whatever still comes for an old one is ignored. No sockets, no clock, no Ray: `outbox` has what is to be sent.
Not thread-safe.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial
from typing import Literal

from msgspec import structs

from plait.cluster.lease import ClusterStream, KnownReplica, Lease
from plait.cluster.resume_points import ReplicaReport
from plait.cluster.routing_table import Route, RoutingTable
from plait.cluster.wire import (
    Beat,
    CancelLease,
    LeaseEvent,
    OpenLease,
    Refused,
    ReplicaCard,
    ReportAnew,
    ToReplica,
)
from plait.engine.adapters import salt_prefix
from plait.engine.admission import OnEvent
from plait.errors import CapacityError, EngineError, EngineKilled, EngineLost, InvalidField, PlaitError
from plait.request import Event, Request
from plait.state.blocks import extend, root
from plait.worker.open_stream import ChoiceEntry, begin_choices
from plait.worker.protocol import EventMessage, decode_event

TRIAL_TOKENS = 2  # of each choice: after them a request is past the place where an engine ended
MAX_KNOWN = 2  # engines that end with a request in their last step, and no other one to suspect
MAX_SHARED = 4  # the same, with others in that step
MAX_LOSSES = 3  # replicas lost in a row of which it is not known why, without progress between
LATE_S = 2.5  # since a sign of life, of which there is one each second: others come first
ASLEEP_S = 1.0  # without a look at the replicas, this gateway was stopped itself
GRACE_S = 2.0  # for an engine to report itself that a request is past its time limit
LossCause = Literal["replica", "silent", "engine", "lost", "announced", "broken"]
UNCOUNTED = ("announced", "engine")  # of an engine's end it is known which requests it had


class LeaseTable:
    """Every open stream of a gateway, and every replica that it is connected with.

    `model`: what replicas must serve, see `ReplicaCard`; others get nothing. `patience_s`: a replica with
    leases that is silent for longer loses them. Times are of one steady clock.
    """

    def __init__(self, routes: RoutingTable, model: str, block_size: int, *, patience_s: float) -> None:
        self._routes, self._model, self._block_size, self._patience_s = routes, model, block_size, patience_s
        self.replicas: dict[str, KnownReplica] = {}
        self.outbox: deque[tuple[str, ToReplica]] = deque()
        self.moved: Counter[tuple[str, str]] = Counter()  # (cause, "yes" or "no": same arithmetic)
        self.routed: Counter[str] = Counter()  # why, see `Route`
        self._lease_seconds: list[float] = []
        self._streams: dict[str, ClusterStream] = {}  # by request id, in order of arrival
        self._waiting: dict[int, ClusterStream] = {}  # of these, those without a lease
        self._causes: dict[int, LossCause] = {}  # of those that wait for a move
        self._num_added = self._num_leases = 0
        self._looked_s = 0.0
        self._adapters: Mapping[str, str] = {}

    def __len__(self) -> int:
        return len(self._streams)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def add(self, request: Request, on_event: OnEvent, now: float) -> None:
        """Take a new request. One with the id of an open request is refused, by events."""
        self._num_added += 1
        chain = self._name_blocks(request, self._block_size)
        stream = ClusterStream(self._num_added, request, on_event, now, begin_choices(request), chain=chain)
        if request.id in self._streams:
            stream.end(InvalidField(f"request id {request.id!r} is in use by an open request", "id"))
            return
        first_end = min(request.boundaries, default=0) // self._block_size
        stream.home_tokens = max(first_end, 1) * self._block_size if chain else 0
        stream.home = chain[max(first_end, 1) - 1] if chain else self._name_blocks(request, 1)[-1]
        self._streams[request.id] = self._waiting[stream.key] = stream
        stream.release = partial(self._forget, stream)

    def cancel(self, request_id: str, index: int | None) -> None:
        """End a request, or one of its choices; one that no replica computes ends at once."""
        if (stream := self._streams.get(request_id)) is None:
            return
        stream.cancel(index)
        if stream.lease is None:
            stream.end_cancelled()
        else:
            self.outbox.append((stream.lease.replica, CancelLease(stream.lease.number, index)))

    # Replicas

    def join(self, name: str, card: ReplicaCard, now: float) -> bool:
        """A replica is connected. False: it serves another model, and gets no request."""
        if card.model != self._model or card.block_size != self._block_size:
            return False
        if name in self.replicas:
            self.lose(name, now)
        self.replicas[name] = KnownReplica(name, card, now)
        self._adapters = card.adapters  # the same everywhere: they are a part of the model's hash
        self._routes.add(name)
        return True

    def retire(self, name: str) -> None:
        """A replica takes no new requests. What it has, it may finish."""
        if (known := self.replicas.get(name)) is not None:
            known.is_leaving = True
            self._routes.remove(name)

    def rejoin(self, name: str) -> None:
        """A replica is listed again. One that has announced that it leaves gets no new requests."""
        known = self.replicas.get(name)
        if known is not None and known.is_leaving and not known.has_announced:
            known.is_leaving = False
            self._routes.add(name)
            self.outbox.append((name, ReportAnew()))

    def announce(self, name: str) -> None:
        """A replica says that it leaves."""
        if (known := self.replicas.get(name)) is not None:
            known.has_announced = True
        self.retire(name)

    def lose(self, name: str, now: float) -> None:
        """The connection with a replica has ended, and with it all its leases."""
        if (known := self.replicas.pop(name, None)) is None:
            return
        self._routes.remove(name)
        for lease in [*known.leases.values()]:
            self._revoke(lease, "announced" if known.is_leaving else "replica", now)

    def hear_beat(self, name: str, beat: Beat, now: float) -> None:
        """A replica lives. A request that it refused may go there again."""
        if (known := self.replicas.get(name)) is None:
            return
        known.heard_s, known.is_silent, known.is_ready, known.beat = now, False, beat.is_ready, beat
        for stream in self._waiting.values():
            stream.refused_by.discard(name)
        if beat.is_lost:  # it has given its engine up
            for lease in [*known.leases.values()]:
                self._revoke(lease, "lost", now)

    def hear_report(self, name: str, report: ReplicaReport, now: float, newest: int | None = None) -> None:
        """What a replica can resume has changed. `newest`: the last lease that it had then; None: all."""
        known = self.replicas.get(name)
        if known is None or known.is_leaving:
            return
        known.heard_s = now
        if not self._routes.hear(name, report, now, newest):
            self.outbox.append((name, ReportAnew()))

    def find_silent(self, now: float) -> list[str]:
        """Take the leases of replicas that have been silent for too long; the names of these replicas."""
        found = []
        if now - self._looked_s > ASLEEP_S:
            for known in self.replicas.values():
                known.heard_s = max(known.heard_s, now - min(LATE_S, self._patience_s / 2))
        self._looked_s = now
        for known in self.replicas.values():
            if known.is_silent or now - known.heard_s <= self._patience_s:
                continue
            known.is_silent = True
            found.append(known.name)
            for lease in [*known.leases.values()]:
                self._revoke(lease, "silent", now)
        return found

    def end_engine(self, name: str, charged: Collection[int], now: float, *, is_foreign: bool) -> None:
        """The engine of a living replica has ended, and is being replaced there; or it is frozen.

        Streams move where another replica has a place, and else go on there. `charged`: leases in its last
        step; `is_foreign`: it was killed from outside, so they are not to blame.
        """
        if (known := self.replicas.get(name)) is None:
            return
        known.is_ready = False
        blamed = [known.leases[key] for key in charged if key in known.leases]
        if on_trial := [lease for lease in blamed if lease.stream.is_suspect]:
            blamed = on_trial
        for lease in blamed if not is_foreign else ():
            stream = lease.stream
            stream.num_charged += 1
            stream.is_suspect = True
            if stream.num_charged >= (MAX_KNOWN if len(blamed) == 1 else MAX_SHARED):
                text = f"{stream.num_charged} engines have ended in a step with this request; it is not tried"
                self._fail(stream, EngineKilled(f"{text} again. What it had generated was delivered"), now)
        places = sum(r.card.max_open - len(r.leases) for r in self.replicas.values() if r.takes)
        for lease in [*known.leases.values()][:places]:
            self._revoke(lease, "engine", now)

    # Leases

    def place(self, now: float) -> None:
        """Give each waiting stream to a replica, in order of arrival, where one has a place for it."""
        able = {name for name, known in self.replicas.items() if known.takes} if self._waiting else ()
        if not able:
            return
        for _, stream in sorted(self._waiting.items()):  # what moves came before what is new
            if able <= stream.refused_by:
                continue
            num_tokens = len(stream.request.prompt_token_ids) + stream.num_tokens
            excluded = self._list_excluded(stream, now)
            found = self._routes.choose(
                stream.chain,
                num_tokens,
                now,
                home=stream.home,
                home_tokens=stream.home_tokens,
                excluded=excluded,
            )
            if found:
                self._open(stream, found[0], now)

    def deliver(self, name: str, message: LeaseEvent, now: float) -> None:
        """Pass an event of a replica on, if the lease is that replica's and nothing is missing before it."""
        known, event = self.replicas.get(name), message.event
        lease = None if known is None else known.leases.get(event.key)
        if known is None or lease is None or event.index not in lease.stream.parts:
            return  # its lease is over
        known.heard_s = now
        stream = lease.stream
        part = stream.parts[event.index]
        if message.start != len(part.token_ids):
            self._revoke(lease, "broken", now)
            return
        found = _read_event(event, lease)
        if found is None:
            self._revoke(lease, "broken", now)
            return
        if _is_loss(found, part):
            self._revoke(lease, "announced" if known.is_leaving else "lost", now)
            return
        if found.token_ids and not lease.has_spoken:
            lease.has_spoken = True
            stream.equality = known.card.equality
            self._routes.record_first_token(lease.route)
        stream.deliver(found, now)
        if (stream.is_suspect or stream.num_losses) and all(
            part.num_on_trial >= TRIAL_TOKENS for part in stream.parts.values()
        ):
            stream.is_suspect, stream.num_losses = False, 0
        if stream.has_failed:
            self.outbox.append((name, CancelLease(lease.number, None)))
            stream.has_failed = False
        self._settle(stream, now)

    def refuse(self, name: str, message: Refused, now: float) -> None:
        """A replica did not take a lease: another one may, or the request is at fault."""
        known = self.replicas.get(name)
        lease = None if known is None else known.leases.get(message.key)
        if lease is None:
            return
        if not isinstance(message.error, CapacityError | EngineError):
            self._fail(lease.stream, message.error, now)
            return
        lease.stream.refused_by.add(name)
        self._end_lease(lease, now)
        lease.stream.end_cancelled()
        if lease.stream.parts:
            self._waiting[lease.stream.key] = lease.stream
        self._settle(lease.stream, now)

    def expire(self, now: float) -> None:
        """End requests past their time limit; an engine that has one gets a moment to do it itself."""
        for stream in [*self._streams.values()]:
            late = now if stream.lease is None else now - GRACE_S
            meanwhile = ", in which a replica was lost" if stream.is_resumed else ""
            if (error := stream.overdue(late, meanwhile)) is not None:
                self._fail(stream, error, now)

    def end_all(self, error: PlaitError | None, now: float) -> None:
        """End every open stream: with this error, or as cancelled."""
        for stream in [*self._streams.values()]:
            self._fail(stream, error, now)

    def fail_lease(self, name: str, key: int, error: PlaitError, now: float) -> None:
        """End the request of a lease that could not be sent, with this error."""
        if (known := self.replicas.get(name)) is not None and (lease := known.leases.get(key)) is not None:
            self._fail(lease.stream, error, now)

    def take_lease_seconds(self) -> list[float]:
        """How long the leases lasted that ended since the last call."""
        found, self._lease_seconds = self._lease_seconds, []
        return found

    def _open(self, stream: ClusterStream, route: Route, now: float) -> None:
        known = self.replicas[route.replica]
        self._num_leases += 1
        lease = Lease(self._num_leases, stream, route.replica, route, now)
        known.leases[lease.number] = stream.lease = lease
        del self._waiting[stream.key]
        for part in stream.parts.values():
            part.num_on_trial = 0
        self.routed[route.why] += 1
        if (cause := self._causes.pop(stream.key, None)) is not None:
            is_same = stream.equality in ("", known.card.equality)
            self.moved[cause, "yes" if is_same else "no"] += 1
        request = replace(stream.so_far(), id=lease.request_id)
        if request.timeout_s is not None:  # the engine counts from when it gets it
            request = replace(request, timeout_s=max(stream.arrival_s + request.timeout_s - now, 0.001))
        self._routes.record_sent(route, stream.chain, lease.number)
        self.outbox.append((route.replica, OpenLease(lease.number, request, route.missing)))

    def _list_excluded(self, stream: ClusterStream, now: float) -> set[str]:
        """Replicas that may not get it: no place, refused, a suspect there, or another arithmetic."""
        able = {name for name, known in self.replicas.items() if known.takes} - stream.refused_by
        able = {name for name in able if now - self.replicas[name].heard_s <= LATE_S} or able
        if stream.is_suspect:
            able -= {n for n in able if any(x.stream.is_suspect for x in self.replicas[n].leases.values())}
        if stream.equality:
            able = {n for n in able if self.replicas[n].card.equality == stream.equality} or able
        return {name for name in self._routes.replicas if name not in able}

    def _revoke(self, lease: Lease, cause: LossCause, now: float) -> None:
        """Take a lease from its replica: the stream goes on elsewhere, unless it was lost too often."""
        stream = lease.stream
        if lease.replica in self.replicas:
            self.outbox.append((lease.replica, CancelLease(lease.number, None)))
        self._end_lease(lease, now)
        stream.is_resumed = True
        stream.end_cancelled()
        if cause not in UNCOUNTED:
            stream.num_losses += 1
        if stream.num_losses >= MAX_LOSSES:
            text = f"{stream.num_losses} replicas were lost in a row under this request; it is not tried"
            stream.end(EngineKilled(f"{text} again. What it had generated was delivered"))
        if stream.parts:
            self._waiting[stream.key], self._causes[stream.key] = stream, cause
        self._settle(stream, now)

    def _end_lease(self, lease: Lease, now: float) -> None:
        lease.stream.lease = None
        if (known := self.replicas.get(lease.replica)) is not None:
            known.leases.pop(lease.number, None)
        self._routes.record_end(lease.route, lease.number)
        self._lease_seconds.append(now - lease.began_s)

    def _fail(self, stream: ClusterStream, error: PlaitError | None, now: float) -> None:
        if (lease := stream.lease) is not None and lease.replica in self.replicas:
            self.outbox.append((lease.replica, CancelLease(lease.number, None)))
        stream.end(error)
        self._settle(stream, now)

    def _name_blocks(self, request: Request, block_size: int) -> tuple[bytes, ...]:
        """The hashes of a prompt's whole blocks, as the prefix index of an engine names them."""
        salt = request.cache_salt
        if request.adapter:  # of a name that no replica has: it is refused there
            salt = salt_prefix(salt, self._adapters.get(request.adapter, request.adapter))
        chain = [root(salt)]
        extend(chain, request.prompt_token_ids, block_size)
        return tuple(chain[1:])

    def _forget(self, stream: ClusterStream) -> None:
        """A stream ends with the event that its reader gets next."""
        del self._streams[stream.request.id]
        self._waiting.pop(stream.key, None)
        self._causes.pop(stream.key, None)

    def _settle(self, stream: ClusterStream, now: float) -> None:
        """End the lease of a stream that has ended."""
        if not stream.parts and stream.lease is not None:
            self._end_lease(stream.lease, now)


def _read_event(message: EventMessage, lease: Lease) -> Event | None:
    """An event of a lease under its request's own id; None: it is of something else."""
    own, event = lease.stream.request.id, message.more
    if event is None:
        return decode_event(own, message)
    if event.index != message.index or event.request_id != lease.request_id:
        return None
    trace = None if event.trace is None else replace(event.trace, request_id=own)
    return structs.replace(event, request_id=own, trace=trace)


def _is_loss(event: Event, part: ChoiceEntry) -> bool:
    """Whether an end says that the engine has gone, and not that the choice is done."""
    if event.finish_reason == "cancelled":
        return part.cancelled_as is None  # no client requested it: the replica is closing
    return event.finish_reason == "error" and isinstance(event.error, EngineLost)
