"""Packed weights as files: their format, and the folder they are in. Knows no tensor.

A file holds the packed weights of one model as kernels keep them:

    magic (8 bytes), length of the header (8), its BLAKE2b (32) | header (JSON) | zeros | tiles

The header has a key, which says of what and how the tiles were made; a file with another key is never used.
Tiles lie at multiples of 64 bytes from a page's start; the header has a checksum of each. A file is written
under another name, and gets its own when all of it is on the disk. It is written and mapped in such a way
that the system can have it in pages of 2 MiB, which save processors the look-ups of small ones.
"""

from __future__ import annotations

import errno
import hashlib
import mmap
import os
import re
import secrets
import struct
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from msgspec import Struct

from plait.cache_folder import cache_base
from plait.checkpoint.readers.mmap_json import LARGE_PAGE, map_file, parse_json
from plait.errors import BadFile

MAGIC = b"plaitpk1"
SUFFIX, UNFINISHED = ".packed", ".partial"
LINE = 64  # bytes that tiles begin at a multiple of
_START = struct.Struct("<8sQ32s")
_PAGE = 4096
_PIECE = LARGE_PAGE  # of a write: a system that keeps files in large pages takes their sizes from writes
_ABANDONED_S = 3600  # after which an unfinished file is removed
_FIELDS = {"key": dict, "source": str, "nbytes": int, "maps": dict}
_NAME_BYTES = 160
_NAME = re.compile(r"(?P<model>.+)-[0-9a-f]{16}")


class Header(Struct, frozen=True):
    """What a file says of itself. `source`: the model's file; `start`: where tiles begin."""

    key: Mapping[str, object]
    source: str
    maps: Mapping[str, object]  # by our name: its parts, and what encoding them counted
    start: int


class Shelved(Struct, frozen=True):
    """The packed weights of a model and one set of options. `made`: seconds since 1970."""

    path: Path
    model: str
    nbytes: int
    made: float


def as_stem(model: str) -> str:
    """A model's name as a part of a file's, which systems bound."""
    return model.replace("/", "--").encode(errors="replace")[:_NAME_BYTES].decode(errors="ignore")


def default_folder(cache_dir: str | None) -> Path | None:
    """Where packed weights are kept: next to compiled kernels; None: as `cache_base`."""
    base = cache_base(cache_dir)
    return base / "packed" if base is not None else None


def list_packed(folder: Path | None) -> list[Shelved]:
    """Everything that is kept in a folder, by name; nothing where it is not there, or not ours to read."""
    found = []
    for path in _files(folder, SUFFIX):
        match = _NAME.fullmatch(path.stem)
        with suppress(OSError):
            status = path.stat()
            found.append(
                Shelved(path, match["model"] if match else path.stem, status.st_size, status.st_mtime)
            )
    return found


def is_folder(path: Path) -> bool:
    """Whether it is a folder that can be looked into."""
    return os.path.isdir(path) and os.access(path, os.R_OK | os.X_OK)


def _files(folder: Path | None, suffix: str) -> list[Path]:
    return sorted(folder.glob(f"*{suffix}")) if folder is not None and is_folder(folder) else []


def clear(folder: Path, model: str | None = None) -> int:
    """Remove the packed weights of a model, or all; the bytes they took.

    Processes that have them mapped keep them.

    model: its name, its path or its Hub id. Raises OSError for what cannot be removed.
    """
    freed = 0
    names = () if model is None else map(as_stem, (model, Path(model).name, Path(model).stem))
    wanted = set(names)
    for item in list_packed(folder):
        if model is None or item.model in wanted:
            item.path.unlink(missing_ok=True)  # another process may clear it, too
            freed += item.nbytes
    drop_unfinished(folder)
    return freed


def drop_unfinished(folder: Path) -> None:
    """Remove what a process began to write, and ended."""
    for path in _files(folder, UNFINISHED):
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > _ABANDONED_S:
                path.unlink()


def whole(nbytes: int) -> int:
    """That many bytes, filled up to whole lines."""
    return -(-nbytes // LINE) * LINE


def encode_header(header: bytes) -> bytes:
    """The bytes of a file before its tiles: the header, filled up to whole pages."""
    raw = _START.pack(MAGIC, len(header), hashlib.blake2b(header, digest_size=32).digest()) + header
    return raw + bytes(-len(raw) % _PAGE)


def write_whole(
    path: Path, first: bytes, blocks: Sequence[memoryview], nbytes: int, mode: int = 0o644
) -> int:
    """A file with all of that or, if something fails, none. Raises OSError. mode: before the umask."""
    drop_unfinished(path.parent)
    name = path.with_name(f"{secrets.token_hex(8)}{UNFINISHED}")
    descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), mode)
    try:
        with os.fdopen(descriptor, "wb", _PIECE) as file:
            _reserve(file.fileno(), len(first) + nbytes)
            for piece in _cut([memoryview(first), *blocks]):
                file.write(piece)  # into the buffer, which is written when it is full: never a part of it
            file.flush()
            os.fsync(file.fileno())
        name.replace(path)
    except BaseException:
        with suppress(OSError):
            name.unlink()
        raise
    return len(first) + nbytes


def _cut(blocks: Iterable[memoryview]) -> Iterator[memoryview]:
    """The bytes of blocks, filled up to whole lines, in parts that cross no multiple of a piece."""
    at = 0
    for block in blocks:
        for part in (block.cast("B"), memoryview(bytes(whole(block.nbytes) - block.nbytes))):
            start = 0
            while start < part.nbytes:
                stop = min(start + _PIECE - at % _PIECE, part.nbytes)
                yield part[start:stop]
                start, at = stop, at + stop - start


def _reserve(descriptor: int, nbytes: int) -> None:
    """Reserve the disk space, so that a full disk fails at once with OSError. Not every file system can."""
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(descriptor, 0, nbytes)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                raise


def read_header(mapped: mmap.mmap | memoryview | bytes, path: Path) -> Header:
    """The header of a file of packed weights. Raises BadFile for what is damaged, cut or something else."""
    if len(mapped) < _START.size:
        raise BadFile("the file is cut off")
    magic, length, digest = _START.unpack(mapped[: _START.size])
    if magic != MAGIC:
        raise BadFile("it is not one of Plait's, or of another version")
    raw = bytes(mapped[_START.size : _START.size + length])
    if len(raw) != length or hashlib.blake2b(raw, digest_size=32).digest() != digest:
        raise BadFile("its header is damaged")
    found = parse_json(raw, f"{path}: header")
    start = len(encode_header(raw))
    if {name: type(found.get(name)) for name in _FIELDS} != _FIELDS:
        raise BadFile("its header is not one of Plait's")
    if len(mapped) != start + found["nbytes"]:
        raise BadFile("the file is cut off")
    return Header(found["key"], found["source"], found["maps"], start)


def read_key(path: Path) -> tuple[str, Mapping[str, object]] | None:
    """(the model's file, the key) of a file of packed weights; None if it is damaged, or gone."""
    try:
        header = read_header(map_file(path), path)
    except BadFile:
        return None
    return header.source, header.key
