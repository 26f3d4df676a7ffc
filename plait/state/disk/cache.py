"""The disk cache: one thread that writes copies of state to files, and reads them back.

    engine's thread   offer ─► handle, write(handle, copy)     read ─► DiskRead    get(handle), drop(handle)
                                   │ queue, bounded in bytes     │                     ▲ copies that were read
    disk's thread                  └─► space, write, rename      └─► open, check, hash ┘

The engine's thread never waits for a file: it takes the lock for the length of a few dictionary operations.
Reads go before writes, because a prompt waits for them. What fails is a miss. It is counted,
and the first of its kind is logged.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from plait.errors import BadFile
from plait.kernels.load import why_refused
from plait.state.disk import scan
from plait.state.disk.file_format import (
    UNFINISHED,
    DiskNames,
    read_content,
    read_names,
    write_content,
)
from plait.state.disk.index import DiskFile, DiskIndex, DiskRead, Key, Rows, keys_of
from plait.state.host_store import RowLayout, SavedState

QUEUE_NBYTES = 256 << 20  # copies that wait to be written, or were read and are not in use yet
RETRY_S = 30.0  # after a failed write; what comes meanwhile is dropped
RESCAN_S = 2.0  # between two looks for files of other servers
MIN_WAIT_S = 0.001
USED_S = 60.0  # a file's time says when it was last used, as exactly as this
ABANDONED_S = 3600.0  # after which an unfinished file is removed
EVENTS = ("written", "read", "evicted", "dropped", "failed", "damaged", "gone", "late")
log = logging.getLogger("plait")


class DiskCache:
    """Copies of blocks and snapshots in files of `folder`, which may hold `limit` bytes, for all its models.

    `limit` None: a tenth of what is free there without these files. `bandwidth`: bytes per second that are
    written, on average; None: as many as the disk takes.
    `fingerprint`: 32 hexadecimal digits, of model, arithmetic and layout. `layout`: of the copies.
    """

    def __init__(
        self,
        folder: Path,
        fingerprint: str,
        layout: RowLayout,
        limit: int | None = None,
        *,
        bandwidth: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.layout, self.clock = layout, clock
        self.limit = sys.maxsize if limit is None else limit
        self.bandwidth, self._write_at = bandwidth, 0.0
        self.folder, self.fingerprint = folder / fingerprint, fingerprint
        self.counts: Counter[str] = Counter()
        self.is_scanning = True
        self._index = DiskIndex(layout.num_groups)
        self._lock = threading.Condition()
        self._offers: dict[int, DiskNames] = {}
        self._writes: deque[tuple[DiskNames, SavedState]] = deque()
        self._reads: deque[DiskRead] = deque()
        self._ahead: deque[DiskRead] = deque()  # for prompts that are further behind in the queue
        self._open: dict[int, DiskRead] = {}  # reads that are not dropped, by handle
        self._coming: set[Key] = set()  # what was offered and is not in the index yet
        self._used: set[DiskFile] = set()  # files of which the time is to be set
        self._queued = self._reading = self._last = 0
        self._retry_at, self._closing = 0.0, False
        self._warned: set[str] = set()  # kinds of faults that the log has
        self._rescan_at = clock() + RESCAN_S
        self._folder_times: dict[str, int] = {}
        self._thread = threading.Thread(target=self._run, name="plait-disk", daemon=True)
        self._thread.start()

    # The engine's thread

    def missing(self, group: int, hashes: Sequence[bytes]) -> set[bytes]:
        """The blocks that are neither on the disk nor on their way there. For the others this is a use."""
        with self._lock:
            known, coming = self._index.blocks[group], self._coming
            for file in {known[one] for one in hashes if one in known}:
                self._use(file)
            return {one for one in hashes if one not in known and (group, one) not in coming}

    def has_snapshot(self, parent: bytes, rest: tuple[int, ...]) -> bool:
        """Whether the snapshot at this place is on the disk, which is a use, or on its way there."""
        with self._lock:
            if (file := self._index.snapshot(parent, rest)) is not None:
                self._use(file)
            return file is not None or (parent, rest) in self._coming

    def block(self, group: int, chain_hash: bytes) -> DiskFile | None:
        """The file that has a block."""
        return self._index.blocks[group].get(chain_hash)  # one operation, so no lock

    def snapshots(self, parent: bytes) -> Sequence[tuple[tuple[int, ...], DiskFile]]:
        """(tokens behind the parent, file) of every snapshot on the disk there, the longest first."""
        with self._lock:
            return tuple(self._index.snapshots(parent))

    def offer(self, names: DiskNames) -> int | None:
        """A handle below 0, to `write` a copy with these names as; None: it cannot be taken now."""
        nbytes = names.nbytes(self.layout)
        with self._lock:
            is_full = self._queued and self._queued + nbytes > QUEUE_NBYTES
            if (is_large := nbytes > self.limit) or is_full or self._closing or self.clock() < self._retry_at:
                self.counts["dropped"] += 1
                if is_large:
                    text = f"{nbytes} bytes of a prefix are above --cache-disk-limit, {self.limit}; raise it"
                    self._warn("large", text)
                return None
            self._queued += nbytes
            self._last -= 1
            self._offers[self._last] = names
            self._coming.update(keys_of(names))
            return self._last

    def write(self, handle: int, saved: SavedState) -> None:
        """Hand over the copy that was offered. One that was withdrawn is ignored."""
        with self._lock:
            if (names := self._offers.pop(handle, None)) is not None:
                self._writes.append((names, saved))
                self._lock.notify_all()

    def withdraw(self) -> None:
        """Forget every offer without a copy: the step failed before which the copy was to be made."""
        with self._lock:
            for names in self._offers.values():
                self._settle(names)
            self._offers.clear()

    def read(self, file: DiskFile, rows: Rows, *, is_ahead: bool = False) -> DiskRead | None:
        """Begin to read these rows of a file's blocks, or its snapshot. None: too much is being read.

        `is_ahead`: for a prompt with others before it; it takes half of the memory at most.
        """
        assert file.names is not None
        most = QUEUE_NBYTES // 2 if is_ahead else QUEUE_NBYTES
        with self._lock:
            if self._reading and self._reading + file.nbytes > most:
                return None
            self._reading += file.nbytes
            self._last -= 1
            read = self._open[self._last] = DiskRead(self._last, file, file.names, rows)
            (self._ahead if is_ahead else self._reads).append(read)
            self._use(file)
            self._lock.notify_all()
            return read

    def get(self, handle: int) -> SavedState | None:
        """What was read as this handle."""
        read = self._open.get(handle)
        return read.saved if read else None

    def drop(self, handle: int) -> None:
        """Free what was read, or give the read up."""
        with self._lock:
            if (read := self._open.pop(handle, None)) is not None:
                self._reading -= read.file.nbytes
                read.saved = None

    def stats(self) -> Mapping[str, int]:
        """Bytes and files on the disk, and what has happened, by event."""
        events = {f"num_disk_{event}": self.counts[event] for event in EVENTS}
        return {"disk_nbytes": self._index.nbytes, "disk_files": len(self._index), **events}

    def close(self, timeout_s: float = 5.0) -> None:
        """Write what is queued, for so long at most, and end the thread. May be called twice."""
        with self._lock:
            self._closing = True
            self._lock.notify_all()
        self._thread.join(timeout_s)

    def _use(self, file: DiskFile) -> None:
        self._index.touch(file)
        if (now := self.clock()) - file.used > USED_S:
            file.used = now
            self._used.add(file)

    def _settle(self, names: DiskNames) -> None:
        """An offer is over: it is in the index, or will not be."""
        self._queued -= names.nbytes(self.layout)
        self._coming.difference_update(keys_of(names))

    # The disk's thread

    def _run(self) -> None:
        self._scan()
        self.is_scanning = False
        self._make_space(0)
        while self._serve(wait=True):
            if self.clock() >= self._rescan_at:
                self._rescan_at = self.clock() + RESCAN_S
                self._rescan()

    def _serve(self, *, wait: bool) -> bool:
        """Do all that is waiting, reads first; with `wait`, wait for it, or for the next rescan.

        False: the cache was closed.
        """
        while True:
            with self._lock:
                if wait and not self._has_work():
                    self._lock.wait(self._wait_s())
                reads = self._reads or self._ahead
                read = reads.popleft() if reads else None
                written = self._writes.popleft() if not read and self._may_write() else None
                used = {*self._used} if not read and not written else set()
                self._used -= used
            if read:
                self._read(read)
            elif written:
                self._write(*written)
            elif used:
                self._mark_used(used)
            else:
                return not self._closing

    def _has_work(self) -> bool:
        return bool(self._reads or self._ahead or self._used or self._closing or self._may_write())

    def _may_write(self) -> bool:
        """Whether a copy waits, and the bandwidth allows to write it now. At the end it always does."""
        return bool(self._writes) and (self._closing or self.clock() >= self._write_at)

    def _wait_s(self) -> float:
        now = self.clock()
        due = [self._rescan_at, *([self._write_at] if self._writes else [])]
        return min(max(min(due) - now, MIN_WAIT_S), RESCAN_S)

    def _mark_used(self, used: set[DiskFile]) -> None:
        for file in used:
            with suppress(OSError):
                os.utime(file.path)
                file.changed = time.time()

    def _read(self, read: DiskRead) -> None:
        if read.handle not in self._open:
            return
        saved, file = None, read.file
        try:
            saved = read_content(file.path, self.fingerprint, read.names, self.layout)
            saved = saved if read.names.parent else self.layout.pick(saved, read.rows)
            self.counts["read"] += 1
        except FileNotFoundError:
            self.counts["gone"] += 1
        except BadFile as error:
            self._lose(file.path, error)
        except Exception as error:  # no error of a disk, or of memory, may end the thread
            self.counts["failed"] += 1
            self._warn("file", f"{file.path} cannot be read ({error})")
        with self._lock:
            if saved is None:
                self._index.remove(file)
                read.has_failed = True
            elif read.handle in self._open:
                read.saved = saved

    def _write(self, names: DiskNames, saved: SavedState) -> None:
        path, file = self.folder / names.file_name, None
        try:
            if self.clock() < self._retry_at:
                self.counts["dropped"] += 1
                return
            if not self._make_space(saved.content.nbytes):
                raise PermissionError("files that were used least recently cannot be removed")
            self._make_folder()
            nbytes = write_content(path, self.fingerprint, names, saved.content)
            if self.bandwidth is not None:
                self._write_at = max(self._write_at, self.clock()) + nbytes / self.bandwidth
            file = DiskFile(path, nbytes, names, self.clock(), time.time())
            self.counts["written"] += 1
        except Exception as error:  # as above
            self.counts["failed"] += 1
            self._retry_at = self.clock() + RETRY_S
            text = f"{self.folder} cannot be written ({error}); serving goes on, and it is tried again"
            self._warn("folder", text)
            if not self.folder.exists():
                with self._lock:
                    self._index.clear()
        finally:
            with self._lock:
                if file is not None:
                    self._index.add(file)
                self._settle(names)
            self._make_space(0)  # the header counts, too

    def _make_folder(self) -> None:
        with suppress(FileExistsError):
            os.mkdir(self.folder, 0o700)
        if refused := why_refused(self.folder):
            raise PermissionError(refused)

    def _make_space(self, nbytes: int) -> bool:
        """Remove the files that were used least recently, by any server, until so many bytes more are within
        the limit. False: a file cannot be removed, as on a read-only disk; it is still read then."""
        while True:
            with self._lock:
                file = self._index.oldest()
                if file is None or self._index.nbytes + nbytes <= self.limit:
                    return True
            changed = scan.last_use(file.path)
            with self._lock:
                if changed is not None and changed > file.changed + USED_S / 2:
                    file.changed = changed
                    self._index.touch(file)
                    continue
                self._index.remove(file)
            if not scan.try_remove(file.path):
                with self._lock:
                    self._index.add(file, is_newest=False)
                return False
            self.counts["evicted"] += 1

    def _scan(self) -> None:
        """Find the files of all models, the newest first; those of this one are known by their headers."""
        try:
            self._folder_times = scan.read_folder_times(self.folder.parent)
            files = sorted(scan.list_files(self.folder.parent), reverse=True)
            if self.limit == sys.maxsize:
                self.limit = scan.share_of_free(self.folder.parent, files)
            self._add_files(files, is_newest=False)
        except OSError as error:  # what was found so far counts
            self._warn("folder", f"{self.folder.parent} cannot be searched ({error})")
        except Exception:
            log.exception("disk cache: the files of %s were not all found", self.folder)

    def _rescan(self) -> None:
        """Find what other servers have written or removed since the last look, if a folder has changed."""
        try:
            times = scan.read_folder_times(self.folder.parent)
            if times == self._folder_times:
                return
            files = sorted(scan.list_files(self.folder.parent))
            there = {file.path for file in files}
            with self._lock:
                for gone in self._index.paths() - there:
                    self._index.forget(gone)
            if self.limit == sys.maxsize:  # the first look found no folder
                self.limit = scan.share_of_free(self.folder.parent, files)
            self._add_files(files, is_newest=True)
            self._folder_times = times
            self._make_space(0)
        except Exception as error:  # the thread goes on
            self._warn("folder", f"{self.folder.parent} cannot be searched ({error})")

    def _add_files(self, files: Sequence[scan.FoundFile], *, is_newest: bool) -> None:
        """Add the files that are not known yet, in this order, and serve what waits meanwhile."""
        for found in files:
            changed, path, nbytes = found
            names = None
            if path in self._index:
                continue
            try:
                if path.suffix == UNFINISHED:
                    if time.time() - changed > ABANDONED_S:
                        path.unlink()
                    continue
                if path.parent == self.folder:
                    names, nbytes = read_names(path, self.fingerprint, self.layout)
            except BadFile as error:
                self._lose(path, error)
                continue
            except OSError:
                continue
            with self._lock:
                if path not in self._index:
                    self._index.add(DiskFile(path, nbytes, names, changed=changed), is_newest=is_newest)
            self._serve(wait=False)
            if self._closing:
                return

    def _lose(self, path: Path, error: BadFile) -> None:
        """Remove a file that is not as it was written."""
        self.counts["damaged"] += 1
        self._warn("damaged", f"{path} is not used: {error}")
        scan.try_remove(path)

    def _warn(self, kind: str, text: str) -> None:
        """Log the first fault of each kind: a damaged file must not hide a disk that fills up later."""
        if kind not in self._warned:
            self._warned.add(kind)
            log.warning("disk cache: %s. Further such faults are counted in /metrics only", text)
