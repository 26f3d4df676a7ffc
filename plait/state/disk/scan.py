"""List the files of a disk cache's folder, whichever server wrote them, and notice when some come or go."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from plait.state.disk.file_format import SUFFIX, UNFINISHED

FREE_SHARE = 0.1  # of the disk space that is free
FINGERPRINT = re.compile(r"[0-9a-f]{32}")  # names of the folders that are ours


class FoundFile(NamedTuple):
    """A file: seconds since 1970 of its last use, path, bytes."""

    changed: float
    path: Path
    nbytes: int


def list_files(root: Path) -> Iterator[FoundFile]:
    """Every file of every model, finished or not."""
    for folder in _list_models(root):
        for entry in _list_entries(Path(folder.path)):
            with suppress(OSError):
                status = entry.stat(follow_symlinks=False)
                if entry.name.endswith((SUFFIX, UNFINISHED)):
                    yield FoundFile(status.st_mtime, Path(entry.path), status.st_size)


def read_folder_times(root: Path) -> dict[str, int]:
    """When each model's folder changed last: a file that comes or goes changes its folder's time."""
    found = {}
    for folder in _list_models(root):
        with suppress(OSError):
            found[folder.name] = folder.stat(follow_symlinks=False).st_mtime_ns
    return found


def share_of_free(root: Path, files: Iterable[FoundFile]) -> int:
    """Bytes for all files, where no limit is given: a tenth of what is free without them. Raises OSError."""
    return int((shutil.disk_usage(root).free + sum(file.nbytes for file in files)) * FREE_SHARE)


def last_use(path: Path) -> float | None:
    """Seconds since 1970 of a file's last use, by whichever server; None: it is gone."""
    try:
        return path.stat(follow_symlinks=False).st_mtime
    except OSError:
        return None


def try_remove(path: Path) -> bool:
    """Remove a file, if it is there. False: it cannot be removed, as on a read-only disk."""
    try:
        path.unlink(missing_ok=True)
    except OSError:
        return False
    return True


def _list_models(root: Path) -> list[os.DirEntry[str]]:
    found = [one for one in _list_entries(root) if FINGERPRINT.fullmatch(one.name)]
    return [one for one in found if _is_folder(one)]


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir(follow_symlinks=False)
    except OSError:
        return False


def _list_entries(folder: Path) -> list[os.DirEntry[str]]:
    """What is in a folder; nothing where it cannot be read."""
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError:
        return []
