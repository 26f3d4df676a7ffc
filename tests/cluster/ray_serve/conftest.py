"""One real Ray cluster for all tests of this folder, because it takes half a minute to start.

The head has three cores, as Ray counts them, for a gateway and a replica; the other replica is on a node of
its own. So there is no place for a third one, and it is known where a replica is.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from plait.cluster.config import NO_RETURN, OWN_RAY_ENVIRONMENT
from tests.cluster.ray_serve import engine_fault
from tests.cluster.ray_serve.running import (
    MODEL,
    OPTIONS,
    STREAMS,
    TOKENS,
    RunningCluster,
    body_of,
    get,
    wait_until,
)

os.environ.update(NO_RETURN)  # before a module of tests imports Ray
STARTED = {
    "RAY_health_check_period_ms": "1000",  # of nodes; a dead one is known after 5 s
    "RAY_health_check_failure_threshold": "5",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "300",  # of 60: without a head a loaded machine needs longer
    "RAY_prestart_worker_first_driver": "0",
    "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "60",  # a loaded machine fails Serve's own checks
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
}


@pytest.fixture(scope="package")
def running() -> Iterator[RunningCluster]:
    """A gateway and two replicas on two nodes."""
    pytest.importorskip("ray", reason="the extra [cluster] is not installed")
    import ray
    from ray import serve
    from ray.cluster_utils import Cluster

    from plait.cluster.ray_serve.run import connect

    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        for name, value in {**OWN_RAY_ENVIRONMENT, **STARTED}.items():
            patch.setitem(os.environ, name, value)
        folder = tempfile.mkdtemp(prefix="plait-ray-")  # a socket's path may have 107 bytes
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        shutil.copy(engine_fault.__file__, Path(folder, "sitecustomize.py"))
        known = os.environ.get("PYTHONPATH", "")
        patch.setitem(os.environ, "PYTHONPATH", os.pathsep.join([folder, *filter(None, [known])]))
        nodes = Cluster()
        stack.callback(end_nodes, nodes)
        nodes.add_node(num_cpus=3, include_dashboard=False, include_log_monitor=False, temp_dir=folder)
        nodes.add_node(num_cpus=2, wait=False)
        with pytest.MonkeyPatch.context() as patch:  # Ray puts the driver's folder before a node's PYTHONPATH
            patch.chdir(folder)
            connect(nodes.address)
        stack.callback(ray.shutdown)
        port = find_port()
        serve.start(http_options={"host": "127.0.0.1", "port": port, "location": "HeadOnly"})
        made = RunningCluster(port, nodes)
        made.run()
        made.wait_ready()
        yield made


@pytest.fixture(scope="package")
def alone() -> Iterator[int]:
    """The port of `plait serve` with the same model and options."""
    port = find_port()
    words = [word for name, value in OPTIONS.items() for word in (f"--{name.replace('_', '-')}", value)]
    command = [sys.executable, "-m", "plait", "serve", str(MODEL), "--port", str(port), *words]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: get(port, "/ready")[0] == 200, "plait serve is not ready")
        yield port
    finally:
        process.terminate()
        process.wait(60)


def find_port() -> int:
    """One that is free."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    return port


def end_nodes(nodes: object) -> None:
    """Kill every process of a cluster."""
    for node in nodes.list_all_nodes():  # type: ignore[attr-defined]
        node.kill_all_processes(check_alive=False, allow_graceful=False, wait=True)


@pytest.fixture(scope="package")
def expected() -> list[str]:
    """The texts that one engine in this process gives."""
    from plait import LLM, SamplingParams

    bodies = [body_of(i) for i in range(STREAMS)]
    params = [
        SamplingParams(max_tokens=TOKENS, temperature=0.8, seed=i, ignore_eos=True) for i in range(STREAMS)
    ]
    with LLM(str(MODEL), threads=1) as llm:
        return [found.outputs[0].text for found in llm.generate([body["prompt"] for body in bodies], params)]
