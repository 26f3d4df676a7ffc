"""Packed weights on disk: what one start packed, the next one maps, and neither reads nor packs it again.

A file holds the maps of one model as kernels keep them:

    magic (8 bytes), length of the header (8), its BLAKE2b (32) | header (JSON) | zeros | tiles

The header has a key, which says of what and how the tiles were made; a file with another key is never used.
Tiles lie at multiples of 64 bytes from a page's start; the header has a checksum of each. A file is written
under another name, and gets its own when all of it is on the disk.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import mmap
import os
import struct
import tempfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from plait.checkpoint.disk import map_file, parse_json
from plait.checkpoint.shelves import UNFINISHED, drop_unfinished
from plait.errors import BadFile
from plait.ops.linear import Linear
from plait.quant.kept import Kept

log = logging.getLogger("plait")
MAGIC = b"plaitpk1"
_START = struct.Struct("<8sQ32s")
_PAGE, _LINE = 4096, 64


@dataclass(frozen=True, slots=True)
class Header:
    """What a file says of itself. `source`: the model's file; `start`: where tiles begin."""

    key: Mapping[str, Any]
    source: str
    maps: Mapping[str, Any]  # by our name: its parts, and what encoding them counted
    start: int
    nbytes: int


class Shelf:
    """The packed weights of one model and one set of options: found on disk, or noted while they are made.

    `source`: the model's file, to tell users; `key`: plain values (as JSON has them) that must all be equal.
    """

    def __init__(self, path: Path, source: str, key: Mapping[str, Any]) -> None:
        self.path, self.source, self.key = path, source, key
        self.num_found = 0  # maps that were taken from the file
        self._maps: Mapping[str, Any] = {}
        self._tiles: Tensor | None = None
        self._noted: dict[str, tuple[Linear, tuple[int, Sequence[int]], Mapping[str, int]]] = {}
        if path.exists():
            self._open()

    @property
    def is_full(self) -> bool:
        """Whether there is a file, and it can be used."""
        return self._tiles is not None

    @property
    def nbytes(self) -> int:
        """Bytes of the tiles that are mapped."""
        return 0 if self._tiles is None else self._tiles.numel()

    def _open(self) -> None:
        try:
            mapped = map_file(self.path)
            header = read_header(mapped, self.path)
            if header.key != self.key:
                raise BadFile("it is of another model or of other options")
            self._maps = header.maps
            self._tiles = torch.frombuffer(mapped, dtype=torch.uint8)[header.start :]
        except BadFile as error:
            log.warning("%s: packed weights are not used: %s; `plait warmup` renews them", self.path, error)

    def find(self, name: str, in_size: int, out_sizes: Sequence[int]) -> list[tuple[Kept, int]] | None:
        """The parts of a linear map, each with the number of fused names in it; None: it must be packed."""
        entry = self._maps.get(name)
        if entry is None or [entry["in"], entry["out"]] != [in_size, list(out_sizes)]:
            return None
        self.num_found += 1
        return [(self._kept(part, in_size), part["names"]) for part in entry["parts"]]

    def counts(self, name: str) -> Mapping[str, int]:
        """What encoding that map counted when it was packed."""
        counted: Mapping[str, int] = self._maps[name]["encoded"]
        return counted

    def _kept(self, part: Mapping[str, Any], in_size: int) -> Kept:
        tiles, order = self._bytes(part["at"], part["nbytes"]), None
        if part["order_at"] is not None:
            order = self._bytes(part["order_at"], 4 * in_size).view(torch.int32)
        shape = (part["out"], in_size)
        return Kept(part["format"], shape, part["rounding"], tuple(part["layout"]), tiles, order)

    def _bytes(self, at: int, nbytes: int) -> Tensor:
        assert self._tiles is not None
        return self._tiles[at : at + nbytes]

    def note(
        self, name: str, linear: Linear, sizes: tuple[int, Sequence[int]], encoded: Mapping[str, int]
    ) -> None:
        """A map was packed: it is written with the others. `encoded`: what encoding it counted."""
        if all(hasattr(packed, "layout") for packed, *_ in linear.parts):
            self._noted[name] = (linear, sizes, encoded)

    def is_sound(self) -> bool:
        """Whether all tiles are what was written. Reads all of them."""
        parts = [part for entry in self._maps.values() for part in entry["parts"]]
        return self.is_full and all(
            _checksum(self._bytes(part["at"], part["nbytes"])) == part["crc"] for part in parts
        )

    def needed(self) -> int:
        """Bytes that `write` would write, without the header."""
        return sum(_whole(block) for linear, *_ in self._noted.values() for block in _blocks(linear))

    def write(self) -> int:
        """What was noted, to the disk; the bytes of the file. Raises OSError, and leaves nothing then."""
        blocks: list[Tensor] = []
        maps, at = dict[str, Any](), 0
        for name, (linear, (in_size, out_sizes), encoded) in self._noted.items():
            parts, left = [], list(out_sizes)
            for packed, _, rounding in linear.parts:
                places = []
                for block in _of(packed):
                    blocks.append(block)
                    places.append(at)
                    at += _whole(block)
                parts.append(_described(packed, rounding, places) | {"names": _take(left, packed.n_out)})
            maps[name] = {"in": in_size, "out": list(out_sizes), "encoded": dict(encoded), "parts": parts}
        header = {"key": self.key, "source": self.source, "nbytes": at, "maps": maps}
        return write_whole(self.path, _opening(json.dumps(header).encode()), blocks, at)


