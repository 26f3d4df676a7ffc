"""The tensors of a model's files, and how its weights are stored before any of them is read."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor

from plait.checkpoint.names import NameMap, UnknownName, sources_of
from plait.quant.encode import Encoder
from plait.quant.weight import Weight


class Checkpoint(Protocol):
    """The tensors of a model's files: safetensors, GGUF, or made up (`synthetic`)."""

    def __contains__(self, name: object) -> bool: ...
    def names(self) -> Iterable[str]: ...
    def format_of(self, name: str) -> str:
        """A storage like 'Q4_K' or 'int4_g128', or a dtype like 'bfloat16'."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """As torch sees it, rows first."""
        ...

    def read(self, name: str) -> Weight | Tensor:
        """A `Weight` for block formats, else a tensor in the file's dtype (a view of the mapped file)."""
        ...


def is_dtype(name: str) -> bool:
    """Whether a format is that of plain numbers."""
    return isinstance(getattr(torch, name, None), torch.dtype)


def list_storages(
    checkpoint: Checkpoint, names: NameMap, ours: Iterable[str], how: Encoder | None
) -> tuple[str, ...]:
    """The formats that matrices of our names have in memory, without plain numbers.

    how: what plain numbers are encoded by. A name without a tensor has none: reading it is an error.
    """
    found = set[str]()
    for name in ours:
        try:
            source, _ = names.resolve(name, checkpoint)
        except UnknownName:
            continue
        for theirs in sources_of(source):
            kept = checkpoint.format_of(theirs) if theirs in checkpoint else ""
            found.add(kept if not is_dtype(kept) else how.kind.name if how else "")
    return tuple(sorted(found - {""}))
