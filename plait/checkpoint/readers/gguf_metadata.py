"""The metadata of a GGUF file. Long lists stay in the file: a vocabulary is read on request.

Nothing is believed. Every count and length is checked against what is left of the file before it is used,
also in lists that stay where they are.

Models that llama.cpp has no architecture for have "plait" as their `general.architecture`; Plait alone reads
them. Tensors have the names, shapes and numbers of the checkpoint that the file was made from; `plait.config`
is its config.json as one string (absent if it had none). So a reader of that checkpoint reads the file, too.
Names that are too long for GGUF are in a list, and numbers stand for them.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from plait.checkpoint.readers.mmap_json import map_file, parse_json
from plait.errors import BadFile, UnsupportedFormat

_MAGIC, _VERSIONS = b"GGUF", (2, 3)
ARCHITECTURE = "plait"
CONFIG = "plait.config"
NAMES = "plait.tensor_names"  # of the tensors that are called `stand_in(n)`, n counting them
Entry = TypeVar("Entry")
MAX_NAME_BYTES = 63  # of a tensor's name for ggml, because its strings end with a zero
_MAX_KEY_BYTES = 65535
_MAX_SHOWN = 400  # characters of a message: keys may be long, and are in it
_MAX_DEPTH = 4  # of arrays in arrays
_MAX_ELEMENTS = 1 << 23  # of all arrays of one file: several times the largest vocabulary with its merges
_LONG = 4096  # elements of a list that is not kept: those of layers are shorter, vocabularies are longer
_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}


class MetadataCursor:
    """Reads forward through a mapped file; whatever would pass its end is a BadFile."""

    def __init__(self, mapped: mmap.mmap, path: Path, at: int = 0) -> None:
        self.mapped, self.path, self.at, self.size = mapped, path, at, len(mapped)
        self.elements = 0  # of the arrays read so far

    @property
    def left(self) -> int:
        return self.size - self.at

    def need(self, nbytes: int, what: str) -> None:
        if nbytes > self.left:
            raise self.bad(f"{what} wants {nbytes} bytes at {self.at}, only {self.left} are left")

    def bad(self, message: str) -> BadFile:
        return BadFile(f"{self.path}: {message[:_MAX_SHOWN]}; the file is truncated or damaged")

    def unpack(self, form: str, what: str) -> Any:
        nbytes = struct.calcsize(f"<{form}")
        self.need(nbytes, what)
        (value,) = struct.unpack_from(f"<{form}", self.mapped, self.at)
        self.at += nbytes
        return value

    def name(self, what: str, limit: int) -> str:
        """A string that must be UTF-8, of 1..limit bytes."""
        length = self.unpack("Q", what)
        if not 0 < length <= limit:
            raise self.bad(f"{what} has {length} bytes, allowed are 1..{limit}")
        self.need(length, what)
        raw = self.mapped[self.at : self.at + length]
        self.at += length
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.bad(f"{what} {raw[:80]!r} is not UTF-8") from error

    def strings(self, count: int, what: str, *, skips: bool = False) -> list[str]:
        """`count` strings, or none if they are to be skipped; one tight loop: vocabularies are long."""
        found: list[str] = []
        mapped, at, size, unpack = self.mapped, self.at, self.size, struct.Struct("<Q").unpack_from
        for _ in range(count):
            if at + 8 > size:
                raise self.bad(f"the strings of {what} pass the end of the file")
            start = at + 8
            at = start + unpack(mapped, at)[0]
            if at > size:
                raise self.bad(f"a string of {what} passes the end of the file")
            if not skips:
                found.append(mapped[start:at].decode("utf-8", "surrogateescape"))
        self.at = at
        return found

    def values(self, kind: int, count: int, what: str) -> list[Any]:
        """`count` scalars of one of GGUF's value types."""
        form = f"<{count}{_SCALARS[kind]}"
        self.need(struct.calcsize(form), what)
        found: list[Any] = list(struct.unpack_from(form, self.mapped, self.at))
        self.at += struct.calcsize(form)
        if kind == _BOOL:
            if any(value > 1 for value in found):
                raise self.bad(f"{what} has a bool that is neither 0 nor 1")
            return [bool(value) for value in found]
        return found


class FileMetadata(Mapping[str, object]):
    """key -> int, float, bool, str or list (of these, or of lists), in the file's order.

    A long list is made anew on each access; `items` and `values` do so with all. A caller that needs one
    twice keeps it. As with weights, the file must stay what it was.
    `value_types`: key -> GGUF's number for the type of its value, and for a list that of its elements.
    Raises BadFile, all of it when it is opened.
    """

    def __init__(self, cursor: MetadataCursor, count: int) -> None:
        """Reads `count` keys and moves the cursor behind them."""
        self._mapped, self._path = cursor.mapped, cursor.path
        self._short: dict[str, object] = {}
        self._long: dict[str, int] = {}  # where the list starts
        types: dict[str, tuple[int, ...]] = {}
        for _ in range(count):
            key = cursor.name("a metadata key", _MAX_KEY_BYTES)
            if key in types:
                raise BadFile(f"{cursor.path}: the metadata key {key[:80]!r} appears twice")
            kind = cursor.unpack("I", key)
            types[key] = (kind,)
            if kind == _ARRAY:
                types[key] = (kind, int.from_bytes(cursor.mapped[cursor.at : cursor.at + 4], "little"))
                self._add_array(cursor, key)
            else:
                self._short[key] = _read_values(cursor, kind, 1, key)[0]
        self.value_types: Mapping[str, tuple[int, ...]] = MappingProxyType(types)

    def __getitem__(self, key: str) -> object:
        if key in self._long:
            return _read_array(MetadataCursor(self._mapped, self._path, self._long[key]), key, 1)
        return self._short[key]

    def __contains__(self, key: object) -> bool:
        return key in self.value_types

    def __iter__(self) -> Iterator[str]:
        return iter(self.value_types)

    def __len__(self) -> int:
        return len(self.value_types)

    def _add_array(self, cursor: MetadataCursor, key: str) -> None:
        start = cursor.at
        kind, count = _array_header(cursor, key)
        if kind == _STRING and count > _LONG:
            cursor.strings(count, key, skips=True)
            self._long[key] = start
            return
        found = _read_elements(cursor, kind, count, key, 1)
        if count > _LONG:
            self._long[key] = start
        else:
            self._short[key] = found


