"""The batches that run, each as a task."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from starlette.types import ASGIApp

from plait.errors import CapacityError, PlaitError
from plait.server.http.errors import Problem, problem
from plait.server.stored.batch_objects import BatchWork
from plait.server.stored.batch_run import BatchRun
from plait.server.stored.inner import InnerApp
from plait.typed_values import decode_json

if TYPE_CHECKING:
    from plait.server.gateway.middleware import Traffic
    from plait.server.gateway.served_models import ServedModels
    from plait.server.store.rows import StoredRow
    from plait.server.store.store import Store

logger = logging.getLogger("plait.server")
PLACES = 8  # lines of all batches in work: each has a place in the engine's queue
RETRY_S, LOADING_S, CANCEL_S = 10.0, 0.2, 30.0


class BatchRunner:
    """Runs every batch that is in work. Only for the event loop's thread."""

    def __init__(self, store: Store, traffic: Traffic, models: ServedModels) -> None:
        self._store, self._traffic, self._models = store, traffic, models
        self._app: ASGIApp | None = None
        self._places = asyncio.Semaphore(PLACES)
        self._runs: dict[str, tuple[BatchRun, asyncio.Task[None]]] = {}
        self._stops = False

    async def start(self, app: ASGIApp) -> None:
        """Go on with the batches that the last server left. `app`: the application's routes."""
        self._app = app
        for row in await self._store.run(lambda rows: rows.list_working("batch")):
            self.launch(row, decode_json(row.body, BatchWork))

    def launch(self, row: StoredRow, work: BatchWork) -> None:
        """Begin a batch, or go on with it."""
        if self._stops:
            return
        is_cancelled = work.batch.status == "cancelling"
        run = BatchRun(self._store, row, work, self._places, self._app_of, is_cancelled)
        self._runs[row.id] = run, asyncio.get_running_loop().create_task(self._run(run))

    async def cancel(self, row: StoredRow) -> None:
        """Cancel a batch that runs, and wait until its answers so far are files."""
        found = self._runs.get(row.id)
        if found is not None:
            run, task = found
            if await run.mark_cancelling():  # a second call must not interrupt what the first has begun
                task.cancel()
            await asyncio.wait({task}, timeout=CANCEL_S)

    async def close(self) -> None:
        """Interrupt every batch; the next server goes on with it."""
        self._stops = True
        tasks = [task for _, task in self._runs.values()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _run(self, run: BatchRun) -> None:
        try:
            try:
                await self._run_to_end(run)
            except asyncio.CancelledError:
                if not run.is_cancelled:
                    raise
                await self._run_to_end(run)
        except Exception as error:
            await _fail(run, problem(error))
        finally:
            self._runs.pop(run.row.id, None)

    async def _run_to_end(self, run: BatchRun) -> None:
        """Run a batch; while the store refuses its answers, it waits and goes on."""
        while self._models.readiness()[1] == "loading":
            await asyncio.sleep(LOADING_S)
        has_ended = False
        while not has_ended:
            try:
                if run.is_cancelled:
                    await run.cancel()
                else:
                    await run.run()
                has_ended = True
            except* CapacityError as errors:
                logger.error("the batch %s waits: %s", run.row.id, errors.exceptions[0])
                await asyncio.sleep(RETRY_S)

    def _app_of(self, tenant: str) -> InnerApp | None:
        key = self._traffic.keyring.find_name(tenant)
        assert self._app is not None
        if key is None:
            return None
        return InnerApp(self._app, self._traffic, key, self._traffic.limits.account(key))


async def _fail(run: BatchRun, found: Problem) -> None:
    """End a batch that cannot go on. If not even that can be stored, the next server tries it again."""
    try:
        await run.fail(found.code or "internal_error", found.message)
    except PlaitError as error:
        logger.error("the batch %s failed (%s), which was not stored: %s", run.row.id, found.message, error)
