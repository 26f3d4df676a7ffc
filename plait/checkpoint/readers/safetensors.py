"""Safetensors: one file, or shards. The header is checked here first; the library then maps the tensors."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from plait.checkpoint.readers.mmap_json import check_stamp, map_file, parse_json, read_stamp
from plait.errors import BadFile, MissingTensor, UnsupportedFormat, clip_text

_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_MAX_SIZE = 1 << 48  # of one dimension
_MAX_DIMS = 64  # torch's own limit
DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {
        "F64": torch.float64,
        "F32": torch.float32,
        "F16": torch.float16,
        "BF16": torch.bfloat16,
        "F8_E4M3": torch.float8_e4m3fn,
        "F8_E5M2": torch.float8_e5m2,
        "F8_E8M0": torch.float8_e8m0fnu,
        "BOOL": torch.bool,
        "I64": torch.int64,
        "I32": torch.int32,
        "I16": torch.int16,
        "I8": torch.int8,
        "U64": torch.uint64,
        "U32": torch.uint32,
        "U16": torch.uint16,
        "U8": torch.uint8,
    }
)


@dataclass(frozen=True, slots=True)
class _Entry:
    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


class SafetensorsFiles:
    """A checkpoint in one or more safetensors files.

    `index`: tensor name -> file name, as a `*.safetensors.index.json` has it; every tensor it names must be
    in the file it says. Raises BadFile for damaged or lying files, UnsupportedFormat for other dtypes.
    """

    def __init__(self, *paths: str | Path, index: Mapping[str, str] | None = None) -> None:
        self.paths = tuple(Path(path) for path in paths)
        self._entries: dict[str, _Entry] = {}
        self._stamps = {path: read_stamp(path) for path in self.paths}  # before headers are read
        for path in self.paths:
            entries = _read_header(path)
            if twice := self._entries.keys() & entries.keys():
                name = min(twice)
                raise BadFile(f"tensor {name!r} is in {self._entries[name].path} and in {path}")
            self._entries |= entries
        for name, file in (index or {}).items():
            if name not in self._entries or self._entries[name].path.name != file:
                raise BadFile(f"the index says that tensor {name!r} is in {file!r}; it is not")
        self._files: dict[Path, Any] = {}  # opened when first read

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def names(self) -> Iterable[str]:
        return self._entries.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entry(name).shape

    def format_of(self, name: str) -> str:
        """Its dtype, like 'bfloat16' or 'float8_e4m3fn'."""
        return str(self._entry(name).dtype).removeprefix("torch.")

    def nbytes(self, name: str) -> int:
        entry = self._entry(name)
        return entry.stop - entry.start

    def read(self, name: str) -> Tensor:
        """A view of the mapped file, in its dtype."""
        path = self._entry(name).path
        try:
            files = self._files  # `release` may be called by another thread meanwhile
            file = files.get(path)
            if file is None:
                file = safe_open(str(path), framework="pt")
                check_stamp(path, self._stamps[path])  # none would see that a model is of two that fit
                files[path] = file
            tensor: Tensor = file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise BadFile(f"{path}: cannot read tensor {name!r}: {error}") from error
        return tensor

    def release(self) -> None:
        """Let go of what was read: memory that only this mapping held is given back."""
        self._files = {}

    def close(self) -> None:
        """Forget the tensors. The mappings go with the last tensor that views them."""
        self._entries, self._files = {}, {}

    def _entry(self, name: str) -> _Entry:
        if name not in self._entries:
            raise MissingTensor(f"{', '.join(path.name for path in self.paths)}: no tensor {name!r}")
        return self._entries[name]


def _read_header(path: Path) -> dict[str, _Entry]:
    """The tensors of one file. Their bytes must fill the rest of it exactly."""
    mapped = map_file(path)
    size = len(mapped)
    if size < 8:
        raise BadFile(f"{path}: has {size} bytes, too few for a safetensors file")
    (length,) = struct.unpack_from("<Q", mapped)
    if length > min(size - 8, _MAX_HEADER_BYTES):
        raise BadFile(
            f"{path}: says that its header has {length} bytes; the file has {size} and "
            f"{_MAX_HEADER_BYTES} are allowed: truncated, damaged, or not safetensors"
        )
    raw = mapped[8 : 8 + length]
    mapped.close()
    if not raw.startswith(b"{"):
        raise BadFile(f"{path}: the header starts with {raw[:8]!r}, not with '{{': not a safetensors file")
    header = parse_json(raw, f"{path}: the header")
    _check_metadata(header.pop("__metadata__", {}), path)
    entries = {name: _entry(name, fields, path) for name, fields in header.items()}
    _check_layout(entries, size - 8 - length, path)
    return entries


def _check_metadata(metadata: object, path: Path) -> None:
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise BadFile(f"{path}: the header's __metadata__ must be an object of strings")


def _entry(name: str, fields: object, path: Path) -> _Entry:
    if not isinstance(fields, dict) or fields.keys() != {"dtype", "shape", "data_offsets"}:
        raise BadFile(f"{path}: tensor {name[:80]!r} must have exactly dtype, shape and data_offsets")
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        what = f"{name[:80]!r} has dtype {str(dtype)[:80]!r}"
        raise UnsupportedFormat(f"{path}: tensor {what}; supported: {', '.join(DTYPES)}")
    if not _is_sizes(shape) or not _is_sizes(offsets) or len(offsets) != 2:
        what = f"shape {clip_text(repr(shape), 80)} and data_offsets {clip_text(repr(offsets), 80)}"
        raise BadFile(f"{path}: tensor {name[:80]!r} has {what}")
    start, stop = offsets
    if prod(shape) * DTYPES[dtype].itemsize != stop - start:
        what = f"{name[:80]!r}, {dtype} {clip_text(shape, 80)}"
        raise BadFile(f"{path}: tensor {what}, does not have {stop - start} bytes")
    return _Entry(path, DTYPES[dtype], tuple(shape), start, stop)


def _is_sizes(value: object) -> bool:
    return (
        isinstance(value, list)
        and len(value) <= _MAX_DIMS
        and all(type(n) is int and 0 <= n < _MAX_SIZE for n in value)
    )


def _check_layout(entries: Mapping[str, _Entry], size: int, path: Path) -> None:
    """The tensors follow each other without a gap and end with the file."""
    end, last = 0, ""
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)):
        if entry.start != end:
            what = f"and {last!r} overlap" if entry.start < end else "comes after a gap"
            raise BadFile(f"{path}: tensor {name!r} at byte {entry.start} {what}")
        end, last = entry.stop, name
    if end != size:
        raise BadFile(f"{path}: the header speaks of {end} bytes of tensors, the file has {size}: truncated?")
