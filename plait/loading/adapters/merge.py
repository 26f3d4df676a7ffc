"""A checkpoint with an adapter merged into its weights, read like any other."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from plait.checkpoint.adapters.adapter_file import AdapterFile
from plait.checkpoint.quantized.parts import Files
from plait.checkpoint.readers.gguf import GgufFile
from plait.errors import BadFile, ShapeMismatch, UnsupportedFormat, UnusedTensor, list_some
from plait.families.common.inside import find_in_files
from plait.quant.fp4 import Fp4
from plait.quant.gguf import Gguf


class MergedTensors:
    """Tensors of a checkpoint as an adapter changes them (`parts.Files`).

    Raises CheckpointError for an adapter of another model.
    """

    def __init__(self, files: Files, adapter: AdapterFile) -> None:
        self._files, self._adapter = files, follow_names(files, adapter)
        check_adapter(files, self._adapter, "hf")
        self.names, self.shape, self.format_of = files.names, files.shape, files.format_of
        self.nbytes, self.release, self.close = files.nbytes, files.release, files.close

    def __contains__(self, name: object) -> bool:
        return name in self._files

    def read(self, name: str) -> Tensor:
        """The sum, rounded to the dtype of the file."""
        return add_change(self._files.read(name), name, self._adapter)


class MergedGguf(GgufFile):
    """A GGUF file of plain weights as an adapter changes it. Raises CheckpointError for another model's."""

    def __init__(self, path: Path, adapter: AdapterFile) -> None:
        super().__init__(path)
        self._adapter = adapter
        check_adapter(self, adapter, "gguf")

    def read(self, name: str) -> Gguf | Fp4 | Tensor:
        """The sum, rounded to the dtype of the file."""
        value = super().read(name)
        return add_change(value, name, self._adapter) if isinstance(value, Tensor) else value


def follow_names(files: Files, adapter: AdapterFile) -> AdapterFile:
    """The adapter with the names of the files. Raises BadFile where it has one tensor under two names."""
    names = find_in_files(adapter.pairs, frozenset(files.names()))
    counts = Counter(names.values())
    if twice := sorted(name for name, theirs in names.items() if counts[theirs] > 1):
        raise BadFile(f"{adapter.path}: these are one tensor of the model: {list_some(twice, 4)}")
    return replace(adapter, pairs={names[name]: pair for name, pair in adapter.pairs.items()})


def check_adapter(files: Files | GgufFile, adapter: AdapterFile, naming: str) -> None:
    """Whether every factor has a plain weight of its shape in the files. Raises CheckpointError."""
    if adapter.naming != naming:
        theirs = "GGUF" if naming == "gguf" else "safetensors"
        raise UnsupportedFormat(
            f"{adapter.path}: its names are not those of {theirs} files, so it cannot be merged; give "
            "the model in the form that the adapter was made for"
        )
    if missing := sorted(name for name in adapter.pairs if name not in files):
        raise UnusedTensor(
            f"{adapter.path}: the model's files have no plain weight for {len(missing)} of the adapter: "
            f"{list_some(missing, 4)}; quantized weights cannot be merged into, nor another model's"
        )
    for name, pair in adapter.pairs.items():
        if (kind := files.format_of(name)) not in ("float32", "bfloat16", "float16"):
            raise UnsupportedFormat(
                f"{adapter.path}: {name} is stored as {kind}; merge the adapter into the plain weights"
            )
        found = (*pair.up.shape[:-1], pair.down.shape[-1])
        wanted = files.shape(name)
        if found != (tuple(reversed(wanted)) if adapter.is_turned and found != wanted else wanted):
            raise ShapeMismatch(
                f"{adapter.path}: {name}: lora_B · lora_A is {list(found)}, and the weight {list(wanted)}"
            )


def add_change(value: Tensor, name: str, adapter: AdapterFile) -> Tensor:
    """A tensor of a file with what the adapter adds to it, in the same dtype."""
    pair = adapter.pairs.get(name)
    if pair is None:
        return value
    change = pair.scale * torch.matmul(pair.up.float(), pair.down.float())
    change = change.T if adapter.is_turned and name not in _UNTURNED else change
    return (value.float() + change).to(value.dtype).contiguous()


_UNTURNED = ("lm_head.weight",)  # a linear layer, also where all others are stored as [in, out]
