"""Replicas for tests: engines in threads with computable tokens, and sockets that lie."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry

from plait.cluster.loop import ClusterLoop
from plait.cluster.replica_server import ReplicaAddress, ReplicaServer
from plait.cluster.wire import ReplicaCard
from plait.engine.admission import OnEvent
from plait.engine.fingerprint import Fingerprint
from plait.errors import EngineError, PlaitError, QueueFull
from plait.request import Event, Request, SamplingParams
from tests.patience import PATIENCE_S, wait_until

BLOCK = 4
STEP_S = 0.002


def token(request: Request, index: int, position: int) -> int:
    """The token of a choice at a position: of the prompt, the choice and the position alone."""
    return hash((request.prompt_token_ids, index, position)) % 1000


def expected(request: Request, index: int = 0) -> list[int]:
    return [token(request, index, i) for i in range(request.params.max_tokens or 0)]


def make_request(
    name: str, num_tokens: int = 20, *, n: int = 1, timeout_s: float | None = None, first: int = 1
) -> Request:
    params = SamplingParams(max_tokens=num_tokens, n=n, seed=1)
    return Request(name, (first, *name.encode()), params, timeout_s=timeout_s)


def make_card(**more: object) -> ReplicaCard:
    values = {
        **dict(
            name="tiny", source=b"{}", spec=b"", model="m", arithmetic="fp_1", max_model_len=100, longest=100
        ),
        **dict(block_size=BLOCK, is_paged=True, max_open=64, answers_metrics=True),
    }
    return ReplicaCard(**{**values, **more})  # type: ignore[arg-type]


class Received:
    """A reader of streams: what came for each request and choice, in order."""

    def __init__(self) -> None:
        self.events: dict[tuple[str, int], list[Event]] = {}
        self._changed = threading.Condition()

    def __call__(self, event: Event) -> None:
        with self._changed:
            self.events.setdefault((event.request_id, event.index), []).append(event)
            self._changed.notify_all()

    def tokens(self, name: str, index: int = 0) -> list[int]:
        return [t for event in self.events.get((name, index), ()) for t in event.token_ids]

    def ends(self, name: str, index: int = 0) -> list[str]:
        return [e.finish_reason for e in self.events.get((name, index), ()) if e.finish_reason is not None]

    def error(self, name: str, index: int = 0) -> Exception | None:
        return self.events[name, index][-1].error

    def wait(self, is_true: Callable[[], bool], seconds: float = PATIENCE_S) -> None:
        until = time.monotonic() + seconds
        with self._changed:
            while not is_true():
                assert time.monotonic() < until, "it did not come to pass"
                self._changed.wait(0.05)  # not all that tests wait for is an event

    def wait_ends(self, *requests: Request) -> None:
        choices = [(r.id, i) for r in requests for i in range(r.params.n)]
        self.wait(lambda: all(self.ends(*choice) for choice in choices))


@dataclass
class _Running:
    request: Request
    on_event: OnEvent
    so_far: dict[int, int]


class ThreadEngine:
    """A `Loop` on a thread: a token of every open choice in a step. `is_still`: it computes nothing and is
    reported as frozen; `is_paused`: it computes nothing.

    `poison`: the first token of prompts that end it. `most`: requests that it takes.
    """

    fault: BaseException | None = None
    loading: tuple[str, int, int] | None = None
    fingerprint, longest = Fingerprint("m", "fp_1"), 100

    def __init__(self, poison: int | None = None, most: int = 64) -> None:
        self.poison, self.max_open = poison, most
        self.healthy, self.live, self.is_still, self.is_paused = True, True, False, False
        self.registry = CollectorRegistry()
        self.on_charged: Callable[[tuple[str, ...], bool], None] = lambda request_ids, is_foreign: None
        self.num_taken = self.num_deaths = 0
        self.lock = threading.RLock()
        self.running: dict[str, _Running] = {}
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def submit(self, request: Request, on_event: OnEvent) -> None:
        with self.lock:
            self.check_capacity()
            self.num_taken += 1
            resumed = request.resumed or ((),) * request.params.n
            so_far = {i: len(ids) for i, ids in enumerate(resumed) if ids is not None}
            for i, ids in enumerate(resumed):
                if ids:
                    assert list(ids) == [token(request, i, p) for p in range(len(ids))], (
                        "a wrong continuation"
                    )
            self.running[request.id] = _Running(request, on_event, so_far)

    def check_capacity(self) -> None:
        if not self.healthy:
            raise EngineError("the model is still loading")
        if len(self.running) >= self.max_open:
            raise QueueFull("it is full")

    def cancel(self, request_id: str, index: int | None = None) -> None:
        with self.lock:
            if (found := self.running.get(request_id)) is not None:
                for i in [*found.so_far]:
                    if index in (None, i):
                        self._end(found, i, Event(request_id, i, finish_reason="cancelled"))

    def step(self) -> None:
        with self.lock:
            poisoned = [r for r in self.running.values() if r.request.prompt_token_ids[0] == self.poison]
            if poisoned and self.healthy:
                self.die(is_foreign=False)
            if self.is_still or self.is_paused or not self.healthy:
                return
            for found in [*self.running.values()]:
                for i, position in [*found.so_far.items()]:
                    is_last = position + 1 == found.request.params.max_tokens
                    new = token(found.request, i, position)
                    event = Event(found.request.id, i, (new,), finish_reason="length" if is_last else None)
                    found.so_far[i] += 1
                    if is_last:
                        self._end(found, i, event)
                    else:
                        found.on_event(event)

    def die(self, *, is_foreign: bool) -> None:
        """The engine process ends below the living replica, and comes back with what is still open."""
        self.healthy = False
        self.num_deaths += 1
        self.on_charged(tuple(self.running), is_foreign)
        threading.Timer(0.1, setattr, (self, "healthy", True)).start()

    def fail(self, request_id: str, error: PlaitError) -> None:
        with self.lock:
            found = self.running[request_id]
            for i in [*found.so_far]:
                self._end(found, i, Event(request_id, i, finish_reason="error", error=error))

    def _end(self, found: _Running, index: int, event: Event) -> None:
        del found.so_far[index]
        if not found.so_far:
            del self.running[found.request.id]
        found.on_event(event)

    def _run(self) -> None:
        while not self._is_closed.wait(STEP_S):
            self.step()

    def stats(self) -> Mapping[str, int]:
        return {"num_running": len(self.running), "num_waiting": 0}

    def follow_log_levels(self) -> None: ...

    def change_adapter(self, name: str, path: str | None) -> None: ...

    def close(self, *, drain: bool = True, timeout_s: float = 30.0) -> bool:
        self._is_closed.set()
        return True


class LyingSocket:
    """Forwards one connection after another to a replica. `drops`: nothing comes through any more.

    `change`: what is done to bytes of the replica.
    """

    def __init__(self, to: ReplicaAddress) -> None:
        self._to, self.drops = to, False
        self.change: Callable[[bytes], bytes] = lambda data: data
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = ReplicaAddress("127.0.0.1", self._listener.getsockname()[1], to.token)
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """End the connections that are open."""
        for one in self._open:
            with_linger(one)
        self._open.clear()

    def close(self) -> None:
        self._listener.close()
        self.cut()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._to[:2])
            except OSError:
                return
            self._open += [near, far]
            for source, to, changes in ((near, far, False), (far, near, True)):
                threading.Thread(target=self._copy, args=(source, to, changes), daemon=True).start()

    def _copy(self, source: socket.socket, to: socket.socket, changes: bool) -> None:
        try:
            while data := source.recv(1 << 16):
                while self.drops:
                    time.sleep(0.01)
                to.sendall(self.change(data) if changes else data)
        except OSError:
            pass
        with_linger(to)


def with_linger(one: socket.socket) -> None:
    with suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)
    one.close()


@dataclass
class Replica:
    """One replica in this process: its engine, its server, and the socket in front of it."""

    engine: ThreadEngine
    server: ReplicaServer
    road: LyingSocket


@dataclass
class Cluster:
    """Replicas and a gateway's loop over them."""

    loop: ClusterLoop
    replicas: dict[str, Replica] = field(default_factory=dict)
    received: Received = field(default_factory=Received)

    def add(self, name: str, *, poison: int | None = None, most: int = 64, **card: object) -> Replica:
        engine = ThreadEngine(poison, most)
        card_of_it = make_card(max_open=most, **card)
        server = ReplicaServer(engine, card_of_it, beat_s=0.05, is_frozen=lambda: engine.is_still)
        engine.on_charged = server.report_charged
        self.replicas[name] = replica = Replica(engine, server, LyingSocket(server.address))
        self.tell()
        return replica

    def tell(self) -> None:
        self.loop.set_members({name: r.road.address for name, r in self.replicas.items()})

    def kill(self, name: str) -> None:
        """A replica ends at once, as by SIGKILL."""
        gone = self.replicas.pop(name)
        gone.road.close()
        gone.server.close()
        gone.engine.close()

    def wait_ready(self, number: int) -> None:
        assert wait_until(lambda: self.loop.count_states()["ready"] >= number), self.loop.describe()

    def submit(self, *requests: Request) -> None:
        for request in requests:
            self.loop.submit(request, self.received)

    def holder(self, request: Request) -> str:
        """The replica that computes a request."""
        until = time.monotonic() + PATIENCE_S
        while time.monotonic() < until:
            for name, replica in self.replicas.items():
                if any(r.partition("~")[0] == request.id for r in replica.engine.running):
                    return name
            time.sleep(0.002)
        raise AssertionError(f"no replica has {request.id}")

    def check(self, *requests: Request) -> None:
        """Each choice has the tokens of a single run, once and in order, and one end."""
        self.received.wait_ends(*requests)
        for request in requests:
            for i in range(request.params.n):
                assert self.received.tokens(request.id, i) == expected(request, i), (request.id, i)
                assert self.received.ends(request.id, i) == ["length"]


@contextmanager
def cluster(number: int = 2, *, patience_s: float = PATIENCE_S, **options: int | None) -> Iterator[Cluster]:
    """A loop over replicas r0, r1, …, all connected."""
    made = Cluster(ClusterLoop(patience_s=patience_s, name="gateway"))
    try:
        for i in range(number):
            made.add(f"r{i}", **options)  # type: ignore[arg-type]
        made.loop.first_card()
        made.wait_ready(number)
        yield made
    finally:
        made.loop.close(drain=False)
        for name in [*made.replicas]:
            made.kill(name)
