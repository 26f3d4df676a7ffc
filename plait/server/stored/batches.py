"""/v1/batches: create, get, list, cancel."""

from __future__ import annotations

from functools import partial

import msgspec

from plait.config import MIB
from plait.errors import InvalidField
from plait.server.api.parse_fields import parse_as
from plait.server.api.stored_metadata import read_metadata
from plait.server.http.errors import TooManyRequests
from plait.server.http.transfer import new_id
from plait.server.store.errors import NotStored
from plait.server.store.rows import Rows, StoredRow
from plait.server.stored.batch_objects import WINDOW_S, BatchObject, BatchRequest, BatchWork
from plait.server.stored.file_objects import EXPIRES, purpose_of
from plait.server.stored.routes import StoredCall, StoredList, StoredRoute, page_of
from plait.typed_values import decode_json

MAX_OPEN = 32  # batches of one key
BODY_BYTES = MIB


async def create_batch(call: StoredCall) -> BatchObject:
    """Begin a batch. Raises InvalidField, NotStored for its file, and TooManyRequests."""
    asked, now = parse_as(await call.body(BODY_BYTES), BatchRequest), call.store.now()
    batch = BatchObject(
        id=new_id("batch", "_"),
        endpoint=asked.endpoint,
        input_file_id=asked.input_file_id,
        created_at=now,
        expires_at=now + WINDOW_S,
        metadata=read_metadata(asked.metadata) or None,
    )
    work = BatchWork(batch=batch, output_expires_s=_output_age(asked))
    row = await call.store.run(partial(_add, tenant=call.tenant, work=work))
    call.state.batches.launch(row, work)
    return batch


def _output_age(asked: BatchRequest) -> int | None:
    if asked.output_expires_after is None:
        return None
    seconds, (least, most) = asked.output_expires_after.seconds, EXPIRES
    if not least <= seconds <= most:
        text = f"output_expires_after.seconds: {seconds} is not from {least} to {most}"
        raise InvalidField(text, "output_expires_after.seconds")
    return seconds


def _add(rows: Rows, tenant: str, work: BatchWork) -> StoredRow:
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
    row = StoredRow(
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
    return _batch(await call.row("batch"))


async def list_batches(call: StoredCall) -> StoredList:
    """A page of the batches, the newest first."""
    query = call.page()

    def read(rows: Rows) -> StoredList:
        found = rows.iterate(call.tenant, "batch", query)
        return page_of(((row.id, msgspec.json.encode(_batch(row))) for row in found), query.limit)

    return await call.store.run(read)


async def cancel_batch(call: StoredCall) -> BatchObject:
    """Cancel the batch; answers that it has become files. One that has ended stays as it is."""
    await call.state.batches.cancel(await call.row("batch"))
    return _batch(await call.row("batch"))


def _batch(row: StoredRow) -> BatchObject:
    return decode_json(row.body, BatchWork).batch


ROUTES = (
    StoredRoute("POST", "/v1/batches", create_batch),
    StoredRoute("GET", "/v1/batches", list_batches),
    StoredRoute("GET", "/v1/batches/{id}", get_batch),
    StoredRoute("POST", "/v1/batches/{id}/cancel", cancel_batch),
)
