"""The store's file: private, locked, checked when it is opened, and typed errors when the disk refuses."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import sqlite3
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from plait.config import ServerConfig
from plait.errors import ConfigError
from plait.server.store.database import RESERVE_BYTES, Database
from plait.server.store.errors import NotStored, StoreFull, StoreUnavailable
from plait.server.store.rows import Rows, StoredRow
from plait.server.store.seal import Seal
from plait.server.store.store import Store, open_store
from tests.server.small_disk import fill_disk, small_disk

__all__ = ["small_disk"]  # a fixture


def database(path: Path) -> Database:
    return Database(str(path), Seal())


def row(name: str, **more: object) -> StoredRow:
    fields: dict[str, object] = {"kind": "chat", "tenant": "a", "created": 1_000, "body": b"{}", **more}
    return StoredRow(id=name, **fields)  # type: ignore[arg-type]


def filled(path: Path, count: int = 50) -> None:
    """A closed database with rows of 2 KiB."""
    store = Store(database(path), 1 << 30, 1e12)
    store.call(lambda rows: [rows.add(row(f"r{i}", body=b"x" * 2048)) for i in range(count)])
    store.close()


def test_the_file_and_its_log_are_private(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    path.touch(0o644)
    store = Store(database(path), 1 << 30, 1e12)
    store.call(lambda rows: rows.add(row("one")))
    found = {name: stat.S_IMODE(os.stat(tmp_path / name).st_mode) for name in os.listdir(tmp_path)}
    assert found == {"s.db": 0o600, "s.db-reserve": 0o600, "s.db-wal": 0o600}
    store.close()
    assert os.listdir(tmp_path) == ["s.db"]


def test_a_second_server_may_not_use_the_same_file(tmp_path: Path) -> None:
    first = database(tmp_path / "s.db")
    with pytest.raises(ConfigError, match=r"is locked; another server uses it"):
        database(tmp_path / "s.db")
    first.close()
    database(tmp_path / "s.db").close()


@pytest.mark.parametrize("left", [100, 5000, 20_000])
def test_a_truncated_file_is_refused_in_one_line(tmp_path: Path, left: int) -> None:
    path = tmp_path / "s.db"
    filled(path)
    os.truncate(path, left)
    with pytest.raises(ConfigError, match=r"move it away") as caught:
        open_store(ServerConfig(store=str(path)))
    assert "\n" not in str(caught.value)
    assert path.stat().st_size == left, "a refused file stays as it is"


def test_a_file_with_a_damaged_page_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    filled(path)
    with path.open("r+b") as file:
        file.seek(2 * 4096)  # the root of the table, behind the header and the map of pages
        file.write(b"\xff" * 4096)
    with pytest.raises(ConfigError, match="damaged"):
        database(path)


def test_what_is_no_database_of_ours_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("not a database, but longer than any header is" * 9)
    with pytest.raises(ConfigError, match="damaged or no database"):
        database(tmp_path / "text")
    other = sqlite3.connect(tmp_path / "other.db")
    other.execute("CREATE TABLE theirs (x)")
    other.close()
    with pytest.raises(ConfigError, match="another program's"):
        database(tmp_path / "other.db")
    with pytest.raises(ConfigError, match=r"cannot be opened|no regular file"):
        database(tmp_path)
    with pytest.raises(ConfigError, match="No such file"):
        database(tmp_path / "no" / "s.db")
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(ConfigError, match="no regular file"):
        database(tmp_path / "fifo")


def test_a_newer_version_s_file_is_refused(tmp_path: Path) -> None:
    filled(tmp_path / "s.db", 1)
    connection = sqlite3.connect(tmp_path / "s.db")
    connection.execute("PRAGMA user_version = 99")
    connection.close()
    with pytest.raises(ConfigError, match="newer version"):
        database(tmp_path / "s.db")


def test_a_full_disk_is_a_typed_error_and_what_was_stored_stays(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = database(tmp_path / "s.db")
    store = Store(found, 1 << 30, 1e12)
    store.call(lambda rows: rows.add(row("one")))
    found.call(lambda connection: connection.execute("PRAGMA max_page_count = 20").fetchall())
    for _ in range(2):
        with pytest.raises(StoreFull, match="the disk is full") as caught:
            store.call(lambda rows: rows.add(row("two", body=b"x" * 500_000)))
    assert [one.message.partition("s.db: ")[2][:16] for one in caplog.records] == ["the disk is full"]
    assert (caught.value.status, caught.value.code) == (503, "store_full")
    assert store.call(lambda rows: rows.get("a", "chat", "one")).body == b"{}"
    store.call(lambda rows: rows.add(row("three")))
    store.close()


def delete(name: str) -> Callable[[Rows], None]:
    return lambda rows: rows.delete(rows.get("a", "chat", name))


def test_a_deletion_that_finds_the_disk_full_gets_the_reserve(tmp_path: Path) -> None:
    found, reserve = database(tmp_path / "s.db"), tmp_path / "s.db-reserve"
    store = Store(found, 1 << 30, 1e12)
    store.call(lambda rows: [rows.add(row(f"r{i}", body=b"secret" * 20_000)) for i in range(9)])
    assert os.stat(reserve).st_blocks * 512 >= RESERVE_BYTES
    seen: list[tuple[bool, int]] = []

    def work(connection: sqlite3.Connection) -> None:
        seen.append((reserve.exists(), connection.execute("PRAGMA secure_delete").fetchone()[0]))
        if reserve.exists():
            raise sqlite3.OperationalError("database or disk is full")
        connection.execute("DELETE FROM objects WHERE id != 'r0'")

    with pytest.raises(StoreFull, match="nothing was stored"):
        asyncio.run(found.run(work))
    assert (seen, reserve.exists()) == ([(True, 1)], True)  # what writes may not have it
    asyncio.run(found.run(work, deletes=True))
    assert seen[1:] == [(True, 1), (False, 2)]
    assert reserve.exists()  # there is space again
    assert found.call(lambda c: c.execute("PRAGMA secure_delete").fetchone()[0]) == 1
    assert found.call(lambda c: c.execute("PRAGMA freelist_count").fetchone()[0]) == 0
    assert (tmp_path / "s.db").read_bytes().count(b"secret") == 20_000  # what was not overwritten has left
    store.close()


def test_rows_are_deleted_on_a_disk_without_one_free_block(small_disk: Path) -> None:
    store = Store(database(small_disk / "s.db"), 1 << 30, 1e12)

    def fill(name: str) -> None:
        """Until not even a small row finds a place."""
        for nbytes in (1 << 20, 4000):
            with contextlib.suppress(StoreFull):
                for i in itertools.count():
                    new = row(f"{name}-{nbytes}-{i}", body=os.urandom(nbytes))
                    store.call(lambda rows, new=new: rows.add(new))  # type: ignore[misc]

    # What the reserve gave is written full, too.
    for name, *gone in (("first", "first-1048576-0", "first-1048576-1"), ("second", "first-1048576-2")):
        fill(name)
        assert os.statvfs(small_disk).f_bavail * 4096 < 1 << 16
        with pytest.raises(StoreFull, match="nothing was stored"):
            asyncio.run(store.run(delete(gone[0])))
        for one in gone:
            asyncio.run(store.run(delete(one), deletes=True))
            with pytest.raises(NotStored):
                asyncio.run(store.run(delete(one)))
    store.call(lambda rows: rows.add(row("new", body=b"x" * (1 << 20))))
    store.close()
    with contextlib.closing(sqlite3.connect(small_disk / "s.db")) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_a_file_that_became_unwritable_is_a_typed_error(tmp_path: Path) -> None:
    found = database(tmp_path / "s.db")
    found.call(lambda connection: connection.execute("PRAGMA query_only = ON"))
    with pytest.raises(StoreUnavailable, match="read-only"):
        found.call(lambda connection: connection.execute("DELETE FROM objects"))
    found.close()


def test_a_file_that_is_damaged_while_it_is_served_is_a_typed_error(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    filled(path)
    store = Store(database(path), 1 << 30, 1e12)
    store._database.call(lambda connection: connection.execute("PRAGMA shrink_memory").fetchall())
    with path.open("r+b") as file:
        file.seek(2 * 4096)
        file.write(b"\xff" * (path.stat().st_size - 2 * 4096))
    with pytest.raises(StoreUnavailable, match="the file is damaged") as caught:
        store.call(lambda rows: rows.get("a", "chat", "r30"))
    assert (caught.value.status, caught.value.code) == (503, "store_unavailable")
    store.close()


def test_work_that_fails_leaves_nothing(tmp_path: Path) -> None:
    store = Store(database(tmp_path / "s.db"), 1 << 30, 1e12)

    def add_and_fail(rows: Rows) -> None:
        rows.add(row("one"))
        raise KeyError("one")

    with pytest.raises(KeyError):
        store.call(add_and_fail)
    assert store.call(lambda rows: rows.find("a", "chat", "one")) is None
    store.close()


def test_a_file_is_opened_on_a_full_disk_and_can_be_read(
    small_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = small_disk / "s.db"
    filled(path)
    ballast = fill_disk(small_disk)
    store = open_store(ServerConfig(store=str(path), store_max_age=1 << 60))
    assert store is not None
    assert f"store: {path}: the disk is full: what is stored can be read" in caplog.text
    with pytest.raises(ConfigError, match="is locked; another server uses it"):
        database(path)
    assert store.call(lambda rows: rows.get("a", "chat", "r1").body) == b"x" * 2048

    def use(rows: Rows) -> bytes:
        found = rows.get("a", "chat", "r2")
        rows.touch(found, 2_000)
        return found.body

    assert store.call(use, reads=True) == b"x" * 2048
    assert asyncio.run(store.run(use, reads=True)) == b"x" * 2048
    with pytest.raises(StoreFull, match="nothing was stored"):
        store.call(use)
    with pytest.raises(StoreFull, match="nothing was stored"):
        store.call(lambda rows: rows.add(row("new", body=b"y" * 9000)))
    ballast.unlink()
    store.call(lambda rows: rows.add(row("new", body=b"y" * 9000)))
    store.close()
    again = Store(database(path), 1 << 30, 1e12)
    assert again.call(lambda rows: rows.get("a", "chat", "new").body) == b"y" * 9000
    again.close()


def test_the_reserve_of_a_full_disk_stays_for_the_next_server(small_disk: Path) -> None:
    path = small_disk / "s.db"
    filled(path)
    first = Store(database(path), 1 << 30, 1e12)
    fill_disk(small_disk)
    first.close()
    assert (small_disk / "s.db-reserve").stat().st_size == RESERVE_BYTES
    store = Store(database(path), 1 << 30, 1e12)
    asyncio.run(store.run(delete("r3"), deletes=True))
    with pytest.raises(NotStored):
        store.call(lambda rows: rows.get("a", "chat", "r3"))
    store.close()


def test_a_new_file_on_a_full_disk_is_refused(small_disk: Path) -> None:
    fill_disk(small_disk)
    with pytest.raises(ConfigError, match="the disk is full; free some"):
        database(small_disk / "s.db")
