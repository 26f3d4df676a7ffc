"""The application that Ray Serve runs: engine replicas, and gateways in front of them.

serve run plait.cluster.ray_serve.app:build model=./model replicas=2..8 max_num_seqs=32
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import get_origin

from ray import serve
from ray.serve import Application
from ray.serve.config import RequestRouterConfig

from plait.cluster.config import ClusterConfig, check_cluster, share_limits
from plait.cluster.ray_serve.gateway import ClusterGateway, serve_http
from plait.cluster.ray_serve.replica import EngineReplica
from plait.config import EngineConfig, ServerConfig
from plait.errors import ConfigError
from plait.option_fields import option_types

APP, ENGINE, GATEWAY = "plait", "engine", "gateway"
SLACK = 64  # calls to a replica that are no requests
SCALER = "plait.cluster.ray_serve.scaler:WaitingWorkScaler"
# Serve would run a gateway on a thread of its own, and hand over every event of a stream by itself.
ONE_LOOP = {"env_vars": {"RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0"}}
REPORT_S = 1.0  # between two reports of a replica's load to Serve's controller


def build(args: Mapping[str, object]) -> Application:
    """From `model` and any option of [engine], [server] and [cluster]: by its name, or in these tables.

    Raises ConfigError for an option that is none.
    """
    given = {name: value for name, value in args.items() if name != "model"}
    tables: dict[str, dict[str, object]] = {}
    for table, kind in (("engine", EngineConfig), ("server", ServerConfig), ("cluster", ClusterConfig)):
        found = given.pop(table, {})
        if not isinstance(found, Mapping):
            raise ConfigError(f"{table}: it is no table of options")
        own = {field.name for field in fields(kind)}
        named = {name: given.pop(name) for name in [*given] if name in own}
        tables[table] = {name: _read(kind, name, value) for name, value in {**found, **named}.items()}
    if given or not isinstance(args.get("model"), str):
        raise ConfigError(f"{min(given)}: no option has this name" if given else "model: name a model")
    engine, server = EngineConfig(**tables["engine"]), ServerConfig(**tables["server"])  # type: ignore[arg-type]
    return make_app(str(args["model"]), engine, server, ClusterConfig(**tables["cluster"]))  # type: ignore[arg-type]


def make_app(model: str, engine: EngineConfig, server: ServerConfig, cluster: ClusterConfig) -> Application:
    """The deployments. Raises ConfigError for options that a cluster cannot keep."""
    check_cluster(engine, server)
    cpus = cluster.cpus if cluster.cpus is not None else float(engine.threads or 1)
    gpus = cluster.gpus
    if gpus is None:
        gpus = float(engine.num_ranks) if engine.device.startswith("cuda") else 0.0
    settings = asdict(engine)
    if engine.threads is None and cpus >= 1:
        settings["threads"] = int(cpus)
    served = asdict(share_limits(server, cluster.gateways))
    replicas = serve.deployment(EngineReplica).options(
        name=ENGINE,
        ray_actor_options={"num_cpus": cpus, "num_gpus": gpus},
        max_ongoing_requests=engine.max_waiting + engine.max_num_seqs + SLACK,
        health_check_period_s=1.0,
        health_check_timeout_s=2 * cluster.patience_s,
        graceful_shutdown_timeout_s=cluster.drain_s,
        graceful_shutdown_wait_loop_s=0.2,
        max_surge_percent=100,
        request_router_config=RequestRouterConfig(
            request_router_class="plait.cluster.ray_serve.router:PinnedRouter"
        ),
        **_scale(cluster),
    )
    gateways = serve.deployment(serve.ingress(lambda: serve_http)(ClusterGateway)).options(
        name=GATEWAY,
        num_replicas=cluster.gateways,
        ray_actor_options={"num_cpus": 0.1, "runtime_env": ONE_LOOP},
        max_ongoing_requests=4096,
        health_check_period_s=2.0,
        max_surge_percent=100,
        graceful_shutdown_timeout_s=max(server.shutdown_timeout_s, 1.0),
    )
    bound = replicas.bind(model, settings, served, cluster.patience_s)
    return gateways.bind(bound, settings, served, cluster.patience_s)


def _scale(cluster: ClusterConfig) -> dict[str, object]:
    """A fixed number of replicas, or Serve's autoscaling by `WaitingWorkScaler`, which has its own delays."""
    least, most = cluster.bounds
    if least == most:
        return {"num_replicas": least}
    limits = {"max_queue_s": cluster.max_queue_s, "down_after_s": cluster.down_after_s}
    policy = {"policy_function": SCALER, "policy_kwargs": {"least": least, "most": most, **limits}}
    bounds = {"min_replicas": least, "max_replicas": most, "initial_replicas": least}
    delays = {"upscale_delay_s": 0.0, "downscale_delay_s": 0.0}
    reports = {"metrics_interval_s": REPORT_S, "look_back_period_s": 2 * REPORT_S}
    return {"autoscaling_config": {**bounds, **delays, **reports, "policy": policy}}


def _read(kind: type, name: str, value: object) -> object:
    """An option's value; `serve run` has words only."""
    if name not in {field.name for field in fields(kind)}:
        raise ConfigError(f"{name}: no option has this name")
    if not isinstance(value, str):
        return value
    hint, _ = option_types(kind)[name]
    try:
        if hint is bool:
            return {"true": True, "false": False}[value.lower()]
        if get_origin(hint) is tuple:
            return tuple(value.split(","))
        return hint(value) if hint in (int, float) else value
    except (KeyError, ValueError) as error:
        raise ConfigError(f"{name}: {value!r} cannot be read") from error
