"""Write small random models: a config, and the tensors that its family would have on disk.

`attention` and `recurrent` have the configs, `tensors` what has no config of a family.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from plait.checkpoint.names import NameMap, sources_of
from plait.checkpoint.synthetic import Synthetic
from plait.checkpoint.weights import Weights
from plait.convert.plan.source import NeededTensor
from plait.convert.plan.tensor_plan import plan_tensors
from plait.errors import ConfigError
from plait.families.common.registry import build_spec, find
from plait.loading.meta.meta_model import meta_target
from plait.model.decoder import Decoder
from plait.model.mtp import MtpHead
from plait.partition import Range
from plait.quant.weight import Dense, Weight
from plait.spec.model import ModelSpec
from plait.spec.moe import TableMoeSpec
from plait.spec.recurrent import NgramSpec
from plait.verify.tiny.attention import ATTENTION
from plait.verify.tiny.recurrent import RECURRENT
from plait.verify.tiny.sizes import Config, Shapes
from plait.verify.tiny.tensors import TENSORS

Shape = tuple[int, ...]
# By what is special in them; the names are those of cells.
CONFIGS: Mapping[str, Config] = {**ATTENTION, **RECURRENT}
NAMES = (*CONFIGS, *TENSORS)  # of the models of `plait verify --certificate`


class NoFile:
    """A checkpoint without a tensor; `shapes`: those of the requested tensors, under our names."""

    def __init__(self) -> None:
        self.shapes: dict[str, Shape] = {}

    def __contains__(self, name: object) -> bool:
        return False

    def names(self) -> Iterator[str]:
        return iter(())

    def format_of(self, name: str) -> str:
        raise KeyError(name)

    def shape(self, name: str) -> Shape:
        raise KeyError(name)

    def read(self, name: str) -> Tensor:
        raise KeyError(name)


class AskedWeights(Weights):
    """Weights without numbers: each that a mixer requires, in the shape that it requests.

    Optional ones, such as a bias, are missing.
    """

    def read(self, name: str, rows: Range | None = None) -> Tensor:
        return torch.empty(0, device="meta")

    def _numbers(
        self, name: str, value: Tensor, shape: Shape | None, dtype: torch.dtype | None = None
    ) -> Tensor:
        return self._ask(name, shape)

    def _matrix(self, name: str, value: Tensor | Weight, shape: tuple[int, int] | None) -> Weight:
        return Dense(self._ask(name, shape))

    def _ask(self, name: str, shape: Shape | None) -> Tensor:
        if shape is None:
            raise ConfigError(
                f"{self._full(name)}: a mixer asks for it without a shape, so that no model can be made up; "
                "give the shape to w.tensor or w.weight"
            )
        assert isinstance(self.checkpoint, NoFile)
        self.checkpoint.shapes[self._full(name)] = shape
        return torch.empty(shape, device="meta")


def write_model(config: Mapping[str, object], folder: Path, seed: int = 0) -> None:
    """Write config.json and model.safetensors of a model with this config, its head for MTP included.

    The numbers are `Synthetic`'s, by tensor and seed. Raises UnsupportedModel for a config of no family, and
    UnsupportedFormat where a recipe has no way back.
    """
    spec, names = build_spec(config)
    asked, target = NoFile(), meta_target(spec)
    target.merge_ids = None  # there is no tokenizer: the file has the table
    weights = AskedWeights(asked, names, target)
    decoder = Decoder(spec, weights)
    if spec.mtp is not None:
        MtpHead(spec, weights, decoder)
    wanted = {
        name: NeededTensor(shape, "", {})
        for name, shape in asked.shapes.items()
        if sources_of(names.resolve(name)[0])  # a constant is in no file
    }
    made = plan_tensors(wanted, names, find(config).name)
    shapes = {one.name: one.shape for one in made}
    write_tensors(config, shapes, folder, seed, _count_drawn(spec, names))


def write_tensors(
    config: Config, shapes: Shapes, folder: Path, seed: int = 0, tables: Mapping[str, int] | None = None
) -> None:
    """Write a config.json, and a model.safetensors with random tensors of these shapes.

    tables: of those tensors that have numbers of experts or merged ids, how many of these there are.
    """
    drawn = Synthetic(shapes, seed)
    tensors = {name: drawn.read(name).contiguous() for name in shapes}
    for name, count in (tables or {}).items():
        tensors[name] = _draw_table(name, shapes[name], count, seed)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config, indent=2))


def _count_drawn(spec: ModelSpec, names: NameMap) -> dict[str, int]:
    """How many experts or merged ids each table of tokens has, under the name of the table in the file."""
    tables = {
        f"{name}.table": mixer.num_experts for name, mixer in spec.mixers() if isinstance(mixer, TableMoeSpec)
    }
    tables |= {
        f"{name}.ids": mixer.merges.count
        for name, mixer in spec.mixers()
        if isinstance(mixer, NgramSpec) and mixer.merges
    }
    return {theirs: count for ours, count in tables.items() for theirs in sources_of(names.resolve(ours)[0])}


def _draw_table(name: str, shape: Shape, count: int, seed: int) -> Tensor:
    """Numbers below `count` for each token, int64 of the shape [tokens, top_k] or [tokens]; no token has one
    twice."""
    if len(shape) == 1:
        return _draw_table(name, (*shape, 1), count, seed)[:, 0].contiguous()
    rows, top_k = shape
    drawn = Synthetic({name: (rows, count)}, seed)
    return drawn.read(name).argsort(1)[:, :top_k].contiguous()


def write_named(name: str, folder: Path, seed: int = 0) -> None:
    """Write one of the models in `NAMES`."""
    if name in TENSORS:
        write_tensors(*TENSORS[name], folder, seed)
    else:
        write_model(CONFIGS[name], folder, seed)
