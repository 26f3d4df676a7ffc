"""The engine of a gateway: a `Loop` over replicas on other machines, which outlives any of them.

An event loop on a thread of its own has a connection with each replica and the lease table. It gets where
replicas are (`set_members`) and knows neither Ray nor how they are started.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial

from prometheus_client import CollectorRegistry

from plait.cluster.lease import KnownReplica
from plait.cluster.lease_table import LeaseTable
from plait.cluster.links import ReplicaLinks
from plait.cluster.metrics import ClusterMetrics
from plait.cluster.replica_metrics import ReplicaMetrics
from plait.cluster.replica_server import ReplicaAddress
from plait.cluster.routing_table import RoutingTable
from plait.cluster.wire import (
    AskMetrics,
    Beat,
    EngineEnded,
    EngineMetrics,
    LeaseEvents,
    OpenLease,
    PointsReport,
    Refused,
    ReplicaCard,
    ReplicaLeaves,
    ToGateway,
)
from plait.engine.admission import OnEvent
from plait.engine.fingerprint import Fingerprint
from plait.engine.metrics import WAITS_S, Histogram
from plait.errors import EngineClosing, EngineError, PlaitError, QueueFull
from plait.request import Request
from plait.server.gateway.joined_metrics import JoinedMetrics
from plait.version import __version__

TICK_S = 0.1  # between two looks at silent replicas, time limits, and requests that wait
STATES = ("ready", "replacing", "silent", "leaving", "unreachable")
log = logging.getLogger("plait.cluster")
Report = Callable[[str, int, int], None]


class ClusterLoop:
    """Starts its thread at construction. `first_card` waits for a replica; requests are taken then.

    `patience_s`: a replica with open streams that shows no sign of life for so long loses them. `on_lease` is
    called for each new lease, on the loop's thread, with the replica and the lease's key. `is_managed`:
    whether a replica that ends is replaced; if not, load balancers should send new requests elsewhere, but
    those that come are served.
    """

    fault: PlaitError | None = None
    loading: tuple[str, int, int] | None = None
    is_managed = True
    device_nbytes = 0  # replicas do not say

    def __init__(
        self,
        *,
        patience_s: float = 5.0,
        name: str = "",
        on_lease: Callable[[str, int], None] = lambda replica, key: None,
    ) -> None:
        self.name = name or os.urandom(8).hex()
        self._patience_s, self._on_lease = patience_s, on_lease
        self._table: LeaseTable | None = None
        self._card: ReplicaCard | None = None
        self._num_places = 0
        self._changed = threading.Condition()
        self._links = ReplicaLinks(self.name, self._hear, self._lose)
        self._num_arriving = 0
        self._is_closing = False
        own, self.registry = (CollectorRegistry(auto_describe=False) for _ in range(2))
        own.register(ClusterMetrics(self))
        self._engine_metrics = ReplicaMetrics(self._ask_metrics)
        self.registry.register(JoinedMetrics([(own, self.metric_labels)]))
        self.registry.register(self._engine_metrics)
        self.lease_seconds = Histogram("plait_cluster_lease_seconds", "How long leases last.", WAITS_S)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="plait-cluster", daemon=True)
        self._thread.start()

    # Replicas

    def set_members(self, members: Mapping[str, ReplicaAddress]) -> None:
        """These replicas take requests, and no others. One that is left out finishes what it has."""
        self._call(partial(self._set_members, dict(members)))

    def report_dead(self, replica: str) -> None:
        """A replica has ended, as is known from elsewhere; its connection may not show it yet."""
        self._call(partial(self._links.end, replica, "the replica has ended"))

    def first_card(self, report: Report = lambda text, done, total: None) -> ReplicaCard:
        """What the replicas serve, once one is there. Raises EngineError when the loop closes before."""
        with self._changed:
            while self._card is None:
                if self._is_closing:
                    raise EngineError("the gateway is closing and waits for no replica any more")
                self._changed.wait(0.5)
                report("waiting for a replica", 0, 1)
            return self._card

    # As `EngineLoop`, which documents what is the same

    def submit(self, request: Request, on_event: OnEvent) -> None:
        with self._changed:
            self.check_capacity()
            self._num_arriving += 1
            # Under the lock that closing takes: behind the last look at all requests, nothing would end it.
            self._call(partial(self._submit, request, on_event, time.monotonic()))

    def check_capacity(self) -> None:
        if self._is_closing or not self._thread.is_alive():
            raise EngineClosing("the gateway is closing and takes no more requests")
        if self._table is None:
            raise EngineError("no replica is there yet")
        if len(self._table) + self._num_arriving >= self.max_open:
            raise QueueFull(f"{self.max_open} requests are open in this gateway; try again later")

    def cancel(self, request_id: str, index: int | None = None) -> None:
        self._call(partial(self._cancel, request_id, index))

    def change_adapter(self, name: str, path: str | None) -> None:
        """Refused: a replica that starts later would not have it."""
        raise EngineError("a cluster changes no adapters while it runs; start it with --lora NAME=PATH")

    @property
    def metric_labels(self) -> dict[str, str]:
        """Of what this gateway counts itself: a scrape may reach any gateway of a cluster."""
        return {"gateway": self.name}

    @property
    def healthy(self) -> bool:
        """Whether any replica takes requests, and is replaced when it ends."""
        return self.is_managed and bool(self.count_states()["ready"])

    @property
    def live(self) -> bool:
        return self._thread.is_alive()

    @property
    def fingerprint(self) -> Fingerprint:
        """Of the replica that was heard first: all others should have its arithmetic, too."""
        card = self._card
        return Fingerprint("", "") if card is None else Fingerprint(card.model, card.arithmetic)

    @property
    def max_open(self) -> int:
        """Places of all replicas; without any, as many as there were last."""
        return self._num_places

    @property
    def longest(self) -> int | None:
        return None if self._card is None else self._card.longest

    def follow_log_levels(self) -> None:
        """Engines of a cluster keep the levels that they were started with."""

    def stats(self) -> Mapping[str, int]:
        """The sums of what replicas say, and the streams that wait here."""
        total: Counter[str] = Counter()
        for known in self._replicas():
            if known.beat is not None:
                total.update(known.beat.stats)
        total["num_running"] += 0
        total["num_waiting"] += 0 if self._table is None else self._table.num_waiting
        return dict(total)

    def close(self, *, drain: bool = True, timeout_s: float = 30.0) -> bool:
        deadline = time.monotonic() + (timeout_s if drain else 0.0)
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        while self._table is not None and len(self._table) and time.monotonic() < deadline:
            time.sleep(0.05)
        self._call(self._stop)
        if threading.current_thread() is not self._thread:
            self._thread.join(5)
        return not self._thread.is_alive()

    # What others read

    def count_states(self) -> dict[str, int]:
        """Replicas by state: see STATES."""
        counts = Counter(known.state for known in self._replicas())
        counts["unreachable"] = len({*self._links.members} - {known.name for known in self._replicas()})
        return {state: counts[state] for state in STATES}

    def has_leases(self, replica: str) -> bool:
        """Whether a replica has streams of this gateway."""
        known = None if self._table is None else self._table.replicas.get(replica)
        return known is not None and bool(known.leases)

    def describe(self) -> dict[str, object]:
        """This gateway, its replicas and counts, for `plait cluster status`."""
        replicas = [
            {
                "name": known.name,
                "state": known.state,
                "arithmetic": known.card.arithmetic,
                "digest": known.card.digest,
                "open": len(known.leases),
                "waiting_tokens": known.beat.waiting_tokens if known.beat else 0,
                "restarts": known.beat.stats.get("num_restarts", 0) if known.beat else 0,
            }
            for known in self._replicas()
        ]
        table = self._table
        moved = {} if table is None else {f"{why} {same}": n for (why, same), n in table.moved.items()}
        routed = {} if table is None else dict(table.routed)
        num_open = 0 if table is None else len(table)
        states = self.count_states()
        found = self.fingerprint
        own = {
            "name": self.name,
            "version": __version__,
            "model": found.model,
            "arithmetic": found.arithmetic,
        }
        counts = {"open": num_open, "moved": moved, "routed": routed}
        return {**own, "states": states, "replicas": replicas, **counts}

    def counts(self) -> tuple[dict[tuple[str, str], int], dict[str, int]]:
        """Moved streams by (cause, same arithmetic), and leases by the reason of their route."""
        return ({}, {}) if self._table is None else (dict(self._table.moved), dict(self._table.routed))

    def _ask_metrics(self, number: int) -> list[str]:
        """Ask every replica that works; which ones. From any thread."""
        names = [k.name for k in self._replicas() if not k.is_silent and k.card.answers_metrics]

        def ask() -> None:
            for name in names:
                self._links.send(name, AskMetrics(number))

        self._call(ask)
        return names

    # On the thread

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._ticking = self._loop.create_task(self._tick_on())
        self._loop.run_forever()
        self._loop.close()

    def _call(self, function: Callable[[], None]) -> None:
        with suppress(RuntimeError):  # closed: everything has ended
            self._loop.call_soon_threadsafe(function)

    async def _tick_on(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            try:
                self._tick()
            except Exception:  # streams must not stand still because one look failed
                log.exception("a look at the replicas failed")

    def _tick(self) -> None:
        if (table := self._table) is None:
            return
        now = time.monotonic()
        for name in table.find_silent(now):
            log.warning("replica %s shows no sign of life for %g s: its streams move", name, self._patience_s)
        table.expire(now)
        for seconds in table.take_lease_seconds():
            self.lease_seconds.observe(seconds)
        self._flush()

    def _replicas(self) -> list[KnownReplica]:
        return [] if self._table is None else [*self._table.replicas.values()]

    def _submit(self, request: Request, on_event: OnEvent, arrived: float) -> None:
        with self._changed:
            self._num_arriving -= 1
        assert self._table is not None
        self._table.add(request, on_event, arrived)
        self._flush()

    def _cancel(self, request_id: str, index: int | None) -> None:
        if self._table is not None:
            self._table.cancel(request_id, index)
            self._flush()

    def _flush(self) -> None:
        """Give waiting streams a replica, and send what there is to send."""
        table = self._table
        if table is None:
            return
        table.place(time.monotonic())
        while table.outbox:
            name, message = table.outbox.popleft()
            try:
                is_sent = self._links.send(name, message)
            except EngineError as error:  # a request that cannot be written
                assert isinstance(message, OpenLease)
                table.fail_lease(name, message.key, error, time.monotonic())
                continue
            if is_sent and isinstance(message, OpenLease):
                self._on_lease(name, message.key)

    def _set_members(self, members: dict[str, ReplicaAddress]) -> None:
        left = self._links.set_members(members)
        if (table := self._table) is None:
            return
        for name in members:
            table.rejoin(name)
        for name in left:
            table.retire(name)

    def _lose(self, name: str, why: str) -> None:
        if self._table is None:
            return
        known = self._table.replicas.get(name)
        if known is not None:
            log.warning("replica %s: %s; %d streams move", name, why, len(known.leases))
        self._table.lose(name, time.monotonic())
        self._engine_metrics.forget(name)
        self._count_places()
        self._flush()

    def _hear(self, name: str, message: ToGateway) -> None:
        now = time.monotonic()
        table = self._table
        if isinstance(message, ReplicaCard):
            self._join(name, message, now)
        elif table is None:
            return
        elif isinstance(message, LeaseEvents):
            for event in message.events:
                table.deliver(name, event, now)
            if not table.outbox and not table.num_waiting:
                return
        else:
            self._hear_state(table, name, message, now)
        self._flush()

    def _hear_state(self, table: LeaseTable, name: str, message: ToGateway, now: float) -> None:
        """What a replica says of itself."""
        match message:
            case Beat():
                table.hear_beat(name, message, now)
            case PointsReport():
                table.hear_report(name, message.report, now, message.newest)
            case EngineEnded():
                log.warning("replica %s: its engine has ended or is frozen", name)
                table.end_engine(name, message.charged, now, is_foreign=message.is_foreign)
            case Refused():
                table.refuse(name, message, now)
            case ReplicaLeaves():
                table.announce(name)
            case EngineMetrics(number, families):
                self._engine_metrics.arrive(name, number, families)

    def _join(self, name: str, card: ReplicaCard, now: float) -> None:
        if self._table is None:
            routes = RoutingTable(card.block_size, is_paged=card.is_paged)
            self._table = LeaseTable(routes, card.model, card.block_size, patience_s=self._patience_s)
        if not self._table.join(name, card, now):
            log.error("replica %s serves another model than this gateway, and gets no requests", name)
            self._links.refuse(name, "it serves another model")
            return
        if name not in self._links.members:  # it left the list while it was being connected
            self._table.retire(name)
        first = self._card or card
        if first.equality != card.equality:
            text = "replica %s computes with other arithmetic (%s) than %s"
            log.warning(text, name, card.equality, first.equality)
        with self._changed:
            self._card = first
            self._count_places()
            self._changed.notify_all()

    def _count_places(self) -> None:
        """The places of all replicas; when the last one goes, its number stays, because requests wait."""
        self._num_places = sum(known.card.max_open for known in self._replicas()) or self._num_places

    def _stop(self) -> None:
        if self._table is not None:
            self._table.end_all(None, time.monotonic())
            self._flush()
        self._ticking.cancel()
        self._links.close()
        self._loop.call_later(0.05, self._loop.stop)
