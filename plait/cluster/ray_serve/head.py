"""Whether the head of a Ray cluster can be reached: without it nothing that ends is replaced.

Ray itself waits a minute before its processes give up, and says nothing meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

PAUSE_S = 2.0
MAX_MISSED = 2  # looks in a row without a connection


class HeadWatch:
    """Connects with the head again and again. `address`: HOST:PORT of its control service (GCS).

    `on_look` is called after each look, with whether the head is there.
    """

    def __init__(self, address: str, on_look: Callable[[bool], None]) -> None:
        host, _, port = address.rpartition(":")
        self._host, self._port, self._on_look = host.strip("[]"), int(port), on_look

    async def run(self) -> None:
        """Look until it is cancelled."""
        num_missed = 0
        while True:
            num_missed = 0 if await self._look() else num_missed + 1
            self._on_look(num_missed < MAX_MISSED)
            await asyncio.sleep(PAUSE_S)

    async def _look(self) -> bool:
        try:
            async with asyncio.timeout(PAUSE_S):
                _, writer = await asyncio.open_connection(self._host, self._port)
        except (OSError, TimeoutError):
            return False
        writer.close()
        return True
