"""Files from outside: mapped if they are regular; JSON only if it is plain, small and not too deep."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import stat
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from plait.errors import BadFile

# Without waiting for a pipe's other end; not every system has every flag.
_FLAGS = os.O_RDONLY | sum(getattr(os, flag, 0) for flag in ("O_CLOEXEC", "O_NONBLOCK", "O_BINARY"))
_MAX_JSON_BYTES = 64 << 20
POINTER, _POINTER_BYTES = b"version https://", 1024  # how a pointer of Git LFS begins, and its largest size
_MAX_DEPTH = 64
_MAX_DIGITS = 20  # of an integer: more does not fit in 64 bits


LARGE_PAGE = 2 << 20  # bytes
_MAP_FIXED = 0x10  # of Linux; Python has no name for it
_mapped: weakref.WeakKeyDictionary[mmap.mmap, tuple[Path, int, int]] = weakref.WeakKeyDictionary()
_broken: list[mmap.mmap] = []  # places that may have holes: others may have got those


def map_file(path: Path) -> mmap.mmap:
    """The bytes of a regular file, mapped copy-on-write: tensors may view them, the file never changes.

    The mapping lives as long as a tensor that views it. Raises BadFile when there is nothing to map.
    """
    with _open_to_map(path) as (descriptor, nbytes):
        mapped = mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY)
        _mapped[mapped] = path, _address_of(mapped), nbytes
        return mapped


def map_in_large_pages(path: Path) -> memoryview:
    """As `map_file`, for a file of which all will be read: in pages of 2 MiB, if the system has it in such.

    Where the system refuses, or has the file in small pages, the mapping is like any other.
    """
    with _open_to_map(path) as (descriptor, nbytes):
        if nbytes >= LARGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError, ValueError):
                place, at = _map_aligned(descriptor, nbytes)
                _mapped[place] = path, _address_of(place) + at, nbytes
                return memoryview(place)[at : at + nbytes]
    return memoryview(map_file(path))


@contextmanager
def _open_to_map(path: Path) -> Iterator[tuple[int, int]]:
    """The descriptor and the bytes of a file that is mapped meanwhile."""
    descriptor = _open_regular(path)
    try:
        if (nbytes := os.fstat(descriptor).st_size) == 0:
            raise BadFile(f"{path}: the file is empty")
        yield descriptor, nbytes
    except (OSError, ValueError) as error:
        raise BadFile(f"{path}: cannot be mapped into memory: {error}") from error
    finally:
        os.close(descriptor)


def _map_aligned(descriptor: int, nbytes: int) -> tuple[mmap.mmap, int]:
    """A place in memory, and where in it the file is: there a large page may begin. Raises OSError.

    A system that chooses the address itself may choose any. So the file takes the place of memory that is
    a large page longer.
    """
    place = mmap.mmap(-1, nbytes + LARGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    start = _address_of(place)
    at = -start % LARGE_PAGE
    call = ctypes.CDLL(None, use_errno=True).mmap
    call.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *3 * (ctypes.c_int,), ctypes.c_long)
    call.restype = ctypes.c_void_p
    flags = mmap.MAP_PRIVATE | _MAP_FIXED
    if call(start + at, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, descriptor, 0) != start + at:
        _broken.append(place)
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    with suppress(OSError):
        place.madvise(mmap.MADV_HUGEPAGE, at, nbytes)
    return place, at


def _address_of(mapped: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(mapped))


def list_mapped() -> list[tuple[Path, int, int]]:
    """Every file that is mapped: its path, the address of its first byte, and its bytes."""
    return [
        (path.resolve(), address, nbytes)
        for mapped, (path, address, nbytes) in list(_mapped.items())
        if not mapped.closed
    ]


def read_stamp(path: Path) -> tuple[int, int]:
    """What changes when a file is replaced or written to: its size and time. Raises BadFile.

    Not its inode: some network file systems give a file another one from time to time.
    """
    try:
        status = os.stat(path)
    except OSError as error:
        raise BadFile(f"{path}: cannot be opened: {error.strerror}") from error
    return status.st_size, status.st_mtime_ns


def check_stamp(path: Path, stamp: tuple[int, int]) -> None:
    """Raises BadFile if the file is not the one any more of which that was the stamp."""
    if read_stamp(path) != stamp:
        raise BadFile(f"{path}: has been replaced or written to since it was opened; load the model again")


def read_start(path: Path, nbytes: int) -> bytes:
    """The first bytes of a regular file, fewer if it is shorter. Raises BadFile."""
    descriptor = _open_regular(path)
    try:
        return os.read(descriptor, nbytes)
    except OSError as error:
        raise BadFile(f"{path}: cannot be read: {error.strerror}") from error
    finally:
        os.close(descriptor)


def refuse_pointers(paths: Iterable[Path]) -> None:
    """Raises BadFile for a file that a clone without Git LFS leaves in place of a large one."""
    for path in paths:
        is_small = path.is_file() and path.stat().st_size < _POINTER_BYTES
        if is_small and read_start(path, len(POINTER)) == POINTER:
            text = "is a Git LFS pointer, not the file itself; run `git lfs pull` in its directory"
            raise BadFile(f"{path}: {text}")


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
