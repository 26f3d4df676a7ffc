"""What the system reports about processes that it killed because memory was short."""

from __future__ import annotations

import re
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

GROUPS = Path("/sys/fs/cgroup")
PROC = Path("/proc")
_KILLS = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)


def num_killed() -> int | None:
    """The number of such processes, of this control group or else of the machine. None: not reported."""
    for file in (*_group_files(), PROC / "vmstat"):
        if found := _KILLS.search(_text(file)):
            return int(found[1])
    return None


def peak_of_children() -> int:
    """Bytes of memory that the largest child that has ended had at most."""
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    return peak if sys.platform == "darwin" else peak << 10


def _group_files() -> Iterator[Path]:
    """Where versions 1 and 2 count them; inside a container the group may be mounted as the root."""
    for line in _text(PROC / "self" / "cgroup").splitlines():
        _, kinds, path = line.split(":", 2)
        if "memory" in kinds.split(","):
            yield from (GROUPS / "memory" / p / "memory.oom_control" for p in (path.strip("/"), ""))
        elif not kinds:
            yield from (GROUPS / p / "memory.events" for p in (path.strip("/"), ""))


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
