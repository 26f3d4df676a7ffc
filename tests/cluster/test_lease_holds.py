"""One call shows a replica's leases to the cluster's scheduler, however many there are."""

from __future__ import annotations

import asyncio
import time
from contextvars import ContextVar

from plait.cluster.ray_serve.lease_holds import LeaseHolds
from tests.cluster.replicas import cluster, make_request
from tests.patience import PATIENCE_S


def test_leases_of_a_replica_share_a_call_and_a_later_one_is_held_again() -> None:
    calls: list[tuple[str, int]] = []

    async def run() -> None:
        ends: list[asyncio.Event] = []

        async def hold(replica: str, key: int) -> None:
            calls.append((replica, key))
            ends.append(asyncio.Event())
            await ends[-1].wait()

        async def settle() -> None:
            for _ in range(3):
                await asyncio.sleep(0)

        holds = LeaseHolds(hold, pause_s=0)
        for replica, key in (("a", 1), ("b", 2), ("a", 3)):
            holds.begin(replica, key)
            await settle()
        assert calls == [("a", 1), ("b", 2)]
        ends[0].set()  # lease 3 was sent after this call, and may be open
        await settle()
        assert calls == [("a", 1), ("b", 2), ("a", 3)]
        ends[2].set()
        await settle()
        holds.begin("a", 4)
        await settle()
        assert calls[3:] == [("a", 4)]
        for end in ends:
            end.set()
        await settle()

    asyncio.run(run())


def test_a_call_does_not_belong_to_the_request_that_brought_the_lease() -> None:
    client = ContextVar("client", default="none")
    seen: list[str] = []

    async def hold(replica: str, key: int) -> None:
        seen.append(client.get())

    async def run() -> None:
        client.set("one that will leave")
        LeaseHolds(hold, pause_s=0).begin("a", 1)
        await asyncio.sleep(0)

    asyncio.run(run())
    assert seen == ["none"]


def test_a_replica_is_held_until_the_last_lease_of_its_gateway_is_over() -> None:
    with cluster(1) as made:
        server, engine = made.replicas["r0"].server, made.replicas["r0"].engine
        engine.is_paused = True  # a frozen one would get no second request
        requests = [make_request(name, 5) for name in "ab"]
        made.submit(*requests)
        for request in requests:
            made.holder(request)
        assert [made.loop.has_leases(name) for name in ("r0", "r1")] == [True, False]
        held = server.hold("gateway", 1)
        made.loop.cancel("a")
        made.received.wait(lambda: bool(made.received.ends("a")))
        time.sleep(0.05)
        assert not held.done()
        engine.is_paused = False
        held.result(PATIENCE_S)
        server.hold("gateway", 2).result(PATIENCE_S)  # it is over before the call comes
        assert server.num_open == 0
        made.received.wait(lambda: bool(made.received.ends("b")))
        assert not made.loop.has_leases("r0")


def test_a_closed_replica_is_held_by_nothing_and_hears_of_its_engine_in_silence() -> None:
    """Its engine ends behind it, and the end is reported all the same."""
    with cluster(1) as made:
        server = made.replicas["r0"].server
        held = server.hold("gateway", 7)  # a lease that never comes
        server.close()
        held.result(PATIENCE_S)
        server.hold("gateway", 8).result(PATIENCE_S)
        server.report_charged(("a",), False)
        server.leave()


def test_a_lost_connection_ends_what_holds_the_replica() -> None:
    with cluster(1) as made:
        server = made.replicas["r0"].server
        made.replicas["r0"].engine.is_still = True
        made.submit(make_request("a", 5))
        held = server.hold("gateway", 1)
        time.sleep(0.05)
        made.loop.close(drain=False)
        held.result(PATIENCE_S)
