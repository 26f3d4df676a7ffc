"""Gives back what a startup needed and no step needs: most code of a library runs while it is loaded."""

from __future__ import annotations

import ctypes
import mmap
import re
from collections.abc import Iterator
from pathlib import Path

MAPPINGS = Path("/proc/self/smaps")
CODE = re.compile(
    r"^(?P<start>[0-9a-f]+)-(?P<stop>[0-9a-f]+) r-xp \S+ \S+ \d+ +/.*\n"
    r"(?:[A-Z][A-Za-z_]*: .*\n)*?Anonymous: +(?P<written>\d+) kB\n"
    r"(?:[A-Z][A-Za-z_]*: .*\n)*?Swap: +(?P<swapped>\d+) kB$",
    re.MULTILINE,
)


def release_code() -> None:
    """Leave the code of libraries to the page cache: most of it ran for imports alone.

    What runs again is mapped again, a page at a time. A mapping with a page that was written is left alone.
    """
    try:
        smaps = MAPPINGS.read_text(errors="replace")
    except OSError:  # not every system has it
        return
    advise = ctypes.CDLL(None, use_errno=True).madvise
    advise.argtypes = [ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int]
    for start, stop in list_code(smaps):
        advise(start, stop - start, mmap.MADV_DONTNEED)  # a refusal costs nothing but the memory


def list_code(smaps: str) -> Iterator[tuple[int, int]]:
    """(start, stop) of every mapping of a file's code of which no page was written. `smaps`: the text."""
    for found in CODE.finditer(smaps):
        if not int(found["written"]) + int(found["swapped"]):
            yield int(found["start"], 16), int(found["stop"], 16)
