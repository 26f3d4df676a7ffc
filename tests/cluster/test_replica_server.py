"""A replica's side of a connection: what it reports, when, and what it takes from a gateway."""

from __future__ import annotations

import pytest

from plait.cluster import replica_server
from plait.cluster.connection import GatewayEnd, ReplicaEnd
from plait.cluster.loop import ClusterLoop
from plait.cluster.replica_server import ReplicaServer
from plait.cluster.resume_points import ResumePoints
from plait.cluster.wire import Greeting, LeaseEvents, OpenLease, PointsReport
from plait.request import Event
from plait.worker.protocol import WireMessage
from tests.cluster.replicas import Received, ThreadEngine, make_card, make_request
from tests.patience import until


class CachingEngine(ThreadEngine):
    """One that keeps every prompt, before the reply's end is delivered."""

    def __init__(self, points: ResumePoints) -> None:
        super().__init__()
        self.points = points

    def _end(self, found: object, index: int, event: Event) -> None:
        self.points.add(event.request_id.encode())
        super()._end(found, index, event)  # type: ignore[arg-type]


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[WireMessage]:
    """What a replica says, in order, of which nothing is due by time."""
    for name in ("BEAT_S", "POINTS_S"):
        monkeypatch.setattr(replica_server, name, 60.0)
    found, send = list[WireMessage](), ReplicaEnd.send

    def record(end: ReplicaEnd, message: WireMessage) -> None:
        found.append(message)
        send(end, message)

    monkeypatch.setattr(ReplicaEnd, "send", record)
    return found


def test_points_and_load_are_reported_with_the_first_token_and_before_the_end(
    sent: list[WireMessage],
) -> None:
    points, received = ResumePoints(), Received()
    engine = CachingEngine(points)
    server = ReplicaServer(engine, make_card(), points=points, beat_s=60.0)
    loop = ClusterLoop(name="gateway")
    try:
        loop.set_members({"r0": server.address})
        loop.first_card()
        request = make_request("a", 300)  # its first token and its end are in two frames, on any machine
        loop.submit(request, received)
        received.wait_ends(request)
    finally:
        loop.close(drain=False)
        server.close()
        engine.close()
    kinds = [message for message in sent if isinstance(message, LeaseEvents | PointsReport)]
    last = max(i for i, message in enumerate(kinds) if isinstance(message, LeaseEvents))
    final, reported = kinds[last], kinds[last - 1]
    assert isinstance(final, LeaseEvents)
    assert isinstance(reported, PointsReport)
    assert reported.report.added == (b"a~1",)
    assert (reported.newest, reported.report.open_replies, reported.report.waiting_tokens) == (1, 0, 0)
    first = next(i for i, message in enumerate(kinds) if isinstance(message, LeaseEvents))
    begun = kinds[first - 1]
    assert isinstance(begun, PointsReport)
    assert (begun.newest, begun.report.open_replies, begun.report.waiting_tokens) == (1, 1, 0)


@pytest.mark.parametrize(
    "messages",
    [
        (Greeting("gateway"), Greeting("another")),
        (OpenLease(1, make_request("a", 500)),),
        (Greeting("gateway"), OpenLease(1, make_request("a", 500)), OpenLease(1, make_request("b"))),
        (Greeting("gateway"), OpenLease(2, make_request("a", 500)), OpenLease(1, make_request("b"))),
    ],
    ids=["two names", "no name", "a key twice", "a key of before"],
)
def test_a_gateway_that_breaks_the_order_of_messages_is_cut_off_and_its_leases_end(
    messages: tuple[WireMessage, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("plait.cluster.links.Greeting", lambda name: None)
    send, links = GatewayEnd.send, list[GatewayEnd]()

    def say(end: GatewayEnd, message: WireMessage | None) -> None:
        if message is None:  # in place of the greeting
            links.append(end)
            for one in messages:
                send(end, one)

    monkeypatch.setattr(GatewayEnd, "send", say)
    engine = ThreadEngine()
    server = ReplicaServer(engine, make_card())
    loop = ClusterLoop(name="gateway")
    try:
        loop.set_members({"r0": server.address})
        until(lambda: len(links) > 1)  # cut off, and connected again
        assert all("b" not in name for name in engine.running)
        loop.set_members({})
        loop.close(drain=False)
        until(lambda: not engine.running and not server.num_open)
    finally:
        loop.close(drain=False)
        server.close()
        engine.close()
