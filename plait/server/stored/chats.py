"""Stored chats: lists, one chat, its messages, its metadata, and its end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec
from starlette.responses import Response

from plait.errors import InvalidField
from plait.server.openai.chat_state import MESSAGES
from plait.server.stored.routes import (
    Deleted,
    StoredCall,
    StoredList,
    StoredRoute,
    as_json,
    page_after,
    page_of,
)
from plait.typed_values import decode_json

if TYPE_CHECKING:
    from plait.server.store.rows import Rows, StoredRow

MAX_METADATA_BYTES = 64 * 1024
MAX_SCANNED = 10_000  # rows that a filtered list looks at for a page
Body = dict[str, object]


class ChatChange(msgspec.Struct, kw_only=True, frozen=True):
    """POST /v1/chat/completions/{id}."""

    metadata: dict[str, str] | None


class _Metadata(msgspec.Struct):
    metadata: dict[str, str] = {}


async def list_chats(call: StoredCall) -> StoredList:
    """A page of the chats, of one `model` and with some `metadata` if the query says so."""
    query, model, wanted = call.page(order="asc"), call.query("model"), call.metadata_filter()

    def read(rows: Rows) -> StoredList:
        def matching() -> Iterator[tuple[str, bytes]]:
            for count, row in enumerate(rows.iterate(call.tenant, "chat", query)):
                if count == MAX_SCANNED:
                    text = f"metadata: {count} chats were read and too few match; go on behind {row.id}"
                    raise InvalidField(text, "metadata")
                if model in (None, "", row.model) and _has(row, wanted):
                    yield row.id, row.body

        return page_of(matching(), query.limit)

    return await call.store.run(read)


def _has(row: StoredRow, wanted: dict[str, str]) -> bool:
    if not wanted:
        return True
    found = decode_json(row.body, _Metadata).metadata
    return wanted.items() <= found.items()


async def get_chat(call: StoredCall) -> Response:
    """One chat."""
    return as_json((await call.row("chat")).body)


async def change_chat(call: StoredCall) -> Response:
    """Replace the chat's metadata; nothing else of it can change."""
    metadata = await call.new_metadata(MAX_METADATA_BYTES)

    def change(rows: Rows) -> StoredRow:
        row = rows.get(call.tenant, "chat", call.id)
        found = decode_json(row.body, Body) | {"metadata": metadata}
        return rows.change(row, msgspec.json.encode(found), row.status)

    return as_json((await call.store.run(change)).body)


async def delete_chat(call: StoredCall) -> Deleted:
    """Delete the chat and its messages."""
    await call.store.run(lambda rows: rows.delete(rows.get(call.tenant, "chat", call.id)), deletes=True)
    return Deleted(id=call.id, object="chat.completion.deleted")


async def list_messages(call: StoredCall) -> StoredList:
    """The messages that the chat was made from."""
    query = call.page(order="asc")

    def read(rows: Rows) -> list[bytes]:
        return [*rows.parts(rows.get(call.tenant, "chat", call.id), MESSAGES)]

    bodies = ((f"{call.id}-{i}", body) for i, body in enumerate(await call.store.run(read)))
    return page_after(bodies, query, "message", "chat", bytes)


ROUTES = (
    StoredRoute("GET", "/v1/chat/completions", list_chats),
    StoredRoute("GET", "/v1/chat/completions/{id}", get_chat),
    StoredRoute("POST", "/v1/chat/completions/{id}", change_chat),
    StoredRoute("DELETE", "/v1/chat/completions/{id}", delete_chat),
    StoredRoute("GET", "/v1/chat/completions/{id}/messages", list_messages),
)
