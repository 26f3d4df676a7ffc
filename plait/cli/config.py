"""`plait config`: every option of `plait serve` with its value, and where the value comes from."""

from __future__ import annotations

import os
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
    server_settings,
    variable_name,
    warn_of_variables,
    write_json,
)
from plait.cli.serve import TABLES, merge_settings, read_table
from plait.config import ServerConfig, option_names

HIDDEN = "(hidden)"


@dataclass(frozen=True, slots=True)
class OptionValue:
    """An option as a server would have it. `source`: default, command line, a variable's name, or a file."""

    table: str
    name: str
    value: object
    source: str


@click.command(cls=GroupedCommand)
@config_file_option()
@config_options(ServerConfig)
@engine_options()
@click.option("--all", "show_all", is_flag=True, help="list also the options that have their default")
@json_option("an array with an object for each option")
@common_options()
@click.pass_context
def config(ctx: click.Context, /, config: str | None, show_all: bool, as_json: bool, **given: object) -> None:
    """Show what `plait serve` would run with, and where each value comes from.

    It takes the options of `plait serve`. The command line wins over the environment (--max-num-seqs is
    PLAIT_MAX_NUM_SEQS), which wins over the file (--config or PLAIT_CONFIG), which wins over defaults.

    \b
    plait config --all
    PLAIT_PORT=9000 plait config --config plait.toml
    """
    found = list_values(ctx, config, given)
    warn_of_variables(os.environ)
    shown = [each for each in found if show_all or each.source != "default"]
    if as_json:
        write_json([{"table": o.table, "name": o.name, "value": o.value, "source": o.source} for o in shown])
        return
    if not shown:
        print("every option has its default; --all lists them")
    for table in TABLES:
        rows = [each for each in shown if each.table == table]
        if rows:
            print(f"[{table}]")
        width = max((len(each.name) for each in rows), default=0)
        for each in rows:
            print(f"{each.name:<{width}} = {toml_text(each.value)}  # {each.source}")


def list_values(ctx: click.Context, path: str | None, given: Mapping[str, object]) -> list[OptionValue]:
    """Every option, in the order of its class. Raises ConfigError as `plait serve` would."""
    sources = {name: source_of(ctx, name) for name in given}
    explicit = {name for name, source in sources.items() if source != "default"}
    if given["cpu"]:
        sources["device"] = sources["cpu"]
    found = []
    for table, settings in (("server", server_settings(given)), ("engine", engine_settings(given))):
        read, kind = read_table(path, table), TABLES[table]
        whole = kind(**merge_settings(settings, explicit, read))
        for name in option_names(kind):
            source = sources[name]
            if source == "default" and name in read:
                source = str(Path(str(path)))
            value = getattr(whole, name)
            found.append(OptionValue(table, name, HIDDEN if name in SECRET and value else value, source))
    return found


def source_of(ctx: click.Context, name: str) -> str:
    """Where the command's parameter has its value from."""
    match ctx.get_parameter_source(name):
        case ParameterSource.COMMANDLINE:
            return "command line"
        case ParameterSource.ENVIRONMENT:
            return variable_name(name)
        case _:
            return "default"


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
