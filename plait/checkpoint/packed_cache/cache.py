"""The packed weights of one model: recorded while a startup packs them, mapped by later startups.

Then neither the model's file is read nor is anything packed: the tiles are pages of a file, which all
processes share.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from plait.checkpoint.packed_cache.file_format import encode_header, read_header, whole, write_whole
from plait.checkpoint.readers.mmap_json import map_in_large_pages
from plait.errors import BadFile
from plait.ops.linear import Linear
from plait.quant.weight import CachedWeight

log = logging.getLogger("plait")


@dataclass(frozen=True, slots=True)
class KeptBlock:
    """A packed weight in memory, that `Shelf.write` also wrote to a file: its address, bytes, and place."""

    path: Path
    start: int
    nbytes: int
    at: int


class Shelf:
    """The packed weights of one model and one set of options: found on disk, or recorded as they are made.

    `source`: the model's file, for messages; `key`: plain values (as JSON has them) that must all be equal.
    """

    def __init__(self, path: Path, source: str, key: Mapping[str, object]) -> None:
        self.path, self.source, self.key = path, source, key
        self.written: list[KeptBlock] = []
        self.num_found = 0  # linear layers that were taken from the file
        self._maps: Mapping[str, Any] = {}
        self._tiles: Tensor | None = None
        self._noted: dict[str, tuple[Linear, tuple[int, Sequence[int]], Mapping[str, int]]] = {}
        if os.path.exists(path):
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
            mapped = map_in_large_pages(self.path)
            header = read_header(mapped, self.path)
            if header.key != self.key:
                raise BadFile("it is of another model or of other options")
            self._maps = header.maps
            self._tiles = torch.frombuffer(mapped, dtype=torch.uint8)[header.start :]
        except BadFile as error:
            log.warning("%s: packed weights are not used: %s; `plait warmup` renews them", self.path, error)

    def find(
        self, name: str, in_size: int, out_sizes: Sequence[int]
    ) -> list[tuple[CachedWeight, int]] | None:
        """The parts of a linear layer, each with the number of fused names in it; None: it must be packed."""
        entry = self._maps.get(name)
        if entry is None or [entry["in"], entry["out"]] != [in_size, list(out_sizes)]:
            return None
        self.num_found += 1
        return [(self._read_part(part, in_size), part["names"]) for part in entry["parts"]]

    def counts(self, name: str) -> Mapping[str, int]:
        """What encoding that linear layer counted when it was packed."""
        counted: Mapping[str, int] = self._maps[name]["encoded"]
        return counted

    def _read_part(self, part: Mapping[str, Any], in_size: int) -> CachedWeight:
        tiles, order = self._bytes(part["at"], part["nbytes"]), None
        if part["order_at"] is not None:
            order = self._bytes(part["order_at"], 4 * in_size).view(torch.int32)
        shape = (part["out"], in_size)
        return CachedWeight(part["format"], shape, part["rounding"], tuple(part["layout"]), tiles, order)

    def _bytes(self, at: int, nbytes: int) -> Tensor:
        assert self._tiles is not None
        return self._tiles[at : at + nbytes]

    def note(
        self, name: str, linear: Linear, sizes: tuple[int, Sequence[int]], encoded: Mapping[str, int]
    ) -> None:
        """Record a packed linear layer, for `write`. `encoded`: what encoding it counted."""
        if all(hasattr(packed, "layout") for packed, *_ in linear.parts):
            self._noted[name] = (linear, sizes, encoded)

    def is_sound(self) -> bool:
        """Whether all tiles are what was written. Reads all of them."""
        return self.is_full and all(
            _checksum(_of(self._read_part(part, entry["in"]))) == part["crc"]
            for entry in self._maps.values()
            for part in entry["parts"]
        )

    def count_needed(self) -> int:
        """Bytes that `write` would write, without the header."""
        packed = [packed for linear, *_ in self._noted.values() for packed, *_ in linear.parts]
        return sum(whole(block.nbytes) for one in packed for block in _of(one))

    def write(self) -> int:
        """Write what was recorded; the bytes of the file. Raises OSError, and leaves nothing then."""
        blocks: list[memoryview] = []
        maps, at = dict[str, Any](), 0
        for name, (linear, (in_size, out_sizes), encoded) in self._noted.items():
            parts, left = [], list(out_sizes)
            for packed, _, rounding in linear.parts:
                places = []
                for block in _of(packed):
                    blocks.append(block)
                    places.append(at)
                    at += whole(block.nbytes)
                parts.append(_describe_part(packed, rounding, places) | {"names": _take(left, packed.n_out)})
            maps[name] = {"in": in_size, "out": list(out_sizes), "encoded": dict(encoded), "parts": parts}
        header = {"key": self.key, "source": self.source, "nbytes": at, "maps": maps}
        # Users that may read the model may read this, because a container's image is built by another user.
        mode = 0o600 | Path(self.source).stat().st_mode & 0o044
        first = encode_header(json.dumps(header).encode())
        written = write_whole(self.path, first, blocks, at, mode)
        starts, path = itertools.accumulate((whole(b.nbytes) for b in blocks), initial=len(first)), self.path
        self.written = [
            KeptBlock(path.resolve(), np.asarray(block).ctypes.data, block.nbytes, place)
            for block, place in zip(blocks, starts, strict=False)
        ]
        return written


def _describe_part(packed: Any, rounding: str, places: Sequence[int]) -> dict[str, Any]:
    """What the header says of a part. places: of its tiles and, if it has one, of its order."""
    return {
        "format": packed.kind,
        "out": packed.n_out,
        "rounding": rounding,
        "layout": astuple(packed.layout) if packed.layout else (),
        "at": places[0],
        "nbytes": packed.nbytes,
        "crc": _checksum(_of(packed)),
        "order_at": places[1] if len(places) > 1 else None,
    }


def _take(sizes: list[int], wanted: int) -> int:
    """How many of the first sizes add up to `wanted`; they are removed from the list."""
    count = 0
    while wanted > 0:
        wanted -= sizes.pop(0)
        count += 1
    return count


def _checksum(blocks: Sequence[memoryview]) -> int:
    found = 0
    for block in blocks:
        found = zlib.crc32(block, found)
    return found


def _of(packed: Any) -> list[memoryview]:
    """The bytes of a packed or cached weight: its tiles, and the order of its columns."""
    tiles = packed.tiles if isinstance(packed, CachedWeight) else packed.data
    order = [] if packed.order is None else [packed.order.view(torch.uint8)]
    return [memoryview(block.numpy()) for block in (tiles, *order)]
