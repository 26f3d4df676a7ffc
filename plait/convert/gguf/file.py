"""Writing GGUF: the library lays out the header, tensors follow one after another as they are made.

`general.file_type` is the number by which a file says what most of its weights are stored in.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

from plait.checkpoint.readers.gguf import PLAIN_TYPES
from plait.convert.plan.choose_storage import is_map
from plait.convert.plan.source import Numbers
from plait.convert.plan.storage import Advance, StorageForm, TensorEntry, append_tensor, raw_bytes
from plait.quant.gguf import BlockType

_KIND = gguf.GGMLQuantizationType
TYPES = {dtype: gguf.GGMLQuantizationType[name] for name, dtype in PLAIN_TYPES.values()}
_UINT32_END = 1 << 32
MAY_BE_EMPTY = ("tokenizer.ggml.merges",)  # lists of strings without which no reader takes a vocabulary
# Where llama.cpp's file types have another name; of those with sizes (S, M, L) the one without additions.
_FILE_TYPES = {"float32": "ALL_F32", "float16": "MOSTLY_F16", "bfloat16": "MOSTLY_BF16"} | {
    **{name: f"MOSTLY_{name}_S" for name in ("Q3_K", "Q4_K", "Q5_K")},
    "MXFP4": "MOSTLY_MXFP4_MOE",
}


class _Writer(gguf.GGUFWriter):
    """The library's writer, which takes lists without an entry, too, where their type is given."""

    def _pack_val(
        self, val: Any, vtype: gguf.GGUFValueType, add_vtype: bool, sub_type: gguf.GGUFValueType | None = None
    ) -> bytes:
        if vtype != gguf.GGUFValueType.ARRAY or sub_type is None or len(val):
            return super()._pack_val(val, vtype, add_vtype, sub_type)
        kinds = (vtype, sub_type) if add_vtype else (sub_type,)
        return b"".join(struct.pack("<I", kind) for kind in kinds) + struct.pack("<Q", 0)


def write_gguf(
    path: Path,
    keys: Mapping[str, object],
    stored: Sequence[StorageForm],
    extra: Mapping[str, Tensor],
    model: Numbers,
    advance: Advance,
    value_types: Mapping[str, tuple[int, ...]] | None = None,
) -> None:
    """A whole file. `value_types`: GGUF's types of values, for keys that came from another file."""
    writer = _Writer(str(path), str(keys["general.architecture"]))
    try:
        for key, value in keys.items():
            if key != "general.architecture":
                _add(writer, key, value, (value_types or {}).get(key))
        for name, tensor in extra.items():
            _declare(writer, TensorEntry(name, tuple(tensor.shape), torch.float32))
        for one in stored:
            for entry in one.entries:
                _declare(writer, entry)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        _write_data(writer, stored, extra, model, advance)
    finally:
        writer.close()


def _write_data(
    writer: gguf.GGUFWriter,
    stored: Sequence[StorageForm],
    extra: Mapping[str, Tensor],
    model: Numbers,
    advance: Advance,
) -> None:
    assert writer.fout is not None
    (file,) = writer.fout
    writer.write_padding(file, file.tell())
    for tensor in extra.values():
        file.write(raw_bytes(tensor))
        writer.write_padding(file, tensor.numel() * 4)
    for one in stored:
        writer.write_padding(file, append_tensor(one, model, file, advance))


def _declare(writer: gguf.GGUFWriter, entry: TensorEntry) -> None:
    if isinstance(entry.kind, BlockType):
        kind = _KIND(entry.kind.type_id)
        row = entry.shape[-1] // entry.kind.elements * entry.kind.nbytes
        shape: tuple[int, ...] = (*entry.shape[:-1], row)
        writer.add_tensor_info(entry.name, shape, np.dtype(np.uint8), entry.nbytes, kind)
    else:
        assert entry.nbytes == prod(entry.shape) * entry.kind.itemsize
        shape = entry.shape or (1,)  # a single number, which the format only has as a row
        writer.add_tensor_info(entry.name, shape, np.dtype(np.float32), entry.nbytes, TYPES[entry.kind])


def _add(writer: gguf.GGUFWriter, key: str, value: object, types: tuple[int, ...] | None) -> None:
    if isinstance(value, list) and not value:
        if key in MAY_BE_EMPTY:
            writer.add_key_value(key, value, gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.STRING)
        return  # any other list without an entry says what its absence does
    kinds = tuple(gguf.GGUFValueType(t) for t in types) if types else _types_of(value)
    writer.add_key_value(key, _encode_strings(value), kinds[0], kinds[1] if len(kinds) > 1 else None)


def _types_of(value: object) -> tuple[gguf.GGUFValueType, ...]:
    kinds = gguf.GGUFValueType
    match value:
        case bool():
            return (kinds.BOOL,)
        case int():
            return (kinds.UINT32 if 0 <= value < _UINT32_END else kinds.INT64,)
        case float():
            return (kinds.FLOAT32,)
        case str():
            return (kinds.STRING,)
        case [int(), *_] if not isinstance(value[0], bool):
            return (kinds.ARRAY, kinds.INT32)
        case [first, *_]:
            return (kinds.ARRAY, *_types_of(first))
    raise TypeError(f"no type of GGUF for {type(value).__name__}")


def _encode_strings(value: object) -> object:
    """Strings as bytes: vocabularies hold pieces of characters."""
    if isinstance(value, str):
        return value.encode("utf-8", "surrogateescape")
    if isinstance(value, list) and value and isinstance(value[0], str):
        return [text.encode("utf-8", "surrogateescape") for text in value]
    return value


def total_nbytes(stored: Iterable[StorageForm]) -> int:
    """Bytes of all their tensors."""
    return sum(entry.nbytes for one in stored for entry in one.entries)


def file_type(stored: Iterable[StorageForm]) -> int:
    """The number of the storage that most bytes of linear layers have."""
    sizes: Counter[str] = Counter()
    for one in stored:
        if is_map(one.made):
            for entry in one.entries:
                kind = entry.kind
                name = str(kind).removeprefix("torch.") if isinstance(kind, torch.dtype) else kind.name
                sizes[name] += entry.nbytes
    most = sizes.most_common(1)[0][0] if sizes else "float32"
    known = gguf.LlamaFileType.__members__
    return int(known.get(_FILE_TYPES.get(most, f"MOSTLY_{most}"), gguf.LlamaFileType.GUESSED))
