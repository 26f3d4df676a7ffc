"""/v1/batches: create, get, list, cancel; and the batches that run."""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING

import msgspec
from starlette.types import ASGIApp

from plait.config import MIB
from plait.errors import CapacityError, InvalidField
from plait.server.api.stored_metadata import read_metadata
from plait.server.http.errors import TooManyRequests, problem
from plait.server.http.transfer import new_id
from plait.server.store.errors import NotStored
from plait.server.store.rows import Row, Rows
from plait.server.stored.batch_objects import (
    WINDOW_S,
    BatchObject,
    BatchWork,
    check_endpoint,
)
from plait.server.stored.batch_run import BatchRun
from plait.server.stored.files import EXPIRES, purpose_of
from plait.server.stored.inner import InnerApp
from plait.server.stored.routes import StoredCall, StoredList, StoredRoute, page_of

if TYPE_CHECKING:
    from plait.server.gateway.middleware import Traffic
    from plait.server.gateway.request_context import LoadingState
    from plait.server.store.store import Store

logger = logging.getLogger("plait.server")
MAX_OPEN = 32  # batches of one key
PLACES = 8  # lines of all batches in work: each has a place in the engine's queue
RETRY_S, LOADING_S = 10.0, 0.2
BODY_BYTES = MIB


class BatchRunner:
    """Runs every batch that is in work. Only for the event loop's thread."""

    def __init__(self, store: Store, traffic: Traffic, loading: LoadingState) -> None:
        self._store, self._traffic, self._loading = store, traffic, loading
        self._app: ASGIApp | None = None
        self._places = asyncio.Semaphore(PLACES)
        self._runs: dict[str, tuple[BatchRun, asyncio.Task[None]]] = {}
        self._stops = False

    async def start(self, app: ASGIApp) -> None:
        """Go on with the batches that the last server left. `app`: the application's routes."""
        self._app = app
        for row in await self._store.run(lambda rows: rows.working("batch")):
            self.launch(row, msgspec.json.decode(row.body, type=BatchWork))

    def launch(self, row: Row, work: BatchWork) -> None:
        """Begin a batch, or go on with it."""
        if self._stops:
            return
        is_cancelled = work.batch.status == "cancelling"
        run = BatchRun(self._store, row, work, self._places, self._app_of, is_cancelled)
        self._runs[row.id] = run, asyncio.get_running_loop().create_task(self._run(run))

    async def cancel(self, row: Row) -> None:
        """Cancel a batch that runs, and wait until its answers so far are files."""
        found = self._runs.get(row.id)
        if found is not None:
            run, task = found
            await run.mark_cancelling()
            task.cancel()
            await asyncio.wait({task})

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
            await self._run_to_end(run)
        except asyncio.CancelledError:
            if not run.is_cancelled:
                raise
            await run.cancel()
        except Exception as error:
            found = problem(error)
            await run.fail(found.code or "internal_error", found.message)
        finally:
            self._runs.pop(run.row.id, None)

    async def _run_to_end(self, run: BatchRun) -> None:
        """Run a batch; while the store refuses its answers, it waits and goes on."""
        while self._loading.front is None:
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
        key = self._traffic.find_key(tenant)
        assert self._app is not None
        return None if key is None else InnerApp(self._app, self._traffic, key)


async def create_batch(call: StoredCall) -> BatchObject:
    """Begin a batch. Raises InvalidField, NotStored for its file, and TooManyRequests."""
    body = await call.body(BODY_BYTES)
    now, endpoint = call.store.now(), check_endpoint(body.get("endpoint"))
    if body.get("completion_window") != "24h":
        raise InvalidField(
            f"completion_window: {body.get('completion_window')!r:.80} is not '24h'", "completion_window"
        )
    source = body.get("input_file_id")
    if not isinstance(source, str):
        raise InvalidField("input_file_id: it must be the id of a file", "input_file_id")
    batch = BatchObject(
        id=new_id("batch", "_"),
        endpoint=endpoint,
        input_file_id=source,
        created_at=now,
        expires_at=now + WINDOW_S,
        metadata=read_metadata(body.get("metadata")) or None,
    )
    work = BatchWork(batch=batch, output_expires_s=_output_age(body.get("output_expires_after")))
    row = await call.store.run(partial(_add, tenant=call.tenant, work=work))
    call.state.batches.launch(row, work)
    return batch


def _output_age(found: object) -> int | None:
    if found is None:
        return None
    seconds = found.get("seconds") if isinstance(found, dict) else None
    anchor = found.get("anchor", "created_at") if isinstance(found, dict) else None
    least, most = EXPIRES
    if type(seconds) is not int or not least <= seconds <= most or anchor != "created_at":
        text = f"anchor must be created_at, seconds a whole number from {least} to {most}"
        raise InvalidField(f"output_expires_after: {text}", "output_expires_after")
    return seconds


def _add(rows: Rows, tenant: str, work: BatchWork) -> Row:
    batch = work.batch
    try:
        file = rows.get(tenant, "file", batch.input_file_id)
    except NotStored as error:
        raise NotStored(f"input_file_id: {error}", "input_file_id") from error
    if file.is_working or purpose_of(file) != "batch":
        raise InvalidField("input_file_id: it must be a whole file of the purpose batch", "input_file_id")
    num_open = rows.count_working(tenant, "batch")
    if num_open >= MAX_OPEN:
        raise TooManyRequests(
            f"{num_open} batches of this key are in work, and {MAX_OPEN} may be; wait for one"
        )
    row = Row(
        id=batch.id,
        kind="batch",
        tenant=tenant,
        created=batch.created_at,
        body=msgspec.json.encode(work),
        status=batch.status,
        refers=file.id,
    )
    return rows.add(row)


async def get_batch(call: StoredCall) -> BatchObject:
    """The batch as it is now."""
    return _batch(await _row(call))


async def list_batches(call: StoredCall) -> StoredList:
    """A page of the batches, the newest first."""
    query = call.page()

    def read(rows: Rows) -> StoredList:
        found = rows.iterate(call.tenant, "batch", query)
        return page_of(((row.id, msgspec.json.encode(_batch(row))) for row in found), query.limit)

    return await call.store.run(read)


async def cancel_batch(call: StoredCall) -> BatchObject:
    """Cancel the batch; answers that it has become files. One that has ended stays as it is."""
    await call.state.batches.cancel(await _row(call))
    return _batch(await _row(call))


async def _row(call: StoredCall) -> Row:
    return await call.store.run(lambda rows: rows.get(call.tenant, "batch", call.id))


def _batch(row: Row) -> BatchObject:
    return msgspec.json.decode(row.body, type=BatchWork).batch


ROUTES = (
    StoredRoute("POST", "/v1/batches", create_batch),
    StoredRoute("GET", "/v1/batches", list_batches),
    StoredRoute("GET", "/v1/batches/{id}", get_batch),
    StoredRoute("POST", "/v1/batches/{id}/cancel", cancel_batch),
)
