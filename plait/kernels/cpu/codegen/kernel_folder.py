"""Compiled kernels as files: trusted only if no other user may write them, read only if they are whole.

A file is magic (8 bytes) | BLAKE2b of its name and the rest (32) | the rest, a pickle of machine code. What
decides a kernel is in its name, so that a name stands for one content, wherever Plait lies on the disk.
Nothing here imports Numba.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import stat
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from msgspec import Struct

from plait.cache_folder import NO_HOME, make_folder

try:
    import fcntl
except ImportError:  # Windows: a process that needs the same kernel at the same time compiles it, too
    fcntl = None  # type: ignore[assignment]

MAGIC = b"plaitkn1"
SUFFIX, PARTIAL = ".kernel", ".partial"
LOCK, SWEPT = ".lock", ".swept"
MAX_NBYTES = 64 << 20  # of a file; kernels have some tens of kilobytes
DAY_S = 86_400.0
UNUSED_S = 30 * DAY_S  # after which kernels are removed
ABANDONED_S = 3600.0  # after which a file that was not finished is removed
PATIENCE_S = 300.0  # for a process that compiles: one that was stopped must not stop all others
ASK_AGAIN_S = 0.02
_READ = os.O_RDONLY | sum(getattr(os, flag, 0) for flag in ("O_CLOEXEC", "O_NONBLOCK", "O_BINARY"))
_MAKE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | sum(getattr(os, f, 0) for f in ("O_CLOEXEC", "O_BINARY"))
_RECORD = struct.Struct(">II")
log = logging.getLogger("plait")


def seal(name: str, payload: bytes) -> bytes:
    """A file's content."""
    return MAGIC + _digest(name, payload) + payload


def unseal(name: str, data: bytes) -> bytes | None:
    """The payload of a file with that name; None: it is empty, cut, changed, or another kernel's."""
    digest, payload = data[8:40], data[40:]
    return payload if data[:8] == MAGIC and digest == _digest(name, payload) else None


def _digest(name: str, payload: bytes) -> bytes:
    return hashlib.blake2b(payload, digest_size=32, key=hashlib.blake2b(name.encode()).digest()).digest()


def refusal(folder: Path) -> str | None:
    """Why compiled kernels are not read from a folder, nor kept there: who may write code may run it as us.

    The folder is `BASE/kernels/TARGET`; all three are looked at. In those above it a sticky bit is enough.
    """
    if not hasattr(os, "geteuid"):
        return None
    for one in (folder, folder.parent, folder.parent.parent):
        try:
            status = one.stat()
        except OSError:
            continue
        if status.st_uid not in (0, os.geteuid()):
            return f"{one} belongs to another user (uid {status.st_uid})"
        if status.st_mode & 0o022 and (one == folder or not status.st_mode & stat.S_ISVTX):
            return f"others may write {one} (mode {stat.S_IMODE(status.st_mode):o}; chmod go-w {one})"
    return None


def is_foreign(status: os.stat_result) -> bool:
    """Whether another user than this one and root may have written a file."""
    if not hasattr(os, "geteuid"):
        return False
    return status.st_uid not in (0, os.geteuid()) or bool(status.st_mode & 0o022)


