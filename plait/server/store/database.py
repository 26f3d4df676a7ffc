"""The store's file: one SQLite database in WAL mode, and the one thread that uses it.

The event loop never waits for the disk: work goes to the thread, and each piece of work is one transaction.
The file is locked as long as the server runs, so that no second server takes its rows for its own. Deleted
content is overwritten (`secure_delete`), and the file shrinks when rows go.

A deletion writes, too: into the log. A reserve lies next to the file, and goes when a deletion finds the disk
full. Pages with deleted content are not overwritten then, but leave the file. On a full disk a file that has
tables is opened, too: it is read until there is space.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import sqlite3
import stat
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from plait.config import MIB
from plait.errors import ConfigError
from plait.server.store.errors import StoreFull, StoreUnavailable
from plait.server.store.seal import Seal

T = TypeVar("T")
logger = logging.getLogger("plait.server")
MODE = 0o600
APPLICATION_ID, VERSION = 0x706C6974, 1  # "plit"
CHECKED_BYTES = 256 * MIB  # a larger file is not read as a whole before the server starts
WAL_BYTES = 16 * MIB  # to which the log is cut after it was merged
RESERVE_BYTES = 8 * MIB  # more than the log takes of a deletion that overwrites nothing, and of a `_SHRINK`
_SHRINK = 512  # pages that leave the file in one transaction where the disk is full
LOGGED_EVERY_S = 60.0  # a fault of the disk, which each request meets
CHECK = b"plait"  # sealed in the file, to know the key by
PRAGMAS = (
    "locking_mode = EXCLUSIVE",
    "trusted_schema = OFF",
    "cell_size_check = ON",
    "secure_delete = ON",
    "synchronous = NORMAL",
    "foreign_keys = ON",
    f"journal_size_limit = {WAL_BYTES}",
)
SCHEMA = """
CREATE TABLE objects (
    position INTEGER PRIMARY KEY AUTOINCREMENT,  -- the order of lists
    id TEXT NOT NULL UNIQUE,
    kind TEXT NOT NULL,
    tenant TEXT NOT NULL,
    created INTEGER NOT NULL,
    used INTEGER NOT NULL,
    expires INTEGER,
    status TEXT NOT NULL,
    model TEXT NOT NULL,
    refers TEXT NOT NULL,  -- the id of the previous response, or of a batch's file
    size INTEGER NOT NULL,
    body BLOB NOT NULL
);

CREATE INDEX objects_of_tenant ON objects (tenant, kind, position);

CREATE INDEX objects_by_use ON objects (used);

CREATE INDEX objects_by_status ON objects (kind, status);

CREATE INDEX objects_by_reference ON objects (refers) WHERE refers != '';

CREATE TABLE parts (
    object INTEGER NOT NULL REFERENCES objects (position) ON DELETE CASCADE,
    name TEXT NOT NULL,
    number INTEGER NOT NULL,
    body BLOB NOT NULL,
    UNIQUE (object, name, number)
);

CREATE TABLE items (
    id TEXT NOT NULL,  -- of an item that a response was given or has made, or that a conversation has
    object INTEGER NOT NULL REFERENCES objects (position) ON DELETE CASCADE
);

CREATE INDEX items_by_id ON items (id);

CREATE INDEX items_of_object ON items (object);

CREATE TABLE tenants (name TEXT PRIMARY KEY, size INTEGER NOT NULL);

CREATE TRIGGER added AFTER INSERT ON objects BEGIN
    INSERT INTO tenants VALUES (new.tenant, new.size)
    ON CONFLICT (name) DO UPDATE SET size = size + excluded.size; END;

CREATE TRIGGER changed AFTER UPDATE OF size ON objects BEGIN
    UPDATE tenants SET size = size + new.size - old.size WHERE name = new.tenant; END;

CREATE TRIGGER deleted AFTER DELETE ON objects BEGIN
    UPDATE tenants SET size = size - old.size WHERE name = old.tenant; END;

