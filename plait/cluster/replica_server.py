"""Serves one engine to gateways: leases come in, and the events of all leases of a step go out as one frame.

An event loop on a thread of its own. It knows neither Ray nor how replicas are found: a gateway needs its
address and token. A gateway with a connection that ends has its leases ended.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from plait.cluster.connection import ReplicaEnd
from plait.cluster.resume_points import PointSource
from plait.cluster.wire import (
    AskMetrics,
    Beat,
    CancelLease,
    EngineEnded,
    EngineMetrics,
    Greeting,
    LeaseEvent,
    LeaseEvents,
    OpenLease,
    PointsReport,
    Refused,
    ReplicaCard,
    ReplicaLeaves,
    ToReplica,
)
from plait.engine.metric_registry import read_families
from plait.errors import EngineError, PlaitError
from plait.frontend.loop import Loop
from plait.request import Event
from plait.worker.protocol import BadFrame, encode_event

BEAT_S = 1.0
POINTS_S = 0.2  # between two looks for changes of what can be resumed that no reply's end has reported
TOKEN_NBYTES = 32
HOLD_S = 10.0  # for a lease to arrive of which the cluster has heard already
MAX_CONNECTIONS = 1024  # gateways, and strangers that have not proved themselves yet
log = logging.getLogger("plait.cluster")


class ReplicaAddress(NamedTuple):
    """Where a replica listens, and what proves that a gateway belongs to its cluster."""

    host: str
    port: int
    token: bytes


@dataclass(slots=True)
class ServedLease:
    """A lease that is open. `starts`: tokens of each open choice that its gateway has or that were sent.

    `missing`: tokens of its prompt that are not cached here, as far as its gateway knew.
    """

    request_id: str
    missing: int
    starts: dict[int, int]
    has_spoken: bool = False


class ReplicaServer:
    """Listens from its construction to `close`. `points`: None if the engine does not report any.

    `engine`: its loop; it stays the caller's. `is_frozen`: whether its process shows no sign of life for now;
    then streams move where they can. Raises OSError for an address that cannot be had.
    """

    def __init__(
        self,
        engine: Loop,
        card: ReplicaCard,
        *,
        host: str = "127.0.0.1",
        points: PointSource | None = None,
        beat_s: float = BEAT_S,
        is_frozen: Callable[[], bool] = lambda: False,
    ) -> None:
        self._engine, self.card, self._points, self._beat_s = engine, card, points, beat_s
        self._token = os.urandom(TOKEN_NBYTES)
        self._gateways: dict[str, _GatewayLink] = {}
        self._links: set[_GatewayLink] = set()
        self._reporting: set[asyncio.Task[None]] = set()
        self._is_leaving = self._was_frozen = False
        self._is_frozen = is_frozen
        self._holds: dict[str, list[tuple[int, Future[None]]]] = {}  # by gateway: (newest lease, what waits)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="plait-replica", daemon=True)
        self._thread.start()
        try:
            self._listener = asyncio.run_coroutine_threadsafe(self._listen(host), self._loop).result()
        except BaseException:
            self._loop.call_soon_threadsafe(self._loop.stop)
            raise
        self.address = ReplicaAddress(host, self._listener.sockets[0].getsockname()[1], self._token)

    @property
    def num_open(self) -> int:
        """Leases of all gateways."""
        return sum(len(link.leases) for link in [*self._links])

    def leave(self) -> None:
        """Announce that it will stop: gateways send nothing new."""
        self.call(self._leave)

    def report_charged(self, request_ids: tuple[str, ...], is_foreign: bool) -> None:
        """The engine's process has ended, see `Watcher.on_charged`. Gateways move what they can."""
        self.call(partial(self._report_charged, frozenset(request_ids), is_foreign))

    def hold(self, gateway: str, key: int) -> Future[None]:
        """Done when lease `key` has come, and the gateway has no lease any more.

        One that does not arrive within HOLD_S is over as well, and all are once the server is closed.
        """
        found: Future[None] = Future()
        if not self.call(partial(self._hold, gateway, key, found)):
            found.set_result(None)
        return found

    def close(self) -> None:
        """End every lease and connection."""
        if not self._thread.is_alive():
            return
        with suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(5)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)

    # On the thread

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.close()

    async def _listen(self, host: str) -> asyncio.Server:
        self._beating = self._loop.create_task(self._beat_on()), self._loop.create_task(self._report_on())
        return await self._loop.create_server(self._connect, host, 0, backlog=128)

    def _connect(self) -> asyncio.Protocol:
        link = _GatewayLink(self)
        self._links.add(link)
        if len(self._links) > MAX_CONNECTIONS:
            self._loop.call_soon(link.end.end, f"{MAX_CONNECTIONS} connections are open")
        return link.end

    async def _close(self) -> None:
        for task in (*self._beating, *self._reporting):
            task.cancel()
        self._listener.close()
        for link in [*self._links]:
            link.end.end("the replica stops")
        await asyncio.sleep(0)  # their ends are called
        for gateway, holds in [*self._holds.items()]:
            self._end_holds(gateway, max(key for key, _ in holds))

    async def _beat_on(self) -> None:
        while True:
            try:
                self._beat()
            except Exception:  # without any, gateways see a silent replica
                log.exception("a beat failed")
            await asyncio.sleep(self._beat_s)

    def _beat(self) -> None:
        engine, links = self._engine, [link for link in self._links if link.name]
        waiting, replies = self._count_load()
        is_frozen, was_frozen = self._is_frozen(), self._was_frozen
        if is_frozen and not was_frozen:
            self._report_charged(frozenset(), is_foreign=True)  # as if it had ended: it may wake again
        self._was_frozen = is_frozen
        stops = is_frozen or self._is_leaving
        beat = Beat(engine.healthy and not stops, not engine.live, waiting, replies, dict(engine.stats()))
        for link in links:
            link.end.send(beat)
        self.report_points()

    async def _report_on(self) -> None:
        while True:
            await asyncio.sleep(POINTS_S)
            try:
                if self._points is not None and self._points.has_changed:
                    self.report_points()
            except Exception:
                log.exception("a report of resume points failed")

    def report_points(self) -> None:
        """Report the load, and what has changed of what can be resumed, to all gateways."""
        links = [link for link in self._links if link.name]
        if self._points is None or not links:
            return
        for report in self._points.report(*self._count_load()):
            for link in links:
                link.end.send(PointsReport(report, link.newest_key))

    def _count_load(self) -> tuple[int, int]:
        """Tokens of prompts that have no reply yet, and open choices."""
        leases = [lease for link in self._links for lease in link.leases.values()]
        waiting = sum(lease.missing for lease in leases if not lease.has_spoken)
        return waiting, sum(len(lease.starts) for lease in leases)

    def _leave(self) -> None:
        self._is_leaving = True
        for link in self._links:
            link.end.send(ReplicaLeaves())

    def _report_charged(self, request_ids: frozenset[str], is_foreign: bool) -> None:
        for link in self._links:
            charged = tuple(key for key, lease in link.leases.items() if lease.request_id in request_ids)
            link.end.send(EngineEnded(charged, is_foreign))

    def _hold(self, gateway: str, key: int, found: Future[None]) -> None:
        self._holds.setdefault(gateway, []).append((key, found))
        link = self._gateways.get(gateway)
        if not self._listener.is_serving():
            self._end_holds(gateway, key)
        elif link is not None and key <= link.newest_key:
            self.release(link)
        else:
            self._loop.call_later(HOLD_S, self._give_up, gateway, key)

    def _give_up(self, gateway: str, key: int) -> None:
        """End what waits for leases up to this one, if it has not come."""
        link = self._gateways.get(gateway)
        if link is None or key > link.newest_key or not link.leases:
            self._end_holds(gateway, key)

    def release(self, link: _GatewayLink) -> None:
        """A lease is over; with the last one, what waits for the gateway's leases."""
        if not link.leases:
            self._end_holds(link.name, link.newest_key)

    def _end_holds(self, gateway: str, newest: int) -> None:
        """End what waits for leases up to this key; a later one may be on its way."""
        holds = self._holds.pop(gateway, [])
        if later := [(key, found) for key, found in holds if key > newest]:
            self._holds[gateway] = later
        for key, found in holds:
            if key <= newest and found.set_running_or_notify_cancel():
                found.set_result(None)

    def greet(self, link: _GatewayLink, name: str) -> None:
        """A gateway has sent its name."""
        if link.name:
            raise BadFrame("a gateway sends its name once")
        if (older := self._gateways.get(name)) is not None:
            older.end.end("the gateway has connected again")
            link.newest_key = older.newest_key
        link.name, self._gateways[name] = name, link
        if self._points is not None:
            self._points.begin_anew()  # it must hear of everything
        self._beat()

    def forget(self, link: _GatewayLink, why: str) -> None:
        """A connection has ended."""
        self._links.discard(link)
        if link.name:
            log.info("gateway %s: the connection has ended: %s", link.name, why)
            if self._gateways.get(link.name) is link:
                del self._gateways[link.name]
        for lease in link.leases.values():
            self._engine.cancel(lease.request_id)
        link.leases.clear()
        self.release(self._gateways.get(link.name, link))

    def hear(self, link: _GatewayLink, message: ToReplica) -> None:
        """A message of a gateway."""
        match message:
            case OpenLease(key, request):
                link.add(key, message)
                try:
                    if self._is_leaving:
                        raise EngineError("the replica is stopping and takes no more requests")
                    self._engine.submit(request, partial(link.arrive, key))
                except PlaitError as error:
                    link.leases.pop(key, None)
                    link.end.send(Refused(key, error))
                    self.release(link)
            case CancelLease(key, index):
                if (lease := link.leases.get(key)) is not None:
                    self._engine.cancel(lease.request_id, index)
            case Greeting(gateway):
                self.greet(link, gateway)
            case AskMetrics(number):
                self._begin_report(link, number)
            case _:
                if self._points is not None:
                    self._points.begin_anew()

    def _begin_report(self, link: _GatewayLink, number: int) -> None:
        task = self._loop.create_task(self._report_metrics(link, number))
        self._reporting.add(task)
        task.add_done_callback(self._reporting.discard)

    async def _report_metrics(self, link: _GatewayLink, number: int) -> None:
        """Ask the engine, which answers between two steps, off this thread: tokens go out meanwhile."""
        try:
            families = await asyncio.to_thread(read_families, self._engine.registry)
            link.end.send(EngineMetrics(number, families))
        except Exception:
            log.exception("the engine's metrics cannot be reported")

    def drop(self, link: _GatewayLink, key: int, request_id: str) -> None:
        """End a lease with an event that cannot be sent."""
        link.leases.pop(key, None)
        self._engine.cancel(request_id)
        self.release(link)

    def call(self, function: Callable[[], None]) -> bool:
        """Call it soon on the event loop's thread. From any thread. False: the server is closed."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function)
            return True
        return False


class _GatewayLink:
    """One gateway: its leases, and the events that wait for the next frame."""

    def __init__(self, server: ReplicaServer) -> None:
        self._server, self.name = server, ""
        self.leases: dict[int, ServedLease] = {}
        self.newest_key = 0
        self._arrived: deque[tuple[int, Event]] = deque()
        self._is_awaited = False
        self.end = ReplicaEnd(
            server._token,
            lambda: self.end.send(server.card),  # what is served here
            partial(server.hear, self),
            partial(server.forget, self),
        )

    def add(self, key: int, message: OpenLease) -> None:
        """Record a lease. Raises BadFrame for a key that was used before."""
        if key <= self.newest_key or not self.name:
            raise BadFrame("a lease with a key that was used before, or of a gateway without a name")
        self.newest_key = key
        request = message.request
        missing = len(request.prompt_token_ids) if message.missing is None else max(message.missing, 0)
        resumed = request.resumed or ((),) * request.params.n
        starts = {i: len(token_ids) for i, token_ids in enumerate(resumed) if token_ids is not None}
        self.leases[key] = ServedLease(request.id, missing, starts)

    def arrive(self, key: int, event: Event) -> None:
        """An event of the engine, from its thread."""
        self._arrived.append((key, event))
        if not self._is_awaited:
            self._is_awaited = True
            self._server.call(partial(self._flush))

    def _flush(self) -> None:
        self._is_awaited = False
        events, has_news = [], False
        while self._arrived:
            key, event = self._arrived.popleft()
            lease = self.leases.get(key)
            if lease is None or event.index not in lease.starts:
                continue
            start = lease.starts[event.index]
            events.append(LeaseEvent(start, encode_event(key, event)))
            lease.starts[event.index] = start + len(event.token_ids)
            has_news |= event.finish_reason is not None or (bool(event.token_ids) and not lease.has_spoken)
            lease.has_spoken |= bool(event.token_ids)
            if event.finish_reason is not None:
                del lease.starts[event.index]
            if not lease.starts:
                del self.leases[key]
                self._server.release(self)
        if has_news:  # before a reply's end: the next turn may come at once, to another gateway
            self._server.report_points()
        if events:
            self._send(events)

    def _send(self, events: list[LeaseEvent]) -> None:
        """Send events as one frame; where that would be too long, as more, and one that is alone fails."""
        try:
            self.end.send(LeaseEvents(tuple(events)))
        except EngineError as error:
            if len(events) > 1:
                self._send(events[: len(events) // 2])
                self._send(events[len(events) // 2 :])
                return
            (start, event), key = (events[0].start, events[0].event), events[0].event.key
            request_id = event.more.request_id if event.more else ""
            failed = Event(request_id, event.index, finish_reason="error", error=error)
            self.end.send(LeaseEvents((LeaseEvent(start, encode_event(key, failed)),)))
            self._server.drop(self, key, request_id)
