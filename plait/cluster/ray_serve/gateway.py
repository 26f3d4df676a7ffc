"""A gateway as Ray Serve runs it: Plait's HTTP application over a `ClusterLoop`. No weights, no torch.

Imported in Ray's actors alone. It asks Serve which replicas there are and where they listen; requests and
tokens go over its own connections with them.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Mapping
from contextvars import Context

import ray
from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp, Receive, Scope, Send

from plait.cluster.card import make_front
from plait.cluster.loop import ClusterLoop
from plait.cluster.ray_serve.head import HeadWatch
from plait.cluster.ray_serve.lease_holds import LeaseHolds
from plait.cluster.ray_serve.membership import MEMBERSHIP
from plait.cluster.replica_server import ReplicaAddress
from plait.config import EngineConfig, ServerConfig
from plait.errors import EngineLost
from plait.frontend.frontend import Parsers
from plait.server.app import create_app
from plait.server.gateway import tracing
from plait.server.gateway.middleware import Traffic

ASK_S = 10.0  # for a replica to say where it listens
ALONE_S = 60.0  # without any replica of its model: the gateway itself may be what is old
APPS: list[ASGIApp] = []  # the application of this process, once it is there
log = logging.getLogger("plait.cluster")


async def serve_http(scope: Scope, receive: Receive, send: Send) -> None:
    """The ASGI application that Serve gets: it calls this process's own."""
    if scope["type"] == "lifespan":
        for word in ("startup", "shutdown"):
            await receive()
            await send({"type": f"lifespan.{word}.complete"})
        return
    await APPS[-1]({**scope, "root_path": ""}, receive, send)


class ClusterGateway:
    """HTTP, keys, templates, text, and the open streams."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self,
        engines: DeploymentHandle,
        engine: Mapping[str, object],
        server: Mapping[str, object],
        patience_s: float,
    ) -> None:
        config, limits = EngineConfig(**engine), ServerConfig(**server)  # type: ignore[arg-type]
        logging.getLogger("plait").setLevel(limits.log_level.upper())
        self._engines, self._home = engines, asyncio.get_running_loop()
        self._addresses: dict[str, ReplicaAddress] = {}
        self._asking: dict[str, asyncio.Task[None]] = {}
        self._holds = LeaseHolds(self._hold)
        self._members: tuple[str, ...] = ()
        self._seen_s = time.monotonic()
        self._loop = ClusterLoop(patience_s=patience_s, on_lease=self._begin_hold)
        await engines.address.remote()  # Serve's handle begins to hear of replicas with its first call
        MEMBERSHIP.listen(self._hear_members)
        card = await asyncio.to_thread(self._loop.first_card)
        parsers = Parsers(limits.tool_call_parser, limits.reasoning_parser)
        self._front = await asyncio.to_thread(make_front, card, self._loop, config, parsers)
        traffic = Traffic(limits, tracing.recorder(limits), labels=self._loop.metric_labels)
        APPS.append(create_app(self._front, limits, traffic))
        watch = HeadWatch(ray.get_runtime_context().gcs_address, self._see_head)
        self._watching = asyncio.create_task(watch.run())

    def describe(self) -> dict[str, object]:
        """Its replicas and counts, for `plait cluster status`."""
        return {"pid": os.getpid(), **self._loop.describe()}

    def check_health(self) -> None:
        """For Ray Serve: raises EngineLost once the loop has ended, or no replica of its model is there."""
        if not self._loop.live:
            raise EngineLost("the cluster's loop has ended")
        states = self._loop.count_states()
        if states["unreachable"] == 0 or sum(states.values()) > states["unreachable"]:
            self._seen_s = time.monotonic()
        elif time.monotonic() - self._seen_s > ALONE_S:
            raise EngineLost("no replica can be reached, or all serve another model")

    def __del__(self) -> None:
        """Ray Serve calls it when what was open has ended, or its time is over."""
        if hasattr(self, "_loop"):
            self._loop.close(drain=False)

    def _see_head(self, is_there: bool) -> None:
        if is_there != self._loop.is_managed:
            text = "is there again" if is_there else "cannot be reached: no replica is replaced"
            log.warning("the head of the Ray cluster %s", text)
        self._loop.is_managed = is_there

    def _hear_members(self, members: tuple[str, ...]) -> None:
        """On the router's thread."""
        self._home.call_soon_threadsafe(self._take_members, members)

    def _take_members(self, members: tuple[str, ...]) -> None:
        """On this gateway's event loop: which replicas take requests."""
        self._members = members
        for name in [*self._addresses]:
            if name not in members:
                del self._addresses[name]
        for name in members:
            if name not in self._addresses and name not in self._asking:
                # In a context of its own: calls in one request's context have one id, and Serve's router
                # would answer the one with the replica of the other.
                self._asking[name] = self._home.create_task(self._ask(name), context=Context())
        self._loop.set_members(self._addresses)

    async def _ask(self, name: str) -> None:
        """Ask a replica where it listens, until it answers or is no member any more."""
        try:
            while name in self._members and name not in self._addresses:
                try:
                    found = await asyncio.wait_for(self._engines.address.remote(at=name), ASK_S)
                    if found is not None and name in self._members:  # it may have left meanwhile
                        self._addresses[name] = ReplicaAddress(*found)
                        break
                    await asyncio.sleep(0.1)  # the list of members is about to change
                except Exception as error:  # whatever Serve raises, because the replica is still a member
                    log.warning("replica %s does not say where it listens: %r", name, error)
                    await asyncio.sleep(0.5)
        finally:
            del self._asking[name]
        self._loop.set_members(self._addresses)

    def _begin_hold(self, name: str, key: int) -> None:
        """On the cluster loop's thread: a lease was sent."""
        self._home.call_soon_threadsafe(self._holds.begin, name, key)

    async def _hold(self, name: str, key: int) -> None:
        """Have Serve see leases as a request. Its failure can show a death that the connection does not."""
        if not self._loop.has_leases(name):  # they were short
            return
        try:
            await self._engines.hold.remote(gateway=self._loop.name, key=key, at=name)
        except ray.exceptions.RayActorError:
            self._loop.report_dead(name)
        except Exception:
            log.exception("Serve does not see the leases of replica %s", name)
