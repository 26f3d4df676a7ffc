"""Runs the application on a Ray cluster, reads its status, and writes it as a file for `serve deploy`."""

from __future__ import annotations

import json
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields

import ray
from ray import serve
from ray.serve.exceptions import RayServeException

from plait.cluster.config import ClusterConfig, check_cluster
from plait.cluster.ray_serve.app import APP, GATEWAY, make_app
from plait.cluster.ray_serve.survey import ask_gateways
from plait.config import EngineConfig, ServerConfig
from plait.errors import ConfigError, EngineError

OBJECT_STORE_NBYTES = 100 << 20  # of a cluster on this machine: tokens do not go through it
CORES_BESIDE = 1  # as Ray counts them, for gateways and the controller
ASK_S = 10.0  # for all gateways to answer
REACH_S = 5.0


def connect(address: str | None, num_cpus: int | None = None) -> None:
    """Join a Ray cluster, or start one on this machine (None). Raises ConfigError if there is none."""
    options: dict[str, object] = {"log_to_driver": False, "logging_level": "error", "namespace": "serve"}
    if address is None:
        options |= {"include_dashboard": False, "object_store_memory": OBJECT_STORE_NBYTES}
        # "local": without it Ray would join another user's cluster on this machine.
        options |= {"address": "local", "num_cpus": num_cpus, "_node_ip_address": "127.0.0.1"}
    else:
        _check_reachable(address)
        options |= {"address": address}
    try:
        ray.init(**options)
    except Exception as error:  # Ray has no class for a startup that takes too long
        what = "Ray does not start here" if address is None else f"no Ray cluster at {address}"
        raise ConfigError(f"address: {what}: {' '.join(str(error).split())}") from error


def _check_reachable(address: str) -> None:
    """Raises ConfigError where nothing listens. Ray itself tries for half a minute, and ends its process."""
    host, _, port = address.rpartition(":")
    if "://" in address or not host or not port.isdigit():
        return  # auto, and what Ray alone can read
    try:
        socket.create_connection((host.strip("[]"), int(port)), REACH_S).close()
    except (OSError, OverflowError, ValueError) as error:
        raise ConfigError(f"address: no Ray cluster at {address}: {error}") from error


def run_cluster(
    model: str,
    engine: EngineConfig,
    server: ServerConfig,
    cluster: ClusterConfig,
    report: Callable[[str], None],
    is_over: threading.Event,
) -> None:
    """Serve a model until `is_over` is set, then stop it. Raises ConfigError and EngineError."""
    check_cluster(engine, server)
    cluster = share_machine(engine, cluster)
    least, most = cluster.bounds
    report("starting Ray" if cluster.address is None else f"joining Ray at {cluster.address}")
    total = math.ceil((cluster.cpus or 1) * 2 * most + 0.1 * 2 * cluster.gateways + CORES_BESIDE)
    connect(cluster.address, total)  # twice: an update starts new replicas before it stops old ones
    try:
        # An explicit host: Serve's own default can be all interfaces.
        serve.start(http_options={"host": server.host, "port": server.port})
        report(f"starting {least} replicas and {cluster.gateways} gateways of {model}")
        try:
            serve.run(make_app(model, engine, server, cluster), name=APP, route_prefix="/")
        except RuntimeError as error:
            raise EngineError(_why_not_started(error, _read_messages())) from error
        report(f"serving {model} at http://{server.host}:{server.port}")
        is_over.wait()
        report("stopping")
        serve.delete(APP)
    finally:
        if cluster.address is None:
            serve.shutdown()
        ray.shutdown()


