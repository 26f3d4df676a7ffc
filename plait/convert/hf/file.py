"""Writing safetensors some rows at a time. The library writes what is in memory; here nothing has to be.

A file is the length of its header (8 bytes), the header (JSON: name -> dtype, shape, offsets), and the bytes.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from pathlib import Path

import torch

from plait.checkpoint.readers.safetensors import DTYPES
from plait.convert.plan.source import Numbers
from plait.convert.plan.storage import Advance, StorageForm, append_tensor
from plait.errors import UnsupportedFormat

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_ALIGN = 8


def shards(stored: Sequence[StorageForm], limit: int) -> list[list[StorageForm]]:
    """Tensors in files of at most `limit` bytes; one that is larger has a file of its own."""
    found: list[list[StorageForm]] = []
    room = 0
    for one in stored:
        size = sum(entry.nbytes for entry in one.entries)
        if not found or size > room:
            found.append([])
            room = limit
        found[-1].append(one)
        room -= size
    return found


def write_safetensors(
    folder: Path, stored: Sequence[StorageForm], model: Numbers, advance: Advance, limit: int
) -> None:
    """model.safetensors, or its shards and their index, into a folder."""
    files = shards(stored, limit)
    if len(files) == 1:
        _write(folder / "model.safetensors", files[0], model, advance)
        return
    weight_map: dict[str, str] = {}
    total = 0
    for number, part in enumerate(files, 1):
        name = f"model-{number:05}-of-{len(files):05}.safetensors"
        _write(folder / name, part, model, advance)
        weight_map |= {entry.name: name for one in part for entry in one.entries}
        total += sum(entry.nbytes for one in part for entry in one.entries)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _write(path: Path, stored: Sequence[StorageForm], model: Numbers, advance: Advance) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for entry in (entry for one in stored for entry in one.entries):
        if not isinstance(entry.kind, torch.dtype) or entry.kind not in _NAMES:
            raise UnsupportedFormat(f"{entry.name}: safetensors cannot hold {entry.kind}")
        offsets = [at, at + entry.nbytes]
        header[entry.name] = {"dtype": _NAMES[entry.kind], "shape": entry.shape, "data_offsets": offsets}
        at += entry.nbytes
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % _ALIGN)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(raw)))
        file.write(raw)
        for one in stored:
            append_tensor(one, model, file, advance)
