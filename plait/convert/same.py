"""The same layout in another storage: every tensor keeps its name, the files beside it stay as they are."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from plait.checkpoint.weights import Checkpoint
from plait.convert.making import Made, Part
from plait.convert.reading import Model, Wanted
from plait.quant.weight import Weight


class Kept:
    """A checkpoint under its own names."""

    def __init__(self, model: Model) -> None:
        self.checkpoint: Checkpoint = model.checkpoint
        self.wanted: Mapping[str, Wanted] = {
            name: Wanted(self.checkpoint.shape(name), name, {}) for name in self.checkpoint.names()
        }
        self._roles: dict[str, list[str]] = {}
        for ours, wanted in model.wanted.items():
            for source in wanted.sources:
                self._roles.setdefault(source, []).append(ours)

    def read(self, name: str) -> Tensor | Weight:
        return self.checkpoint.read(name)

    def made(self) -> list[Made]:
        """All its tensors, those too that no mixer reads."""
        return [
            Made(name, wanted.shape, (Part(name),), tuple(self._roles.get(name, ())))
            for name, wanted in self.wanted.items()
        ]
