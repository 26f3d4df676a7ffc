"""The head of a cluster is killed. It is the last test: nothing can be managed any more."""

from __future__ import annotations

import os
import signal
import time

import pytest

from tests.cluster.ray_serve.running import MOST_S, RunningCluster, check

pytest.importorskip("ray", reason="the extra [cluster] is not installed")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.ray,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore"),
]


def test_streams_end_well_without_the_head_and_the_gateway_is_not_ready(
    running: RunningCluster, expected: list[str]
) -> None:
    import ray

    running.wait_served()
    ray.shutdown()  # without a head Ray ends its driver, too
    head = running.nodes.head_node.all_processes["gcs_server"][0].process.pid
    check(running.streams(lambda: os.kill(head, signal.SIGKILL)), expected)
    until = time.monotonic() + MOST_S
    while running.get("/ready")[0] != 503:
        assert time.monotonic() < until
        time.sleep(0.1)
    assert running.get("/live")[0] == 200
    check(running.streams(), expected)  # until Ray ends its processes: see `conftest.STARTED`
    answer = running.ask_status()
    assert answer.returncode == 2
    assert f"no Ray cluster at {running.nodes.address}" in answer.stderr
