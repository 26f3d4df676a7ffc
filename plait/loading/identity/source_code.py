"""Hashes of parts of Plait's own source code."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2]


def hash_code(parts: Iterable[str]) -> str:
    """32 hexadecimal digits of these modules (`memory.py`) and folders (`ops`) of the package, in order."""
    return hashlib.blake2b("".join(map(_hash_part, parts)).encode(), digest_size=16).hexdigest()


@cache
def _hash_part(part: str) -> str:
    """Read once: what a process has imported does not change with the files."""
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted([PACKAGE / part] if part.endswith(".py") else (PACKAGE / part).rglob("*.py")):
        digest.update(path.relative_to(PACKAGE).as_posix().encode() + b"\0")
        digest.update(path.read_bytes())
    return digest.hexdigest()
