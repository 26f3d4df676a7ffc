"""The options of a cluster, declared as those of the engine and the server are."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, fields, replace

from plait.config import EngineConfig, ServerConfig
from plait.errors import ConfigError
from plait.option_fields import check_fields, option

RANGE = re.compile(r"(\d{1,5})(?:\.\.(\d{1,5}))?")
# Options of `plait serve` that a gateway behind Ray Serve's proxy cannot keep, and what to do instead.
NOT_SERVED = {
    **dict.fromkeys(("tls_cert", "tls_key"), "put a proxy with TLS in front of the cluster"),
    **dict.fromkeys(("root_path", "max_connections"), "Ray Serve's proxy has the connections"),
    "address_file": "see plait cluster status",
    **dict.fromkeys(
        ("models_dir", "keep_alive", "models_memory", "max_loaded_models"), "a cluster has one model"
    ),
    "admin_key": "a cluster has one model",
    **dict.fromkeys(("store", "store_limit", "store_max_age", "store_key"), "gateways share no store"),
    **dict.fromkeys(("log_file", "log_format"), "Ray keeps the logs of a cluster"),
    **dict.fromkeys(
        ("kv_events", "kv_events_replay", "kv_events_topic"), "gateways route by what replicas report to them"
    ),
    "startup_digest": "replicas are always compared so: see plait cluster status",
}
# The environment in which Ray starts, on every machine of a cluster: its processes read it.
RAY_ENVIRONMENT = {
    "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "1",  # Serve would look after its proxy every 10 s
    "RAY_SERVE_PROXY_USE_GRPC": "1",  # an event costs less than as an item of an actor's generator
    "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": str(2**31 - 1),  # of 4 MiB: long lists of vectors fail
}
# Of a Ray that a command starts itself: a loaded machine takes longer than Ray's 30 s.
OWN_RAY_ENVIRONMENT = {**RAY_ENVIRONMENT, "RAY_raylet_start_wait_time_s": "120"}
# Read when Ray is imported. Else a thread of Serve, which reports its numbers every few seconds, joins the
# cluster again behind `ray.shutdown()`; if that ends, so does this process, or it waits for its head.
NO_RETURN = {"RAY_ENABLE_AUTO_CONNECT": "0"}
NOT_COMPUTED = {"lora_folder": "adapters of a cluster are loaded at its start, with --lora"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """How many replicas and gateways there are, and what a replica gets of a machine."""

    replicas: str = option("2", "engines, each on one machine: N, or LEAST..MOST by the work that waits")
    gateways: int = option(2, "processes that have HTTP, text and the open streams", least=1)
    cpus: float | None = option(
        None, "CPU cores of a replica, as Ray counts them; default: --threads, else this machine's share"
    )
    gpus: float | None = option(None, "GPUs of a replica; default: its ranks with --device cuda, else none")
    address: str | None = option(
        None, "HOST:PORT of a Ray cluster, or auto; default: one on this machine that ends with the command"
    )
    drain_s: float = option(30.0, "seconds that a replica's replies get when it stops; then they move")
    patience_s: float = option(5.0, "a replica that shows no sign of life for so long loses its streams")
    max_queue_s: float = option(
        2.0, "seconds of work that may wait for each replica; with more, LEAST..MOST starts others"
    )
    down_after_s: float = option(
        300.0, "seconds under a third of that before LEAST..MOST stops a replica, one at a time"
    )

    def __post_init__(self) -> None:
        check_fields(self)
        least, most = self.bounds
        if not 1 <= least <= most:
            raise ConfigError(f"replicas: {self.replicas!r} is not N or LEAST..MOST with at least 1")
        for name in ("cpus", "gpus"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < math.inf:
                raise ConfigError(f"{name}: {value} is no number of {name}")
        if not 0 <= self.drain_s < math.inf:
            raise ConfigError(f"drain_s: {self.drain_s} is not a number of seconds")
        if not 0 < self.max_queue_s < math.inf:
            raise ConfigError(f"max_queue_s: {self.max_queue_s} is not a positive number of seconds")
        if not 0 <= self.down_after_s < math.inf:
            raise ConfigError(f"down_after_s: {self.down_after_s} is not a number of seconds")
        if not 1.5 <= self.patience_s < math.inf:
            raise ConfigError(
                f"patience_s: {self.patience_s} is less than 1.5; replicas report once a second"
            )

    @property
    def bounds(self) -> tuple[int, int]:
        """The least and the most replicas."""
        found = RANGE.fullmatch(str(self.replicas).strip())
        if found is None:
            raise ConfigError(f"replicas: {self.replicas!r} is not N or LEAST..MOST")
        return int(found[1]), int(found[2] or found[1])


def check_cluster(engine: EngineConfig, server: ServerConfig) -> None:
    """Raises ConfigError for an option that would be without effect in a cluster."""
    for config, refused in ((server, NOT_SERVED), (engine, NOT_COMPUTED)):
        plain = type(config)()
        for field in fields(config):
            if field.name in refused and getattr(config, field.name) != getattr(plain, field.name):
                raise ConfigError(f"{field.name}: not in a cluster: {refused[field.name]}")


def share_limits(server: ServerConfig, num_gateways: int) -> ServerConfig:
    """One gateway's part of the limits for each key, because gateways do not share their counts."""
    names = ("requests_per_minute", "tokens_per_minute", "max_requests_per_key")
    limits = {name: getattr(server, name) for name in names}
    return replace(
        server, **{name: -(-limit // num_gateways) for name, limit in limits.items() if limit is not None}
    )
