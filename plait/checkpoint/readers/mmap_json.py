"""Files from outside: mapped if they are regular; JSON only if it is plain, small and not too deep."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import stat
import weakref
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from plait.errors import BadFile

# Without waiting for a pipe's other end; not every system has every flag.
_FLAGS = os.O_RDONLY | sum(getattr(os, flag, 0) for flag in ("O_CLOEXEC", "O_NONBLOCK", "O_BINARY"))
_MAX_JSON_BYTES = 64 << 20
_MAX_DEPTH = 64
_MAX_DIGITS = 20  # of an integer: more does not fit in 64 bits


LARGE_PAGE = 2 << 20  # bytes
TRIES = 8  # places at which a file is mapped until it begins where a large page may
_mapped: weakref.WeakKeyDictionary[mmap.mmap, Path] = weakref.WeakKeyDictionary()


def map_file(path: Path, *, in_large_pages: bool = False) -> mmap.mmap:
    """The bytes of a regular file, mapped copy-on-write: tensors may view them, the file never changes.

    The mapping lives as long as a tensor that views it. Raises BadFile when there is nothing to map.
    `in_large_pages`: all of it will be read, in pages of 2 MiB if the system has the file in such pages.
    """
    descriptor = _open_regular(path)
    try:
        if os.fstat(descriptor).st_size == 0:
            raise BadFile(f"{path}: the file is empty")
        mapped = _map_large(descriptor) if in_large_pages else _map(descriptor)
        _mapped[mapped] = path
        return mapped
    except (OSError, ValueError) as error:
        raise BadFile(f"{path}: cannot be mapped into memory: {error}") from error
    finally:
        os.close(descriptor)


def _map(descriptor: int) -> mmap.mmap:
    return mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY)


def _map_large(descriptor: int) -> mmap.mmap:
    """A mapping that begins where a large page may, with large pages requested, before anything is read.

    Most file systems choose such an address, overlays and memory do not. Where the system refuses, or has
    the file in small pages, the mapping is like any other.
    """
    mapped = _map(descriptor)
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return mapped
    nbytes = -(-len(mapped) // mmap.PAGESIZE) * mmap.PAGESIZE
    with ExitStack() as fillers:
        for _ in range(TRIES if nbytes >= LARGE_PAGE else 0):
            if (address := _address_of(mapped)) % LARGE_PAGE == 0:
                break
            mapped.close()
            mapped = _map_below(descriptor, nbytes + (address - nbytes) % LARGE_PAGE)
            if _address_of(mapped) == address:  # a gap that fits the file and not both: fill it, and go on
                with suppress(OSError, ValueError):
                    elsewhere = _map(descriptor)
                    fillers.enter_context(mapped)
                    mapped = elsewhere
    with suppress(OSError):
        mapped.madvise(mmap.MADV_HUGEPAGE)
    return mapped


def _map_below(descriptor: int, nbytes: int) -> mmap.mmap:
    """A mapping of a file where one of that size, which is dropped, pushes it: Linux maps downwards.

    Any that is at least as large as the file takes the place that the file would have had.
    """
    try:
        above = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=mmap.PROT_READ)
    except (OSError, ValueError):  # of a limit on addresses
        return _map(descriptor)
    with above, suppress(OSError, ValueError):  # a limit may allow the file, but not both
        return _map(descriptor)
    return _map(descriptor)


def _address_of(mapped: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(mapped))


def list_mapped() -> list[tuple[Path, int, int]]:
    """Every file that is mapped: its path, the address of its first byte, and its bytes."""
    return [
        (path.resolve(), _address_of(mapped), len(mapped))
        for mapped, path in list(_mapped.items())
        if not mapped.closed
    ]


def read_start(path: Path, nbytes: int) -> bytes:
    """The first bytes of a regular file, fewer if it is shorter. Raises BadFile."""
    descriptor = _open_regular(path)
    try:
        return os.read(descriptor, nbytes)
    except OSError as error:
        raise BadFile(f"{path}: cannot be read: {error.strerror}") from error
    finally:
        os.close(descriptor)


def read_json(path: Path, what: str) -> dict[str, Any]:
    """The object in a JSON file. `what` names the file's part in messages. Raises BadFile."""
    descriptor = _open_regular(path)
    try:
        with os.fdopen(descriptor, "rb") as file:
            raw = file.read(_MAX_JSON_BYTES + 1)
    except OSError as error:
        raise BadFile(f"{path}: cannot be read: {error.strerror}") from error
    if len(raw) > _MAX_JSON_BYTES:
        raise BadFile(f"{path}: {what} is larger than {_MAX_JSON_BYTES >> 20} MiB")
    return parse_json(raw, f"{path}: {what}")


def parse_json(raw: bytes, what: str) -> dict[str, Any]:
    """A JSON object out of bytes: UTF-8 without a byte order mark, no key twice, at most 64 levels deep,
    integers of at most 20 digits. Infinity and NaN are read: published configs have them. Raises BadFile.
    """
    if raw.startswith((b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff")):
        raise BadFile(f"{what} starts with a byte order mark; save it as UTF-8 without one")
    try:
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=_once_each, parse_int=_integer)
    except RecursionError:
        raise BadFile(f"{what} is nested too deeply (at most {_MAX_DEPTH} levels)") from None
    except UnicodeDecodeError as error:
        raise BadFile(f"{what} is not UTF-8 (byte {error.start})") from error
    except ValueError as error:
        raise BadFile(f"{what} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise BadFile(f"{what} must be a JSON object, got {type(value).__name__}")
    if _is_deeper(value, _MAX_DEPTH):
        raise BadFile(f"{what} is nested too deeply (at most {_MAX_DEPTH} levels)")
    return value


def _open_regular(path: Path) -> int:
    """A descriptor of a regular file; pipes and devices are refused without waiting for them."""
    try:
        _check_regular(path, os.stat(path).st_mode)
        descriptor = os.open(path, _FLAGS)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise BadFile(f"{path}: cannot be opened: {reason}") from error
    try:
        _check_regular(path, os.fstat(descriptor).st_mode)  # it may have been replaced in between
    except BadFile:
        os.close(descriptor)
        raise
    return descriptor


def _check_regular(path: Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        kind = "a directory" if stat.S_ISDIR(mode) else "a pipe, socket or device"
        raise BadFile(f"{path}: is {kind}, not a regular file")


def _once_each(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {twice[:80]!r} appears twice")
    return found


def _integer(digits: str) -> int:
    if len(digits) > _MAX_DIGITS:
        raise ValueError(f"an integer of {len(digits)} digits does not fit in 64 bits")
    return int(digits)


def _is_deeper(value: Any, limit: int) -> bool:
    level = [value]
    for _ in range(limit):
        inner = (v.values() if isinstance(v, dict) else v for v in level)
        level = [x for values in inner for x in values if isinstance(x, dict | list)]
        if not level:
            return False
    return True
