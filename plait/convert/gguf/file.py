"""Writing GGUF: the library lays out the header, tensors follow one after another as they are made."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

from plait.convert.plan.source import Numbers
from plait.convert.plan.storage import StorageForm, TensorEntry
from plait.quant.gguf import BlockType

Advance = Callable[[int], None]  # so many bytes more are written
_KIND = gguf.GGMLQuantizationType
TYPES: Mapping[torch.dtype, gguf.GGMLQuantizationType] = MappingProxyType(
    {
        torch.float32: _KIND.F32,
        torch.float16: _KIND.F16,
        torch.bfloat16: _KIND.BF16,
        torch.float64: _KIND.F64,
        torch.int8: _KIND.I8,
        torch.int16: _KIND.I16,
        torch.int32: _KIND.I32,
        torch.int64: _KIND.I64,
    }
)
_UINT32_END = 1 << 32


def write_gguf(
    path: Path,
    keys: Mapping[str, Any],
    stored: Sequence[StorageForm],
    extra: Mapping[str, Tensor],
    model: Numbers,
    advance: Advance,
    value_types: Mapping[str, tuple[int, ...]] | None = None,
) -> None:
    """A whole file. `value_types`: GGUF's types of values, for keys that came from another file."""
    writer = gguf.GGUFWriter(str(path), str(keys["general.architecture"]))
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

    def sink(piece: Tensor) -> None:
        advance(file.write(raw_bytes(piece)))

    for one in stored:
        start, wanted = file.tell(), sum(entry.nbytes for entry in one.entries)
        one.write(model, sink)
        written = file.tell() - start
        assert written == wanted, f"{one.made.name}: {written} bytes instead of {wanted}"
        writer.write_padding(file, written)


def raw_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a tensor of any dtype."""
    flat = tensor.detach().contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]


def _declare(writer: gguf.GGUFWriter, entry: TensorEntry) -> None:
    if isinstance(entry.kind, BlockType):
        kind = _KIND(entry.kind.type_id)
        row = entry.shape[-1] // entry.kind.elements * entry.kind.nbytes
        shape: tuple[int, ...] = (*entry.shape[:-1], row)
        writer.add_tensor_info(entry.name, shape, np.dtype(np.uint8), entry.nbytes, kind)
    else:
        assert entry.nbytes == prod(entry.shape) * entry.kind.itemsize
        writer.add_tensor_info(entry.name, entry.shape, np.dtype(np.float32), entry.nbytes, TYPES[entry.kind])


def _add(writer: gguf.GGUFWriter, key: str, value: Any, types: tuple[int, ...] | None) -> None:
    if isinstance(value, list) and not value:
        return  # the format has no empty lists
    kinds = tuple(gguf.GGUFValueType(t) for t in types) if types else _types_of(value)
    writer.add_key_value(key, _encode_strings(value), kinds[0], kinds[1] if len(kinds) > 1 else None)


def _types_of(value: Any) -> tuple[gguf.GGUFValueType, ...]:
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


def _encode_strings(value: Any) -> Any:
    """Strings as bytes: vocabularies hold pieces of characters."""
    if isinstance(value, str):
        return value.encode("utf-8", "surrogateescape")
    if isinstance(value, list) and value and isinstance(value[0], str):
        return [text.encode("utf-8", "surrogateescape") for text in value]
    return value


def total_nbytes(stored: Iterable[StorageForm]) -> int:
    """Bytes of all their tensors."""
    return sum(entry.nbytes for one in stored for entry in one.entries)
