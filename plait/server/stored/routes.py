"""What the endpoints of stored objects share: a call with its key and its query, and lists in pages."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, Literal, TypeVar

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from plait.errors import InvalidField
from plait.server.api.stored_metadata import read_metadata
from plait.server.gateway.exchange import SCOPE_KEY, Exchange
from plait.server.http.errors import json_response
from plait.server.http.transfer import read_object
from plait.server.store.errors import START, NotStored, StoreOff
from plait.server.store.rows import Kind, PageQuery, StoredRow

if TYPE_CHECKING:
    from plait.server.store.store import Store
    from plait.server.stored.state import StoredState

MAX_PAGE = 100
_FILTER = re.compile(r"metadata\[(.{1,64})\]")


T = TypeVar("T")


class StoredCall(Struct, frozen=True):
    """One request for something that is stored."""

    state: StoredState
    request: Request
    exchange: Exchange

    @property
    def store(self) -> Store:
        return self.state.store

    @property
    def tenant(self) -> str:
        return self.exchange.key.name

    @property
    def id(self) -> str:
        """The id in the path."""
        return self.name("id")

    def name(self, place: str) -> str:
        """What the path has at a place in braces."""
        found: str = self.request.path_params[place]
        return found

    async def row(self, kind: Kind) -> StoredRow:
        """The row that the path names. Raises NotStored."""
        return await self.store.run(lambda rows: rows.get(self.tenant, kind, self.id))

    def query(self, name: str) -> str | None:
        return self.request.query_params.get(name)

    def page(self, *, most: int = MAX_PAGE, usual: int = 20, order: str = "desc") -> PageQuery:
        """`limit`, `after` and `order` of a list. Raises InvalidField."""
        order = self.query("order") or order
        if order not in ("asc", "desc"):
            raise InvalidField(f"order: {order!r:.80} is not asc or desc", "order")
        limit = number_of("limit", self.query("limit"), 1, most)
        after = self.query("after") or ""
        return PageQuery(limit=usual if limit is None else limit, after=after, is_descending=order == "desc")

    def metadata_filter(self) -> dict[str, str]:
        """The `metadata[name]=value` of the query."""
        found = {}
        for name, value in self.request.query_params.items():
            if match := _FILTER.fullmatch(name):
                found[match[1]] = value
        return found

    async def body(self, max_bytes: int) -> dict[str, object]:
        return await read_object(self.request, max_bytes)

    async def new_metadata(self, max_bytes: int) -> dict[str, str]:
        """What replaces an object's metadata. Raises InvalidField."""
        body = await self.body(max_bytes)
        if "metadata" not in body:
            raise InvalidField("metadata: it is required; only metadata can change", "metadata")
        return read_metadata(body["metadata"])


Answer = Callable[[StoredCall], Awaitable[msgspec.Struct | Response]]


class StoredRoute(Struct, frozen=True):
    """`method path`, which answers from the store."""

    method: Literal["GET", "POST", "DELETE"]
    path: str
    answer: Answer

    def handler(self, state: StoredState | None) -> Callable[[Request], Awaitable[Response]]:
        """The route's handler. Without a store every call is refused by StoreOff."""

        async def handle(request: Request) -> Response:
            if state is None:
                raise StoreOff(f"{request.method} {request.url.path:.200}: {START}")
            found = await self.answer(StoredCall(state, request, request.scope[SCOPE_KEY]))
            return found if isinstance(found, Response) else json_response(found)

        return handle


class StoredList(msgspec.Struct, kw_only=True, frozen=True):
    """A page of a list; `after=last_id` gets the next one."""

    object: Literal["list"] = "list"
    data: list[msgspec.Raw]
    first_id: str | None
    last_id: str | None
    has_more: bool


class Deleted(msgspec.Struct, kw_only=True, frozen=True):
    id: str
    object: str
    deleted: Literal[True] = True


def as_json(body: bytes) -> Response:
    """A stored body as it is."""
    return Response(body, 200, media_type="application/json")


def page_after(
    found: Iterable[tuple[str, T]], query: PageQuery, what: str, place: str, encode: Callable[[T], bytes]
) -> StoredList:
    """A page of (id, value), which come oldest first. Raises NotStored for an `after` that is not among them.

    what, place: what each is, and what it is in, as the error says it. encode: its JSON, of the page only.
    """
    entries = [*found]
    if query.is_descending:
        entries.reverse()
    names = [name for name, _ in entries]
    if query.after and query.after not in names:
        raise NotStored(f"after: there is no {what} {query.after!r:.80} in this {place}", "after")
    rest = entries[names.index(query.after) + 1 if query.after else 0 :]
    return page_of(((name, encode(value)) for name, value in rest), query.limit)


def page_of(found: Iterable[tuple[str, bytes]], limit: int) -> StoredList:
    """The first `limit` of (id, JSON), and whether there are more."""
    ids: list[str] = []
    bodies: list[msgspec.Raw] = []
    has_more = False
    for name, body in found:
        if len(ids) == limit:
            has_more = True
            break
        ids.append(name)
        bodies.append(msgspec.Raw(body))
    return StoredList(
        data=bodies, first_id=ids[0] if ids else None, last_id=ids[-1] if ids else None, has_more=has_more
    )


def number_of(name: str, text: str | None, least: int, most: int) -> int | None:
    """A whole number of the query; None: it is not there. Raises InvalidField."""
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= 10 and least <= int(text) <= most):
        raise InvalidField(f"{name}: {text!r:.80} is not a whole number from {least} to {most}", name)
    return int(text)


def flag_of(name: str, text: str | None) -> bool:
    """A `true` or `false` of the query. Raises InvalidField."""
    if text not in (None, "", "true", "false"):
        raise InvalidField(f"{name}: {text!r:.80} is not true or false", name)
    return text == "true"
