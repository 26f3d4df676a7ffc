"""Conversations: items that responses go on from, and to which each adds its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec
from starlette.responses import Response

from plait.errors import InvalidField
from plait.server.api.schema import JsonValue
from plait.server.api.stored_metadata import read_metadata
from plait.server.http.transfer import new_id
from plait.server.responses.input_items import check_items
from plait.server.responses.state import Item, append_items, list_items
from plait.server.store.errors import NotStored
from plait.server.store.rows import MAX_CHAIN, MAX_CHAIN_BYTES, Rows, StoredRow
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

MAX_NEW_ITEMS = 20  # at a time, as OpenAI has it
MAX_BYTES = 8 * 1024 * 1024


class Conversation(msgspec.Struct, kw_only=True, frozen=True):
    """What a conversation says of itself; its items are lists of their own."""

    id: str
    object: Literal["conversation"] = "conversation"
    created_at: int
    metadata: dict[str, str]


class NewConversation(msgspec.Struct, kw_only=True, frozen=True):
    """POST /v1/conversations. `items`: the first ones."""

    items: list[dict[str, JsonValue]] | None = None
    metadata: dict[str, str] | None = None


class ConversationChange(msgspec.Struct, kw_only=True, frozen=True):
    """POST /v1/conversations/{id}."""

    metadata: dict[str, str] | None


class NewItems(msgspec.Struct, kw_only=True, frozen=True):
    """POST /v1/conversations/{id}/items."""

    items: list[dict[str, JsonValue]]


async def create_conversation(call: StoredCall) -> Conversation:
    """Begin a conversation."""
    body = await call.body(MAX_BYTES)
    items, metadata = _read_items(body.get("items")), read_metadata(body.get("metadata"))
    found = Conversation(id=new_id("conv", "_"), created_at=call.store.now(), metadata=metadata)

    def add(rows: Rows) -> None:
        row = StoredRow(
            id=found.id,
            kind="conversation",
            tenant=call.tenant,
            created=found.created_at,
            body=msgspec.json.encode(found),
        )
        append_items(rows, rows.add(row), items)

    await call.store.run(add)
    return found


async def get_conversation(call: StoredCall) -> Response:
    """One conversation."""
    return as_json((await call.row("conversation")).body)


async def change_conversation(call: StoredCall) -> Response:
    """Replace the metadata."""
    metadata = await call.new_metadata(MAX_BYTES)

    def change(rows: Rows) -> StoredRow:
        row = _find(rows, call)
        found = msgspec.structs.replace(decode_json(row.body, Conversation), metadata=metadata)
        return rows.change(row, msgspec.json.encode(found), row.status)

    return as_json((await call.store.run(change)).body)


async def delete_conversation(call: StoredCall) -> Deleted:
    """Delete a conversation with its items; responses that were in it stay."""
    await call.store.run(lambda rows: rows.delete(_find(rows, call)), deletes=True)
    return Deleted(id=call.id, object="conversation.deleted")


async def create_items(call: StoredCall) -> StoredList:
    """Add items to the end."""
    body = await call.body(MAX_BYTES)
    items = _read_items(body.get("items"))
    if not items:
        raise InvalidField(f"items: send 1 to {MAX_NEW_ITEMS} of them", "items")

    def add(rows: Rows) -> list[Item]:
        row = _find(rows, call)
        if rows.count_entries(row) + len(items) > MAX_CHAIN or row.size > MAX_CHAIN_BYTES:
            text = f"it may have {MAX_CHAIN} items and {MAX_CHAIN_BYTES} bytes; begin a new conversation"
            raise InvalidField(f"items: {text}", "items")
        rows.touch(row, call.store.now())
        return append_items(rows, row, items)

    added = await call.store.run(add)
    return page_of(((str(item["id"]), msgspec.json.encode(item)) for item in added), len(added))


async def list_conversation_items(call: StoredCall) -> StoredList:
    """A page of the items, the newest first."""
    query = call.page()

    def read(rows: Rows) -> list[tuple[str, bytes]]:
        return [*rows.entries(_find(rows, call))]

    return page_after(await call.store.run(read), query, "item", "conversation", bytes)


async def get_item(call: StoredCall) -> Response:
    """One item."""
    name = call.name("item")

    def read(rows: Rows) -> bytes:
        found = rows.find_entry(_find(rows, call), name)
        if found is None:
            raise NotStored(f"there is no item {name!r:.80} in this conversation")
        return found

    return as_json(await call.store.run(read))


async def delete_item(call: StoredCall) -> Response:
    """Delete one item; the conversation is the answer."""
    name = call.name("item")

    def delete(rows: Rows) -> StoredRow:
        row = _find(rows, call)
        if not rows.delete_entry(row, name):
            raise NotStored(f"there is no item {name!r:.80} in this conversation")
        return row

    return as_json((await call.store.run(delete, deletes=True)).body)


def _find(rows: Rows, call: StoredCall) -> StoredRow:
    return rows.get(call.tenant, "conversation", call.id)


def _read_items(sent: object) -> Sequence[Item]:
    """Items with ids, as clients read them again. Raises InvalidField."""
    if sent is None:
        return ()
    if not isinstance(sent, list) or len(sent) > MAX_NEW_ITEMS:
        raise InvalidField(f"items: send a list of at most {MAX_NEW_ITEMS}", "items")
    check_items(sent)
    return list_items(sent)


ROUTES = (
    StoredRoute("POST", "/v1/conversations", create_conversation),
    StoredRoute("GET", "/v1/conversations/{id}", get_conversation),
    StoredRoute("POST", "/v1/conversations/{id}", change_conversation),
    StoredRoute("DELETE", "/v1/conversations/{id}", delete_conversation),
    StoredRoute("GET", "/v1/conversations/{id}/items", list_conversation_items),
    StoredRoute("POST", "/v1/conversations/{id}/items", create_items),
    StoredRoute("GET", "/v1/conversations/{id}/items/{item}", get_item),
    StoredRoute("DELETE", "/v1/conversations/{id}/items/{item}", delete_item),
)
