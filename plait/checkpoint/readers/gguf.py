"""GGUF, versions 2 and 3: one file, or the parts of a split one.

The file is not believed: every count, length and size is checked against what is left of the file before
anything is made of it. Metadata strings are UTF-8 with `surrogateescape`, because vocabularies hold pieces of
characters: encoding a string the same way gives the file's bytes back. Keys and tensor names must be UTF-8.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor

from plait.checkpoint.readers.gguf_metadata import (
    FileMetadata,
    MetadataCursor,
    is_own,
    read_counts,
    restore_names,
)
from plait.checkpoint.readers.gguf_parts import part_paths
from plait.checkpoint.readers.mmap_json import map_file
from plait.errors import BadFile, MissingTensor, UnsupportedFormat, list_some
from plait.quant.fp4 import Fp4
from plait.quant.gguf import BLOCK_TYPES, BlockType, Gguf, scale_nvfp4
from plait.quant.weight import as_tensor

_MAX_NAME_BYTES = 64
_MAX_DIMS = 4
_MAX_ALIGNMENT = 1 << 20
_DEFAULT_ALIGNMENT = 32
PLAIN_TYPES: Mapping[int, tuple[str, torch.dtype]] = MappingProxyType(
    {
        0: ("F32", torch.float32),
        1: ("F16", torch.float16),
        24: ("I8", torch.int8),
        25: ("I16", torch.int16),
        26: ("I32", torch.int32),
        27: ("I64", torch.int64),
        28: ("F64", torch.float64),
        30: ("BF16", torch.bfloat16),
    }
)
_OTHER_NAMES = {4: "Q4_2", 5: "Q4_3", 31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8"} | {
    36: "IQ4_NL_4_4", 37: "IQ4_NL_4_8", 38: "IQ4_NL_8_8"
}  # fmt: skip  # no file of today has them


@dataclass(frozen=True, slots=True)
class _Entry:
    """Where a tensor is: `data` is its part's mapped bytes, `shape` as torch sees it (rows first)."""

    data: Tensor
    shape: tuple[int, ...]
    kind: BlockType | tuple[str, torch.dtype]
    start: int
    nbytes: int


class GgufFile:
    """A checkpoint in GGUF. Opening any part of a split file opens them all.

    `metadata`, `value_types`: of the first part.
    Raises BadFile for damaged or lying files, UnsupportedFormat for versions and tensor types we do not read.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        first = _Part(self.path)
        parts = _all_parts(first)
        self.metadata = parts[0].metadata
        self.value_types = self.metadata.value_types
        architecture = self.metadata.get("general.architecture")
        if not isinstance(architecture, str) or not architecture:
            raise BadFile(f"{parts[0].path}: no 'general.architecture' in the metadata; not a model")
        self._mapped = tuple(part.mapped for part in parts)
        self._entries: dict[str, _Entry] = {}
        for part in parts:
            if twice := self._entries.keys() & part.entries.keys():
                raise BadFile(f"{part.path}: tensor {min(twice)!r} is in another part too")
            self._entries |= part.entries
        total = self.metadata.get("split.tensors.count")
        if len(parts) > 1 and total != len(self._entries):
            raise BadFile(f"{self.path}: the parts hold {len(self._entries)} tensors, the first says {total}")
        if is_own(self.metadata):
            self._entries = restore_names(self._entries, self.metadata)
        self._factors = self._find_factors()
        more = {scale.removesuffix("scale") + "input_scale" for scale in self._factors.values()}
        self._hidden = {*self._factors.values(), *more}

    def __contains__(self, name: object) -> bool:
        return name in self._entries and name not in self._hidden

    def names(self) -> Iterable[str]:
        """All tensors; the factors of NVFP4 matrices are parts of these."""
        return [name for name in self._entries if name not in self._hidden]

    def _find_factors(self) -> dict[str, str]:
        """name of an NVFP4 matrix -> name of its factor, of those that have one."""
        found: dict[str, str] = {}
        for name, entry in self._entries.items():
            scale = name.removesuffix("weight") + "scale"
            if name.endswith(".weight") and isinstance(entry.kind, BlockType) and entry.kind.name == "NVFP4":
                found |= {name: scale} if scale in self._entries else {}
        return found

    def shape(self, name: str) -> tuple[int, ...]:
        """As torch sees it, rows first; three dimensions for stacked experts, [experts, rows, columns]."""
        return self._entry(name).shape

    def format_of(self, name: str) -> str:
        """How it is stored: a block format like 'Q4_K', or a dtype like 'float32'."""
        kind = self._entry(name).kind
        return kind.name if isinstance(kind, BlockType) else str(kind[1]).removeprefix("torch.")

    def nbytes(self, name: str) -> int:
        return self._entry(name).nbytes

    def read(self, name: str) -> Gguf | Fp4 | Tensor:
        """A view of the file. Plain types have their shape and dtype; block types are a `Gguf` with rows of
        all dimensions but the last, flattened. A vector of a block type is decoded, to float32. NVFP4 with a
        factor is an `Fp4`, a copy.
        """
        entry = self._entry(name)
        raw = entry.data[entry.start : entry.start + entry.nbytes]
        if isinstance(entry.kind, BlockType):
            weight = Gguf(raw.view(prod(entry.shape[:-1]), -1), entry.kind)
            if name in self._factors and len(entry.shape) > 1:
                return scale_nvfp4(weight, as_tensor(self.read(self._factors[name])))
            return weight if len(entry.shape) > 1 else weight.dequantize(torch.float32).view(-1)
        dtype = entry.kind[1]
        aligned = raw if raw.storage_offset() % dtype.itemsize == 0 else raw.clone()
        return aligned.view(dtype).view(entry.shape)

    def release(self) -> None:
        """Let go of the pages read so far: the next access to a tensor reads them from the file again."""
        for mapped in self._mapped:
            if hasattr(mapped, "madvise"):
                mapped.madvise(mmap.MADV_DONTNEED)

    def close(self) -> None:
        """Forget the tensors. The mapping goes with the last tensor that views it."""
        self._entries = {}

    def _entry(self, name: str) -> _Entry:
        if name not in self._entries:
            raise MissingTensor(f"{self.path}: no tensor {name!r}")
        return self._entries[name]


class _Part:
    """One file: its metadata and its tensors."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.mapped = map_file(path)
        cursor = MetadataCursor(self.mapped, path)
        num_tensors, num_keys = read_counts(cursor)
        self.metadata = FileMetadata(cursor, num_keys)
        self.entries = _read_entries(cursor, num_tensors, _alignment(self.metadata, path))
        self.count = self._split_number("split.count", 1)
        self.number = self._split_number("split.no", 0)

    def _split_number(self, key: str, default: int) -> int:
        value = self.metadata.get(key, default)
        if type(value) is not int or not 0 <= value <= 99999:
            raise BadFile(f"{self.path}: {key} is {value!r}, not a number of parts")
        return value


