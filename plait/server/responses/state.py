"""Responses that are stored: the items of a conversation so far, and what is written when a reply is whole.

A response has its own items of input, and refers to the response before it. So a conversation of a hundred
turns has each of its items once, and what was deleted is in no later response.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Protocol

import msgspec
from msgspec import Struct

from plait.errors import CapacityError, InvalidField
from plait.server.http.transfer import new_id
from plait.server.responses.items import Response
from plait.server.store.errors import START, NotStored, PreviousNotStored, StoreOff
from plait.server.store.rows import MAX_CHAIN, MAX_CHAIN_BYTES, Rows, StoredRow
from plait.typed_values import decode_json

if TYPE_CHECKING:
    from plait.server.gateway.request_context import RequestContext
    from plait.server.store.store import Store

Item = dict[str, object]
INPUT = "input"  # the parts of a response with its items
AT = "previous_response_id"
IN = "conversation"
_TEXT_OF = {"assistant": "output_text"}
_ID = re.compile(r"[A-Za-z0-9_-]{1,128}")
_GONE_ON_FROM = ("completed", "incomplete")


class StateFields(Protocol):
    """The fields of a request that say what is stored."""

    @property
    def input(self) -> str | Sequence[Item]: ...

    @property
    def store(self) -> bool | None: ...

    @property
    def background(self) -> bool: ...

    @property
    def previous_response_id(self) -> str | None: ...

    @property
    def conversation_id(self) -> str | None: ...


class Stored(Struct, frozen=True):
    """Whether a response is stored. `warning`: why it is not, although the request would have had it."""

    warning: str = ""

    def is_stored(self, keeper: ResponseKeeper | None) -> bool:
        return keeper is not None and not self.warning


class ResponseKeeper(Struct, frozen=True):
    """Writes one response. `is_demanded`: the request has `store: true`, so a failure is the reply's.

    `conversation`: where its items go when it has ended well; "": it is in none.
    """

    store: Store
    tenant: str
    items: Sequence[Item]
    refers: str
    is_demanded: bool
    conversation: str = ""

    async def save(self, response: Response) -> Stored:
        """Add the response with its items. Raises CapacityErrors if storing was demanded."""
        try:
            await self.store.run(partial(self.add, response=response))
        except CapacityError as error:
            if self.is_demanded:
                raise
            return Stored(f"the response was not stored: {error}")
        return Stored()

    def add(self, rows: Rows, response: Response) -> StoredRow:
        """Add the response's row."""
        row = StoredRow(
            id=response.id,
            kind="response",
            tenant=self.tenant,
            created=response.created_at,
            body=msgspec.json.encode(response),
            status=response.status,
            model=response.model,
            refers=self.refers,
        )
        added = rows.add(row, {INPUT: [msgspec.json.encode(item) for item in self.items]})
        rows.add_items(added, (str(item["id"]) for item in self.items))
        rows.add_items(added, (item.id for item in response.output))
        self.append(rows, response)
        return added

    def append(self, rows: Rows, response: Response) -> None:
        """Add the items to the conversation, if there is one and the response has ended well."""
        if self.conversation and response.status in _GONE_ON_FROM:
            row = rows.find(self.tenant, "conversation", self.conversation)
            if row is not None:  # else it was deleted meanwhile
                output = msgspec.to_builtins(response.output)
                append_items(rows, row, [*self.items, *_without_cut_calls(output)])
                rows.touch(row, self.store.now())


def keeper_of(context: RequestContext, asked: StateFields) -> ResponseKeeper | None:
    """What stores the response; None: it is not stored. Raises StoreOff and InvalidField.

    With a store a response is stored unless `store` is false, as OpenAI has it.
    """
    if asked.background and context.store is None:
        raise StoreOff(f"background: {START}", "background")
    if asked.background and asked.store is False:
        text = "background: a reply in the background must be stored; leave store out, or send store: true"
        raise InvalidField(text, "background")
    if asked.conversation_id is not None and asked.store is False:
        text = "conversation: what a conversation has is stored; leave store out, or send store: true"
        raise InvalidField(text, IN)
    if context.store is None:
        if asked.store:
            context.report_unread(("store",), {})
        return None
    if asked.store is False:
        return None
    tenant, refers = context.exchange.key.name, asked.previous_response_id or ""
    demanded, conversation = asked.store is True, asked.conversation_id or ""
    items = list_items(asked.input)
    return ResponseKeeper(context.store, tenant, items, refers, demanded, conversation)


def resolve_references(context: RequestContext, sent: str | Sequence[Item]) -> str | list[Item]:
    """An input with stored items in place of each `item_reference`. Raises InvalidField, naming the place."""
    if isinstance(sent, str):
        return sent
    wanted = {i: item.get("id") for i, item in enumerate(sent) if item.get("type") == "item_reference"}
    if not wanted:
        return [*sent]
    store, tenant = context.store, context.exchange.key.name
    if store is None:
        at = f"input[{next(iter(wanted))}]"
        raise InvalidField(f"{at}: {START}, or send the item itself", at)

    def read(rows: Rows) -> dict[int, Item | None]:
        return {i: _find_item(rows, tenant, str(name)) for i, name in wanted.items()}

    found = [*sent]
    for i, item in store.call(read).items():
        if item is None:
            text = f"input[{i}]: there is no item {wanted[i]!r:.80} that this key has stored; send the item"
            raise InvalidField(text, f"input[{i}]")
        found[i] = item
    return found


