"""The store: rows in the database's thread, and retention by age and size.

Old rows go first: those not used for `--store-max-age`. Above `--store-limit`, the key that has the most
loses its least recently used rows; a key with a name may have half of it. So a key that stores much pushes
its own rows out, not those of others. What is in work stays, with what it refers to. If nothing else is
left, the new row is refused.
"""

from __future__ import annotations

import logging
import sqlite3
import time
from collections.abc import Callable, Iterable
from typing import TypeVar

from plait.config import MIB, ServerConfig
from plait.errors import PlaitError
from plait.server.store.database import Database
from plait.server.store.errors import StoreFull
from plait.server.store.rows import IN_WORK, Rows
from plait.server.store.seal import Seal, read_seal

logger = logging.getLogger("plait.server")
T = TypeVar("T")
Clock = Callable[[], float]
PLAIN = Seal()
CLEAN_EVERY_S = 60.0
FREED_PAGES = 1024  # that the file gives back at a time
MAX_FILE_BYTES = 200 * MIB  # as OpenAI's limit for the file of a batch
_FREE = f"""
    status NOT IN ({IN_WORK}) AND NOT EXISTS
    (SELECT 1 FROM objects AS user WHERE user.refers = objects.id AND user.refers != ''
     AND user.status IN ({IN_WORK}))
"""


class Store:
    """What clients have stored. `limit`: bytes of all rows; `max_age_s`: of rows that were not used."""

    def __init__(
        self, database: Database, limit: int, max_age_s: float, seal: Seal = PLAIN, clock: Clock = time.time
    ) -> None:
        self._database, self._seal = database, seal
        self._limit, self._max_age_s, self._clock, self._cleaned_s = limit, max_age_s, clock, 0.0

    @property
    def max_file_bytes(self) -> int:
        """The largest file: a quarter of the store, so that a batch's output finds a place."""
        return min(MAX_FILE_BYTES, self._limit // 4)

    @property
    def clean_every_s(self) -> float:
        return CLEAN_EVERY_S

    async def clean(self) -> None:
        """Delete what is too old."""
        self._cleaned_s = 0.0
        await self._database.run(self._clean, deletes=True)

    def now(self) -> int:
        return int(self._clock())

    async def run(self, work: Callable[[Rows], T], *, deletes: bool = False, reads: bool = False) -> T:
        """What `work` returns, as one transaction. Raises StoreFull, StoreUnavailable, and what it raises.

        `deletes`: it deletes, which goes on when the disk is full. `reads`: it reads rows and has them count
        as used, which they do not when the disk is full. Both may be called twice.
        """
        try:
            return await self._database.run(self._wrap_change(work), deletes=deletes)
        except StoreFull:
            if not reads:
                raise
        return await self._database.run(self._wrap_look(work))

    def call(self, work: Callable[[Rows], T], *, deletes: bool = False, reads: bool = False) -> T:
        """As `run`, from any thread but the event loop's."""
        try:
            return self._database.call(self._wrap_change(work), deletes=deletes)
        except StoreFull:
            if not reads:
                raise
        return self._database.call(self._wrap_look(work))

    def close(self) -> None:
        self._database.close()

    def _wrap_look(self, work: Callable[[Rows], T]) -> Callable[[sqlite3.Connection], T]:
        return lambda connection: work(Rows(connection, self._seal, counts_use=False))

    def _wrap_change(self, work: Callable[[Rows], T]) -> Callable[[sqlite3.Connection], T]:
        def run(connection: sqlite3.Connection) -> T:
            before = connection.total_changes
            rows = Rows(connection, self._seal)
            found = work(rows)
            if connection.total_changes != before:
                self._clean(connection)
                self._enforce_limit(connection, rows.writers)
            return found

        return run

    def _clean(self, connection: sqlite3.Connection) -> None:
        """Delete what is too old, now and then."""
        now = self._clock()
        if now - self._cleaned_s >= CLEAN_EVERY_S or now < self._cleaned_s:
            self._cleaned_s = now
            self._database.keep_reserve()
            oldest = int(now - self._max_age_s)
            text = f"DELETE FROM objects WHERE (used < ? OR expires <= ?) AND {_FREE}"
            connection.execute(text, (oldest, int(now)))
            connection.execute("DELETE FROM tenants WHERE size <= 0")
            connection.execute(f"PRAGMA incremental_vacuum({FREED_PAGES})").fetchall()

    def _enforce_limit(self, connection: sqlite3.Connection, writers: Iterable[str]) -> None:
        """Delete what is too much: of the keys that wrote, then of the largest. Raises StoreFull."""
        for tenant in writers:
            share = self._limit // 2 if tenant else self._limit
            while (excess := _size(connection, tenant) - share) > 0:
                if not _evict(connection, tenant, excess):
                    raise StoreFull(
                        f"store: this key may hold {share} bytes and has as much in work; try again later, "
                        "delete files, or start the server with a larger --store-limit"
                    )
        while (excess := _total(connection) - self._limit) > 0:
            tenants = connection.execute("SELECT name FROM tenants ORDER BY size DESC").fetchall()
            if not any(_evict(connection, tenant, excess) for (tenant,) in tenants):
                raise StoreFull(
                    f"store: it may hold {self._limit} bytes and is full of what is in work; try again "
                    "later, delete files, or start the server with a larger --store-limit"
                )


def _evict(connection: sqlite3.Connection, tenant: str, excess: int) -> bool:
    """Delete the least recently used rows of a tenant, some at a time. False: it has none to delete."""
    text = f"SELECT position, size FROM objects WHERE tenant = ? AND {_FREE} ORDER BY used, position LIMIT 64"
    freed, chosen = 0, []
    for position, size in connection.execute(text, (tenant,)):
        if freed >= excess:
            break
        freed += size
        chosen.append((position,))
    connection.executemany("DELETE FROM objects WHERE position = ?", chosen)
    return bool(chosen)


def open_store(config: ServerConfig) -> Store | None:
    """The store of the options; None: the server has none. Raises ConfigError."""
    if config.store is None:
        return None
    seal = read_seal(config.store_key)
    database = Database(config.store, seal)
    store = Store(database, config.store_limit, config.store_max_age, seal=seal)
    try:
        store.call(_drop_uploads, deletes=True)
    except StoreFull as error:
        logger.error("%s of the files that were being sent; the next startup deletes them", error)
    except PlaitError:
        store.close()
        raise
    logger.info("storing in %s, encrypted: %s", config.store, bool(seal))
    return store


def _drop_uploads(rows: Rows) -> None:
    """Delete the files that were being sent when the server ended."""
    for row in rows.list_working("file"):
        if row.status == "uploading":
            rows.delete(row)


def _size(connection: sqlite3.Connection, tenant: str) -> int:
    found = connection.execute("SELECT size FROM tenants WHERE name = ?", (tenant,)).fetchone()
    return int(found[0]) if found else 0


def _total(connection: sqlite3.Connection) -> int:
    (found,) = connection.execute("SELECT coalesce(sum(size), 0) FROM tenants").fetchone()
    return int(found)
