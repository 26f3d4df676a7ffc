"""The models of `plait serve`: NAME,ALIAS=PATH, the tables [models.NAME] of a file, and a folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from plait.checkpoint.find_files import find_model
from plait.config import EngineConfig, ServerConfig, option_names
from plait.errors import ConfigError, PlaitError
from plait.server.models.catalog import NAME, ModelCatalog, ModelEntry
from plait.server.ollama.wire import read_keep_alive

MODEL_KEYS = ("model", "aliases", "keep_alive", "tool_call_parser", "reasoning_parser")
Table = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class NamedModel:
    """A model as it was written. `name`: None without one; `table`: its options of the file."""

    name: str | None
    source: str
    table: Table
    aliases: tuple[str, ...] = ()

    def engine(self, settings: Mapping[str, object]) -> EngineConfig:
        """How it is loaded: its own options win. Raises ConfigError."""
        own = {key: value for key, value in self.table.items() if key not in MODEL_KEYS}
        return make_engine(self.name or self.source, {**settings, **own})


def make_engine(name: str, settings: Mapping[str, object]) -> EngineConfig:
    """Raises ConfigError, which names the model."""
    try:
        return EngineConfig(**settings)  # type: ignore[arg-type]  # __post_init__ checks values of any type
    except ConfigError as error:
        raise ConfigError(f"models.{name}: {error}") from error


def list_named(words: Sequence[str], tables: Mapping[str, Table]) -> list[NamedModel]:
    """The models that an operator named: of the command line, then those of the file with a `model`.

    Raises ConfigError.
    """
    found = []
    for names, source in map(split_name, words):
        name = names[0] if names else None
        found.append(NamedModel(name, source, tables.get(name or "", {}), names[1:]))
    known = {one.name for one in found}
    for name, table in tables.items():
        if name not in known and "model" in table:
            found.append(NamedModel(name, _text(name, table, "model"), table))
    return found


def split_name(word: str) -> tuple[tuple[str, ...], str]:
    """NAME,ALIAS=PATH as (names, path); what is a path with = in it, or has no name, is a path."""
    before, equals, source = word.partition("=")
    if not equals or "://" in before or Path(word).exists():
        return (), word
    names = tuple(before.split(","))
    for name in names:
        if not NAME.fullmatch(name):
            text = f"model: {name!r} is no name; write letters, digits and ._:@/+- before the ="
            raise ConfigError(text)
    if not source:
        raise ConfigError(f"model: {word!r} names no model after the =")
    return names, source


def needs_pool(models: Sequence[NamedModel], server: ServerConfig) -> bool:
    """Whether more is requested than one model that stays as long as the server runs."""
    given = (server.models_dir, server.keep_alive, server.models_memory, server.max_loaded_models)
    own = any(one.aliases or {"aliases", "keep_alive"} & one.table.keys() for one in models)
    return len(models) != 1 or own or any(value is not None for value in given)


def make_catalog(
    models: Sequence[NamedModel],
    tables: Mapping[str, Table],
    settings: Mapping[str, object],
    server: ServerConfig,
) -> ModelCatalog:
    """All models of a server. `settings`: engine options that hold for each. Raises ConfigError."""
    if server.served_model_name is not None:
        raise ConfigError("served_model_name: it is for one model; with several write NAME=PATH")
    if server.keep_alive is not None:
        _keep_alive("keep_alive", server.keep_alive)
    if not models and server.models_dir is None:
        raise ConfigError("model: none is named; give PATH, NAME=PATH, or --models-dir")
    entries = [make_entry(one.name or _own_name(one.source), one, settings) for one in models]
    named = {entry.name for entry in entries}
    special = {
        name: make_entry(name, NamedModel(name, "", table), settings)
        for name, table in tables.items()
        if name not in named
    }
    if special and server.models_dir is None:
        name = next(iter(special))
        raise ConfigError(f"[models.{name}]: no model has this name; add model = PATH there")
    template = ModelEntry(name="", source="", engine=make_engine("*", settings))
    return ModelCatalog(entries, server.models_dir, template, special)


def make_entry(name: str, one: NamedModel, settings: Mapping[str, object]) -> ModelEntry:
    """A model of a catalogue; `settings`: engine options that hold for each. Raises ConfigError."""
    table, keep = one.table, one.table.get("keep_alive")
    aliases = table.get("aliases", ())
    aliases = (aliases,) if isinstance(aliases, str) else aliases
    if not isinstance(aliases, list | tuple) or not all(isinstance(alias, str) for alias in aliases):
        raise ConfigError(f"[models.{name}]: aliases must be a list of names")
    return ModelEntry(
        name=name,
        source=one.source,
        engine=one.engine(settings),
        aliases=(*one.aliases, *aliases),
        tool_call_parser=_optional(name, table, "tool_call_parser"),
        reasoning_parser=_optional(name, table, "reasoning_parser"),
        keep_alive_s=None if keep is None else _keep_alive(f"[models.{name}]", keep),
    )


def _own_name(source: str) -> str:
    """What a model is called that was given no name: as where it is the only one."""
    try:
        return find_model(source, offline=True).name
    except PlaitError:
        return source


def _keep_alive(where: str, value: object) -> float:
    try:
        return read_keep_alive(value)
    except PlaitError as error:
        text = str(error).removeprefix("keep_alive: ")
        raise ConfigError(f"{where}: {text}" if where == "keep_alive" else f"{where}: {error}") from error


def _text(name: str, table: Table, key: str) -> str:
    value = table[key]
    if not isinstance(value, str) or not value:
        raise ConfigError(f"[models.{name}]: {key} must be text")
    return value


def _optional(name: str, table: Table, key: str) -> str | None:
    return None if key not in table else _text(name, table, key)


def check_table(path: str, name: str, table: object) -> Table:
    """A table [models.NAME] with its keys in our spelling. Raises ConfigError for an unknown one."""
    if not isinstance(table, dict) or not NAME.fullmatch(name):
        raise ConfigError(f"config: {path}: [models.{name}] must be a table of one model's options")
    found = {key.replace("-", "_"): value for key, value in table.items()}
    if unknown := sorted(found.keys() - {*option_names(EngineConfig), *MODEL_KEYS}):
        raise ConfigError(f"config: {path}: [models.{name}] has no option {unknown[0]!r}")
    return found
