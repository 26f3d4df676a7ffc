"""Copies on the disk come back byte for byte or not at all, whatever happens to the files."""

from __future__ import annotations

import errno
import logging
import os
import random
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from plait.errors import BadFile
from plait.memory import PagedState, SlotState, State
from plait.state.blocks import DIGEST_BYTES
from plait.state.disk import cache as cache_module
from plait.state.disk.cache import RETRY_S, DiskCache
from plait.state.disk.file_format import DiskNames, read_content, read_names, write_content
from plait.state.disk.index import DiskRead
from plait.state.host_store import HostStore, SavedState
from tests.patience import PATIENCE_S

STATES: dict[str, State] = {
    "a": PagedState({"k": (2,), "v": (3,)}),
    "b": PagedState({"k": (5,)}, window=8),
    "c": SlotState({"ssm": ((7,), "float32"), "conv": ((3,), "model")}),
}
FINGERPRINT, OTHER = "0123456789abcdef" * 2, "f" * 32
STORE = HostStore(STATES, {"full": 6, "window:8": 6}, 3, 4, "bfloat16")
LAYOUT = STORE.layout


def hash_of(number: int) -> bytes:
    return number.to_bytes(DIGEST_BYTES, "big")


def blocks(*numbers: int, window: tuple[int, ...] = ()) -> DiskNames:
    return DiskNames((tuple(map(hash_of, numbers)), tuple(map(hash_of, window))))


def snapshot(parent: int, *rest: int) -> DiskNames:
    return DiskNames(parent=hash_of(parent), rest=rest)


def copy_for(names: DiskNames, seed: int = 0) -> SavedState:
    content = np.random.default_rng(seed).integers(0, 256, names.nbytes(LAYOUT), np.uint8)
    return SavedState(names.tables(LAYOUT), names.has_slot(LAYOUT), content)


def until(done: Callable[[], object], seconds: float = PATIENCE_S) -> None:
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end, "it never happens"
        time.sleep(0.001)


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[..., DiskCache]]:
    made: list[DiskCache] = []

    def open_cache(limit: int | None = 1 << 30, folder: Path = tmp_path, **options: object) -> DiskCache:
        made.append(DiskCache(folder, FINGERPRINT, LAYOUT, limit, **options))  # type: ignore[arg-type]
        until(lambda: not made[-1].is_scanning)
        return made[-1]

    yield open_cache
    for one in made:
        one.close()


def put(cache: DiskCache, names: DiskNames, seed: int = 0) -> SavedState:
    """Write a copy and wait until it is there."""
    handle, saved = cache.offer(names), copy_for(names, seed)
    assert handle is not None
    assert handle < 0
    cache.write(handle, saved)
    until(lambda: not cache._coming)
    return saved


def fetch(cache: DiskCache, names: DiskNames) -> DiskRead | None:
    """Read all of a file, if the index has it."""
    if names.parent:
        file = dict(cache.snapshots(names.parent)).get(names.rest)
    else:
        file = cache.block(0, names.blocks[0][0])
    if file is None:
        return None
    read = cache.read(file, tuple(tuple(range(len(group))) for group in names.blocks))
    assert read is not None
    until(lambda: read.saved is not None or read.has_failed)
    return read


ALL = (blocks(1, 2, 3, window=(2, 3)), snapshot(3), snapshot(3, 5, 6), blocks(4))


def test_copies_come_back_in_another_process(opened: Callable[..., DiskCache]) -> None:
    first = opened()
    saved = [put(first, names, seed) for seed, names in enumerate(ALL)]
    assert first.stats()["num_disk_written"] == len(ALL)
    first.close()
    second = opened()
    for names, one in zip(ALL, saved, strict=True):
        read = fetch(second, names)
        assert read is not None
        found = second.get(read.handle)
        assert found is not None
        assert (found.tables, found.has_slot) == (one.tables, one.has_slot)
        assert found.content.tobytes() == one.content.tobytes()
        second.drop(read.handle)
        assert second.get(read.handle) is None
    assert second.missing(0, [hash_of(n) for n in (1, 4, 9)]) == {hash_of(9)}
    assert second.missing(1, [hash_of(n) for n in (1, 2)]) == {hash_of(1)}
    assert second.has_snapshot(hash_of(3), (5, 6))
    assert not second.has_snapshot(hash_of(3), (5,))
    assert second._reading == 0


