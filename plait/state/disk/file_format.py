"""A file of the disk cache: whole blocks of one prefix, or one snapshot. Bytes and names, no tensors.

    magic (8 bytes), length of the header (8), of the content (8), BLAKE2b of the header (32)
    | header (msgpack) | content, as `HostStore.save` lays it out

The name of a file is a hash of what its content is named by, so equal content has one file. It is written
under another name and renamed. Nothing waits for the disk itself: after a power cut a file may hold anything,
and its hashes show that. A file is read as if a stranger had written it: sizes first, then hashes.
"""

from __future__ import annotations

import io
import os
import secrets
import stat
import struct
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path

import msgspec
import numpy as np
from msgspec import Struct

from plait.errors import BadFile
from plait.kernels.load import is_foreign_file
from plait.state.blocks import DIGEST_BYTES
from plait.state.host_store import Bytes, RowLayout, SavedState
from plait.typed_values import decode_msgpack

MAGIC = b"plaitkv1"
SUFFIX, UNFINISHED = ".state", ".partial"
MOST_HEADER = 1 << 20  # bytes
_START = struct.Struct("<8sQQ32s")
_FLAGS = (
    os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
)


class DiskNames(Struct, frozen=True, array_like=True):
    """What is in a file. `blocks`: by group, the chain hashes of whole blocks; or, of a snapshot, its place:
    `parent`, the hash of the blocks before it, and `rest`, the tokens that follow."""

    blocks: tuple[tuple[bytes, ...], ...] = ()
    parent: bytes = b""
    rest: tuple[int, ...] = ()

    @property
    def file_name(self) -> str:
        """A hash of the names, and so of all tokens before and in the content."""
        return blake2b(msgspec.msgpack.encode(self), digest_size=20).hexdigest() + SUFFIX

    def tables(self, layout: RowLayout) -> tuple[int, ...]:
        """How many blocks of each group the content has."""
        if self.parent:
            return (int(bool(self.rest)),) * layout.num_groups
        return tuple(map(len, self.blocks))

    def has_slot(self, layout: RowLayout) -> bool:
        """Whether the content has a slot."""
        return bool(self.parent) and layout.has_slots

    def nbytes(self, layout: RowLayout) -> int:
        """Bytes of the content."""
        return layout.nbytes(self.tables(layout), self.has_slot(layout))


class DiskHeader(Struct, frozen=True, array_like=True):
    """`fingerprint`: of model, arithmetic and layout; `digest`: BLAKE2b of the content."""

    fingerprint: str
    names: DiskNames
    digest: bytes


def write_content(path: Path, fingerprint: str, names: DiskNames, content: Bytes) -> int:
    """Write all of a file or none of it, readable by this user alone; its bytes. Raises OSError."""
    header = msgspec.msgpack.encode(DiskHeader(fingerprint, names, _digest(content)))
    first = _START.pack(MAGIC, len(header), content.nbytes, _digest(header)) + header
    temporary = path.with_name(secrets.token_hex(8) + UNFINISHED)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(first)
            file.write(content.data)
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
    return len(first) + content.nbytes


def read_names(path: Path, fingerprint: str, layout: RowLayout) -> tuple[DiskNames, int]:
    """What a file says it has, and its bytes. Raises BadFile for one that cannot be ours, and OSError."""
    with _open_file(path) as file:
        header, start, nbytes = _read_header(file, fingerprint, layout)
    return header.names, start + nbytes


def read_content(path: Path, fingerprint: str, names: DiskNames, layout: RowLayout) -> SavedState:
    """The content of a file with these names. Raises BadFile if any byte is not as written, and OSError."""
    with _open_file(path) as file:
        header, _, nbytes = _read_header(file, fingerprint, layout)
        if header.names != names:
            raise BadFile("it has other content than before")
        content = np.empty(nbytes, np.uint8)
        if file.readinto(content.data) != nbytes or file.read(1):
            raise BadFile("it is cut off")
    if _digest(content) != header.digest:
        raise BadFile("its content is damaged")
    return SavedState(names.tables(layout), names.has_slot(layout), content)


def _open_file(path: Path) -> io.BufferedReader:
    """A regular file that only this user or root may have written."""
    descriptor = os.open(path, _FLAGS)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise BadFile("it is no regular file")
        if is_foreign_file(status):
            raise BadFile("another user may have written it")
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def _read_header(file: io.BufferedReader, fingerprint: str, layout: RowLayout) -> tuple[DiskHeader, int, int]:
    """The header, where the content begins, and its bytes."""
    raw = file.read(_START.size)
    if len(raw) < _START.size:
        raise BadFile("it is cut off")
    magic, length, nbytes, digest = _START.unpack(raw)
    if magic != MAGIC:
        raise BadFile("it is not one of Plait's, or of another version")
    if length > MOST_HEADER or os.fstat(file.fileno()).st_size != _START.size + length + nbytes:
        raise BadFile("its size is wrong")
    raw = file.read(length)
    if _digest(raw) != digest:
        raise BadFile("its header is damaged")
    try:
        header = decode_msgpack(raw, DiskHeader)
    except msgspec.MsgspecError as error:
        raise BadFile(f"its header is of another version ({error})") from error
    if header.fingerprint != fingerprint:
        raise BadFile("it is of another model or another arithmetic")
    _check_names(header.names, layout)
    if header.names.nbytes(layout) != nbytes:
        raise BadFile("its content has another size than its names")
    return header, _START.size + length, nbytes


def _check_names(names: DiskNames, layout: RowLayout) -> None:
    hashes = [one for group in names.blocks for one in group]
    if names.parent:
        whole = not hashes and len(names.rest) < layout.block_size
        whole = whole and all(0 <= token < 1 << 63 for token in names.rest)
        hashes.append(names.parent)
    else:
        whole = bool(hashes) and not names.rest and len(names.blocks) == layout.num_groups
    if not whole or any(len(one) != DIGEST_BYTES for one in hashes):
        raise BadFile("its names are not those of blocks or of a snapshot")


def _digest(content: bytes | Bytes) -> bytes:
    return blake2b(content if isinstance(content, bytes) else content.data, digest_size=32).digest()