def _described(packed: Any, rounding: str, places: Sequence[int]) -> dict[str, Any]:
    """What the header says of a part. places: of its tiles and, if it has one, of its order."""
    return {
        "format": packed.kind,
        "out": packed.n_out,
        "rounding": rounding,
        "layout": astuple(packed.layout) if packed.layout else (),
        "at": places[0],
        "nbytes": packed.nbytes,
        "crc": _checksum(packed.data),
        "order_at": places[1] if len(places) > 1 else None,
    }


def _take(sizes: list[int], wanted: int) -> int:
    """How many of the first sizes make up `wanted`; they leave the list."""
    count = 0
    while wanted > 0:
        wanted -= sizes.pop(0)
        count += 1
    return count


def _checksum(block: Tensor) -> int:
    return zlib.crc32(block.numpy().data)


def _of(packed: Any) -> list[Tensor]:
    """Its bytes: tiles, and the order of its columns."""
    return [packed.data] + ([] if packed.order is None else [packed.order.view(torch.uint8)])


def _blocks(linear: Linear) -> Iterator[Tensor]:
    for packed, *_ in linear.parts:
        yield from _of(packed)


def _whole(block: Tensor) -> int:
    """Bytes in whole cache lines."""
    return -(-block.numel() // _LINE) * _LINE


def _opening(header: bytes) -> bytes:
    """All that stands before the tiles."""
    raw = _START.pack(MAGIC, len(header), hashlib.blake2b(header, digest_size=32).digest()) + header
    return raw + bytes(-len(raw) % _PAGE)


def write_whole(path: Path, opening: bytes, blocks: Sequence[Tensor], nbytes: int) -> int:
    """A file with all of that or, if something fails, none. Raises OSError."""
    drop_unfinished(path.parent)
    descriptor, name = tempfile.mkstemp(suffix=UNFINISHED, dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            _reserve(file.fileno(), len(opening) + nbytes)
            file.write(opening)
            for block in blocks:
                file.write(block.numpy().data)
                file.write(bytes(_whole(block) - block.numel()))
            file.flush()
            os.fchmod(file.fileno(), 0o644)  # whoever may read the model: an image is built by another user
            os.fsync(file.fileno())
        Path(name).replace(path)
    except BaseException:
        with suppress(OSError):
            Path(name).unlink()
        raise
    return len(opening) + nbytes


def _reserve(descriptor: int, nbytes: int) -> None:
    """A full disk says so at once. Raises OSError; where nothing can be reserved, writing will tell."""
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(descriptor, 0, nbytes)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                raise


def read_header(mapped: mmap.mmap | bytes, path: Path) -> Header:
    """The header of a file of packed weights. Raises BadFile for what is damaged, cut or something else."""
    if len(mapped) < _START.size:
        raise BadFile("the file is cut off")
    magic, length, digest = _START.unpack(mapped[: _START.size])
    if magic != MAGIC:
        raise BadFile("it is not one of Plait's, or of another version")
    raw = mapped[_START.size : _START.size + length]
    if len(raw) != length or hashlib.blake2b(raw, digest_size=32).digest() != digest:
        raise BadFile("its header is damaged")
    found = parse_json(raw, f"{path}: header")
    start = len(_opening(raw))
    if len(mapped) != start + found["nbytes"]:
        raise BadFile("the file is cut off")
    return Header(found["key"], found["source"], found["maps"], start, found["nbytes"])


def read_key(path: Path) -> tuple[str, Mapping[str, Any]] | None:
    """(the model's file, the key) of a file of packed weights; None if it is damaged, or gone."""
    try:
        header = read_header(map_file(path), path)
    except BadFile:
        return None
    return header.source, header.key