def read_counts(cursor: MetadataCursor) -> tuple[int, int]:
    """(tensors, keys) of the header. Raises UnsupportedFormat for other versions and byte orders."""
    magic = cursor.mapped[:4]
    if magic != _MAGIC:
        raise BadFile(f"{cursor.path}: starts with {magic!r}, not {_MAGIC!r}: not a GGUF file")
    cursor.at = 4
    version = cursor.unpack("I", "the version")
    if version not in _VERSIONS:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        which = f"big-endian (version {swapped})" if 0 < swapped < 256 < version else f"version {version}"
        raise UnsupportedFormat(
            f"{cursor.path}: GGUF {which}; supported: little-endian, versions 2 and 3. Convert it again."
        )
    num_tensors, num_keys = cursor.unpack("Q", "the tensor count"), cursor.unpack("Q", "the key count")
    smallest = num_keys * 14 + num_tensors * 25  # a key: 8 + 1 + 4 + 1 bytes; a tensor: 8 + 1 + 4 + 4 + 8
    if smallest > cursor.left:
        raise cursor.bad(
            f"{num_keys} keys and {num_tensors} tensors need {smallest} bytes, only {cursor.left} are left"
        )
    return num_tensors, num_keys


def read_metadata(path: Path) -> FileMetadata:
    """The metadata of one file alone; its tensors are not looked at. Raises BadFile and UnsupportedFormat."""
    cursor = MetadataCursor(map_file(path), path)
    return FileMetadata(cursor, read_counts(cursor)[1])


def _array_header(cursor: MetadataCursor, key: str) -> tuple[int, int]:
    """(type, number) of the elements that follow."""
    kind, count = cursor.unpack("I", key), cursor.unpack("Q", key)
    cursor.elements += count
    if count > cursor.left or cursor.elements > _MAX_ELEMENTS:
        raise cursor.bad(
            f"{key} brings the arrays to {cursor.elements} elements; "
            f"{cursor.left} bytes are left and {_MAX_ELEMENTS} elements are allowed"
        )
    return kind, count


def _read_array(cursor: MetadataCursor, key: str, depth: int) -> list[object]:
    kind, count = _array_header(cursor, key)
    return _read_elements(cursor, kind, count, key, depth)


def _read_elements(cursor: MetadataCursor, kind: int, count: int, key: str, depth: int) -> list[object]:
    if kind != _ARRAY:
        return _read_values(cursor, kind, count, key)
    if depth == _MAX_DEPTH:
        raise cursor.bad(f"{key} is an array nested more than {_MAX_DEPTH} deep")
    return [_read_array(cursor, key, depth + 1) for _ in range(count)]


def _read_values(cursor: MetadataCursor, kind: int, count: int, key: str) -> list[Any]:
    if kind == _STRING:
        return cursor.strings(count, key)
    if kind not in _SCALARS:
        raise cursor.bad(f"{key} has the value type {kind}; known are 0..12")
    return cursor.values(kind, count, key)


def is_own(metadata: Mapping[str, object] | None) -> bool:
    """Whether a GGUF file holds a checkpoint under its own names. `metadata`: None for other files."""
    return metadata is not None and metadata.get("general.architecture") == ARCHITECTURE


def own_config(metadata: Mapping[str, object]) -> dict[str, object] | None:
    """The config.json of the checkpoint in such a file, if it had one. Raises BadFile."""
    text = metadata.get(CONFIG)
    if text is None:
        return None
    if not isinstance(text, str):
        raise BadFile(f"GGUF metadata {CONFIG}: must be JSON as text, got {type(text).__name__}")
    return parse_json(text.encode("utf-8", "surrogateescape"), f"GGUF metadata {CONFIG}")


def stand_in(number: int) -> str:
    """The name that stands for one that is too long."""
    return f"plait.{number}"


def restore_names(entries: Mapping[str, Entry], metadata: Mapping[str, object]) -> dict[str, Entry]:
    """Tensors by their own names, where the file had to call them something else. Raises BadFile."""
    listed = metadata.get(NAMES, [])
    if not isinstance(listed, list) or not all(isinstance(name, str) and name for name in listed):
        raise BadFile(f"GGUF metadata {NAMES}: must be a list of names")
    names = {stand_in(n): name for n, name in enumerate(listed)}
    if missing := names.keys() - entries.keys():
        raise BadFile(
            f"GGUF metadata {NAMES} has a name for {min(missing)!r}, which is no tensor of the file"
        )
    found = {names.get(name, name): entry for name, entry in entries.items()}
    if len(found) < len(entries):
        raise BadFile(f"GGUF metadata {NAMES}: two tensors have one name")
    return found