def test_some_blocks_of_a_file_are_those_that_were_saved(opened: Callable[..., DiskCache]) -> None:
    for row in range(6):
        for name in STATES:
            for array in STORE[name].values():
                array[row % len(array)] = np.random.default_rng(row).integers(
                    0, 256, array.shape[1], np.uint8
                )
    cache = opened()
    store = HostStore(STATES, {"full": 6, "window:8": 6}, 3, 4, "bfloat16")
    STORE.disk = store.disk = cache
    handle = cache.offer(blocks(1, 2, 3, window=(2, 3)))
    assert handle is not None
    STORE.save(handle, ((1, 2, 3), (4, 5)), 0)
    until(lambda: not cache._coming)
    file = cache.block(0, hash_of(1))
    assert file is not None
    read = cache.read(file, ((2, 0), (1,)))
    assert read is not None
    until(lambda: read.saved)
    store.load(read.handle, ((4, 1), (2,)), 0)
    for group, pairs in (("a", ((3, 4), (1, 1))), ("b", ((5, 2),))):
        for key, array in store[group].items():
            for source, target in pairs:
                assert array[target].tobytes() == STORE[group][key][source].tobytes()
    store.drop(read.handle)
    assert cache.get(read.handle) is None


def test_a_file_that_is_cut_or_changed_anywhere_is_bad(tmp_path: Path) -> None:
    rng, names = random.Random(0), ALL[0]
    saved = copy_for(names)
    path = tmp_path / names.file_name
    write_content(path, FINGERPRINT, names, saved.content)
    raw = path.read_bytes()
    for at in range(0, len(raw), 7):
        changed = bytearray(raw)
        changed[at] ^= 1 << rng.randrange(8)
        for wrong in (raw[:at], bytes(changed), raw[:at] + rng.randbytes(len(raw) - at)):
            path.write_bytes(wrong)
            with pytest.raises(BadFile):
                read_content(path, FINGERPRINT, names, LAYOUT)
    path.write_bytes(raw)
    assert read_content(path, FINGERPRINT, names, LAYOUT).content.tobytes() == saved.content.tobytes()
    for fingerprint, others in ((OTHER, names), (FINGERPRINT, ALL[3])):
        with pytest.raises(BadFile):
            read_content(path, fingerprint, others, LAYOUT)


@pytest.mark.parametrize(
    "names",
    [
        DiskNames(((hash_of(1)[:-1],), ())),
        DiskNames(((hash_of(1),),)),
        DiskNames(((), ())),
        DiskNames(((hash_of(1),), ()), hash_of(2)),
        DiskNames(parent=hash_of(1), rest=(1, 2, 3, 4)),
        DiskNames(parent=hash_of(1), rest=(-1,)),
    ],
)
def test_names_that_no_engine_writes_are_bad(names: DiskNames, tmp_path: Path) -> None:
    path = tmp_path / "one.state"
    write_content(path, FINGERPRINT, names, np.zeros(100, np.uint8))
    with pytest.raises(BadFile):
        read_names(path, FINGERPRINT, LAYOUT)


def test_a_file_of_another_user_or_behind_a_link_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / ALL[0].file_name
    write_content(path, FINGERPRINT, ALL[0], copy_for(ALL[0]).content)
    path.chmod(0o622)
    with pytest.raises(BadFile, match="another user"):
        read_names(path, FINGERPRINT, LAYOUT)
    path.chmod(0o600)
    link = tmp_path / "link.state"
    link.symlink_to(path)
    with pytest.raises(OSError, match="symbolic links"):
        read_names(link, FINGERPRINT, LAYOUT)


def test_files_are_for_their_owner_alone(opened: Callable[..., DiskCache], tmp_path: Path) -> None:
    put(opened(), ALL[0])
    (path,) = tmp_path.rglob("*.state")
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700


def kills(opened: Callable[..., DiskCache], folder: Path, count: int) -> None:
    """A writer dies at a random byte, of a file with its own name or another: what starts then is right."""
    rng, mine = random.Random(1), folder / FINGERPRINT
    whole = {}
    for seed, names in enumerate(ALL):
        path = folder / "whole"
        write_content(path, FINGERPRINT, names, copy_for(names, seed).content)
        whole[names] = path.read_bytes()
        path.unlink()
    mine.mkdir(exist_ok=True)
    for _ in range(count):
        left = {}
        for names, raw in whole.items():
            cut = rng.choice([len(raw), rng.randrange(len(raw))])
            tail = rng.choice([b"", bytes(len(raw) - cut), rng.randbytes(len(raw) - cut)])
            left[names] = raw[:cut] + tail == raw
            (mine / names.file_name).write_bytes(raw[:cut] + tail)
            (mine / f"{rng.randrange(9)}.partial").write_bytes(raw[: rng.randrange(len(raw))])
        cache = opened()
        for seed, names in enumerate(ALL):
            read = fetch(cache, names)
            if left[names]:
                assert read is not None
            if read is not None and read.saved is not None:
                assert left[names], "a damaged file was read"
                assert read.saved.content.tobytes() == copy_for(names, seed).content.tobytes()
        cache.close()


