"""The connections of a gateway with its replicas: one each, made again while the replica is a member."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection
from functools import partial

from plait.cluster.connection import HANDSHAKE_S, GatewayEnd
from plait.cluster.replica_server import ReplicaAddress
from plait.cluster.wire import Greeting, ToGateway, ToReplica

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 2.0  # before a replica that cannot be reached is tried again
log = logging.getLogger("plait.cluster")


class ReplicaLinks:
    """All methods are of the event loop's thread. `gateway`: the name to greet with.

    `on_message` gets what a replica says, `on_end` the end of a connection that was open, with the reason.
    """

    def __init__(
        self, gateway: str, on_message: Callable[[str, ToGateway], None], on_end: Callable[[str, str], None]
    ) -> None:
        self._gateway, self._on_message, self._on_end = gateway, on_message, on_end
        self._members: dict[str, ReplicaAddress] = {}
        self._links: dict[str, GatewayEnd] = {}
        self._keeping: dict[str, asyncio.Task[None]] = {}
        self._refused: set[str] = set()

    @property
    def members(self) -> Collection[str]:
        """Replicas that take requests, connected or not."""
        return [*self._members]

    def set_members(self, members: dict[str, ReplicaAddress]) -> list[str]:
        """Connect with these replicas; returns those that are members no more.

        A connection with one of them stays until it ends: it may finish what it has.
        """
        gone = [name for name in self._members if name not in members]
        self._members = members
        for name in gone:
            if name not in self._links and (task := self._keeping.pop(name, None)) is not None:
                task.cancel()
        for name in members:
            if name not in self._keeping or self._keeping[name].done():
                self._keeping[name] = asyncio.get_running_loop().create_task(self._keep(name))
        return gone

    def send(self, name: str, message: ToReplica) -> bool:
        """Returns whether there is a connection. Raises EngineError for what cannot be written."""
        if (link := self._links.get(name)) is None:
            return False
        link.send(message)
        return True

    def end(self, name: str, why: str) -> None:
        """End the connection with a replica; a member is connected again."""
        if (link := self._links.get(name)) is not None:
            link.end(why)

    def refuse(self, name: str, why: str) -> None:
        """End the connection with a replica, and make no other."""
        self._refused.add(name)
        self.end(name, why)

    def close(self) -> None:
        """End every connection."""
        self._members = {}
        for task in self._keeping.values():
            task.cancel()
        for link in [*self._links.values()]:
            link.end("the gateway closes")

    async def _keep(self, name: str) -> None:
        pause_s = FIRST_PAUSE_S
        while (address := self._members.get(name)) is not None and name not in self._refused:
            try:
                if await self._connect(name, address):
                    pause_s = FIRST_PAUSE_S
            except Exception:
                log.exception("the connection with replica %s failed", name)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def _connect(self, name: str, address: ReplicaAddress) -> bool:
        """One connection from its start to its end. Returns whether it was ever open."""
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[str] = loop.create_future()
        has_opened = False

        def on_open() -> None:
            nonlocal has_opened
            has_opened = True
            self._links[name] = end
            end.send(Greeting(self._gateway))

        def on_end(why: str) -> None:
            if not ended.done():
                ended.set_result(why)
            if self._links.get(name) is end:
                del self._links[name]
                self._on_end(name, why)

        end = GatewayEnd(address.token, on_open, partial(self._on_message, name), on_end)
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                await loop.create_connection(lambda: end, address.host, address.port)
        except (OSError, TimeoutError) as error:
            log.info("replica %s cannot be reached: %s", name, error)
            return False
        try:
            why = await ended
        finally:
            end.end("the gateway closes it")
        if not has_opened:
            log.warning("replica %s: no connection: %s", name, why)
        return has_opened