class Spare:
    """Memory for kernels that no folder took: a server lends it to its engines, one after the other.

    A file without a name, which is gone with the last process that has it open, however that ends.
    """

    def __init__(self, descriptor: int) -> None:
        """Takes the descriptor. What an engine that was killed had half written is cut off."""
        self._file = os.fdopen(descriptor, "r+b", buffering=0)
        self._places: dict[str, tuple[int, int]] = {}
        self._end, size = 0, os.fstat(descriptor).st_size
        while self._end + _RECORD.size <= size:
            named, nbytes = _RECORD.unpack(os.pread(descriptor, _RECORD.size, self._end))
            start = self._end + _RECORD.size
            if start + named + nbytes > size:
                break
            name = os.pread(descriptor, named, start).decode(errors="replace")
            self._places[name] = start + named, nbytes
            self._end = start + named + nbytes

    def read(self, name: str) -> bytes | None:
        """What `add` was given, if it is whole."""
        if name not in self._places:
            return None
        at, nbytes = self._places[name]
        return unseal(name, os.pread(self._file.fileno(), nbytes, at))

    def add(self, name: str, data: bytes) -> None:
        """Keep a sealed kernel; where even this memory is full, it is not kept."""
        raw = name.encode()
        record, written = memoryview(_RECORD.pack(len(raw), len(data)) + raw + data), 0
        with suppress(OSError):
            while written < len(record):
                written += os.pwrite(self._file.fileno(), record[written:], self._end + written)
            self._places[name] = self._end + _RECORD.size + len(raw), len(data)
            self._end += len(record)


