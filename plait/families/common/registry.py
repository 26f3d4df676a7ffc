"""Families by the names that configs use. A family is a function of a normalised config that returns data."""

from __future__ import annotations

import difflib
import pkgutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any

from plait.checkpoint.names import NameMap
from plait.errors import UnsupportedModel
from plait.families.common.detection import UNDETECTED, Detection
from plait.families.common.hf_config import USUAL_HF, HfConfig
from plait.families.common.refused import why_no_decoder, why_refused
from plait.families.config.normalize import NOTHING, Config, normalize
from plait.families.config.wrappers import lift_text, list_texts
from plait.spec.model import ModelSpec

MOST_NAMES, MOST_LETTERS = 64, 200  # that are looked at, and of which the nearest known name is searched
Build = Callable[[Config], tuple[ModelSpec, NameMap]]


class UnknownArchitecture(UnsupportedModel):
    """A config that names no architecture at all, or one that no family registered."""


@dataclass(frozen=True, slots=True)
class Family:
    """How one kind of model is built from its config.

    `defaults` stand for absent keys. `honours` are the keys of `neutral.NEUTRAL` that `build` looks at.
    `tiny` is the config of a small one, which `plait verify --family` fills with random numbers. `detection`
    is for checkpoints without a config, `hf` for models that are written with one. `saved_as`: architectures
    of other families that configs of these model types may name.
    """

    name: str
    architectures: tuple[str, ...]
    model_types: tuple[str, ...]
    build: Build
    defaults: Mapping[str, object]
    honours: Collection[str]
    tiny: Mapping[str, object]
    detection: Detection
    hf: HfConfig
    saved_as: tuple[str, ...] = ()


FAMILIES: dict[str, Family] = {}


def family(
    *architectures: str,
    model_types: tuple[str, ...] = (),
    defaults: Mapping[str, object] = NOTHING,
    honours: Collection[str] = (),
    tiny: Mapping[str, object] = NOTHING,
    detection: Detection = UNDETECTED,
    hf: HfConfig = USUAL_HF,
    saved_as: tuple[str, ...] = (),
) -> Callable[[Build], Build]:
    """Register a family under its architectures and model types. Raises ValueError for one that is taken."""

    def register(build: Build) -> Build:
        name = model_types[0] if model_types else architectures[0]
        entry = Family(
            name, architectures, model_types, build, defaults, honours, tiny, detection, hf, saved_as
        )
        if taken := [key for key in (*architectures, *model_types) if key in FAMILIES]:
            raise ValueError(f"family {taken[0]!r} is defined twice")
        FAMILIES.update(dict.fromkeys((*architectures, *model_types), entry))
        return build

    return register


def families_by_name() -> Mapping[str, Family]:
    """Every family, by architecture and by model type: those of `plait.families`, and of loaded plug-ins."""
    _import_families()
    return FAMILIES


def families() -> Collection[Family]:
    """Every family once."""
    return {entry.name: entry for entry in families_by_name().values()}.values()


@cache
def _import_families() -> None:
    """A module of the folder registers its families itself: there is no list of them."""
    for module in pkgutil.iter_modules([str(Path(__file__).parents[1])], "plait.families."):
        if not module.ispkg:
            import_module(module.name)


def find(config: Mapping[str, object]) -> Family:
    """The family of a raw config: by architecture, then by model type. Raises UnknownArchitecture.

    By model type first where a family's checkpoints are saved under the architecture of another one.
    """
    families = families_by_name()
    names = names_in(config)
    if why := why_no_decoder(config):
        raise UnknownArchitecture(why)
    for name in names:
        if name in families and any(other in families[name].saved_as for other in names):
            return families[name]
    for name in names:  # what refuses a whole model comes before the text model inside it
        if name in families:
            return families[name]
        if why := why_refused(name):
            raise UnknownArchitecture(why)
    if not names:
        raise UnknownArchitecture("the config names no architecture and no model_type")
    every = sorted(a for f in families.values() for a in f.architectures)
    near = difflib.get_close_matches(names[0][:MOST_LETTERS], every, 1, 0.5)
    hint = f"; the nearest is {near[0]}" if near else ""
    raise UnknownArchitecture(
        f"architecture {names[0]!r} is not known{hint}; `plait families` lists all, and --plugin adds one"
    )


def names_in(config: Mapping[str, Any]) -> list[str]:
    """The architectures and model types that a config names, the most specific first."""
    named = config.get("architectures") or config.get("model_type")
    if isinstance(config.get("ssm_cfg"), Mapping) and not named:  # state-spaces' own format names nothing
        return ["MambaLMHeadModel"]
    listed = [*islice(config.get("architectures") or (), MOST_NAMES)]
    names = [*listed, config.get("model_type"), lift_text(config).get("model_type")]
    names = [name for name in names if name]
    return [*names, *list_texts(names)]


def build_spec(config: Mapping[str, object]) -> tuple[ModelSpec, NameMap]:
    """What a model is and where its tensors are, from its config alone. Raises UnsupportedModel."""
    entry = find(config)
    return entry.build(normalize(config, entry.defaults, entry.honours, entry.hf.words))