def share_machine(engine: EngineConfig, cluster: ClusterConfig) -> ClusterConfig:
    """With the cores of a replica: its threads, else this machine's share. Raises ConfigError.

    Another machine's cores are not known here.
    """
    if cluster.cpus is not None:
        return cluster
    if engine.threads is not None:
        cpus = float(engine.threads)
    elif cluster.address is None:
        cpus = float(max(len(os.sched_getaffinity(0)) // cluster.bounds[1], 1))
    else:
        raise ConfigError("cpus: say how many cores a replica gets on the machines of the cluster")
    values = {field.name: getattr(cluster, field.name) for field in fields(cluster)}
    return ClusterConfig(**{**values, "cpus": cpus})


def read_status(address: str) -> dict[str, object]:
    """What Serve and the gateways of a running cluster say. Raises ConfigError if there is none."""
    connect(address)
    try:
        found = serve.status().applications.get(APP)
        if found is None:
            raise ConfigError(f"address: the cluster at {address} does not run {APP}")
        deployments = {name: dict(each.replica_states) for name, each in found.deployments.items()}
        handle = serve.get_deployment_handle(GATEWAY, APP)

        def ask(count: int) -> list[dict[str, object]]:
            calls, rows = [handle.describe.remote() for _ in range(count)], []
            until = time.monotonic() + ASK_S
            for call in calls:  # a gateway that hangs or ends leaves the others' rows
                with suppress(TimeoutError, ray.exceptions.RayError):
                    rows.append(call.result(timeout_s=max(until - time.monotonic(), 0.1)))
            return rows

        gateways = ask_gateways(ask, deployments.get(GATEWAY, {}).get("RUNNING", 1), ASK_S)
        return {"status": str(found.status.value), "deployments": deployments, "gateways": gateways}
    except RayServeException as error:
        raise ConfigError(f"address: {' '.join(str(error).split())}") from error
    finally:
        ray.shutdown()


def make_config(
    model: str, engine: EngineConfig, server: ServerConfig, cluster: ClusterConfig
) -> dict[str, object]:
    """The file for `serve deploy` and KubeRay, as plain values. Raises ConfigError.

    It holds what differs from the defaults, and no key: a file of keys is read on the gateways' machines.
    """
    check_cluster(engine, server)
    for name, instead in (("api_key", "use api_key_file"), ("mcp_token", "leave it out")):
        if getattr(server, name):
            raise ConfigError(f"{name}: it would be readable in the file; {instead}")
    tables = {
        "engine": find_changed(engine),
        "server": find_changed(server),
        "cluster": find_changed(cluster),
    }
    args: dict[str, object] = {"model": model}
    args |= {name: changed for name, changed in tables.items() if changed}
    path = "plait.cluster.ray_serve.app:build"
    application = {"name": APP, "route_prefix": "/", "import_path": path, "args": args}
    http = {"host": server.host, "port": server.port}
    return {"proxy_location": "EveryNode", "http_options": http, "applications": [application]}


def find_changed(config: EngineConfig | ServerConfig | ClusterConfig) -> dict[str, object]:
    """The options that have not their default, as JSON has them."""
    plain = type(config)()
    names = (field.name for field in fields(config))
    changed = {n: getattr(config, n) for n in names if getattr(config, n) != getattr(plain, n)}
    return {name: [*value] if isinstance(value, tuple) else value for name, value in changed.items()}


def write_config(config: Mapping[str, object]) -> str:
    """As YAML: JSON is YAML, too, and needs no library."""
    return json.dumps(config, indent=2) + "\n"


def _read_messages() -> list[str]:
    """What Serve says of each deployment."""
    found = serve.status().applications.get(APP)
    return [] if found is None else [each.message for each in found.deployments.values()]


def _why_not_started(error: RuntimeError, messages: Sequence[str]) -> str:
    """The line of Serve's texts that says why: the last one of a replica's or a gateway's own error."""
    lines = [line.strip() for text in (*messages, str(error)) for line in text.splitlines() if line.strip()]
    ours = [line for line in lines if line.startswith("plait.errors.")]
    return (ours[-1].partition(": ")[2] if ours else lines[-1]) if lines else "the cluster did not start"
