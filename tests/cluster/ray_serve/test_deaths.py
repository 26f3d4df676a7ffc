"""Whatever ends below open streams, their texts are those of one engine.

The tests share a cluster and run in this order: each leaves two replicas, but the last one takes a node away.
"""

from __future__ import annotations

import os
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from plait.cluster.lease_table import LATE_S
from tests.cluster.ray_serve.engine_fault import POISON
from tests.cluster.ray_serve.running import (
    STREAMS,
    Body,
    RunningCluster,
    StreamedReply,
    body_of,
    check,
    is_stopped,
    open_stream,
    read_stream,
    wait_until,
)

pytest.importorskip("ray", reason="the extra [cluster] is not installed")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.ray,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore"),
]
REGEX = "[a-f]{150}-[0-9]{200}"


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


def test_a_slow_replica_keeps_its_streams_and_new_requests_go_elsewhere(
    running: RunningCluster, expected: list[str]
) -> None:
    running.wait_ready()
    later: list[StreamedReply] = []
    num_open: list[int] = []
    slow: list[int] = []

    def pause() -> None:
        name = running.find_busiest()
        slow.append(running.processes_of(name)[0])
        os.kill(slow[0], signal.SIGSTOP)
        try:
            time.sleep(LATE_S + 0.2)  # since its last sign of life
            num_open.append(running.count_open(name))
            with ThreadPoolExecutor() as threads:
                asked = [threads.submit(running.stream, i, max_tokens=4) for i in range(STREAMS)]
                while not all(each.done() for each in asked):
                    num_open.append(running.count_open(name))
            later.extend(each.result() for each in asked)
            assert is_stopped(slow[0])
        finally:
            os.kill(slow[0], signal.SIGCONT)

    check(running.streams(pause), expected)
    assert [reply.finish_reason for reply in later] == ["length"] * STREAMS
    assert all(text.startswith(reply.text) for reply, text in zip(later, expected, strict=True))
    assert max(num_open) == num_open[0] > 0  # the stopped one got none of them
    assert slow[0] in running.pids()


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


def test_replies_of_every_kind_wait_for_a_new_replica_when_all_are_killed(
    running: RunningCluster, expected: list[str], alone: int
) -> None:
    kinds: list[Body] = [
        {"temperature": 0.0, "logprobs": 2},
        {"n": 2, "frequency_penalty": 0.5, "max_tokens": 200},
        {"stop": [expected[2][-30:-20]]},
        {"structured_outputs": {"regex": REGEX}, "top_k": 5, "logprobs": 1},
        {"presence_penalty": 1.0, "top_p": 0.9},
        {"repetition_penalty": 1.2, "logit_bias": {"300": 2.0}, "min_p": 0.02},
    ]
    bodies = [{**body_of(i), **more} for i, more in enumerate(kinds)]
    wanted = [read_stream(alone, body) for body in bodies]
    running.wait_ready()
    before = running.moved()
    found = running.streams(lambda: [os.kill(pid, signal.SIGKILL) for pid in running.pids()], bodies=bodies)
    assert [reply.error for reply in (*wanted, *found)] == [""] * 2 * len(bodies)
    assert [reply.merged for reply in found] == [reply.merged for reply in wanted]
    assert running.moved()["replica yes"] > before.get("replica yes", 0)  # a busy client reads late
    assert wanted[0].merged[0]["logprobs"]
    assert len({choice["text"] for choice in wanted[1].merged.values()}) == 2
    assert wanted[2].finish_reason == wanted[3].finish_reason == "stop"
    assert re.fullmatch(REGEX, wanted[3].text)


def test_a_request_that_ends_engines_fails_after_the_second_and_no_other_stream_changes(
    running: RunningCluster, expected: list[str]
) -> None:
    running.wait_ready()
    before, poisoned = running.count_restarts(), list[StreamedReply]()
    check(running.streams(lambda: poisoned.append(running.stream(0, prompt=POISON))), expected)
    assert "2 engines have ended in a step with this request" in poisoned[0].error
    assert poisoned[0].text == ""
    running.wait_ready()
    assert running.count_restarts() == before + 2
    check(running.streams(), expected)


def test_a_client_that_leaves_frees_its_replica(running: RunningCluster) -> None:
    running.wait_ready()
    ended = 'plait_requests_total{finish_reason="cancelled"'
    links = [open_stream(running.port, body_of(i)) for i in range(4)]
    for _, answer in links:
        while not answer.readline().startswith(b"data: {"):
            pass
    for link, answer in links:
        answer.close()
        link.close()
    wait_until(lambda: running.describe()["open"] == 0, "streams without a reader are open")
    rows = running.get("/metrics")[1].splitlines()
    assert sum(float(row.rpartition(" ")[2]) for row in rows if row.startswith(ended)) >= 4


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
