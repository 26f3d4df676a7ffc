"""Write a small random checkpoint of a family from its config alone: all tensors that its mixers read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from plait.checkpoint.synthetic import Synthetic
from plait.checkpoint.weights import Weights
from plait.convert.plan.source import NeededTensor
from plait.convert.plan.tensor_plan import plan_tensors
from plait.errors import ConfigError
from plait.families.common.registry import Family, build_spec
from plait.loading.meta_model import meta_target
from plait.model.decoder import Decoder
from plait.quant.weight import Dense, Weight

Shape = tuple[int, ...]


class NoFile:
    """A checkpoint without a tensor; `shapes`: those of the requested tensors, under our names."""

    def __init__(self) -> None:
        self.shapes: dict[str, Shape] = {}

    def __contains__(self, name: object) -> bool:
        return False

    def names(self) -> Iterator[str]:
        return iter(())

    def shape(self, name: str) -> Shape:
        raise KeyError(name)

    def read(self, name: str) -> Tensor:
        raise KeyError(name)


class AskedWeights(Weights):
    """Weights without numbers: each that a mixer requires, in the shape that it requests.

    Optional ones, such as a bias, are missing.
    """

    def read(self, name: str) -> Tensor:
        return torch.empty(0, device="meta")

    def _numbers(
        self, name: str, value: Tensor, shape: Shape | None, dtype: torch.dtype | None = None
    ) -> Tensor:
        return self._asked(name, shape)

    def _matrix(self, name: str, value: Tensor | Weight, shape: tuple[int, int] | None) -> Weight:
        return Dense(self._asked(name, shape))

    def _asked(self, name: str, shape: Shape | None) -> Tensor:
        if shape is None:
            raise ConfigError(
                f"{self._full(name)}: a mixer asks for it without a shape, so that no model can be made up; "
                "give the shape to w.tensor or w.weight"
            )
        assert isinstance(self.checkpoint, NoFile)
        self.checkpoint.shapes[self._full(name)] = shape
        return torch.empty(shape, device="meta")


def write_tiny_model(entry: Family, folder: Path, seed: int = 0) -> None:
    """Write config.json and model.safetensors of the family's `tiny` config.

    Raises ConfigError for a family without one, and UnsupportedFormat where a recipe has no way back.
    """
    if not entry.tiny:
        raise ConfigError(
            f"family {entry.name}: it has no config of a small model; give @family(…, tiny={{…}}) one"
        )
    named = {"model_type": entry.model_types[0]} if entry.model_types else {}
    config: dict[str, Any] = {"architectures": [entry.architectures[0]], **named, **entry.tiny}
    spec, names = build_spec(config)
    asked = NoFile()
    Decoder(spec, AskedWeights(asked, names, meta_target(spec)))
    wanted = {name: NeededTensor(shape, "", {}) for name, shape in asked.shapes.items()}
    shapes = {made.name: made.shape for made in plan_tensors(wanted, names, entry.name)}
    drawn = Synthetic(shapes, seed)
    tensors = {name: drawn.read(name).contiguous() for name in shapes}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config, indent=2))
