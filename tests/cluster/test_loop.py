"""Streams outlive replicas: engines in threads, real sockets, and everything that can end or lie."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable
from functools import partial, partialmethod

import pytest
from prometheus_client import Gauge
from prometheus_client.exposition import generate_latest

from plait.cluster import lease_table
from plait.cluster.connection import ReplicaEnd
from plait.cluster.lease_table import MAX_LOSSES, LeaseTable
from plait.cluster.loop import ClusterLoop
from plait.cluster.wire import LeaseEvents, ReplicaCard
from plait.engine.fingerprint import Fingerprint
from plait.errors import DeadlineExceeded, EngineError, EngineKilled, EngineLost, InvalidField, QueueFull
from plait.request import Event
from plait.worker.protocol import WireMessage
from tests.cluster.replicas import cluster, expected, make_card, make_request
from tests.patience import PATIENCE_S, until

LONG = 150


def hear_others(patch: pytest.MonkeyPatch) -> list[str]:
    """Replicas show signs of life, however busy this machine is; those that are added to the list do not."""
    quiet: list[str] = []
    patch.setattr(lease_table, "ASLEEP_S", math.inf)  # a gateway that had to wait excuses all of them
    for method in ("find_silent", "place"):

        def look(table: LeaseTable, now: float, *, real: Callable[[LeaseTable, float], object]) -> object:
            for known in table.replicas.values():
                if known.name not in quiet:
                    known.heard_s = now
            return real(table, now)

        patch.setattr(LeaseTable, method, partialmethod(look, real=getattr(LeaseTable, method)))
    return quiet


def test_streams_over_replicas_have_the_tokens_of_a_single_run() -> None:
    with cluster() as made:
        requests = [make_request(f"q{i}", n=1 + i % 2) for i in range(6)]
        made.submit(*requests)
        made.check(*requests)
        assert made.loop.describe()["moved"] == {}


def test_a_scrape_has_the_metrics_of_every_engine_with_its_replica() -> None:
    with cluster() as made:
        for name, replica in made.replicas.items():
            Gauge("plait_requests_running", "Choices.", registry=replica.engine.registry).set(int(name[1:]))
        text = generate_latest(made.loop.registry).decode()
        for name in made.replicas:
            assert f'plait_requests_running{{replica="{name}"}} {name[1:]}.0' in text
        made.kill("r1")
        made.wait_ready(1)
        assert 'replica="r1"' not in generate_latest(made.loop.registry).decode()


def test_a_full_gateway_takes_a_request_as_soon_as_another_has_ended() -> None:
    with cluster(1, most=2) as made:
        first, second, third = (
            make_request(name, length) for name, length in zip("abc", (5, LONG, 5), strict=True)
        )
        refused: list[Exception] = []

        def send_next(event: Event) -> None:
            made.received(event)
            if event.finish_reason is not None:  # from the reader itself: no moment passes between
                try:
                    made.loop.submit(third, made.received)
                except QueueFull as error:
                    refused.append(error)

        made.submit(second)
        made.loop.submit(first, send_next)
        with pytest.raises(QueueFull):
            made.loop.submit(third, made.received)
        made.check(first, third)
        assert refused == []


def test_streams_move_when_their_replica_is_killed() -> None:
    with cluster() as made:
        requests = [make_request(f"q{i}", LONG, n=1 + i % 2) for i in range(6)]
        made.submit(*requests)
        made.received.wait(lambda: all(len(made.received.tokens(r.id)) > 5 for r in requests))
        made.kill(made.holder(requests[0]))
        made.check(*requests)
        assert sum(made.loop.counts()[0].values()) >= 1
        assert {why for why, _ in made.loop.counts()[0]} == {"replica"}


def test_streams_wait_for_a_new_replica_when_all_are_killed_and_their_time_limit_holds() -> None:
    with cluster() as made:
        request, hurried = make_request("a", LONG), make_request("b", LONG, timeout_s=900.0)
        made.submit(request, hurried)
        made.received.wait(lambda: all(len(made.received.tokens(r)) > 5 for r in "ab"))
        for name in ("r0", "r1"):
            made.kill(name)
        assert made.loop._table is not None
        made.loop._table._streams["b"].arrival_s -= 900.0  # its time is over
        made.received.wait(lambda: bool(made.received.ends("b")))
        assert isinstance(made.received.error("b"), DeadlineExceeded)
        assert "a replica was lost" in str(made.received.error("b"))
        assert made.received.tokens("b") == expected(hurried)[: len(made.received.tokens("b"))]
        assert not made.loop.healthy
        assert not made.received.ends("a")
        made.add("r2")
        made.check(request)


def test_streams_of_a_silent_replica_move_and_its_late_frames_are_ignored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    quiet = hear_others(monkeypatch)
    with cluster(patience_s=1.0) as made:
        request = make_request("a", LONG)
        made.submit(request)
        made.received.wait(lambda: len(made.received.tokens("a")) > 5)
        silent = made.holder(request)
        quiet.append(silent)
        made.replicas[silent].road.drops = True  # a partition: the replica goes on and nothing arrives
        made.check(request)
        assert made.loop.counts()[0] == {("silent", "yes"): 1}
        made.replicas[silent].road.drops = False  # its old frames arrive now
        made.wait_ready(2)
        assert made.received.tokens("a") == expected(request)
        assert not made.replicas[silent].engine.running


def test_a_slow_replica_keeps_its_streams_and_gets_no_new_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_table, "LATE_S", 0.5)
    quiet = hear_others(monkeypatch)
    with cluster() as made:
        request = make_request("a", LONG)
        made.submit(request)
        made.received.wait(lambda: len(made.received.tokens("a")) > 5)
        holder = made.holder(request)
        quiet.append(holder)
        slow, (known,) = made.replicas[holder], [r for r in made.loop._replicas() if r.name == holder]
        slow.road.drops = True
        until(lambda: time.monotonic() - known.heard_s > lease_table.LATE_S + 0.1)
        later = [make_request(f"b{i}") for i in range(4)]
        made.submit(*later)
        made.check(*later)
        slow.road.drops = False
        made.check(request)
        assert slow.engine.num_taken == 1
        assert made.loop.counts()[0] == {}


@pytest.mark.parametrize("lie", ["repeated", "left out", "late"])
def test_streams_move_when_their_replica_repeats_or_leaves_out_a_frame(
    lie: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with cluster() as made:
        request, other = make_request("a", LONG), make_request("b", LONG)
        made.submit(request, other)
        made.received.wait(lambda: all(len(made.received.tokens(r)) > 5 for r in "ab"))
        late: list[Callable[[], object]] = []  # sends what was left out
        send = ReplicaEnd.send

        def send_wrongly(end: ReplicaEnd, message: WireMessage) -> None:
            if late or not isinstance(message, LeaseEvents):
                send(end, message)
                return
            later = asyncio.get_running_loop().call_soon_threadsafe
            late.append(partial(later, send, end, message))
            if lie == "repeated":
                send(end, message)
                send(end, message)

        monkeypatch.setattr(ReplicaEnd, "send", send_wrongly)
        made.received.wait(lambda: sum(made.loop.counts()[0].values()) > 0)
        if lie == "late":
            late[0]()
        made.check(request, other)
        assert made.loop.counts()[0].keys() == {("broken", "yes")}


def test_a_client_that_leaves_while_no_replica_is_there_is_not_computed_any_more() -> None:
    with cluster(1) as made:
        request = make_request("a", LONG)
        made.submit(request)
        made.received.wait(lambda: len(made.received.tokens("a")) > 5)
        made.kill("r0")
        made.loop.cancel("a")
        made.received.wait_ends(request)
        assert made.received.ends("a") == ["cancelled"]
        later = made.add("r1")
        made.wait_ready(1)
        assert not later.engine.num_taken


def test_a_changed_frame_ends_the_connection_and_no_wrong_token_arrives() -> None:
    with cluster() as made:
        request = make_request("a", LONG)
        made.submit(request)
        made.received.wait(lambda: len(made.received.tokens("a")) > 5)
        road = made.replicas[made.holder(request)].road
        road.change = lambda data: data[:-1] + bytes([data[-1] ^ 1])
        made.received.wait(lambda: len(made.received.tokens("a")) > 60)
        made.check(request)


def test_streams_move_when_the_engine_below_a_living_replica_ends() -> None:
    with cluster() as made:
        request = make_request("a", LONG)
        made.submit(request)
        made.received.wait(lambda: len(made.received.tokens("a")) > 5)
        name = made.holder(request)
        engine = made.replicas[name].engine
        with engine.lock:
            engine.die(is_foreign=True)
        made.check(request)
        assert made.loop.counts()[0] == {("engine", "yes"): 1}
        made.wait_ready(2)


def test_streams_move_from_an_engine_that_is_frozen_and_it_takes_others_when_it_wakes() -> None:
    with cluster() as made:
        request = make_request("a", LONG)
        made.submit(request)
        made.received.wait(lambda: len(made.received.tokens("a")) > 5)
        engine = made.replicas[made.holder(request)].engine
        engine.is_still = True
        made.check(request)
        assert made.loop.counts()[0] == {("engine", "yes"): 1}
        assert made.loop.count_states()["replacing"] == 1
        engine.is_still = False
        made.wait_ready(2)
        assert not engine.running


def test_streams_stay_where_the_engine_ends_and_no_other_replica_is_there() -> None:
    with cluster(1) as made:
        request = make_request("a", LONG)
        made.submit(request)
        made.received.wait(lambda: len(made.received.tokens("a")) > 5)
        engine = made.replicas["r0"].engine
        with engine.lock:
            engine.die(is_foreign=True)
        made.check(request)
        assert made.loop.counts()[0] == {}


def test_a_request_that_ends_engines_fails_after_the_second_and_no_other_stream_changes() -> None:
    with cluster(3, poison=99) as made:
        others = [make_request(f"q{i}", LONG) for i in range(6)]
        made.submit(*others)
        made.received.wait(lambda: all(len(made.received.tokens(r.id)) > 5 for r in others))
        poisonous = make_request("p", first=99)
        made.submit(poisonous)
        made.received.wait_ends(poisonous)
        assert isinstance(made.received.error("p"), EngineKilled)
        made.check(*others)
        assert sum(replica.engine.num_deaths for replica in made.replicas.values()) == 2


def test_an_engine_that_is_given_up_loses_its_streams_to_another() -> None:
    with cluster() as made:
        request = make_request("a", LONG)
        made.submit(request)
        made.received.wait(lambda: len(made.received.tokens("a")) > 5)
        engine = made.replicas[made.holder(request)].engine
        with engine.lock:
            engine.healthy = engine.live = False
            engine.fail(next(iter(engine.running)), EngineLost("it does not stay up"))
        made.check(request)


def test_a_replica_that_stops_in_order_moves_its_streams_without_a_loss() -> None:
    with cluster() as made:
        request = make_request("a", LONG)
        made.submit(request)
        made.received.wait(lambda: len(made.received.tokens("a")) > 5)
        name = made.holder(request)
        made.replicas[name].server.leave()
        other = make_request("b")
        made.wait_ready(1)
        made.submit(other)
        made.check(other)
        made.kill(name)
        made.check(request)
        assert made.loop.counts()[0] == {("announced", "yes"): 1}


def test_a_replica_that_is_no_member_finishes_what_it_has_and_gets_nothing_new() -> None:
    with cluster() as made:
        request = make_request("a", LONG)
        made.submit(request)
        name = made.holder(request)
        leaving = made.replicas.pop(name)
        made.tell()
        later = [make_request(f"b{i}") for i in range(4)]
        made.wait_ready(1)
        made.submit(*later)
        made.check(request, *later)
        assert leaving.engine.num_taken == 1
        assert made.loop.counts()[0] == {}
        made.replicas[name] = leaving


def test_a_replica_that_is_no_member_any_more_when_its_card_comes_gets_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is connected already, and ends soon: what it got would have to move."""
    join, has_joined = ClusterLoop._join, threading.Event()

    def join_late(loop: ClusterLoop, name: str, card: ReplicaCard, now: float) -> None:
        loop._set_members({"r0": made.replicas["r0"].road.address})
        join(loop, name, card, now)
        has_joined.set()

    with cluster(1) as made:
        monkeypatch.setattr(ClusterLoop, "_join", join_late)
        late = made.add("late")
        assert has_joined.wait(PATIENCE_S)
        requests = [make_request(f"q{i}") for i in range(8)]
        made.submit(*requests)
        made.check(*requests)
        assert late.engine.num_taken == 0
        made.tell()
        made.wait_ready(2)


