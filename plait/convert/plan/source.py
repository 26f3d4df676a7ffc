"""The model to convert, as its mixers read it: our tensor names, their shapes, their numbers on request."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from plait.checkpoint.names import NameMap, Source, sources_of
from plait.checkpoint.storages import Checkpoint
from plait.checkpoint.synthetic import Synthetic
from plait.checkpoint.weights import Weights
from plait.errors import CheckpointError, UnsupportedFormat
from plait.families.common.resolved import Resolved
from plait.loading.meta.meta_model import Outline, meta_target
from plait.model.decoder import Decoder
from plait.quant.weight import Weight
from plait.spec.model import ModelSpec


@dataclass(frozen=True, slots=True)
class NeededTensor:
    """One tensor that the model reads: its shape under our name, and what of the checkpoint it is made of."""

    shape: tuple[int, ...]
    source: Source
    fields: Mapping[str, str]

    @property
    def sources(self) -> tuple[str, ...]:
        return sources_of(self.source)


class Numbers(Protocol):
    """Tensors by the names that parts have."""

    @property
    def checkpoint(self) -> Checkpoint: ...
    @property
    def wanted(self) -> Mapping[str, NeededTensor]: ...
    def read(self, name: str) -> Tensor | Weight: ...


class RecordingNameMap(NameMap):
    """A name map that records which names were resolved."""

    def __init__(self, names: NameMap) -> None:
        super().__init__()
        self._names, self.ignored, self.beside = names, names.ignored, names.beside
        self.found: dict[str, tuple[Source, dict[str, str]]] = {}

    def resolve(self, name: str, present: Container[str] | None = None) -> tuple[Source, dict[str, str]]:
        found = self._names.resolve(name, present)
        self.found[name] = found
        return found


class Model:
    """What a checkpoint is, under our names.

    The decoder is built once over headers alone, and what it reads is recorded: `wanted`. Raises
    MissingTensor, ShapeMismatch and UnusedTensor as loading would.
    """

    def __init__(self, resolved: Resolved, checkpoint: Checkpoint) -> None:
        self.resolved, self.checkpoint = resolved, checkpoint
        self.spec: ModelSpec = resolved.spec
        outline, asked = Outline(checkpoint), RecordingNameMap(resolved.names)
        weights = Weights(outline, asked, meta_target(self.spec))
        Decoder(self.spec, weights)
        weights.check_all_used()
        self.wanted: Mapping[str, NeededTensor] = {
            name: NeededTensor(_shape(source, fields, outline), source, fields)
            for name, (source, fields) in asked.found.items()
            if all(s in checkpoint for s in sources_of(source))
        }

    def read(self, name: str) -> Tensor | Weight:
        """The tensor under our name, in the checkpoint's storage where its recipe leaves it there."""
        wanted = self.wanted[name]
        if isinstance(wanted.source, str):
            return self.checkpoint.read(wanted.source)
        value: Tensor | Weight = wanted.source.fn(
            *(self.checkpoint.read(s) for s in wanted.source.sources), **wanted.fields
        )
        return value


def check_complete(resolved: Resolved, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Whether the model can be built from tensors of these shapes, every one used.

    Raises UnsupportedFormat: what would be written could not be read.
    """
    try:
        Model(resolved, Synthetic(shapes))
    except CheckpointError as error:
        raise UnsupportedFormat(f"what would be written could not be read again: {error}") from error


def _shape(source: Source, fields: Mapping[str, str], outline: Outline) -> tuple[int, ...]:
    if isinstance(source, str):
        return outline.shape(source)
    value: Tensor = source.fn(*(outline.read(s) for s in source.sources), **fields)
    return tuple(value.shape)
