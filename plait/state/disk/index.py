"""Which blocks and snapshots are on the disk, in which file, and which file was used last. Opens no file."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct

from plait.state.disk.file_format import DiskNames
from plait.state.host_store import SavedState

Rows = tuple[tuple[int, ...], ...]  # of the blocks in a file, by group
# Of a block: its group and hash; of a snapshot: its place.
Key = tuple[int, bytes] | tuple[bytes, tuple[int, ...]]


class DiskFile(Struct, eq=False):
    """A file. `names` None: it is of another model, and its bytes count. `used`: when its time was set.

    `changed`: its time as it was known last, in seconds since 1970.
    """

    path: Path
    nbytes: int
    names: DiskNames | None
    used: float = 0.0
    changed: float = 0.0


class DiskRead(Struct, eq=False):
    """A file that is being read: `rows` of its blocks, by group, or its snapshot. `saved`: what was read."""

    handle: int
    file: DiskFile
    names: DiskNames
    rows: Rows
    saved: SavedState | None = None
    has_failed: bool = False


class DiskIndex:
    """Maps names to files. Not safe for threads: `DiskCache` has the lock."""

    def __init__(self, num_groups: int) -> None:
        self.nbytes = 0
        self.blocks: list[dict[bytes, DiskFile]] = [{} for _ in range(num_groups)]  # by group: hash -> file
        # Of the same blocks, further files: servers that share a folder cut one prefix in different ways.
        self._others: list[dict[bytes, list[DiskFile]]] = [{} for _ in range(num_groups)]
        self._snapshots: dict[bytes, dict[tuple[int, ...], DiskFile]] = {}  # parent -> rest -> file
        self._files: OrderedDict[Path, DiskFile] = OrderedDict()  # least recently used first

    def __len__(self) -> int:
        return len(self._files)

    def __contains__(self, path: Path) -> bool:
        return path in self._files

    def add(self, file: DiskFile, *, is_newest: bool = True) -> None:
        """Add a file, in place of one with its path. `is_newest` False: all others were used after it."""
        if (known := self._files.get(file.path)) is not None:
            self.remove(known)
        self._files[file.path] = file
        self._files.move_to_end(file.path, last=is_newest)
        self.nbytes += file.nbytes
        if file.names is None:
            return
        for blocks, others, hashes in zip(self.blocks, self._others, file.names.blocks, strict=False):
            for chain_hash in hashes:
                if blocks.setdefault(chain_hash, file) is not file:
                    others.setdefault(chain_hash, []).append(file)
        if file.names.parent:
            self._snapshots.setdefault(file.names.parent, {})[file.names.rest] = file

    def remove(self, file: DiskFile) -> None:
        """Remove a file that is gone, or about to be. One that is not there is left alone."""
        if self._files.get(file.path) is not file:
            return
        del self._files[file.path]
        self.nbytes -= file.nbytes
        if file.names is None:
            return
        for known, others, hashes in zip(self.blocks, self._others, file.names.blocks, strict=False):
            for chain_hash in hashes:
                left = [one for one in others.pop(chain_hash, []) if one is not file]
                if known.get(chain_hash) is file:
                    del known[chain_hash]
                    if left:
                        known[chain_hash] = left.pop(0)
                if left:
                    others[chain_hash] = left
        places = self._snapshots.get(file.names.parent, {})
        if places.pop(file.names.rest, None) and not places:
            del self._snapshots[file.names.parent]

    def paths(self) -> set[Path]:
        """Every file's path."""
        return {*self._files}

    def forget(self, path: Path) -> None:
        """Remove the file with this path, if there is one."""
        if (file := self._files.get(path)) is not None:
            self.remove(file)

    def clear(self) -> None:
        """Forget all files."""
        for file in [*self._files.values()]:
            self.remove(file)

    def snapshot(self, parent: bytes, rest: tuple[int, ...]) -> DiskFile | None:
        """The file with the snapshot at exactly this place."""
        return self._snapshots.get(parent, {}).get(rest)

    def snapshots(self, parent: bytes) -> Iterator[tuple[tuple[int, ...], DiskFile]]:
        """(tokens behind the parent, file) of every snapshot there, the longest first."""
        yield from sorted(self._snapshots.get(parent, {}).items(), key=lambda item: -len(item[0]))

    def touch(self, file: DiskFile) -> None:
        """Mark a file as recently used: it is evicted last."""
        if self._files.get(file.path) is file:
            self._files.move_to_end(file.path)

    def oldest(self) -> DiskFile | None:
        """The file that was used least recently."""
        return next(iter(self._files.values()), None)


def keys_of(names: DiskNames) -> list[Key]:
    """The keys of what a file with these names has."""
    if names.parent:
        return [(names.parent, names.rest)]
    return [(group, one) for group, hashes in enumerate(names.blocks) for one in hashes]
