"""The lease table, alone: any order of frames, losses and cancels gives each choice its tokens, once."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

from hypothesis import given, settings
from hypothesis import strategies as st

from plait.cluster.lease_table import MAX_LOSSES, LeaseTable
from plait.cluster.resume_points import ReplicaReport
from plait.cluster.routing_table import RoutingTable
from plait.cluster.wire import Beat, CancelLease, LeaseEvent, OpenLease, Refused, ToReplica
from plait.engine.adapters import AdapterTable
from plait.errors import EngineKilled, QueueFull
from plait.request import Event, Request
from plait.state.blocks import extend, root
from plait.worker.protocol import encode_event
from tests.cluster.replicas import BLOCK, Received, expected, make_card, make_request, token

READY = Beat(True, False, 0, 0, {})


@dataclass
class ModelLease:
    request: Request
    starts: dict[int, int]


@dataclass
class Model:
    """Replicas as dictionaries, and a table over them. The test is the network, the clock and the engines."""

    names: tuple[str, ...] = ("r0", "r1", "r2")
    now: float = 100.0
    received: Received = field(default_factory=Received)
    leases: dict[str, dict[int, ModelLease]] = field(default_factory=dict)
    old_frames: list[tuple[str, LeaseEvent]] = field(default_factory=list)

    def __post_init__(self) -> None:
        routes = RoutingTable(BLOCK, is_paged=True, rng=random.Random(1))
        self.table = LeaseTable(routes, "m", BLOCK, patience_s=5.0)
        for name in self.names:
            self.join(name)

    def join(self, name: str) -> None:
        self.leases[name] = {}
        self.table.join(name, make_card(), self.now)

    def add(self, request: Request) -> None:
        self.table.add(request, self.received, self.now)
        self.settle()

    def settle(self) -> None:
        """Place what waits, and hand out what is to be sent."""
        self.table.place(self.now)
        while self.table.outbox:
            name, message = self.table.outbox.popleft()
            self.take(name, message)
            self.table.place(self.now)

    def take(self, name: str, message: ToReplica) -> None:
        match message:
            case OpenLease(key, request):
                resumed = request.resumed or ((),) * request.params.n
                for i, ids in enumerate(resumed):
                    assert list(ids or ()) == expected(request, i)[: len(ids or ())]
                starts = {i: len(ids) for i, ids in enumerate(resumed) if ids is not None}
                assert starts, "a lease for nothing"
                self.leases[name][key] = ModelLease(request, starts)
            case CancelLease(key, index):
                lease = self.leases.get(name, {}).get(key)
                for i in [*lease.starts] if lease else ():
                    if index in (None, i):
                        self.end(name, key, i, Event(lease.request.id, i, finish_reason="cancelled"))

    def end(self, name: str, key: int, index: int, event: Event) -> None:
        lease = self.leases[name][key]
        start = lease.starts.pop(index)
        if not lease.starts:
            del self.leases[name][key]
        self.send(name, LeaseEvent(start, encode_event(key, event)))

    def send(self, name: str, message: LeaseEvent) -> None:
        self.old_frames.append((name, message))
        self.table.deliver(name, message, self.now)

    def step(self, name: str, num_tokens: int, lie: str = "") -> None:
        """Tokens of every lease of a replica; `lie`: what is wrong with the first event."""
        for key, lease in [*self.leases[name].items()]:
            for i, start in [*lease.starts.items()]:
                left = (lease.request.params.max_tokens or 0) - start
                ids = tuple(token(lease.request, i, start + p) for p in range(min(num_tokens, left)))
                reason = "length" if len(ids) == left else None
                event = Event(lease.request.id, i, ids, finish_reason=reason)
                if lie == "gap":
                    self.send(name, LeaseEvent(start + 1, encode_event(key, event)))
                elif lie == "repeat" and start:
                    again = Event(lease.request.id, i, (token(lease.request, i, start - 1),))
                    self.send(name, LeaseEvent(start - 1, encode_event(key, again)))
                lie = ""
                if key not in self.leases[name] or i not in lease.starts:
                    continue
                if reason:
                    self.end(name, key, i, event)
                else:
                    lease.starts[i] = start + len(ids)
                    self.send(name, LeaseEvent(start, encode_event(key, event)))


ACTIONS = st.one_of(
    st.tuples(st.just("add"), st.integers(1, 3)),
    st.tuples(st.just("step"), st.integers(0, 2)),
    st.tuples(st.just("step"), st.integers(0, 2)),
    st.tuples(st.just("lie"), st.integers(0, 2)),
    st.tuples(st.just("lose"), st.integers(0, 2)),
    st.tuples(st.just("join"), st.integers(0, 2)),
    st.tuples(st.just("retire"), st.integers(0, 2)),
    st.tuples(st.just("silence"), st.integers(0, 2)),
    st.tuples(st.just("engine"), st.integers(0, 2)),
    st.tuples(st.just("old"), st.integers(0, 10_000)),
    st.tuples(st.just("refuse"), st.integers(0, 2)),
    st.tuples(st.just("cancel"), st.integers(0, 10_000)),
)


@dataclass
class Run:
    """One run of a model: what was requested and cancelled."""

    model: Model
    requests: list[Request] = field(default_factory=list)
    cancelled: set[tuple[str, int]] = field(default_factory=set)

    def act(self, kind: str, number: int) -> None:
        getattr(self, kind)(number)
        self.model.settle()

    def add(self, number: int) -> None:
        self.requests.append(make_request(f"q{len(self.requests)}", 7, n=number))
        self.model.add(self.requests[-1])

    def step(self, number: int) -> None:
        self.model.step(f"r{number}", 2)

    def lie(self, number: int) -> None:
        self.model.step(f"r{number}", 1, ("gap", "repeat")[len(self.model.old_frames) % 2])

    def lose(self, number: int) -> None:
        self.model.leases[f"r{number}"].clear()
        self.model.table.lose(f"r{number}", self.model.now)

    def join(self, number: int) -> None:
        if f"r{number}" not in self.model.table.replicas:
            self.model.join(f"r{number}")

    def retire(self, number: int) -> None:
        self.model.table.retire(f"r{number}")

    def silence(self, number: int) -> None:
        model = self.model
        for other in {*model.names} - {f"r{number}"}:
            model.now += 1.3
            model.table.hear_beat(other, READY, model.now)
            model.table.find_silent(model.now - 0.5)  # the gateway itself was awake
            model.table.find_silent(model.now)

    def engine(self, number: int) -> None:
        charged = [*self.model.leases[f"r{number}"]]
        self.model.table.end_engine(f"r{number}", charged, self.model.now, is_foreign=number != 1)

    def old(self, number: int) -> None:
        if frames := self.model.old_frames:
            self.model.table.deliver(*frames[number % len(frames)], self.model.now)

    def refuse(self, number: int) -> None:
        leases = self.model.leases[f"r{number}"]
        for key in [*leases][:1]:
            del leases[key]
            self.model.table.refuse(f"r{number}", Refused(key, QueueFull("it is full")), self.model.now)

    def cancel(self, number: int) -> None:
        if self.requests:
            request = self.requests[number % len(self.requests)]
            index = number % request.params.n
            self.cancelled.add((request.id, index))
            self.model.table.cancel(request.id, index)


@settings(max_examples=60, deadline=None)
@given(st.lists(ACTIONS, max_size=40))
def test_any_order_of_frames_losses_and_cancels_gives_each_choice_its_tokens_once(
    actions: list[tuple[str, int]],
) -> None:
    run = Run(model := Model())
    for kind, number in actions:
        run.act(kind, number)
    for name in model.names:  # everything is well again
        model.leases[name].clear()
        model.table.lose(name, model.now)
        model.join(name)
    for _ in range(20):
        model.settle()
        for name in model.names:
            model.table.hear_beat(name, READY, model.now)
            model.step(name, 3)
    assert len(model.table) == 0
    assert not any(model.leases.values())
    for request in run.requests:
        for i in range(request.params.n):
            check(model.received, request, i, (request.id, i) in run.cancelled)


def check(received: Received, request: Request, index: int, is_cancelled: bool) -> None:
    found, ends = received.tokens(request.id, index), received.ends(request.id, index)
    assert len(ends) == 1, (request.id, index, ends)
    if ends == ["length"]:
        assert found == expected(request, index)
        return
    assert found == expected(request, index)[: len(found)]
    if ends == ["error"]:
        assert isinstance(received.error(request.id, index), EngineKilled)
    else:
        assert is_cancelled
        assert ends in (["cancelled"], ["stop"])  # as its replica says, or the table for one that is lost


def test_a_request_fails_after_losses_in_a_row_without_progress() -> None:
    model = Model()
    request = make_request("a", 50)
    model.add(request)
    for _ in range(MAX_LOSSES):
        (name,) = [n for n, leases in model.leases.items() if leases]
        model.leases[name].clear()
        model.table.lose(name, model.now)
        model.join(name)
        model.settle()
    assert isinstance(model.received.error("a"), EngineKilled)
    assert "3 replicas were lost in a row" in str(model.received.error("a"))


def test_losses_with_progress_between_are_never_too_many() -> None:
    model = Model()
    request = make_request("a", 50)
    model.add(request)
    for _ in range(3 * MAX_LOSSES):
        (name,) = [n for n, leases in model.leases.items() if leases]
        model.step(name, 3)
        model.leases[name].clear()
        model.table.lose(name, model.now)
        model.join(name)
        model.settle()
    assert model.received.tokens("a") == expected(request)[: 9 * MAX_LOSSES]
    assert sum(model.table.moved.values()) == 3 * MAX_LOSSES


def test_suspects_are_not_sent_to_the_same_replica() -> None:
    model = Model(names=("r0", "r1", "r2"))
    requests = [make_request("q", 50, first=i) for i in range(12)]
    requests = [Request(f"q{i}", r.prompt_token_ids, r.params) for i, r in enumerate(requests)]
    for request in requests:
        model.add(request)
    name = max(model.leases, key=lambda n: len(model.leases[n]))
    charged = [*model.leases[name]]
    assert len(charged) > 2
    model.table.end_engine(name, charged, model.now, is_foreign=False)
    model.settle()
    suspects = [
        sum(lease.stream.is_suspect for lease in known.leases.values())
        for known in model.table.replicas.values()
        if known.name != name
    ]
    assert suspects == [1, 1]


def test_a_gateway_that_was_stopped_itself_takes_no_replica_for_silent() -> None:
    model = Model()
    model.table.find_silent(model.now)
    assert model.table.find_silent(model.now + 60) == []
    assert model.table.find_silent(model.now + 60.9) == []
    late = [model.now + 60.9 + 0.9 * i for i in range(1, 4)]
    assert [name for at in late for name in model.table.find_silent(at)] == ["r0", "r1", "r2"]


def test_a_cancelled_request_that_is_refused_is_not_computed_elsewhere() -> None:
    model = Model()
    model.add(make_request("a", 50))
    (name,) = [n for n, leases in model.leases.items() if leases]
    (key,) = model.leases[name]
    model.table.cancel("a", None)
    model.table.outbox.clear()  # the refusal was on its way before the cancel arrives
    model.table.refuse(name, Refused(key, QueueFull("full")), model.now)
    model.leases[name].clear()
    model.settle()
    assert len(model.table) == 0
    assert not any(model.leases.values())


def test_a_replica_that_is_listed_again_gets_requests_again_unless_it_leaves() -> None:
    model = Model(names=("r0",))
    model.table.retire("r0")
    model.add(make_request("a", 50))
    assert not model.leases["r0"]
    model.table.rejoin("r0")
    model.settle()
    assert model.leases["r0"]
    model.table.announce("r0")
    model.table.rejoin("r0")
    assert model.table.replicas["r0"].is_leaving


def test_blocks_are_named_as_the_prefix_index_names_them_with_salt_and_adapter() -> None:
    model = Model()
    model.table.join("r0", make_card(adapters={"law": "digest"}), model.now)
    for salt, adapter, expected_root in (("s", "", "s"), ("s", "law", "s\0adapter digest")):
        request = replace(make_request("a"), prompt_token_ids=tuple(range(10)))
        request = replace(request, cache_salt=salt, adapter=adapter)
        chain = [root(expected_root)]
        extend(chain, request.prompt_token_ids, BLOCK)
        assert model.table._name_blocks(request, BLOCK) == tuple(chain[1:])
        assert len(chain) == 3
    known = AdapterTable(1, lambda slot, path: "digest", lambda slot: None)
    known.load("law", "path", ())
    assert known.place("law", "s") == (1, "s\0adapter digest")
    assert known.digests() == {"law": "digest"}


def test_a_request_of_an_adapter_goes_where_its_prefix_is_reported() -> None:
    model = Model()
    for name in model.names:
        model.table.join(name, make_card(adapters={"law": "digest"}), model.now)
    request = replace(make_request("a"), prompt_token_ids=tuple(range(40)), adapter="law")
    chain = [root("\0adapter digest")]
    extend(chain, request.prompt_token_ids, BLOCK)
    for name in model.names:
        added = tuple(chain[1:]) if name == "r2" else ()
        model.table.hear_report(name, ReplicaReport(1, 0, 0, added, begins=True), model.now)
    model.add(request)
    assert [name for name, leases in model.leases.items() if leases] == ["r2"]
    assert model.table.routed == {"prefix": 1}