def test_a_writer_that_dies_at_any_byte_leaves_nothing_wrong(
    opened: Callable[..., DiskCache], tmp_path: Path
) -> None:
    kills(opened, tmp_path, 20)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_ten_thousand_writers_that_die_leave_nothing_wrong(
    opened: Callable[..., DiskCache], tmp_path: Path
) -> None:
    kills(opened, tmp_path, 10_000 // len(ALL))


def test_what_was_used_least_recently_is_evicted(opened: Callable[..., DiskCache]) -> None:
    cache = opened()
    put(cache, snapshot(1))
    cache.limit = 3 * cache.stats()["disk_nbytes"]
    put(cache, snapshot(2))
    put(cache, snapshot(3))
    assert cache.has_snapshot(hash_of(1), ())  # a use
    put(cache, snapshot(4))
    put(cache, snapshot(5))
    assert [parent for parent in range(1, 6) if cache.has_snapshot(hash_of(parent), ())] == [1, 4, 5]
    assert cache.stats()["disk_nbytes"] == cache.limit
    assert cache.stats()["num_disk_evicted"] == 2
    assert len([*cache.folder.iterdir()]) == 3


def test_files_of_other_models_count_and_are_evicted(
    opened: Callable[..., DiskCache], tmp_path: Path
) -> None:
    old = tmp_path / OTHER / "old.state"
    old.parent.mkdir()
    old.write_bytes(bytes(1000))
    os.utime(old, (1, 1))
    stranger = tmp_path / "notes" / "mine.state"
    stranger.parent.mkdir()
    stranger.write_bytes(bytes(1000))
    cache = opened(limit=1200)
    assert cache.stats()["disk_nbytes"] == 1000
    put(cache, ALL[0])
    put(cache, ALL[1])
    assert not old.exists()
    assert stranger.exists()


def test_servers_that_share_a_folder_find_what_the_others_write(
    opened: Callable[..., DiskCache], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_module, "RESCAN_S", 0.01)
    first, second = opened(), opened()
    for seed, names in enumerate(ALL):
        saved = put(first, names, seed)
        until(lambda names=names: fetch(second, names) is not None)
        read = fetch(second, names)
        assert read is not None
        assert read.saved is not None
        assert read.saved.content.tobytes() == saved.content.tobytes()
    until(lambda: second.stats()["disk_nbytes"] == first.stats()["disk_nbytes"])
    assert not second.missing(0, [hash_of(1), hash_of(4)]), "it would write them again"
    for path in first.folder.iterdir():
        path.unlink()
    until(lambda: not second.stats()["disk_files"] and not first.stats()["disk_files"])
    assert second.counts["gone"] == 0


def test_what_another_server_has_used_meanwhile_is_not_evicted_first(
    opened: Callable[..., DiskCache],
) -> None:
    cache = opened()
    put(cache, snapshot(1))
    cache.limit = 2 * cache.stats()["disk_nbytes"]
    put(cache, snapshot(2))
    used = time.time() + 100
    os.utime(cache.folder / snapshot(1).file_name, (used, used))
    put(cache, snapshot(3))
    assert [parent for parent in (1, 2, 3) if cache.has_snapshot(hash_of(parent), ())] == [1, 3]


def test_copies_are_written_no_faster_than_the_bandwidth(opened: Callable[..., DiskCache]) -> None:
    now = [0.0]
    cache = opened(bandwidth=10, clock=lambda: now[0])
    names = [snapshot(n) for n in range(1, 4)]
    for n, one in enumerate(names):
        handle = cache.offer(one)
        assert handle is not None
        cache.write(handle, copy_for(one))
        if not n:
            until(lambda: cache.counts["written"] == 1)
            until(lambda: cache.stats()["disk_nbytes"])
    nbytes = cache.stats()["disk_nbytes"]
    assert fetch(cache, names[0]) is not None, "a read waits for no write"
    for written in (2, 3):
        now[0] += nbytes / 10 - 0.5
        time.sleep(0.02)
        assert cache.counts["written"] == written - 1
        now[0] += 0.6
        until(lambda written=written: cache.counts["written"] == written)


def test_what_waits_for_the_bandwidth_is_written_at_the_end(opened: Callable[..., DiskCache]) -> None:
    cache = opened(bandwidth=1)
    for names in ALL:
        handle = cache.offer(names)
        assert handle is not None
        cache.write(handle, copy_for(names))
    cache.close()
    assert cache.counts["written"] == len(ALL)


def test_a_default_limit_is_a_tenth_of_what_is_free(
    opened: Callable[..., DiskCache], monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=5000))
    assert opened(limit=None).limit == 500


