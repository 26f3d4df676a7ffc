"""Whatever ends below open streams, their texts are those of one engine.

The tests share a cluster and run in this order: each leaves two replicas, but the last one takes a node away.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.cluster.ray_serve.running import RunningCluster, check

pytest.importorskip("ray", reason="the extra [cluster] is not installed")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.ray,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore"),
]


def test_text_is_that_of_one_engine_and_a_gateway_has_no_torch(
    running: RunningCluster, expected: list[str]
) -> None:
    check(running.streams(), expected)
    (gateway,) = running.pids("gateway")
    assert "torch" not in Path(f"/proc/{gateway}/maps").read_text()
    rows = dict(line.split(":", 1) for line in Path(f"/proc/{gateway}/status").read_text().splitlines())
    assert int(rows["VmRSS"].split()[0]) < 300_000


def test_streams_go_on_when_an_engine_process_is_killed(running: RunningCluster, expected: list[str]) -> None:
    running.wait_ready()
    before = running.moved()
    check(running.streams(lambda: running.end(signal.SIGKILL, engine=True)), expected)
    assert running.moved()["engine yes"] > before.get("engine yes", 0)


def test_streams_move_from_an_engine_process_that_is_stopped(
    running: RunningCluster, expected: list[str]
) -> None:
    running.wait_ready()
    before, engines = running.moved(), list[int]()

    def stop() -> None:
        engines.append(running.busiest()[1])
        os.kill(engines[0], signal.SIGSTOP)

    check(running.streams(stop), expected)
    os.kill(engines[0], signal.SIGCONT)
    assert running.moved()["engine yes"] > before.get("engine yes", 0)


def test_streams_go_on_when_a_replica_is_killed(running: RunningCluster, expected: list[str]) -> None:
    running.wait_ready()
    before, victims = running.moved(), list[int]()
    check(running.streams(lambda: victims.append(running.end(signal.SIGKILL))), expected)
    assert running.moved()["replica yes"] > before.get("replica yes", 0)
    running.wait_ready()
    assert not {*victims} & {*running.pids()}


def test_no_text_changes_when_a_replica_is_slow(running: RunningCluster, expected: list[str]) -> None:
    running.wait_ready()
    actor, _ = running.busiest()

    def pause() -> None:
        os.kill(actor, signal.SIGSTOP)
        time.sleep(3)
        os.kill(actor, signal.SIGCONT)

    check(running.streams(pause), expected)
    assert actor in running.pids()


def test_streams_of_a_stopped_replica_move_and_what_it_still_sends_is_ignored(
    running: RunningCluster, expected: list[str]
) -> None:
    running.wait_ready()
    before, victims = running.moved(), list[int]()
    check(running.streams(lambda: victims.append(running.end(signal.SIGSTOP))), expected)
    assert running.moved()["silent yes"] > before.get("silent yes", 0)
    os.kill(victims[0], signal.SIGCONT)
    running.wait_ready()
    assert victims[0] in running.pids()
    check(running.streams(), expected)


def test_a_request_past_its_time_limit_ends_while_no_replica_is_there(
    running: RunningCluster, expected: list[str]
) -> None:
    running.wait_ready()

    def kill_all(count: int) -> None:
        if count == 30:
            for pid in running.pids():
                os.kill(pid, signal.SIGKILL)

    reply = running.stream(0, kill_all, timeout_s=1.0)
    assert "not done within timeout_s (1 s), in which a replica was lost" in reply.error
    assert expected[0].startswith(reply.text)


def test_streams_wait_for_a_new_replica_when_all_are_killed(
    running: RunningCluster, expected: list[str]
) -> None:
    running.wait_ready()
    check(running.streams(lambda: [os.kill(pid, signal.SIGKILL) for pid in running.pids()]), expected)


def test_streams_and_new_requests_go_on_when_the_controller_is_killed(
    running: RunningCluster, expected: list[str]
) -> None:
    import ray

    running.wait_ready()

    def kill() -> None:
        ray.kill(ray.get_actor("SERVE_CONTROLLER_ACTOR", namespace="serve"), no_restart=False)

    check(running.streams(kill), expected)
    check(running.streams(), expected)


def test_connections_break_when_the_proxy_is_killed_and_new_ones_are_served(
    running: RunningCluster, expected: list[str]
) -> None:
    running.wait_ready()
    proxy = running.proxy()
    broken = running.streams(lambda: os.kill(proxy, signal.SIGKILL))
    assert any(reply.error or not reply.finish_reason for reply in broken)
    assert all(whole.startswith(reply.text) for reply, whole in zip(broken, expected, strict=True))
    running.wait_served()
    check(running.streams(), expected)


def test_a_replica_that_stays_stopped_is_replaced(running: RunningCluster, expected: list[str]) -> None:
    running.wait_ready()
    victims = list[int]()
    check(running.streams(lambda: victims.append(running.end(signal.SIGSTOP))), expected)
    running.wait_ready()
    assert not {*victims} & {*running.pids()}


def test_streams_go_on_when_a_node_is_killed(running: RunningCluster, expected: list[str]) -> None:
    running.wait_ready()
    (node,) = running.nodes.worker_nodes
    raylet = running.raylet(node)
    before = running.moved()

    def kill() -> None:
        for pid in (raylet, *running.children(raylet)):
            os.kill(pid, signal.SIGKILL)

    check(running.streams(kill), expected)
    assert running.moved()["replica yes"] > before.get("replica yes", 0)
    running.nodes.remove_node(node, allow_graceful=False)
