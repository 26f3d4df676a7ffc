"""GET, DELETE and cancel of /v1/responses/{id}, the items of its input, and its stream again."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator, Iterable
from functools import partial

import msgspec
from starlette.responses import Response

from plait.errors import InvalidField
from plait.server.http.transfer import EventStream
from plait.server.responses.state import items_of, read_conversation
from plait.server.stored.background import EVENTS_PART, FRAMES, EventFrame, follow
from plait.server.stored.routes import (
    Deleted,
    StoredCall,
    StoredList,
    StoredRoute,
    as_json,
    flag_of,
    number_of,
    page_after,
)
from plait.typed_values import decode_json

MAX_EVENTS = 2**31 - 1


async def get_response(call: StoredCall) -> Response | msgspec.Struct:
    """The response as it is now, or with `stream=true` its events behind `starting_after`."""
    if flag_of("stream", call.query("stream")):
        return await _stream(call)
    number_of("starting_after", call.query("starting_after"), 0, MAX_EVENTS)
    row = await call.row("response")
    return as_json(row.body)


async def _stream(call: StoredCall) -> Response:
    after = number_of("starting_after", call.query("starting_after"), 0, MAX_EVENTS)
    first = 0 if after is None else after + 1
    job = call.state.background.find(call.tenant, call.id)
    if job is not None and job.is_streamed:
        return EventStream(follow(job, first), _nothing, form=FRAMES)
    row = await call.row("response")
    found = await call.store.run(lambda rows: rows.next_part(row, EVENTS_PART, -1))
    if found is None:
        text = "stream: only a response that was made with background: true and stream: true has events"
        raise InvalidField(text, "stream")
    frames = (await asyncio.to_thread(zlib.decompress, found[1])).split(b"\n\n")[:-1]
    return EventStream(_replay(frames[first:]), _nothing, form=FRAMES)


async def _replay(frames: Iterable[bytes]) -> AsyncIterator[msgspec.Struct]:
    for frame in frames:
        yield EventFrame(frame + b"\n\n")


async def _nothing() -> None:
    """A reader that leaves changes nothing."""


async def delete_response(call: StoredCall) -> Deleted:
    """Delete the response; one that runs in the background is cancelled first."""
    row = await call.row("response")
    await call.state.background.cancel(call.tenant, call.id)
    await call.store.run(lambda rows: rows.delete(row), deletes=True)
    return Deleted(id=call.id, object="response")


async def cancel_response(call: StoredCall) -> Response:
    """Cancel a response that runs in the background; one that has ended stays as it is."""
    row = await call.row("response")
    if not decode_json(row.body, _Background).background:
        raise InvalidField(
            f"{call.id}: only a response with background: true can be cancelled", "response_id"
        )
    await call.state.background.cancel(call.tenant, call.id)
    return as_json((await call.row("response")).body)


class _Background(msgspec.Struct):
    background: bool = False


async def list_input_items(call: StoredCall) -> StoredList:
    """The items that the model was given: of the conversation before, and of this response's own input."""
    query = call.page()
    read = partial(read_conversation, tenant=call.tenant, previous=call.id, now=call.store.now())
    chain = await call.store.run(read, reads=True)
    items = [
        item
        for place, (row, bodies) in enumerate(chain, 1)
        for item in items_of(row, bodies, with_output=place < len(chain))
    ]
    named = ((str(item.get("id", "")), item) for item in items)
    return page_after(named, query, "item", "list", msgspec.json.encode)


ROUTES = (
    StoredRoute("GET", "/v1/responses/{id}", get_response),
    StoredRoute("DELETE", "/v1/responses/{id}", delete_response),
    StoredRoute("GET", "/v1/responses/{id}/input_items", list_input_items),
    StoredRoute("POST", "/v1/responses/{id}/cancel", cancel_response),
)
