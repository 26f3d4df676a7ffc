"""Gives back what a startup needed and no step needs: most of a library is read while it is loaded."""

from __future__ import annotations

import ctypes
import mmap
import re
from collections.abc import Iterator
from pathlib import Path

MAPPINGS = Path("/proc/self/smaps")
READ_ONLY = re.compile(
    r"^(?P<start>[0-9a-f]+)-(?P<stop>[0-9a-f]+) r-[-x]p \S+ \S+ \d+ +/.*\n"
    r"(?:[A-Z][A-Za-z_]*: .*\n)*?Anonymous: +(?P<written>\d+) kB\n"
    r"(?:[A-Z][A-Za-z_]*: .*\n)*?Swap: +(?P<swapped>\d+) kB$",
    re.MULTILINE,
)


def release_libraries() -> None:
    """Leave code and constants of libraries to the page cache: most of them were read for imports alone.

    What is read again is mapped again, some pages at a time. A mapping with a page that was written is left
    alone.
    """
    try:
        smaps = MAPPINGS.read_text(errors="replace")
    except OSError:  # not every system has it
        return
    advise = ctypes.CDLL(None, use_errno=True).madvise
    advise.argtypes = [ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int]
    for start, stop in list_read_only(smaps):
        advise(start, stop - start, mmap.MADV_DONTNEED)  # a refusal costs nothing but the memory


def list_read_only(smaps: str) -> Iterator[tuple[int, int]]:
    """(start, stop) of every read-only mapping of a file of which no page was written. `smaps`: the text."""
    for found in READ_ONLY.finditer(smaps):
        if not int(found["written"]) + int(found["swapped"]):
            yield int(found["start"], 16), int(found["stop"], 16)
