"""The folder of packed weights: what is in it, and how it gets rid of it. Knows no tensor."""

from __future__ import annotations

import re
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

SUFFIX, UNFINISHED = ".packed", ".partial"
_ABANDONED_S = 3600  # after which a file that nobody finished is removed
_NAME = re.compile(r"(?P<model>.+)-[0-9a-f]{16}")


@dataclass(frozen=True, slots=True)
class Shelved:
    """The packed weights of a model and one set of options. `made`: seconds since 1970."""

    path: Path
    model: str
    nbytes: int
    made: float


def as_stem(model: str) -> str:
    """A model's name as a part of a file's."""
    return model.replace("/", "--")


def default_folder(cache_dir: str | None) -> Path:
    """Where packed weights are kept: beside compiled kernels."""
    return (Path(cache_dir) if cache_dir else Path.home() / ".cache" / "plait") / "packed"


def shelved(folder: Path) -> list[Shelved]:
    """Everything that is kept in a folder, by name."""
    found = []
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        match = _NAME.fullmatch(path.stem)
        with suppress(OSError):
            status = path.stat()
            found.append(
                Shelved(path, match["model"] if match else path.stem, status.st_size, status.st_mtime)
            )
    return found


def clear(folder: Path, model: str | None = None) -> int:
    """Remove the packed weights of a model, or all; the bytes they took. Who has them mapped keeps them.

    model: its name, its path or its Hub id. Raises OSError for what cannot be removed.
    """
    freed = 0
    names = () if model is None else map(as_stem, (model, Path(model).name, Path(model).stem))
    wanted = set(names)
    for item in shelved(folder):
        if model is None or item.model in wanted:
            item.path.unlink()
            freed += item.nbytes
    drop_unfinished(folder)
    return freed


def drop_unfinished(folder: Path) -> None:
    """Remove what a process began to write, and ended."""
    for path in folder.glob(f"*{UNFINISHED}"):
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > _ABANDONED_S:
                path.unlink()