def test_a_full_replica_refuses_and_the_next_one_takes_it() -> None:
    with cluster(1, most=2) as made:
        made.replicas["r0"].engine.max_open = 1
        first, second = make_request("a", LONG), make_request("b")
        made.submit(first, second)
        made.check(first, second)
        with pytest.raises(QueueFull, match="2 requests"):
            made.submit(*(make_request(f"c{i}", LONG) for i in range(3)))


@pytest.mark.parametrize("other", [{"arithmetic": "fp_2"}, {"digest": "of another machine"}])
def test_a_continuation_goes_to_a_replica_with_the_same_arithmetic_while_there_is_one(
    other: dict[str, str],
) -> None:
    with cluster(2) as made:
        request = make_request("a", LONG)
        made.submit(request)
        made.received.wait(lambda: len(made.received.tokens("a")) > 5)
        first = made.holder(request)
        for i in range(3):
            made.add(f"other{i}", **other)
        made.wait_ready(5)
        made.kill(first)
        made.received.wait(lambda: sum(made.loop.counts()[0].values()) == 1)
        assert made.loop.counts()[0] == {("replica", "yes"): 1}
        (second,) = {"r0", "r1"} & made.replicas.keys()
        made.kill(second)
        made.check(request)
        assert made.loop.counts()[0] == {("replica", "yes"): 1, ("replica", "no"): 1}