def _find_item(rows: Rows, tenant: str, name: str) -> Item | None:
    """The stored item with the id `name`: of a conversation, or of a response's input or output."""
    row = rows.find_item(tenant, name)
    if row is None:
        return None
    if row.kind == "conversation":
        body = rows.find_entry(row, name)
        return None if body is None else decode_json(body, Item)
    sent = (decode_json(body, Item) for body in rows.parts(row, INPUT))
    items = chain(decode_json(row.body, _Output).output, sent)
    return next((item for item in items if item.get("id") == name), None)


def earlier_items(context: RequestContext, previous: str | None) -> list[Item]:
    """The items of the conversation up to and with the response `previous`; None: there are none.

    Raises PreviousNotStored, and InvalidField for a response that has not ended well.
    """
    if previous is None:
        return []
    if context.store is None:
        raise PreviousNotStored(f"{AT}: {START}, or send the earlier items in input", AT)
    tenant, now = context.exchange.key.name, context.store.now()
    try:
        read = partial(read_conversation, tenant=tenant, previous=previous, now=now)
        found = context.store.call(read, reads=True)
    except NotStored as error:
        raise PreviousNotStored(f"{AT}: {error}; send the earlier items in input", AT) from error
    status = found[-1][0].status
    if status not in _GONE_ON_FROM:
        hint = "wait until it is done" if found[-1][0].is_working else "it has no whole reply"
        raise InvalidField(f"{AT}: the response {previous:.80} is {status}; {hint}", AT)
    return [item for row, bodies in found for item in items_of(row, bodies)]


def read_conversation(
    rows: Rows, tenant: str, previous: str, now: int
) -> list[tuple[StoredRow, list[bytes]]]:
    """The responses up to `previous`, the first one first, each with the items of its input."""
    return [(row, [*rows.parts(row, INPUT)]) for row in rows.chain(tenant, previous, now)]


def items_of(row: StoredRow, bodies: Sequence[bytes], *, with_output: bool = True) -> list[Item]:
    """The items of a response's input and of its output, without calls that were cut."""
    found: list[Item] = [decode_json(body, Item) for body in bodies]
    if with_output:
        found += _without_cut_calls(decode_json(row.body, _Output).output)
    return found


def _without_cut_calls(output: Sequence[Item]) -> list[Item]:
    return [
        item
        for item in output
        if not (item.get("type") == "function_call" and item.get("status") != "completed")
        and not (item.get("type") == "mcp_call" and item.get("status") == "incomplete")
    ]


def conversation_items(context: RequestContext, conversation: str) -> list[Item]:
    """The items of a conversation, which counts as used now. Raises StoreOff, NotStored and InvalidField."""
    store, tenant = context.store, context.exchange.key.name
    if store is None:
        raise StoreOff(f"{IN}: {START}", IN)

    def read(rows: Rows) -> list[bytes]:
        row = rows.find(tenant, "conversation", conversation)
        if row is None:
            raise NotStored(f"{IN}: there is no {conversation!r:.80} that this key has stored", IN)
        if rows.count_entries(row) >= MAX_CHAIN or row.size > MAX_CHAIN_BYTES:
            text = f"it has {MAX_CHAIN} items or more than {MAX_CHAIN_BYTES} bytes; begin a new one"
            raise InvalidField(f"{IN}: {text}", IN)
        rows.touch(row, store.now())
        return [body for _, body in rows.entries(row)]

    return [decode_json(body, Item) for body in store.call(read, reads=True)]


def append_items(rows: Rows, row: StoredRow, items: Sequence[Item]) -> list[Item]:
    """Add items to a conversation. One with an id that is in it already gets another."""
    added = []
    for item in items:
        if not _ID.fullmatch(str(item["id"])) or rows.find_entry(row, str(item["id"])) is not None:
            item = {**item, "id": new_id("item", "_")}
        rows.add_entry(row, str(item["id"]), msgspec.json.encode(item))
        added.append(item)
    return added


class _Output(msgspec.Struct):
    output: list[Item]


def list_items(sent: str | Sequence[Item]) -> list[Item]:
    """An input as a list of items with ids, as clients read it again."""
    if isinstance(sent, str):
        return [_item({"role": "user", "content": sent})]
    return [_item(item) for item in sent if isinstance(item, Mapping)]


def _item(sent: Mapping[str, object]) -> Item:
    item = {"type": "message", **{name: value for name, value in sent.items() if value is not None}}
    kind, role = item["type"], item.get("role")
    if not str(kind).startswith("mcp_"):
        item.setdefault("status", "completed")
    if kind == "message" and isinstance(item.get("content"), str):
        part: Item = {"type": _TEXT_OF.get(str(role), "input_text"), "text": item["content"]}
        if role == "assistant":
            part["annotations"] = []
        item["content"] = [part]
    prefixes = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}
    prefixes["mcp_approval_response"] = "mcpa"
    item.setdefault("id", new_id(prefixes.get(str(kind), "item"), "_"))
    return item
