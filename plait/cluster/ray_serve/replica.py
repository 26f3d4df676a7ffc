"""A replica as Ray Serve runs it: a supervised engine process, and the server that gateways connect with.

Imported in Ray's actors alone. Serve pickles a class that it decorates by value; this one is plain, and
`plait.cluster.ray_serve.app` decorates it.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping

import ray
from ray import serve

from plait.cluster.card import add_digest, make_card
from plait.cluster.replica_server import ReplicaServer
from plait.cluster.resume_points import ResumePoints
from plait.cluster.scaling import ReplicaLoad
from plait.config import EngineConfig, ServerConfig
from plait.errors import EngineLost
from plait.worker.client import EngineProcess
from plait.worker.supervisor import Patience


class EngineReplica:
    """Ray Serve starts it, looks after it and stops it; requests and tokens go around Ray."""

    def __init__(
        self, model: str, engine: Mapping[str, object], server: Mapping[str, object], patience_s: float
    ) -> None:
        config, limits = EngineConfig(**engine), ServerConfig(**server)  # type: ignore[arg-type]
        patience = Patience(
            stalled_s=limits.step_timeout_s,
            frozen_s=limits.frozen_timeout_s,
            loading_s=limits.loading_timeout_s,
            goes_on=limits.on_engine_lost == "retry",
        )
        self._id = serve.get_replica_context().replica_id.unique_id
        self._process = EngineProcess(model, config, patience=patience)
        try:
            card = add_digest(make_card(self._process, config), self._process, config)
            points = ResumePoints()
            self._process.follow_prefixes(points.apply)
            host = ray.util.get_node_ip_address()
            self._server = ReplicaServer(
                self._process,
                card,
                host=host,
                points=points,
                is_frozen=lambda: self._process.silent_s > patience_s,
            )
        except BaseException:
            self._process.close(drain=False)
            raise
        self._process.on_charged = self._server.report_charged

    def address(self, at: str = "") -> tuple[str, int, bytes] | None:
        """Where gateways connect, and the token that lets them in. None: `at` is another replica."""
        if at not in ("", self._id):
            return None
        host, port, token = self._server.address
        return host, port, token  # Ray's cluster pickles no class of ours

    async def hold(self, gateway: str, key: int, at: str = "") -> None:
        """While a gateway has leases: so Serve sees them, and waits for them when it stops the replica."""
        if at != self._id:
            return
        await asyncio.wrap_future(self._server.hold(gateway, key))

    def record_autoscaling_stats(self) -> dict[str, float]:
        """What Serve hands to its policy for the number of replicas, see `WaitingWorkScaler`."""
        return ReplicaLoad.from_stats(self._process.stats()).to_numbers()

    def pids(self, at: str = "") -> tuple[int, int | None]:
        """The processes of the actor and its engine."""
        return os.getpid(), self._process.pid

    def check_health(self) -> None:
        """For Ray Serve: raises EngineLost once the engine is given up, and the replica is replaced."""
        if not self._process.live:
            raise EngineLost("the engine was given up")

    def __del__(self) -> None:
        """Ray Serve calls it when what was open has ended, or its time is over."""
        if hasattr(self, "_server"):
            self._server.leave()
            self._server.close()
        if hasattr(self, "_process"):
            self._process.close(drain=False)
