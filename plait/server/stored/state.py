"""What runs over the store while the server does: responses in the background, batches, and retention."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from functools import partial
from typing import TYPE_CHECKING

from plait.errors import CapacityError
from plait.server.store.errors import StoreFull
from plait.server.stored.background import BackgroundRunner, fail_unfinished
from plait.server.stored.batch_runner import BatchRunner

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from plait.server.gateway.middleware import Traffic
    from plait.server.gateway.served_models import ServedModels
    from plait.server.store.store import Store

logger = logging.getLogger("plait.server")


class StoredState:
    """The store of a server, and what is in work. Only for the event loop's thread."""

    def __init__(self, store: Store, traffic: Traffic, models: ServedModels) -> None:
        self.store = store
        self.background = BackgroundRunner(store, traffic)
        self.batches = BatchRunner(store, traffic, models)
        self._unfinished = frozenset[str]()  # responses that the last server left in work
        self._cleaning: asyncio.Task[None] | None = None

    async def start(self, app: ASGIApp) -> None:
        """Settle what was in work when the last server ended, and go on with its batches.

        `app`: the application's routes. Raises CapacityErrors, but not for a full disk: then responses are
        settled when there is space.
        """
        left = await self.store.run(lambda rows: rows.list_working("response"))
        self._unfinished = frozenset(row.id for row in left)
        with contextlib.suppress(StoreFull):  # `open_store` has logged it
            await self._settle()
        await self.batches.start(app)
        self._cleaning = asyncio.get_running_loop().create_task(self._clean())

    async def _settle(self) -> None:
        """Have the responses that the last server left say so. Raises CapacityErrors."""
        if self._unfinished:
            await self.store.run(partial(fail_unfinished, ids=self._unfinished))
            self._unfinished = frozenset()

    async def pause(self) -> None:
        """Interrupt batches, because the server stops; responses get the time that requests get."""
        await self.batches.close()

    async def close(self) -> None:
        """End what is in work, so that its rows say so."""
        await self.batches.close()
        await self.background.close()
        if self._cleaning is not None:
            self._cleaning.cancel()
            await asyncio.gather(self._cleaning, return_exceptions=True)

    async def _clean(self) -> None:
        while True:
            await asyncio.sleep(self.store.clean_every_s)
            try:
                await self._settle()
                await self.store.clean()
            except CapacityError as error:
                logger.error("%s", error)
