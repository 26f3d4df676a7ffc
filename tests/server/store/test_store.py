"""Rows of the store: each key sees its own, and age and size decide what goes."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from plait.config import MIB, ServerConfig
from plait.errors import ConfigError, InvalidField
from plait.server.store import rows as stored_rows
from plait.server.store.database import Database
from plait.server.store.errors import NotStored, StoreFull, StoreUnavailable
from plait.server.store.rows import PageQuery, StoredRow
from plait.server.store.seal import Seal, read_seal
from plait.server.store.store import Store, open_store
from tests.patience import PATIENCE_S
from tests.server.store.test_database import row


class Clock:
    """A clock that stands still."""

    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(tmp_path: Path, clock: Clock) -> Any:
    found = Store(Database(str(tmp_path / "s.db"), Seal()), 400_000, 3600, clock=clock)
    yield found
    found.close()


def names(store: Store, tenant: str = "a") -> list[str]:
    query = PageQuery(is_descending=False)
    return store.call(lambda rows: [found.id for found in rows.iterate(tenant, "chat", query)])


def test_no_key_sees_lists_or_goes_on_from_another_s_rows(store: Store) -> None:
    store.call(lambda rows: (rows.add(row("mine")), rows.add(row("theirs", tenant="b"))))
    assert names(store) == ["mine"]
    assert names(store, "b") == ["theirs"]
    for wrong in (("b", "mine"), ("", "mine"), ("a", "theirs"), ("a", "none")):
        with pytest.raises(NotStored, match="there is no chat completion"):
            store.call(lambda rows, wrong=wrong: rows.get(wrong[0], "chat", wrong[1]))
    with pytest.raises(NotStored):  # not as a place in a list either
        store.call(lambda rows: [*rows.iterate("a", "chat", PageQuery(after="theirs"))])
    with pytest.raises(NotStored):  # nor under another kind
        store.call(lambda rows: rows.get("a", "response", "mine"))
    store.call(lambda rows: rows.add(row("r1", kind="response", tenant="b")))
    store.call(lambda rows: rows.add(row("r2", kind="response", refers="r1")))
    with pytest.raises(NotStored):  # a chain that leads into another key's rows ends there
        store.call(lambda rows: rows.chain("a", "r2", 1_000))


def test_lists_go_both_ways_and_on_from_a_row(store: Store) -> None:
    store.call(lambda rows: [rows.add(row(f"c{i}")) for i in range(5)])

    def page(**query: Any) -> list[str]:
        found = store.call(lambda rows: [*rows.iterate("a", "chat", PageQuery(**query))])
        return [one.id for one in found]

    assert page() == ["c4", "c3", "c2", "c1", "c0"]
    assert page(after="c2") == ["c1", "c0"]
    assert page(after="c2", is_descending=False) == ["c3", "c4"]


def test_a_row_grows_with_its_parts_and_goes_with_them(store: Store) -> None:
    made = store.call(lambda rows: rows.add(row("one", body=b"12345"), {"input": [b"ab", b"c"]}))
    store.call(lambda rows: rows.change(made, b"123", "failed"))

    def read(rows: Any) -> tuple[StoredRow, list[bytes], tuple[int, bytes] | None, set[int]]:
        found = rows.get("a", "chat", "one")
        return (
            found,
            [*rows.parts(found, "input")],
            rows.next_part(found, "input", 0),
            rows.part_numbers(found, "input"),
        )

    found, parts, after, numbers = store.call(read)
    assert (found.body, found.status, found.size) == (b"123", "failed", 6)
    assert (parts, after, numbers) == ([b"ab", b"c"], (1, b"c"), {0, 1})
    store.call(lambda rows: rows.delete(found))
    with pytest.raises(NotStored, match="deleted meanwhile"):
        store.call(lambda rows: rows.change(found, b"", "completed"))
    left = store._database.call(
        lambda connection: connection.execute("SELECT count(*) FROM parts").fetchone()
    )
    assert left == (0,)


def test_what_was_not_used_for_long_goes_but_not_what_is_in_work_or_needed(
    store: Store, clock: Clock
) -> None:
    store.call(
        lambda rows: [
            rows.add(row("old")),
            rows.add(row("works", status="in_progress", refers="needed")),
            rows.add(row("needed")),
            rows.add(row("short", expires=2_000)),
        ]
    )
    clock.now = 2_100.0
    store.call(lambda rows: rows.add(row("new", created=2_100)))
    assert names(store) == ["old", "works", "needed", "new"]
    clock.now = 5_000.0
    store.call(lambda rows: rows.add(row("newest", created=5_000)))
    assert names(store) == ["works", "needed", "new", "newest"]


def test_a_conversation_that_goes_on_keeps_its_beginning(store: Store, clock: Clock) -> None:
    store.call(lambda rows: rows.add(row("r1", kind="response")))
    store.call(lambda rows: rows.add(row("r2", kind="response", refers="r1")))
    clock.now = 4_000.0
    chain = store.call(lambda rows: rows.chain("a", "r2", 4_000))
    assert [found.id for found in chain] == ["r1", "r2"]
    clock.now = 5_000.0
    store.call(lambda rows: rows.add(row("c", created=5_000)))
    assert store.call(lambda rows: rows.get("a", "response", "r1")).id == "r1"


def test_a_key_that_stores_much_pushes_its_own_rows_out(store: Store, clock: Clock) -> None:
    store.call(lambda rows: rows.add(row("small", tenant="b", body=b"x" * 1_000)))
    for i in range(10):
        clock.now += 1
        store.call(lambda rows, i=i: rows.add(row(f"c{i}", created=int(clock.now), body=b"x" * 30_000)))
    assert names(store) == [f"c{i}" for i in range(4, 10)]
    assert names(store, "b") == ["small"]


def test_a_store_that_is_full_of_work_refuses_more(store: Store) -> None:
    store.call(lambda rows: rows.add(row("works", status="in_progress", body=b"x" * 150_000)))
    with pytest.raises(StoreFull, match=r"this key may hold 200000 bytes"):
        store.call(lambda rows: rows.add(row("more", status="queued", body=b"x" * 60_000)))
    assert names(store) == ["works"]
    store.call(lambda rows: rows.add(row("theirs", tenant="b", status="queued", body=b"x" * 190_000)))
    with pytest.raises(StoreFull, match=r"may hold 400000 bytes"):
        store.call(lambda rows: rows.add(row("more", tenant="c", status="queued", body=b"x" * 100_000)))
    assert names(store, "b") == ["theirs"]


def test_a_server_without_keys_may_use_all_of_the_store(store: Store) -> None:
    store.call(lambda rows: rows.add(row("works", tenant="", status="in_progress", body=b"x" * 390_000)))
    assert names(store, "") == ["works"]


def test_a_conversation_that_is_too_long_is_refused(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_rows, "MAX_CHAIN_BYTES", 3)
    store.call(lambda rows: rows.add(row("r1", kind="response")))
    store.call(lambda rows: rows.add(row("r2", kind="response", refers="r1")))
    assert len(store.call(lambda rows: rows.chain("a", "r1", 1_000))) == 1
    with pytest.raises(InvalidField, match="begin a new one"):
        store.call(lambda rows: rows.chain("a", "r2", 1_000))


def test_the_event_loop_goes_on_while_the_disk_is_slow(store: Store) -> None:
    has_turned = threading.Event()

    async def main() -> bool:
        slow = asyncio.ensure_future(store.run(lambda rows: has_turned.wait(PATIENCE_S)))
        for _ in range(3):
            await asyncio.sleep(0.001)
        assert not slow.done()
        has_turned.set()
        return await slow

    assert asyncio.run(main())


def test_uploads_that_were_cut_go_when_the_server_starts(tmp_path: Path) -> None:
    config = ServerConfig(store=str(tmp_path / "s.db"))
    first = open_store(config)
    assert first is not None
    created = first.now()
    first.call(
        lambda rows: [
            rows.add(row(status, kind="file", status=status, created=created))
            for status in ("uploading", "writing", "processed")
        ]
    )
    first.close()
    again = open_store(config)
    assert again is not None
    found = again.call(lambda rows: [one.id for one in rows.iterate("a", "file", PageQuery())])
    again.close()
    assert found == ["processed", "writing"]
    assert open_store(ServerConfig()) is None


class Xor:
    """Stands for AES-GCM where `cryptography` is not installed: it notices other places, too."""

    def encrypt(self, nonce: bytes, data: bytes, associated_data: bytes | None) -> bytes:
        return bytes(b ^ 0x55 for b in data) + (associated_data or b"")

    def decrypt(self, nonce: bytes, data: bytes, associated_data: bytes | None) -> bytes:
        place = associated_data or b""
        if not data.endswith(place):
            raise ValueError("InvalidTag")
        return bytes(b ^ 0x55 for b in data[: len(data) - len(place)])


def test_sealed_bodies_are_not_in_the_file_and_cannot_be_moved(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    store = Store(Database(str(path), Seal(Xor())), MIB, 1e12, Seal(Xor()))
    made = store.call(lambda rows: rows.add(row("one", body=b"the secret"), {"input": [b"another secret"]}))
    assert store.call(lambda rows: [rows.get("a", "chat", "one").body, *rows.parts(made, "input")]) == [
        b"the secret",
        b"another secret",
    ]
    store._database.call(lambda connection: connection.execute("UPDATE objects SET tenant = 'b'"))
    with pytest.raises(StoreUnavailable, match="the store's file was changed"):
        store.call(lambda rows: rows.get("b", "chat", "one"))
    store.close()
    assert b"secret" not in path.read_bytes()
    with pytest.raises(ConfigError, match="is encrypted; give its --store-key"):
        Database(str(path), Seal())
    Database(str(tmp_path / "plain.db"), Seal()).close()
    with pytest.raises(ConfigError, match="was written without a key"):
        Database(str(tmp_path / "plain.db"), Seal(Xor()))


def test_the_key_s_file_is_checked(tmp_path: Path) -> None:
    pytest.importorskip("cryptography", reason="cryptography is not installed: it is an extra")
    key = tmp_path / "key"
    key.write_text("ab" * 32 + "\n")
    key.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        read_seal(str(key))
    key.chmod(0o600)
    seal = read_seal(str(key))
    assert seal.open(seal.close(b"text", "here"), "here") == b"text"
    with pytest.raises(StoreUnavailable):
        seal.open(seal.close(b"text", "here"), "there")
    Database(str(tmp_path / "s.db"), seal).close()
    key.write_text("cd" * 32)
    with pytest.raises(ConfigError, match="another key"):
        Database(str(tmp_path / "s.db"), read_seal(str(key)))
    for wrong in ("", "ab", "zz" * 32, "ab" * 33):
        key.write_text(wrong)
        with pytest.raises(ConfigError, match="hexadecimal"):
            read_seal(str(key))


def test_a_key_without_a_store_is_refused() -> None:
    with pytest.raises(ConfigError, match="store_key: it needs store"):
        ServerConfig(store_key="key")
