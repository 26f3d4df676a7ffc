"""Gateways that end or lose their cluster's head, and replicas that come and go under load.

Engines in threads, real sockets. What starts and lists replicas is the test itself.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest

from plait.cluster.loop import ClusterLoop
from plait.request import Request
from tests.cluster.replicas import Cluster, Received, Replica, cluster, expected, make_request
from tests.patience import PATIENCE_S, until

LONG = 150


def find_holders(made: Cluster) -> set[str]:
    """Replicas that have open streams, as the gateway knows them: their last events have come."""
    replicas = made.loop.describe()["replicas"]
    assert isinstance(replicas, list)
    return {replica["name"] for replica in replicas if replica["open"]}


def has_taken(replica: Replica, number: int) -> bool:
    """Whether a replica has got more requests than this."""
    return replica.engine.num_taken > number


def test_a_killed_gateway_frees_its_replicas_and_another_gives_the_same_tokens() -> None:
    with cluster() as made:
        request, received = make_request("a", LONG), Received()
        other = ClusterLoop(patience_s=5.0, name="other")
        try:
            other.set_members({name: each.server.address for name, each in made.replicas.items()})
            other.first_card()
            made.submit(request)
            made.received.wait(lambda: len(made.received.tokens("a")) > 5)
            engine = made.replicas[made.holder(request)].engine
            for each in made.replicas.values():  # a killed process says nothing; its connections end
                each.road.close()
            until(lambda: not engine.running)
            other.submit(request, received)
            received.wait_ends(request)
        finally:
            other.close(drain=False)
        assert received.tokens("a") == expected(request)
        assert received.ends("a") == ["length"]


def test_a_gateway_without_a_head_is_not_ready_and_serves_all_the_same() -> None:
    with cluster() as made:
        made.loop.is_managed = False
        assert not made.loop.healthy
        assert made.loop.live
        requests = [make_request(f"q{i}") for i in range(4)]
        made.submit(*requests)
        made.check(*requests)
        made.loop.is_managed = True
        assert made.loop.healthy


def test_streams_and_new_requests_go_on_while_a_list_of_replicas_is_old() -> None:
    with cluster() as made:
        request = make_request("a", LONG)
        made.submit(request)
        made.received.wait(lambda: len(made.received.tokens("a")) > 5)
        made.kill(made.holder(request))  # the gateway hears of no change: the controller has ended, too
        later = [make_request(f"b{i}") for i in range(6)]
        made.submit(*later)
        made.check(request, *later)
        assert made.loop.count_states() | {"ready": 1, "unreachable": 1} == made.loop.count_states()


@contextmanager
def load(made: Cluster, num_clients: int = 6) -> Iterator[list[Request]]:
    """Clients that ask again and again; then every reply must be whole. The requests that were sent."""
    sent: list[Request] = []
    is_over = threading.Event()

    def ask(client: int) -> None:
        number = 0
        while not is_over.is_set():
            request = make_request(f"c{client}-{number}", 40)
            sent.append(request)
            made.submit(request)
            made.received.wait_ends(request)
            number += 1

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(num_clients)]
    for thread in threads:
        thread.start()
    try:
        yield sent
    finally:
        is_over.set()
        for thread in threads:
            thread.join(PATIENCE_S)
    assert not any(thread.is_alive() for thread in threads)
    made.check(*sent)


def stop(made: Cluster, name: str, *, drains: bool) -> None:
    """End a replica in order: it takes nothing new. `drains`: what it has may end there, else it moves."""
    replica = made.replicas[name]
    replica.server.leave()
    until(lambda: made.loop.count_states()["leaving"] > 0)
    if drains:
        until(lambda: name not in find_holders(made))
    made.kill(name)
    made.tell()


@pytest.mark.parametrize("drains", [True, False])
def test_no_stream_breaks_while_each_replica_is_replaced_under_load(drains: bool) -> None:
    with cluster() as made, load(made) as sent:
        for old, new in (("r0", "r2"), ("r1", "r3")):
            replica = made.add(new)  # before the old one stops, as a surge does
            made.wait_ready(3)
            until(partial(has_taken, replica, 2))
            stop(made, old, drains=drains)
        num_sent = len(sent)
        until(lambda: len(sent) > num_sent + 6)
    assert {why for why, _ in made.loop.counts()[0]} <= ({"announced"} if not drains else set())


def test_a_second_replica_takes_requests_under_load_and_leaves_again() -> None:
    with cluster(1) as made, load(made) as sent:
        second = made.add("r1")
        until(partial(has_taken, second, 6))
        stop(made, "r1", drains=True)
        num_sent = len(sent)
        until(lambda: len(sent) > num_sent + 6)
    assert made.loop.counts()[0] == {}