CREATE TABLE seal (body BLOB NOT NULL);
"""


class Database:
    """One open database. `path` is its name in errors of the log; clients never see it.

    Raises ConfigError where the file cannot be opened, is damaged, locked, or not ours.
    """

    def __init__(self, path: str, seal: Seal) -> None:
        self.path = path
        _create_private(path)
        try:
            self._connection = _connect(path, seal)
        except sqlite3.Error as error:
            raise ConfigError(f"store: {path}: {_explain(error)}") from error
        self._thread = ThreadPoolExecutor(1, "plait-store")
        self._reserve = f"{path}-reserve"
        self._log_again_at = 0.0
        self.keep_reserve()

    async def run(self, work: Callable[[sqlite3.Connection], T], *, deletes: bool = False) -> T:
        """What `work` returns, in the store's thread and in one transaction. Raises StoreFull and others.

        Work that was begun ends, also when the caller is cancelled. `deletes`: it makes the file smaller, so
        it may use the reserve; it may be called twice.
        """
        call = partial(self._transact, work, deletes=deletes)
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)

    def call(self, work: Callable[[sqlite3.Connection], T], *, deletes: bool = False) -> T:
        """As `run`, from any thread that may wait."""
        return self._thread.submit(partial(self._transact, work, deletes=deletes)).result()

    def close(self) -> None:
        """Wait for the work that was begun, and merge the log into the file.

        The reserve stays where the disk is full, because the next server could not write it again.
        """
        self._thread.shutdown(wait=True)
        with contextlib.suppress(OSError):
            if self._has_space():
                os.unlink(self._reserve)
        with contextlib.suppress(sqlite3.Error):
            self._connection.close()

    def keep_reserve(self) -> None:
        """Have the reserve on the disk, if that leaves some of it free. From the store's thread alone."""
        with contextlib.suppress(OSError):
            if os.path.exists(self._reserve):
                return
            if not self._has_space():
                return
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0)
            handle = os.open(self._reserve, flags, MODE)
            try:
                _fill(handle, RESERVE_BYTES)
            except OSError:
                os.unlink(self._reserve)
            finally:
                os.close(handle)

    def _has_space(self) -> bool:
        """Whether a reserve leaves some of the disk free. Raises OSError."""
        return shutil.disk_usage(os.path.dirname(self._reserve) or ".").free >= RESERVE_BYTES + MIB

    def _transact(self, work: Callable[[sqlite3.Connection], T], *, deletes: bool = False) -> T:
        with _translate_errors("deleted" if deletes else "stored"):
            try:
                return self._attempt(work)
            except sqlite3.Error as error:
                self._log_fault(error)
                if not deletes or not _is_full(error):
                    raise
            return self._attempt_with_reserve(work)

    def _log_fault(self, error: sqlite3.Error) -> None:
        """Log it, now and then: a client may be answered without being stored, so that none complains."""
        if (now := time.monotonic()) >= self._log_again_at:
            self._log_again_at = now + LOGGED_EVERY_S
            logger.warning("store: %s: %s", self.path, _explain(error))

    def _attempt(self, work: Callable[[sqlite3.Connection], T]) -> T:
        self._connection.execute("BEGIN")  # the file is locked anyway
        try:
            found = work(self._connection)
            self._connection.execute("COMMIT")
        except BaseException:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            raise
        return found

    def _attempt_with_reserve(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Again, with the reserve's place on the disk and without overwriting; then the file shrinks."""
        with contextlib.suppress(OSError):
            os.unlink(self._reserve)
        self._connection.execute("PRAGMA secure_delete = FAST").fetchall()
        try:
            self._merge_log()
            found = self._attempt(work)
            with contextlib.suppress(sqlite3.Error):  # what was deleted is deleted; the rest leaves later
                self._shrink()
        finally:
            self._connection.execute("PRAGMA secure_delete = ON").fetchall()
            self.keep_reserve()
        return found

    def _shrink(self) -> None:
        """Give all free pages back to the disk: none of them has deleted content any more."""
        self._merge_log()
        while self._connection.execute("PRAGMA freelist_count").fetchone()[0]:
            self._connection.execute(f"PRAGMA incremental_vacuum({_SHRINK})").fetchall()
            self._merge_log()

    def _merge_log(self) -> None:
        self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()


def _fill(handle: int, nbytes: int) -> None:
    """Give a file blocks of the disk. Raises OSError."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(handle, 0, nbytes)
        return
    for _ in range(nbytes // MIB):
        os.write(handle, bytes(MIB))


def _is_full(error: sqlite3.Error) -> bool:
    return "full" in str(error)


@contextlib.contextmanager
def _translate_errors(done: str) -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        text = _explain(error)
        if _is_full(error):
            raise StoreFull(f"store: {text}; nothing was {done}") from error
        raise StoreUnavailable(f"store: {text}; send store: false to go on without it") from error


def _explain(error: sqlite3.Error) -> str:
    """What is wrong, and what the operator can do."""
    text = str(error)
    if "locked" in text or "busy" in text:
        return "the database is locked; another server uses it, so name another file"
    if "readonly" in text or "read-only" in text:
        return "the database is read-only; give the server write access to the file and its folder"
    if _is_full(error):
        return "the disk is full; free some, or lower --store-limit"
    if "malformed" in text or "not a database" in text or "corrupt" in text:
        return "the file is damaged or no database; move it away, and the server begins a new one"
    return text


def _create_private(path: str) -> None:
    """Create the file, or check it: a regular file that no other user may read. Raises ConfigError."""
    flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0)
    try:
        handle = os.open(path, flags, MODE)
    except OSError as error:
        raise ConfigError(f"store: {path} cannot be opened: {error.strerror}") from error
    try:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode):
            raise ConfigError(f"store: {path} is no regular file; name another one")
        if os.name == "posix" and stat.S_IMODE(found.st_mode) & 0o077:
            os.fchmod(handle, MODE)
        _check_length(path, os.pread(handle, 100, 0), found.st_size)
    except OSError as error:
        raise ConfigError(f"store: {path} cannot be kept private: {error.strerror}") from error
    finally:
        os.close(handle)


def _check_length(path: str, head: bytes, size: int) -> None:
    """Raises ConfigError for a file that is shorter than its header says, and has no log to complete it."""
    if len(head) < 100 or os.path.exists(path + "-wal"):
        return
    page = int.from_bytes(head[16:18], "big")
    pages = int.from_bytes(head[28:32], "big")
    whole = pages * (65536 if page == 1 else page)
    is_counted = head[24:28] == head[92:96]  # else an old program wrote it, and the number means nothing
    if head.startswith(b"SQLite format 3\0") and is_counted and size < whole:
        raise ConfigError(f"store: {path}: it has {size} of its {whole} bytes; move it away")


def _connect(path: str, seal: Seal) -> sqlite3.Connection:
    """Open, lock, check and, for a new file, fill the database. Raises sqlite3.Error and ConfigError."""
    connection = sqlite3.connect(path, timeout=0, isolation_level=None, check_same_thread=False)
    try:
        for pragma in PRAGMAS:
            connection.execute(f"PRAGMA {pragma}")
        if not os.path.getsize(path):
            connection.execute("PRAGMA auto_vacuum = INCREMENTAL")  # of a file that has tables it is a write
        _check_ours(connection, path)
        (mode,) = connection.execute("PRAGMA journal_mode = WAL").fetchone()
        if mode != "wal":
            raise ConfigError(f"store: {path}: this file system has no write-ahead log; name another file")
        connection.execute("BEGIN IMMEDIATE")  # takes the lock, which stays
        if not connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
            _create_tables(connection, seal)
            connection.execute("COMMIT")
        else:
            _try_write(connection, path)
        _check_seal(connection, path, seal)
    except BaseException:
        connection.close()
        raise
    return connection


def _create_tables(connection: sqlite3.Connection, seal: Seal) -> None:
    for statement in SCHEMA.split(";\n\n"):
        connection.execute(statement)
    connection.execute("INSERT INTO seal VALUES (?)", (seal.close(CHECK, "seal"),))
    connection.execute(f"PRAGMA user_version = {VERSION}")
    connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")


def _try_write(connection: sqlite3.Connection, path: str) -> None:
    """End the transaction that was begun with a write. Raises sqlite3.Error, but for a full disk."""
    try:
        connection.execute(f"PRAGMA user_version = {VERSION}")
        connection.execute("COMMIT")
    except sqlite3.Error as error:
        if not _is_full(error):
            raise
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        logger.error(
            "store: %s: the disk is full: what is stored can be read, nothing can be stored; free some",
            path,
        )


def _check_ours(connection: sqlite3.Connection, path: str) -> None:
    """Raises ConfigError for another program's database, a newer version's, and a damaged one."""
    (owner,) = connection.execute("PRAGMA application_id").fetchone()
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    if tables and owner != APPLICATION_ID:
        raise ConfigError(f"store: {path} is another program's database; name another file")
    if version > VERSION:
        raise ConfigError(f"store: {path} was written by a newer version of Plait; name another file")
    if os.path.getsize(path) <= CHECKED_BYTES:
        (found,) = connection.execute("PRAGMA quick_check(1)").fetchone()
        if found != "ok":
            raise sqlite3.DatabaseError("database disk image is malformed")


def _check_seal(connection: sqlite3.Connection, path: str, seal: Seal) -> None:
    """Raises ConfigError where the file was written with another key, or with none."""
    (sealed,) = connection.execute("SELECT body FROM seal").fetchone() or (b"",)
    if (sealed == CHECK) == bool(seal):
        with_key = "was written without a key; leave --store-key out" if seal else "is encrypted; "
        raise ConfigError(f"store: {path} {with_key}" + ("" if seal else "give its --store-key"))
    try:
        found = seal.open(sealed, "seal")
    except StoreUnavailable:
        found = b""
    if found != CHECK:
        raise ConfigError(f"store: {path} was written with another key; give that as --store-key")