def test_a_replica_of_another_model_gets_no_request() -> None:
    with cluster(1) as made:
        foreign = made.add("foreign", model="another")
        requests = [make_request(f"q{i}") for i in range(8)]
        made.submit(*requests)
        made.check(*requests)
        assert foreign.engine.num_taken == 0
        assert made.loop.count_states()["unreachable"] == 1


def test_a_cancelled_stream_ends_once_and_frees_its_replica() -> None:
    with cluster() as made:
        request = make_request("a", 10_000, n=2)
        made.submit(request)
        made.received.wait(lambda: len(made.received.tokens("a", 1)) > 5)
        made.loop.cancel("a", 0)
        made.received.wait(lambda: made.received.ends("a", 0) == ["cancelled"])
        assert not made.received.ends("a", 1)
        made.loop.cancel("a")
        made.received.wait_ends(request)
        assert made.received.ends("a", 1) == ["cancelled"]
        assert not any(replica.engine.running for replica in made.replicas.values())


def test_the_end_of_a_gateway_frees_its_replicas() -> None:
    with cluster(1) as made:
        made.submit(make_request("a", 10_000))
        made.holder(make_request("a"))
        assert made.loop.close(drain=False)
        assert made.received.ends("a") == ["cancelled"]
        engine = made.replicas["r0"].engine
        made.received.wait(lambda: not engine.running or not engine.step())
        with pytest.raises(EngineError, match="closing"):
            made.submit(make_request("b"))


