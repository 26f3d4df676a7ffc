"""`plait config`: every option of `plait serve` with its value, and where the value comes from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import click
from click.core import ParameterSource

from plait.cli.common.help import GroupedCommand
from plait.cli.common.options import (
    SECRET,
    common_options,
    config_file_option,
    config_options,
    engine_options,
    engine_settings,
    json_option,
    models_option,
    server_settings,
    write_json,
)
from plait.cli.common.unread_flags import variable_name
from plait.cli.serve import TABLES, merge_settings, read_model_tables, read_table
from plait.config import ServerConfig, option_names

HIDDEN = "(hidden)"
COMMAND_LINE, DEFAULT, INHERITED = "command line", "default", "[engine]"


@dataclass(frozen=True, slots=True)
class OptionValue:
    """An option as a server would have it. `table`: server, engine or models.NAME. `source`: default, command
    line, a variable's name, a file, or [engine] for what a model has from there."""

    table: str
    name: str
    value: object
    source: str


@click.command(cls=GroupedCommand)
@models_option()
@config_file_option()
@config_options(ServerConfig)
@engine_options()
@click.option("--all", "show_all", is_flag=True, help="list also the options that have their default")
@json_option("an array with an object for each option")
@common_options()
@click.pass_context
def config(
    ctx: click.Context,
    /,
    model: tuple[str, ...],
    config: str | None,
    show_all: bool,
    as_json: bool,
    **given: object,
) -> None:
    """Show what `plait serve` would run with, and where each value comes from.

    It takes the options of `plait serve`. The command line wins over the environment (--max-num-seqs is
    PLAIT_MAX_NUM_SEQS), which wins over the file (--config or PLAIT_CONFIG), which wins over defaults.
    [models.NAME] of the file wins for its model; --all lists every option of the engine there.

    \b
    plait config --all
    PLAIT_PORT=9000 plait config --config plait.toml
    plait config small=./model --config plait.toml
    """
    found = list_values(ctx, config, given)
    found += list_model_values(config, model, [each for each in found if each.table == "engine"])
    shown = [each for each in found if show_all or each.source not in (DEFAULT, INHERITED)]
    if as_json:
        write_json([{"table": o.table, "name": o.name, "value": o.value, "source": o.source} for o in shown])
        return
    if not shown:
        print("every option has its default; --all lists them")
    for table in dict.fromkeys(each.table for each in found):
        rows = [each for each in shown if each.table == table]
        if rows:
            print(f"[{table}]")
        width = max((len(each.name) for each in rows), default=0)
        for each in rows:
            print(f"{each.name:<{width}} = {toml_text(each.value)}  # {each.source}")


def list_values(ctx: click.Context, path: str | None, given: Mapping[str, object]) -> list[OptionValue]:
    """Every option, in the order of its class. Raises ConfigError as `plait serve` would."""
    sources = {name: source_of(ctx, name) for name in given}
    explicit = {name for name, source in sources.items() if source != DEFAULT}
    if given["cpu"]:
        sources["device"] = sources["cpu"]
    found = []
    for table, settings in (("server", server_settings(given)), ("engine", engine_settings(given))):
        read, kind = read_table(path, table), TABLES[table]
        whole = kind(**merge_settings(settings, explicit, read))
        for name in option_names(kind):
            source = sources[name]
            if source == DEFAULT and name in read:
                source = str(Path(str(path)))
            value = getattr(whole, name)
            found.append(OptionValue(table, name, HIDDEN if name in SECRET and value else value, source))
    return found


def list_model_values(
    path: str | None, words: tuple[str, ...], engine: list[OptionValue]
) -> list[OptionValue]:
    """Every option of each model that the file or the command line names; `engine`: those of [engine].

    Raises ConfigError as `plait serve` would.
    """
    from plait.cli.common.served_models import MODEL_KEYS, NamedModel, list_named, make_entry

    tables, settings = read_model_tables(path), {each.name: each.value for each in engine}
    typed = {one.name: one for one in list_named(words, tables) if one.name is not None}
    found = []
    for name in dict.fromkeys([*typed, *tables]):
        table, one = tables.get(name, {}), typed.get(name) or NamedModel(name, "", tables[name])
        entry = make_entry(name, one, settings)
        own = {key: (value, str(path)) for key, value in table.items()}
        if one.source != table.get("model", ""):
            own["model"] = (entry.source, COMMAND_LINE)
        if one.aliases:
            own["aliases"] = (entry.aliases, f"{COMMAND_LINE}, {path}" if "aliases" in own else COMMAND_LINE)
        rows = {key: own[key] for key in MODEL_KEYS if key in own}
        rows |= {each.name: own.get(each.name, (each.value, INHERITED)) for each in engine}
        found += [OptionValue(f"models.{name}", key, *row) for key, row in rows.items()]
    return found


def source_of(ctx: click.Context, name: str) -> str:
    """Where the command's parameter has its value from."""
    match ctx.get_parameter_source(name):
        case ParameterSource.COMMANDLINE:
            return COMMAND_LINE
        case ParameterSource.ENVIRONMENT:
            return variable_name(name)
        case _:
            return DEFAULT


def toml_text(value: object) -> str:
    """A value as a TOML file has it; an option without a value as the comment that it is."""
    match value:
        case None:
            return "(none)"
        case bool():
            return str(value).lower()
        case tuple() | list():
            return f"[{', '.join(toml_text(each) for each in value)}]"
        case str():
            escaped = value.replace("\\", "\\\\").replace('"', '\\"')
            return f'"{escaped}"'
        case _:
            return str(value)
