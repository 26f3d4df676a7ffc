"""Adapters as GGUF files: general.type adapter, tensors `NAME.weight.lora_a` and `.lora_b` (llama.cpp)."""

from __future__ import annotations

import math
from pathlib import Path

from torch import Tensor

from plait.checkpoint.adapters.adapter_file import AdapterFile, FactorPair, HalfPairs, digest_pairs
from plait.checkpoint.readers.gguf import GgufFile
from plait.errors import BadFile, ShapeMismatch, UnsupportedFormat, clip_text
from plait.quant.weight import as_tensor

_ENDS = {".lora_a": "A", ".lora_b": "B"}
_TABLES = ("token_embd.weight",)  # rows that are looked up: llama.cpp's factors of them lie the other way


def open_gguf(path: Path, max_rank: int) -> AdapterFile:
    """An adapter in GGUF. Raises BadFile, UnsupportedFormat and ShapeMismatch, one line each."""
    file = GgufFile(path)
    kind, lora = file.metadata.get("general.type"), file.metadata.get("adapter.type")
    if kind != "adapter" or lora != "lora":
        raise UnsupportedFormat(
            f"{path}: general.type is {kind!r} and adapter.type {lora!r}; an adapter has 'adapter' and 'lora'"
        )
    if file.metadata.get("adapter.alora.invocation_tokens") is not None:
        raise UnsupportedFormat(f"{path}: adapters that begin at an invocation (aLoRA) cannot be served")
    alpha = file.metadata.get("adapter.lora.alpha")
    if not isinstance(alpha, int | float) or not (math.isfinite(alpha) and abs(alpha) < 1e6):
        raise BadFile(f"{path}: adapter.lora.alpha is {clip_text(repr(alpha), 60)}; it must be below 1e6")
    pairs = HalfPairs(path)
    for name in file.names():
        end = name[-len(".lora_a") :]
        weight = name.removesuffix(end)
        if end not in _ENDS or not weight.endswith(".weight") or weight in _TABLES:
            raise UnsupportedFormat(
                f"{path}: tensor {clip_text(name, 120)!r} cannot be served; expected is WEIGHT.lora_a or "
                "WEIGHT.lora_b of a linear layer"
            )
        shape = file.shape(name)
        rank = shape[-2] if end == ".lora_a" and len(shape) > 1 else shape[-1]
        if rank > max_rank:
            raise ShapeMismatch(
                f"{path}: {name!r} has rank {rank}; the limit is {max_rank} (--max-lora-rank)"
            )
        value = file.read(name)
        tensor = value if isinstance(value, Tensor) else as_tensor(value).view(shape)
        pairs.put(weight, "A" if end == ".lora_a" else "B", name, tensor)
    done = {
        weight: FactorPair(down, up, float(alpha) / down.shape[-2] if alpha else 1.0)
        for weight, down, up in pairs
    }
    architecture = str(file.metadata.get("general.architecture"))
    return AdapterFile(path, "gguf", done, digest_pairs(done), architecture=architecture)
