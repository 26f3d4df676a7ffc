"""Calls that show the cluster's scheduler which replicas have leases: one a replica, not one a lease.

A scheduler such as Ray Serve lets a replica end once it has no open call. Requests go around it, so a gateway
keeps one call open at each replica that has leases of it. A call for each lease would cost both sides some
milliseconds of processor time for each request. It waits for a moment, because its work would delay the
first token. A replica that is stopped within that moment moves its streams.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextvars import Context

PAUSE_S = 0.25  # until a lease is shown


class LeaseHolds:
    """All methods are of one event loop's thread. `pause_s`: from a lease to its call.

    `hold(replica, key)`: a call that lasts until the replica has had the lease `key`, and has no lease of
    this gateway any more. It must not raise.
    """

    def __init__(self, hold: Callable[[str, int], Awaitable[None]], pause_s: float = PAUSE_S) -> None:
        self._hold, self._pause_s = hold, pause_s
        self._newest: dict[str, int] = {}  # of replicas with a call: the key of the newest lease
        self._calling: set[asyncio.Task[None]] = set()

    def begin(self, replica: str, key: int) -> None:
        """A lease was sent to a replica. Keys of one replica grow."""
        is_held = replica in self._newest
        self._newest[replica] = key
        if not is_held:
            # In a context of its own: Serve would take it for a part of the client's request that brought
            # the lease, and end it when that client leaves.
            task = asyncio.get_running_loop().create_task(self._keep(replica), context=Context())
            self._calling.add(task)
            task.add_done_callback(self._calling.discard)

    async def _keep(self, replica: str) -> None:
        """Call again while a newer lease was sent than the call knows of: it may have ended before that."""
        key = 0
        try:
            await asyncio.sleep(self._pause_s)
            while (newest := self._newest[replica]) != key:
                key = newest
                await self._hold(replica, key)
        finally:
            del self._newest[replica]
