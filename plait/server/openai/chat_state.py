"""Chats with `store: true`: what is written when the reply is whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct

from plait.errors import InvalidField
from plait.server.api.stored_metadata import read_metadata
from plait.server.store.rows import Rows, StoredRow
from plait.typed_values import decode_json

if TYPE_CHECKING:
    from plait.server.gateway.request_context import RequestContext
    from plait.server.store.store import Store

MESSAGES = "messages"  # the parts of a chat with its messages
FIELDS = ("store", "metadata")


class _Head(msgspec.Struct):
    id: str
    created: int
    model: str


class ChatKeeper(Struct, frozen=True):
    """Writes one chat."""

    store: Store
    tenant: str
    metadata: Mapping[str, str]

    async def save(self, whole: msgspec.Struct, messages: Sequence[Mapping[str, object]]) -> None:
        """Add the chat with its messages. Raises CapacityErrors."""
        body = msgspec.json.encode(whole)
        head = decode_json(body, _Head)
        parts = [
            msgspec.json.encode({"content": None, **message, "id": f"{head.id}-{i}"})
            for i, message in enumerate(messages)
        ]
        row = StoredRow(
            id=head.id, kind="chat", tenant=self.tenant, created=head.created, body=body, model=head.model
        )

        def add(rows: Rows) -> None:
            rows.add(row, {MESSAGES: parts})

        await self.store.run(add)


def keeper_of(context: RequestContext, body: Mapping[str, object]) -> ChatKeeper | None:
    """What stores the chat; None: it is not stored. Raises InvalidField for metadata out of bounds.

    Without a store, or without `store`, these fields change nothing and are reported.
    """
    wanted = body.get("store", False)
    if context.store is None or wanted is False:
        context.report_unread((name for name in FIELDS if name in body and body[name] is not False), {})
        return None
    if wanted is not True:
        raise InvalidField(f"store: {wanted!r:.80} is not true or false", "store")
    return ChatKeeper(context.store, context.exchange.key.name, read_metadata(body.get("metadata")))
