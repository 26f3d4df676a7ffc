"""Rows of the store, as one transaction sees them. Every read names the tenant, so no key sees another's.

A row is an object of a client: a response, a chat, a file or a batch. Its `body` is what it says of itself as
JSON, its parts are lists of bodies: the items of an input, the chunks of a file.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from msgspec import Struct

from plait.config import MIB
from plait.errors import InvalidField
from plait.server.store.errors import NotStored
from plait.server.store.seal import Seal

Kind = Literal["response", "chat", "file", "batch", "conversation"]
NAMES: Mapping[Kind, str] = {
    "response": "response",
    "chat": "chat completion",
    "file": "file",
    "batch": "batch",
    "conversation": "conversation",
}
# States of what is in work: such a row, and what it refers to, is neither too old nor in the way.
WORKING = ("queued", "in_progress", "uploading", "writing", "validating", "finalizing", "cancelling")
IN_WORK = ", ".join(f"'{status}'" for status in WORKING)
MAX_CHAIN = 10_000  # responses of one conversation: as many as a chat has messages
MAX_CHAIN_BYTES = 64 * MIB  # of all its items: more text than any context holds
_COLUMNS = "position, id, kind, tenant, created, expires, status, model, refers, size, body"


_Columns = tuple[int, str, Kind, str, int, int | None, str, str, str, int, bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRow:
    """One object. Times are seconds since 1970; `expires` None: with the store's own age. `size`: bytes of
    its body and parts. `refers`: the id of the response before it, or of the file that a batch reads.
    """

    id: str
    kind: Kind
    tenant: str
    created: int
    body: bytes
    status: str = "completed"
    model: str = ""
    refers: str = ""
    expires: int | None = None
    position: int = 0
    size: int = 0

    @property
    def is_working(self) -> bool:
        return self.status in WORKING


class PageQuery(Struct, frozen=True, kw_only=True):
    """Which rows of a list: at most `limit` behind the row `after`, newest first if `is_descending`."""

    limit: int = 20
    after: str = ""
    is_descending: bool = True


class Rows:
    """The rows, inside one transaction of the store's thread. `counts_use`: what is read counts as used."""

    def __init__(self, connection: sqlite3.Connection, seal: Seal, *, counts_use: bool = True) -> None:
        self._connection, self._seal, self._counts_use = connection, seal, counts_use
        self.writers: set[str] = set()  # tenants of which rows grew

    def add(self, row: StoredRow, parts: Mapping[str, Sequence[bytes]] = {}) -> StoredRow:
        """Insert a row with its parts."""
        self.writers.add(row.tenant)
        sealed = self._seal.close(row.body, _place(row.id, row.tenant, "body", 0))
        values = (row.id, row.kind, row.tenant, row.created, row.created, row.expires, row.status)
        cursor = self._connection.execute(
            "INSERT INTO objects "
            "(id, kind, tenant, created, used, expires, status, model, refers, size, body) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (*values, row.model, row.refers, len(sealed), sealed),
        )
        found = replace(row, position=cursor.lastrowid or 0, size=len(sealed))
        for name, bodies in parts.items():
            for number, body in enumerate(bodies):
                self.add_part(found, name, number, body)
        return found

    def get(self, tenant: str, kind: Kind, object_id: str) -> StoredRow:
        """Raises NotStored, also for another tenant's."""
        found = self.find(tenant, kind, object_id)
        if found is None:
            raise NotStored(f"there is no {NAMES[kind]} {object_id!r:.80} that this key has stored")
        return found

    def find(self, tenant: str, kind: Kind, object_id: str) -> StoredRow | None:
        found = self._connection.execute(
            f"SELECT {_COLUMNS} FROM objects WHERE id = ? AND tenant = ? AND kind = ?",
            (object_id, tenant, kind),
        ).fetchone()
        return None if found is None else self._row(found)

    def iterate(self, tenant: str, kind: Kind, query: PageQuery) -> Iterator[StoredRow]:
        """The rows behind `query.after`, all of them: the caller stops at its limit. Raises NotStored."""
        sign, order = ("<", "DESC") if query.is_descending else (">", "ASC")
        edge = ""
        values: list[str | int] = [tenant, kind]
        if query.after:
            edge = f"AND position {sign} ?"
            values.append(self.get(tenant, kind, query.after).position)
        cursor = self._connection.execute(
            f"SELECT {_COLUMNS} FROM objects WHERE tenant = ? AND kind = ? {edge} ORDER BY position {order}",
            values,
        )
        yield from (self._row(found) for found in cursor)

    def list_working(self, kind: Kind) -> list[StoredRow]:
        """The rows of all tenants that are in work; for the server itself, when it starts."""
        text = f"SELECT {_COLUMNS} FROM objects WHERE kind = ? AND status IN ({IN_WORK}) ORDER BY position"
        return [self._row(found) for found in self._connection.execute(text, (kind,))]

    def count_working(self, tenant: str, kind: Kind) -> int:
        text = f"SELECT count(*) FROM objects WHERE tenant = ? AND kind = ? AND status IN ({IN_WORK})"
        (found,) = self._connection.execute(text, (tenant, kind)).fetchone()
        return int(found)

    def change(self, row: StoredRow, body: bytes, status: str) -> StoredRow:
        """Replace the body and the status of a row that was read or added before. Raises NotStored."""
        sealed = self._seal.close(body, _place(row.id, row.tenant, "body", 0))
        found = self._connection.execute(
            "UPDATE objects SET body = ?, status = ?, expires = ?, size = size + ? - length(body) "
            "WHERE position = ? RETURNING size",
            (sealed, status, row.expires, len(sealed), row.position),
        ).fetchone()
        if found is None:
            raise NotStored(f"the {NAMES[row.kind]} {row.id!r:.80} was deleted meanwhile")
        return replace(row, body=body, status=status, size=int(found[0]))

    def delete(self, row: StoredRow) -> None:
        """Delete a row and its parts. Raises nothing if it is gone."""
        self._connection.execute("DELETE FROM objects WHERE position = ?", (row.position,))

    def add_part(self, row: StoredRow, name: str, number: int, body: bytes) -> None:
        """Add one body to a list of a row's parts."""
        self.writers.add(row.tenant)
        sealed = self._seal.close(body, _place(row.id, row.tenant, name, number))
        self._connection.execute(
            "INSERT INTO parts (object, name, number, body) VALUES (?, ?, ?, ?)",
            (row.position, name, number, sealed),
        )
        self._connection.execute(
            "UPDATE objects SET size = size + ? WHERE position = ?", (len(sealed), row.position)
        )

    def add_items(self, row: StoredRow, names: Iterable[str]) -> None:
        """Have `find_item` find the row by the ids of items that it has."""
        text = "INSERT INTO items (id, object) VALUES (?, ?)"
        self._connection.executemany(text, [(name, row.position) for name in names])

    def find_item(self, tenant: str, name: str) -> StoredRow | None:
        """The oldest row that has an item; None: this tenant has stored none."""
        columns = ", ".join(f"objects.{column}" for column in _COLUMNS.split(", "))
        found = self._connection.execute(
            f"SELECT {columns} FROM items JOIN objects ON objects.position = items.object "
            "WHERE items.id = ? AND objects.tenant = ? ORDER BY objects.position LIMIT 1",
            (name, tenant),
        ).fetchone()
        return None if found is None else self._row(found)

    def parts(self, row: StoredRow, name: str) -> Iterator[bytes]:
        """The bodies of a list, in the order of their numbers."""
        cursor = self._connection.execute(
            "SELECT number, body FROM parts WHERE object = ? AND name = ? ORDER BY number",
            (row.position, name),
        )
        for number, body in cursor:
            yield self._seal.open(body, _place(row.id, row.tenant, name, number))

    def next_part(self, row: StoredRow, name: str, after: int) -> tuple[int, bytes] | None:
        """The first body with a number above `after`, with its number; None: there is no more."""
        found = self._connection.execute(
            "SELECT number, body FROM parts WHERE object = ? AND name = ? AND number > ? "
            "ORDER BY number LIMIT 1",
            (row.position, name, after),
        ).fetchone()
        if found is None:
            return None
        return int(found[0]), self._seal.open(found[1], _place(row.id, row.tenant, name, found[0]))

    def entries(self, row: StoredRow) -> Iterator[tuple[str, bytes]]:
        """All parts of a row of which each has a name of its own, in the order of their numbers."""
        text = "SELECT name, number, body FROM parts WHERE object = ? ORDER BY number"
        for name, number, body in self._connection.execute(text, (row.position,)):
            yield name, self._seal.open(body, _place(row.id, row.tenant, name, number))

    def find_entry(self, row: StoredRow, name: str) -> bytes | None:
        """The part with this name."""
        text = "SELECT number, body FROM parts WHERE object = ? AND name = ? LIMIT 1"
        found = self._connection.execute(text, (row.position, name)).fetchone()
        return (
            None if found is None else self._seal.open(found[1], _place(row.id, row.tenant, name, found[0]))
        )

    def add_entry(self, row: StoredRow, name: str, body: bytes) -> None:
        """Add a part behind all others, which `find_item` finds by its name."""
        text = "SELECT coalesce(max(number), -1) + 1 FROM parts WHERE object = ?"
        (number,) = self._connection.execute(text, (row.position,)).fetchone()
        self.add_part(row, name, int(number), body)
        self.add_items(row, (name,))

    def delete_entry(self, row: StoredRow, name: str) -> bool:
        """Delete the part with this name. False: there is none."""
        text = "DELETE FROM parts WHERE object = ? AND name = ? RETURNING length(body)"
        sizes = [int(size) for (size,) in self._connection.execute(text, (row.position, name))]
        text = "UPDATE objects SET size = size - ? WHERE position = ?"
        self._connection.execute(text, (sum(sizes), row.position))
        self._connection.execute("DELETE FROM items WHERE object = ? AND id = ?", (row.position, name))
        return bool(sizes)

    def count_entries(self, row: StoredRow) -> int:
        text = "SELECT count(*) FROM parts WHERE object = ?"
        return int(self._connection.execute(text, (row.position,)).fetchone()[0])

    def touch(self, row: StoredRow, now: int) -> None:
        """Have a row count as used now."""
        if self._counts_use:
            self._connection.execute("UPDATE objects SET used = ? WHERE position = ?", (now, row.position))

    def part_numbers(self, row: StoredRow, name: str) -> set[int]:
        """The numbers of a list's parts."""
        text = "SELECT number FROM parts WHERE object = ? AND name = ?"
        return {int(number) for (number,) in self._connection.execute(text, (row.position, name))}

    def parts_length(self, row: StoredRow, name: str) -> int:
        """Bytes of all bodies of a list."""
        text = "SELECT coalesce(sum(length(body)), 0), count(*) FROM parts WHERE object = ? AND name = ?"
        size, count = self._connection.execute(text, (row.position, name)).fetchone()
        return int(size) - int(count) * self._seal.num_added

    def is_in_use(self, object_id: str) -> bool:
        """Whether a row that is in work refers to this one."""
        text = f"SELECT 1 FROM objects WHERE refers = ? AND status IN ({IN_WORK}) LIMIT 1"
        return self._connection.execute(text, (object_id,)).fetchone() is not None

    def chain(self, tenant: str, object_id: str, now: int) -> list[StoredRow]:
        """A conversation's responses, the first one first; all of them count as used now.

        Raises NotStored where one of them is not there any more, and InvalidField for too long a one.
        """
        found: list[StoredRow] = []
        size = 0
        while object_id or not found:  # an empty id is one of no response, too
            found.append(self.get(tenant, "response", object_id))
            size, object_id = size + found[-1].size, found[-1].refers
            if len(found) > MAX_CHAIN or size > MAX_CHAIN_BYTES:
                text = f"the conversation has more than {MAX_CHAIN} responses or {MAX_CHAIN_BYTES} bytes"
                raise InvalidField(f"previous_response_id: {text}; begin a new one", "previous_response_id")
        for row in found:
            self.touch(row, now)
        return found[::-1]

    def _row(self, found: _Columns) -> StoredRow:
        position, object_id, kind, tenant, created, expires, status, model, refers, size, sealed = found
        body = self._seal.open(sealed, _place(object_id, tenant, "body", 0))
        return StoredRow(
            id=object_id,
            kind=kind,
            tenant=tenant,
            created=created,
            body=body,
            status=status,
            model=model,
            refers=refers,
            expires=expires,
            position=position,
            size=size,
        )


def _place(object_id: str, tenant: str, name: str, number: int) -> str:
    return f"{object_id}\0{tenant}\0{name}\0{number}"
