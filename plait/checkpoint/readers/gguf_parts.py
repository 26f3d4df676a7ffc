"""The names of the parts of a split GGUF model."""

from __future__ import annotations

import re
from pathlib import Path

_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


def part_paths(path: Path) -> list[Path]:
    """Every part of the split model that a file's name belongs to; [path] for any other name."""
    match = _PART.fullmatch(path.name)
    if not match:
        return [path]
    stem, count = match["stem"], int(match["count"])
    return [path.with_name(f"{stem}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1)]