class KernelFiles:
    """The compiled kernels of one target, in a folder; what it does not take goes to `spare`.

    `unkept`: why the next run compiles again what this one compiles; None: it does not. A folder that
    cannot be written is read all the same. No method raises OSError.
    """

    def __init__(self, folder: Path | None, spare: Spare | None = None) -> None:
        self.folder, self.spare = folder, spare
        self.unkept = NO_HOME if folder is None else refusal(folder)
        self._is_read = self.unkept is None
        self._has_warned = folder is not None and not self._is_read
        if self._has_warned:
            log.warning("compiled kernels are neither read nor kept: %s", self.unkept)
        self._lock: int | None = None  # its descriptor; -1: there are no locks here
        self._damaged: set[str] = set()

    def read(self, name: str) -> bytes | None:
        """The payload that was kept under a name; None: there is none, or it is damaged."""
        found = self.spare.read(name) if self.spare is not None else None
        if found is not None or self.folder is None or not self._is_read:
            return found
        path = self.folder / name
        try:
            with open(path, "rb", opener=lambda name, _: os.open(name, _READ)) as file:
                status = os.fstat(file.fileno())
                data = file.read(MAX_NBYTES + 1) if stat.S_ISREG(status.st_mode) else b""
        except OSError as error:
            if not isinstance(error, FileNotFoundError):
                log.info("%s cannot be read: %s", path, error.strerror)
            return None
        if is_foreign(status):
            self._skip(path, "may have been written by another user")
            return None
        if (found := unseal(name, data)) is None:
            self._skip(path, "is damaged")
            return None
        if time.time() - status.st_mtime > DAY_S:
            with suppress(OSError):
                os.utime(path)  # its age is that of its last use, within a day
        return found

    def write(self, name: str, payload: bytes) -> None:
        """Keep a kernel: in the folder, or if it cannot be written, with one warning, in the spare memory."""
        data = seal(name, payload)
        if self.folder is not None and self.unkept is None:
            try:
                _write(self.folder / name, data)
                return
            except OSError as error:
                self.unkept = f"{self.folder} cannot be written ({error.strerror or error})"
        if not self._has_warned:
            self._has_warned = True
            log.warning(
                "compiled kernels are not kept, and the next run compiles them again: %s", self.unkept
            )
        if self.spare is not None:
            self.spare.add(name, data)

    @contextmanager
    def lock(self, name: str) -> Iterator[None]:
        """Held while a kernel is compiled: a process that needs the same one waits, and then looks again.

        The system ends the lock with its holder. Where there are no locks, nothing is waited for.
        """
        at = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=7).digest(), "big")
        is_held, has_waited = self._take(at)
        try:
            if has_waited and self.folder is not None and not os.path.exists(self.folder / name):
                self._lock = -1  # who compiled it could not keep it: to wait for others serves nothing
            yield
        finally:
            if is_held is not None:
                with suppress(OSError):
                    fcntl.lockf(is_held, fcntl.LOCK_UN, 1, at)

    def _take(self, at: int) -> tuple[int | None, bool]:
        """Lock byte `at` of the lock file: (its descriptor, None without a lock; whether this waited)."""
        if self._lock is None:
            self._lock = self._open_lock()
        until, has_waited = time.monotonic() + PATIENCE_S, False
        while self._lock >= 0 and time.monotonic() < until:
            try:
                fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, at)
                return self._lock, has_waited
            except (BlockingIOError, PermissionError):
                has_waited = True
                time.sleep(ASK_AGAIN_S)
            except OSError as error:
                log.info("%s: no locks, so each process compiles (%s)", self.folder, error.strerror)
                self._lock = -1
        return None, has_waited

    def forget_lock(self) -> None:
        """Open the lock file anew: this process is a fork that has closed its descriptor."""
        self._lock = None

    def _open_lock(self) -> int:
        if fcntl is None or self.folder is None or self.unkept is not None:
            return -1
        try:
            make_folder(self.folder)
            # Never closed: a process that closes a file loses all its locks on it.
            return os.open(self.folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError:
            return -1

    def _skip(self, path: Path, why: str) -> None:
        if path.name not in self._damaged:
            self._damaged.add(path.name)
            log.warning("%s %s: this kernel is compiled again", path, why)


def _write(path: Path, data: bytes) -> None:
    """All of it or nothing, in place of what was there. Raises OSError."""
    make_folder(path.parent)
    part = path.with_name(f".{os.urandom(8).hex()}{PARTIAL}")
    try:
        with os.fdopen(os.open(part, _MAKE, 0o644), "wb") as file:
            file.write(data)
        part.replace(path)
    except BaseException:
        with suppress(OSError):
            part.unlink()
        raise


class KernelRoom(Struct, frozen=True):
    """The kernels of one target and one version of what all of them share. `used`: seconds since 1970."""

    path: Path
    nbytes: int
    used: float


def rooms(kernels: Path) -> list[KernelRoom]:
    """What lies in a folder of compiled kernels, by name; nothing where it cannot be looked into."""
    found = []
    with suppress(OSError), os.scandir(kernels) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                path = Path(entry.path)
                files = list(_statuses(path))
                used = max((s.st_mtime for s in files), default=entry.stat(follow_symlinks=False).st_mtime)
                found.append(KernelRoom(path, sum(s.st_size for s in files), used))
    return sorted(found, key=lambda room: room.path.name)


def _statuses(folder: Path) -> Iterator[os.stat_result]:
    for above, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                yield os.lstat(os.path.join(above, name))


def sweep(kernels: Path, current: Path | None = None, unused_s: float = UNUSED_S) -> int:
    """Remove kernels that no run has used for so long, and files that were not finished; the bytes freed.

    `current`: the folder that this run uses; it stays if all of it is that old. Never raises OSError: what
    cannot be removed stays.
    """
    freed, now = 0, time.time()
    for room in rooms(kernels):
        if now - room.used >= unused_s:
            if room.path != current:
                shutil.rmtree(room.path, ignore_errors=True)
                freed += 0 if room.path.exists() else room.nbytes
            continue
        with suppress(OSError), os.scandir(room.path) as entries:
            for entry in entries:
                limit = {SUFFIX: unused_s, PARTIAL: ABANDONED_S}.get(Path(entry.name).suffix)
                with suppress(OSError):  # another start may sweep at the same time
                    status = entry.stat(follow_symlinks=False)
                    if limit is not None and now - status.st_mtime >= limit:
                        os.unlink(entry.path)
                        freed += status.st_size
    return freed


def sweep_daily(kernels: Path, current: Path) -> None:
    """`sweep`, if no run has done it today."""
    marker = kernels / SWEPT
    with suppress(OSError):
        if marker.exists() and time.time() - marker.stat().st_mtime < DAY_S:
            return
        marker.touch(mode=0o644)
        if freed := sweep(kernels, current):
            log.info("%s: kernels that were unused for 30 days are removed (%d bytes)", kernels, freed)