def test_a_request_that_comes_while_the_gateway_closes_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    with cluster(1) as made:
        loop, call, is_first = made.loop, made.loop._call, True
        closing = threading.Thread(target=partial(loop.close, drain=False))

        def call_while_it_closes(function: Callable[[], None]) -> None:
            nonlocal is_first
            if is_first:  # the request: the gateway would close now, if it could
                is_first = False
                closing.start()
                closing.join(0.5)
            call(function)

        monkeypatch.setattr(loop, "_call", call_while_it_closes)
        made.submit(make_request("a", 10_000))
        closing.join()
        made.received.wait(lambda: bool(made.received.ends("a")))


def test_a_request_with_an_id_that_is_open_is_refused() -> None:
    with cluster(1) as made:
        made.submit(make_request("a", 10_000))
        made.submit(make_request("a", 10_000))
        made.received.wait(lambda: bool(made.received.ends("a")))
        assert isinstance(made.received.error("a"), InvalidField) or made.received.ends("a") == ["error"]
        made.loop.cancel("a")


def test_what_is_measured_names_states_moves_and_routes() -> None:
    with cluster() as made:
        request = make_request("a")
        made.submit(request)
        made.check(request)
        found = {
            sample.name: sample.labels | {"value": sample.value}
            for family in made.loop.registry.collect()
            for sample in family.samples
            if sample.value and not sample.name.endswith(("_bucket", "_created"))
        }
        assert found["plait_cluster_replicas"] == {"gateway": "gateway", "state": "ready", "value": 2}
        assert found["plait_cluster_routed_total"] == {"gateway": "gateway", "why": "home", "value": 1}
        assert made.loop.max_open == 128
        assert made.loop.fingerprint == Fingerprint("m", "fp_1")
        assert made.loop.longest == 100
        assert MAX_LOSSES == 3
        assert make_card().max_open == 64
