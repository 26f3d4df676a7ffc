"""Changes of a running cluster under load: a node with another version, an update, scaling, a lost gateway.

The tests go on with the cluster that `test_deaths` leaves: one replica, on the head.
"""

from __future__ import annotations

import os
import re
import signal
import time

import pytest

from tests.cluster.ray_serve.running import RunningCluster, check, copy_as_other_version

pytest.importorskip("ray", reason="the extra [cluster] is not installed")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.ray,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore"),
]


def test_streams_go_on_with_another_version_where_no_equal_replica_is_left(
    running: RunningCluster, expected: list[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = copy_as_other_version(tmp_path_factory.mktemp("other"))
    if running.nodes.worker_nodes:  # this test runs alone
        running.nodes.remove_node(*running.nodes.worker_nodes, allow_graceful=False)
    running.nodes.add_node(num_cpus=8, env_vars={"PYTHONPATH": str(folder)})  # also for the update's surge
    running.wait_ready()
    known = running.describe()["replicas"]
    assert len({replica["arithmetic"] for replica in known}) == 2
    assert len({replica["digest"] for replica in known}) == 1, "only the version's number differs"
    actor_of = {replica["name"]: running.processes_of(replica["name"])[0] for replica in known}
    on_head = {*running.children(running.raylet(running.nodes.head_node))}
    (victim,) = {*actor_of.values()} & on_head
    replies = running.streams(lambda: os.kill(victim, signal.SIGKILL))
    check(replies, expected)  # the other version differs in its number alone
    assert running.moved()["replica no"] > 0
    assert re.search(
        r'plait_cluster_moved_total\{gateway="\w+",same_arithmetic="no"', running.get("/metrics")[1]
    )


def test_no_stream_breaks_when_a_changed_version_is_run(running: RunningCluster, expected: list[str]) -> None:
    running.wait_ready()
    before = running.pids()
    scaling = {"replicas": "1..2", "max_queue_s": "0.2", "down_after_s": "2", "max_num_seqs": "2"}
    with running.load(expected) as replies:
        running.run(gateways="2", **scaling)
        while {*before} & {*running.pids()}:
            time.sleep(0.1)
    assert len(replies) > 6


def test_a_second_replica_takes_requests_while_work_waits_and_leaves_later(
    running: RunningCluster, expected: list[str]
) -> None:
    with running.load(expected) as replies:
        running.wait_ready(2)
        at_work: set[str] = set()
        while len(at_work) < 2:
            known = running.describe()["replicas"]  # of one of two gateways: it has not all that is open
            at_work |= {replica["name"] for replica in known if replica["open"] or replica["waiting_tokens"]}
            time.sleep(0.05)
    num_replies = len(replies)
    with running.load(expected[:1]) as replies:
        running.wait_ready(1)
    assert num_replies > 6
    assert replies


def test_the_same_seed_gives_the_same_text_at_another_gateway_when_one_is_killed(
    running: RunningCluster, expected: list[str]
) -> None:
    assert len(running.pids("gateway")) == 2
    found = running.streams(running.kill_busiest_gateway, at_event=3)  # while all are far from their ends
    assert any(reply.error or not reply.finish_reason for reply in found)
    assert all(whole.startswith(reply.text) for reply, whole in zip(found, expected, strict=True))
    check(running.streams(), expected)