def _alignment(metadata: Mapping[str, object], path: Path) -> int:
    value = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if type(value) is not int or not 0 < value <= _MAX_ALIGNMENT or value & (value - 1):
        raise BadFile(f"{path}: general.alignment is {value!r}, not a power of two up to {_MAX_ALIGNMENT}")
    return value


def _read_entries(cursor: MetadataCursor, count: int, alignment: int) -> dict[str, _Entry]:
    headers = [_read_header(cursor, alignment) for _ in range(count)]
    base = -(-cursor.at // alignment) * alignment
    data = torch.frombuffer(cursor.mapped, dtype=torch.uint8)
    entries: dict[str, _Entry] = {}
    end, last = 0, ""
    for name, shape, kind, offset, nbytes in sorted(headers, key=lambda header: header[3]):
        if name in entries:
            raise BadFile(f"{cursor.path}: tensor {name!r} appears twice")
        if offset < end:
            raise BadFile(f"{cursor.path}: tensors {last!r} and {name!r} overlap")
        end, last = offset + nbytes, name
        if base + end > cursor.size:
            raise cursor.bad(f"tensor {name!r} ends at byte {base + end} of {cursor.size}")
        entries[name] = _Entry(data, shape, kind, base + offset, nbytes)
    return {header[0]: entries[header[0]] for header in headers}  # in the order of the file


def _read_header(
    cursor: MetadataCursor, alignment: int
) -> tuple[str, tuple[int, ...], BlockType | tuple[str, torch.dtype], int, int]:
    """(name, shape, type, offset after the header, size in bytes) of the next tensor."""
    name = cursor.name("a tensor name", _MAX_NAME_BYTES)
    num_dims = cursor.unpack("I", name)
    if not 0 < num_dims <= _MAX_DIMS:
        raise cursor.bad(f"tensor {name!r} has {num_dims} dimensions, allowed are 1..{_MAX_DIMS}")
    dims = [cursor.unpack("Q", name) for _ in range(num_dims)]  # the fastest first
    kind = _type_of(cursor.unpack("I", name), name, cursor.path)
    offset = cursor.unpack("Q", name)
    elements, size = (kind.elements, kind.nbytes) if isinstance(kind, BlockType) else (1, kind[1].itemsize)
    if not all(dims) or dims[0] % elements:
        raise cursor.bad(f"tensor {name!r} has dimensions {dims}; the first must be a multiple of {elements}")
    nbytes = prod(dims) // elements * size
    if offset % alignment or nbytes > cursor.size or offset > cursor.size:
        raise cursor.bad(f"tensor {name!r}: {nbytes} bytes at {offset} are not inside the file and aligned")
    return name, tuple(reversed(dims)), kind, offset, nbytes


def _type_of(type_id: int, name: str, path: Path) -> BlockType | tuple[str, torch.dtype]:
    found = BLOCK_TYPES.get(type_id) or PLAIN_TYPES.get(type_id)
    if found is None:
        known = [plain for plain, _ in PLAIN_TYPES.values()] + [kind.name for kind in BLOCK_TYPES.values()]
        raise UnsupportedFormat(
            f"{path}: tensor {name!r} is stored as {_OTHER_NAMES.get(type_id, 'an unknown type')} "
            f"(type {type_id}); supported: {', '.join(known)}"
        )
    return found


def _all_parts(opened: _Part) -> list[_Part]:
    """The parts of a split file in order; of a whole file, itself. Raises BadFile naming what is missing."""
    if opened.count <= 1:
        return [opened]
    paths = part_paths(opened.path)
    if len(paths) != opened.count:
        raise BadFile(
            f"{opened.path}: is part {opened.number + 1} of {opened.count} of a split model, "
            "and its name must say so: NAME-00001-of-0000N.gguf"
        )
    if missing := [path.name for path in paths if not path.exists()]:
        raise BadFile(f"{opened.path.parent}: parts are missing: {list_some(missing, 8)}")
    parts = []
    for number, path in enumerate(paths):
        part = opened if path == opened.path else _Part(path)
        if (part.number, part.count) != (number, opened.count):
            raise BadFile(f"{path}: says that it is part {part.number + 1} of {part.count}, unlike its name")
        parts.append(part)
    return parts
