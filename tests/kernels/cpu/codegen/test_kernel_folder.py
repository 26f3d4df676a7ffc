"""Compiled kernels as files: whole or not there, ours alone, made by one process at a time, gone when old."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from plait.cache_folder import cache_base, make_folder
from plait.kernels.cpu.codegen import kernel_folder
from plait.kernels.cpu.codegen.kernel_folder import (
    DAY_S,
    KernelFiles,
    Spare,
    refusal,
    rooms,
    seal,
    sweep,
    sweep_daily,
    unseal,
)
from plait.worker.start_process import new_memory

NAME, OLD = "rows-0123.kernel", 31 * DAY_S
HOLDER = """
import sys, time
from pathlib import Path
from plait.kernels.cpu.codegen.kernel_folder import KernelFiles
with KernelFiles(Path(sys.argv[1])).lock(sys.argv[2]):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def room(tmp_path: Path) -> Path:
    return tmp_path / "base" / "kernels" / "target"


def age(path: Path, seconds: float) -> None:
    then = time.time() - seconds
    os.utime(path, (then, then))


def full_disk(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_what_is_written_is_read_by_another_process_of_any_umask(room: Path) -> None:
    umask = os.umask(0)
    try:
        KernelFiles(room).write(NAME, b"code")
    finally:
        os.umask(umask)
    files = KernelFiles(room)
    assert (files.read(NAME), files.read("other"), files.unkept) == (b"code", None, None)
    modes = [path.stat().st_mode & 0o777 for path in (room / NAME, room, room.parent, room.parent.parent)]
    assert modes == [0o644, 0o755, 0o755, 0o755]


@pytest.mark.parametrize("damage", ["empty", "cut", "magic", "bit", "longer", "renamed"])
def test_a_damaged_file_is_reported_once_not_used_and_replaced(
    room: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    KernelFiles(room).write(NAME, b"code" * 100)
    path, data = room / NAME, bytearray((room / NAME).read_bytes())
    match damage:
        case "bit":
            data[len(data) // 2] ^= 4
        case "magic":
            data[0] ^= 1
        case "renamed":
            data = bytearray(seal("another.kernel", b"code" * 100))
    path.write_bytes({"empty": b"", "cut": data[:-9], "longer": data + b"x"}.get(damage, bytes(data)))
    files = KernelFiles(room)
    assert (files.read(NAME), files.read(NAME)) == (None, None)
    assert [record.message.count(str(path)) for record in caplog.records] == [1]
    files.write(NAME, b"new")
    assert KernelFiles(room).read(NAME) == b"new"


def test_a_checksum_is_bound_to_the_name() -> None:
    assert unseal(NAME, seal(NAME, b"code")) == b"code"
    assert unseal("x", seal(NAME, b"code")) is None


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("bit", [0o020, 0o002])
def test_a_folder_that_others_may_write_is_refused_with_one_line(
    room: Path, which: int, bit: int, caplog: pytest.LogCaptureFixture
) -> None:
    KernelFiles(room).write(NAME, b"code")
    folder = (room, room.parent, room.parent.parent)[which]
    folder.chmod(0o755 | bit)
    files = KernelFiles(room)
    assert files.read(NAME) is None
    files.write("new.kernel", b"code")
    assert not (room / "new.kernel").exists()
    assert files.unkept
    (record,) = caplog.records
    assert f"others may write {folder}" in record.message
    assert f"chmod go-w {folder}" in record.message


def test_a_sticky_folder_above_is_enough(room: Path) -> None:
    make_folder(room)
    room.parent.parent.chmod(0o1777)
    assert refusal(room) is None
    room.chmod(0o1777)
    assert refusal(room)


def test_files_and_folders_of_other_users_are_refused_but_those_of_root_are_not(
    room: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = KernelFiles(room)
    files.write(NAME, b"code")
    if os.geteuid() == 0:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
        assert KernelFiles(room).read(NAME) == b"code"
        os.chown(room / NAME, 54321, -1)
        assert KernelFiles(room).read(NAME) is None
        os.chown(room, 54321, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert "another user" in (refusal(room) or "")


def test_a_file_that_others_may_write_is_not_read(room: Path) -> None:
    KernelFiles(room).write(NAME, b"code")
    (room / NAME).chmod(0o666)
    assert KernelFiles(room).read(NAME) is None


def test_a_full_disk_is_one_warning_with_the_folders_name(
    room: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kernel_folder.Path, "replace", full_disk)
    files = KernelFiles(room)
    for name in ("a", "b"):
        with files.lock(name):
            files.write(name, b"code")
    (record,) = caplog.records
    assert f"{room} cannot be written (No space left on device)" in record.message
    assert files.unkept in record.message
    assert [path.name for path in room.iterdir()] == [kernel_folder.LOCK]  # nothing half written


def test_a_folder_that_cannot_be_made_is_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    files = KernelFiles(tmp_path / "file" / "kernels" / "target")
    assert files.read(NAME) is None
    for name in ("a", "b"):
        with files.lock(name):
            files.write(name, b"code")
    assert [str(tmp_path / "file") in record.message for record in caplog.records] == [True]


def test_a_folder_that_cannot_be_written_is_read_without_a_word(
    room: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    KernelFiles(room).write(NAME, b"code")
    age(room / NAME, 2 * DAY_S)
    for name in ("mkdir", "replace", "utime", "unlink"):
        monkeypatch.setattr(os, name, full_disk)
    monkeypatch.setattr(kernel_folder, "_write", full_disk)
    files = KernelFiles(room)
    assert files.read(NAME) == b"code"
    sweep_daily(room.parent, room)
    assert (caplog.records, files.unkept) == ([], None)


def test_without_a_home_nothing_is_kept_and_it_is_reported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    assert (cache_base(None), cache_base("x")) == (None, Path("x"))
    files = KernelFiles(None)
    with files.lock(NAME):
        assert files.read(NAME) is None
        files.write(NAME, b"code")
    assert "--cache-dir" in caplog.text


def test_spare_memory_is_handed_from_one_engine_to_the_next(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    memory, room = new_memory("test"), tmp_path / "file" / "kernels" / "target"
    first = KernelFiles(room, Spare(os.dup(memory)))
    for name in ("a", "b"):
        first.write(name, name.encode() * 1000)
    os.ftruncate(memory, os.fstat(memory).st_size - 5)  # killed while it wrote
    second = KernelFiles(room, Spare(os.dup(memory)))
    assert (second.read("a"), second.read("b")) == (b"a" * 1000, None)
    second.write("b", b"again")
    third = KernelFiles(room, Spare(os.dup(memory)))
    assert (third.read("a"), third.read("b")) == (b"a" * 1000, b"again")
    os.pwrite(memory, b"\xff" * 9, 60)
    assert KernelFiles(room, Spare(memory)).read("a") is None


def test_a_process_waits_for_the_one_that_compiles_the_same_and_for_no_other(room: Path) -> None:
    first, order = KernelFiles(room), []
    entered = threading.Event()
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(room), NAME], stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with first.lock("another.kernel"):
            order.append("another")

        def wait() -> None:
            with first.lock(NAME):
                order.append("after the holder")
                entered.set()

        waiter = threading.Thread(target=wait)
        waiter.start()
        assert not entered.wait(0.2)
    finally:
        holder.kill()  # the system ends the lock with its holder
        holder.communicate()
    assert entered.wait(30)
    waiter.join()
    assert order == ["another", "after the holder"]


def test_a_holder_that_is_stopped_does_not_stop_others(room: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_folder, "PATIENCE_S", 0.1)
    monkeypatch.setattr(kernel_folder.fcntl, "lockf", lambda *_: (_ for _ in ()).throw(BlockingIOError()))
    with KernelFiles(room).lock(NAME):
        pass


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_where_there_are_no_locks_nothing_is_waited_for(
    room: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    asked = []

    def lockf(*_: Any) -> None:
        asked.append(1)
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(kernel_folder.fcntl, "lockf", lockf)
    files = KernelFiles(room)
    for name in ("a", "b"):
        with files.lock(name):
            files.write(name, b"code")
    assert (len(asked), files.read("b")) == (1, b"code")


def test_kernels_that_were_unused_for_thirty_days_go_and_others_stay(room: Path) -> None:
    old_room, file = room.with_name("old"), room / NAME
    for one in (room, old_room):
        for name in (NAME, "stale.kernel", ".0123.partial"):
            KernelFiles(one).write(name, b"code")
            age(one / name, OLD)
    age(file, 2 * DAY_S)
    assert KernelFiles(room).read(NAME) == b"code"
    assert time.time() - file.stat().st_mtime < DAY_S  # its use was recorded
    assert sweep(room.parent) > 0
    assert [one.path for one in rooms(room.parent)] == [room]
    assert [path.name for path in room.iterdir()] == [NAME]


def test_the_folder_of_this_run_stays_and_a_sweep_is_made_once_a_day(room: Path) -> None:
    other = room.with_name("other")
    for one in (room, other):
        KernelFiles(one).write(NAME, b"code")
        age(one / NAME, OLD)
    sweep_daily(room.parent, room)
    assert [one.path for one in rooms(room.parent)] == [room]
    KernelFiles(other).write(NAME, b"code")
    age(other / NAME, OLD)
    sweep_daily(room.parent, room)
    assert other.exists()
    age(room.parent / kernel_folder.SWEPT, 2 * DAY_S)
    sweep_daily(room.parent, room)
    assert not other.exists()
