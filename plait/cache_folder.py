"""The folder under which everything is kept that can be made again: `--cache-dir`, or the user's own."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

NO_HOME = "this user has no home folder; name a folder with --cache-dir"


def cache_base(cache_dir: str | Path | None) -> Path | None:
    """Where compiled kernels, packed weights and findings lie; None: none is named, and no home known."""
    if cache_dir:
        return Path(cache_dir)
    try:
        return Path.home() / ".cache" / "plait"
    except RuntimeError:
        return None


def nearest_folder(path: Path) -> Path:
    """The path if it is a folder, or the nearest one above it that is there, and may be seen."""
    path = path.absolute()
    return next(one for one in (path, *path.parents) if os.path.isdir(one))


def make_folder(path: Path) -> None:
    """Make it with all above it, so that only its owner may write, whatever the umask. Raises OSError.

    Compiled kernels are code: they are not read from a folder that others may write.
    """
    missing = [one for one in (path, *path.parents) if not os.path.isdir(one)]
    for one in reversed(missing):
        with suppress(FileExistsError):  # another process was first; a file is found when it is written to
            os.mkdir(one, 0o755)
