"""The log of servers that `plait run` starts: one file of its user, of bounded size."""

from __future__ import annotations

import os
from pathlib import Path

MAX_BYTES = 8 << 20  # a longer one is put aside by the next server, and the one put aside before is removed
TAIL_BYTES = 1 << 20  # the most of a file's end that is read at once


def log_path() -> Path:
    """Where it is; the file may be absent."""
    base = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(base).expanduser() / "plait" / "serve.log"


def prepare_log() -> Path:
    """The file, made if it is absent, for its user alone. Raises OSError."""
    path = log_path()
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    if path.exists() and path.stat().st_size > MAX_BYTES:
        path.replace(path.with_suffix(".log.1"))
    path.touch(mode=0o600)
    return path


def last_lines(path: Path, count: int, *, begin: int = 0) -> list[str]:
    """The last lines of a file, at most so many, of what stands from byte `begin` on. Raises OSError."""
    with path.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        start = max(begin, end - TAIL_BYTES)
        file.seek(start)
        text = file.read(TAIL_BYTES).decode("utf-8", "replace")
    lines = text.splitlines()
    if start > begin:
        lines = lines[1:]  # the first may be the end of a line
    return lines[-count:] if count else []