def test_a_limit_below_one_file_is_one_warning(
    opened: Callable[..., DiskCache], caplog: pytest.LogCaptureFixture
) -> None:
    cache = opened(limit=10)
    assert cache.offer(ALL[0]) is None
    assert cache.offer(ALL[3]) is None
    assert cache.stats()["num_disk_dropped"] == 2
    (record,) = caplog.records
    assert "above --cache-disk-limit, 10" in record.message


def test_a_full_queue_drops_what_comes_and_waits_for_nothing(
    opened: Callable[..., DiskCache], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_module, "QUEUE_NBYTES", 100)
    cache = opened()
    handle = cache.offer(ALL[0])
    assert handle is not None
    assert cache.offer(ALL[3]) is None
    assert cache.stats()["num_disk_dropped"] == 1
    assert cache.missing(0, [hash_of(1), hash_of(4)]) == {hash_of(4)}
    cache.withdraw()
    assert cache.missing(0, [hash_of(1)]) == {hash_of(1)}
    cache.write(handle, copy_for(ALL[0]))  # too late: ignored
    assert put(cache, ALL[3])
    assert cache.stats()["num_disk_written"] == 1


def full(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_is_one_warning_and_is_tried_again(
    opened: Callable[..., DiskCache],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Also behind the warning of a damaged file."""
    now = [0.0]
    mine = tmp_path / FINGERPRINT
    mine.mkdir()
    (mine / "damaged.state").write_text("no state")
    cache = opened(clock=lambda: now[0])
    with monkeypatch.context() as patch:
        patch.setattr(cache_module, "write_content", full)
        for names in ALL:
            now[0] += 100.0
            put(cache, names)
        assert cache.offer(ALL[0]) is None, "nothing is copied for a disk that has just failed"
    assert cache.stats()["num_disk_failed"] == len(ALL)
    damaged, no_space = (record.message for record in caplog.records)
    assert "damaged.state is not used" in damaged
    assert "No space left" in no_space
    now[0] += 100.0
    put(cache, ALL[0])
    assert fetch(cache, ALL[0]) is not None


def refuse_changes(patch: pytest.MonkeyPatch) -> None:
    """From now on the file system is read-only."""
    real = os.open

    def read_only(path: Path, flags: int, mode: int = 0o777) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            raise OSError(errno.EROFS, "Read-only file system")
        return real(path, flags, mode)

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    patch.setattr(os, "open", read_only)
    for name in ("mkdir", "unlink", "utime", "rename", "replace"):
        patch.setattr(os, name, refuse)


def test_a_read_only_disk_is_read_and_is_one_warning(
    opened: Callable[..., DiskCache], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = [0.0]
    first = opened()
    for names in ALL:
        put(first, names)
    first.close()
    with monkeypatch.context() as patch:
        refuse_changes(patch)
        cache = opened(limit=first._index.nbytes, clock=lambda: now[0])  # full to the last byte
        for number in range(3):
            now[0] += 100.0
            put(cache, blocks(60 + number))
            for names in ALL:
                read = fetch(cache, names)
                assert read is not None, "a file that cannot be removed is still there"
                assert read.saved is not None
        stats = cache.stats()
        cache.close()
    assert (stats["num_disk_failed"], stats["num_disk_evicted"], stats["disk_files"]) == (3, 0, len(ALL))
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


def test_a_folder_that_is_removed_or_cannot_be_made_ends_nothing(
    opened: Callable[..., DiskCache], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    now = [0.0]
    root = tmp_path / "root"
    root.mkdir()
    cache = opened(folder=root, clock=lambda: now[0])
    for names in ALL:
        put(cache, names)
    for path in root.rglob("*.state"):
        path.unlink()
    read = fetch(cache, ALL[0])
    assert read is not None
    assert read.has_failed
    assert cache.stats()["num_disk_gone"] == 1
    assert fetch(cache, ALL[0]) is None, "what is gone is not looked for again"
    (root / FINGERPRINT).rmdir()
    root.rmdir()
    put(cache, blocks(50))
    assert cache.stats()["num_disk_failed"] == 1
    assert cache.stats()["disk_files"] == 0
    assert len(caplog.records) == 1
    never = opened(limit=None, folder=tmp_path / "file", clock=lambda: now[0])
    (tmp_path / "file").write_text("no folder")
    put(never, ALL[0])
    assert never.stats()["num_disk_failed"] == 1
    assert len(caplog.records) == 2
    assert not any(record.exc_info for record in caplog.records)
    (tmp_path / "file").unlink()
    (tmp_path / "file").mkdir()
    now[0] += RETRY_S
    put(never, ALL[1])
    until(lambda: never.limit < shutil.disk_usage(tmp_path).total)
