"""What a family answers: the model as data, where its tensors are, and where every number came from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from plait.checkpoint.names import NameMap
from plait.families.config.normalize import Config
from plait.spec.model import ModelSpec


@dataclass(frozen=True, slots=True)
class Resolved:
    """A checkpoint with its spec, names and config.

    `config`: the config after normalisation and completion, as it was used to build `spec`.
    `provenance`: for each of its keys where the value came from ("config.json", "tensor …", "default (…)",
    "--set"). `family`: the name of the family that built it. `is_detected`: no config has all of it, so names
    and shapes completed it; `plait.loading.probe.candidates` knows what they leave open.
    """

    spec: ModelSpec
    names: NameMap
    config: Config
    provenance: Mapping[str, str]
    family: str
    is_detected: bool = False
    hf_names: NameMap | None = None  # of a model in GGUF: where Hugging Face's files would have its tensors
