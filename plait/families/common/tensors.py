"""A checkpoint's names and shapes by layer, and what has been concluded from them so far."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from plait.errors import UnsupportedModel
from plait.families.config.aliases import ALIASES

Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]
Named = tuple[str, Shape]  # a tensor's whole name and its shape
LAYER = re.compile(r"^(?P<prefix>.*?)layers\.(?P<i>\d{1,6})\.(?P<rest>.+)$")
EMBEDDINGS = ("embed_tokens.weight", "embeddings.weight", "embedding.weight")
HEADS = (
    *("lm_head.weight", "language_model.lm_head.weight", "model.lm_head.weight", "output.weight"),
    *("thinker.lm_head.weight", "llm.lm_head.weight"),  # next to a talker, or eyes
    "model.transformer.ff_out.weight",  # Molmo 1
    "head.weight",  # RWKV
    "embed_out.weight",  # GPT-NeoX
    "transformer.output_layer.weight",  # ChatGLM
    "output_projection.weight",  # BioGPT
    # heads of their own in BERT and its kin, which most files tie
    *(
        "cls.predictions.decoder.weight",
        "lm_head.decoder.weight",
        "generator_lm_head.weight",
        "decoder.weight",
    ),
)
MTP = ("eh_proj.weight", "shared_head.norm.weight")
OTHERS = ("vision_tower.", "visual.", "audio_tower.", "mtp.", "multi_modal_projector.")


class Tensors:
    """Shapes by layer. `known`: what a config says; `values` and `why`: what the shapes say beyond it."""

    def __init__(self, shapes: Shapes, known: Mapping[str, Any]) -> None:
        self.known, self.values, self.why = known, dict[str, Any](), dict[str, str]()
        self.ends: dict[str, Shape] = {}
        self.layers: dict[int, dict[str, Named]] = {}
        for name, shape in shapes.items():
            if is_aside(name):
                continue
            if match := LAYER.match(name):
                self.layers.setdefault(int(match["i"]), {})[match["rest"]] = (name, tuple(shape))
            else:
                self.ends[name] = tuple(shape)
        for i in [i for i, layer in self.layers.items() if any(m in layer for m in MTP)]:
            del self.layers[i]  # drafts a second token; not part of the model
        if not self.layers:
            raise UnsupportedModel(
                f"no tensor of {', '.join(sorted(shapes)[:4])}… is called '…layers.N.…': no model Plait knows"
            )

    def has(self, rest: str) -> bool:
        return any(rest in layer for layer in self.layers.values())

    def first(self, *choices: str, beside: str | None = None) -> Named | None:
        """A tensor in the first layer that has one of these; `beside`: only of layers that have this, too."""
        for rest in choices:
            for i in sorted(self.layers):
                if rest in self.layers[i] and (beside is None or beside in self.layers[i]):
                    return self.layers[i][rest]
        return None

    def need(self, *choices: str, beside: str | None = None) -> Named:
        """The same, and UnsupportedModel where there is none."""
        if (found := self.first(*choices, beside=beside)) is None:
            raise UnsupportedModel(
                f"cannot tell the model's sizes: no layer has a tensor {' or '.join(choices)!r}"
            )
        return found

    def words(self, marks: Mapping[str, str], otherwise: str) -> list[str]:
        """One word per layer: that of the first mark it has."""
        kinds = []
        for i in sorted(self.layers):
            kinds.append(next((w for mark, w in marks.items() if mark in self.layers[i]), otherwise))
        return kinds

    def put(self, key: str, value: object, why: str) -> None:
        """Conclude, unless the config or an earlier conclusion has spoken."""
        if key not in self.values and not self.is_said(key):
            self.values[key], self.why[key] = value, why

    def size(self, key: str, value: int, source: Named) -> None:
        """Conclude from a tensor's shape. A size of nothing is a damaged file's. Raises UnsupportedModel."""
        if value < 1:
            raise UnsupportedModel(f"tensor {source[0]} {list(source[1])} would make {key} {value}")
        self.put(key, value, f"tensor {source[0]} {list(source[1])}")

    def default(self, key: str, value: object, why: str = "the tensors do not tell") -> None:
        self.put(key, value, f"default ({why})")

    def get(self, key: str) -> Any:
        """What the config says, else what has been concluded."""
        for name in (key, *ALIASES.get(key, ())):
            if self.known.get(name) is not None:
                return self.known[name]
        return self.values.get(key)

    def is_said(self, *keys: str) -> bool:
        """Does the config say one of these, under any of its names?"""
        names = [name for key in keys for name in (key, *ALIASES.get(key, ()))]
        return any(self.known.get(name) is not None for name in names)

    def example(self) -> str:
        """The name of some tensor, for messages."""
        layer = self.layers[min(self.layers)]
        return layer[min(layer)][0]


def is_aside(name: str) -> bool:
    """Whether a tensor is of a part that sees, hears or drafts a second token: not of the text model."""
    return name.startswith(OTHERS) or name.startswith(tuple(f"model.{o}" for o in OTHERS))
