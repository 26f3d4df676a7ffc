"""`plait serve`: a model over HTTP, in OpenAI's words."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from plait.cache_folder import cache_base
from plait.cli.common.help import GroupedCommand
from plait.cli.common.options import (
    common_options,
    config_file_option,
    config_options,
    engine_options,
    engine_settings,
    model_option,
    server_settings,
    warn_of_variables,
)
from plait.config import EngineConfig, ServerConfig, option_names
from plait.errors import ConfigError
from plait.worker.start_process import StartedProcess, new_spare, start_process

TABLES: Mapping[str, type] = {"server": ServerConfig, "engine": EngineConfig}


@click.command(cls=GroupedCommand)
@model_option()
@config_file_option()
@config_options(ServerConfig)
@engine_options()
@common_options()
@click.pass_context
def serve(ctx: click.Context, /, model: str, config: str | None, **given: Any) -> None:
    """Serve a model over the OpenAI API: /v1/chat/completions, /v1/completions, /v1/models, /health.

    Ctrl-C (or SIGTERM) stops it; requests that are running get --shutdown-timeout-s seconds to finish.
    SIGHUP has it read --config, --api-key-file and the certificate again. What is given here wins over
    the environment (PLAIT_PORT for --port, and so on), which wins over --config; `plait config` shows it.

    \b
    plait serve ./model
    plait serve ./model --host 0.0.0.0 --api-key-file keys.toml
    plait serve org/name:Q4_K_M --max-model-len 8192 --max-num-seqs 32
    """
    warn_of_variables(os.environ)
    explicit = {name for name in given if ctx.get_parameter_source(name) is not ParameterSource.DEFAULT}

    def server_config() -> ServerConfig:
        return ServerConfig(**merge_settings(server_settings(given), explicit, read_table(config, "server")))

    engine = EngineConfig(**merge_settings(engine_settings(given), explicit, read_table(config, "engine")))
    server = server_config()
    begun = begin_engine(engine)
    from plait.server.run import run_server

    run_server(model, engine, server, reread=server_config, begun=begun)


def begin_engine(engine: EngineConfig) -> StartedProcess | None:
    """The engine's process: it imports what it needs while this one does. None: it is started later."""
    base = cache_base(engine.cache_dir)
    has_images = engine.startup_image == "auto" and base is not None and os.path.isdir(base / "images")
    with suppress(OSError):
        return start_process(engine.max_num_seqs, new_spare(), "image" if has_images else "torch")
    return None


def merge_settings(
    settings: Mapping[str, object], explicit: set[str], table: Mapping[str, object]
) -> dict[str, Any]:
    """A command's settings, with those of a file where none was given."""
    fixed = explicit | ({"device"} if "cpu" in explicit else set())
    return {**settings, **{name: value for name, value in table.items() if name not in fixed}}


def read_table(path: str | None, name: str) -> dict[str, Any]:
    """One table of the file, with the fields of its config. Raises ConfigError for what is not one."""
    if path is None:
        return {}
    try:
        tables = tomllib.loads(Path(path).read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"config: {path} cannot be read: {error}") from error
    known = {f"[{table}]": set(option_names(kind)) for table, kind in TABLES.items()}
    for table, values in tables.items():
        if table not in TABLES or not isinstance(values, dict):
            raise ConfigError(f"config: {path} has {table!r}; it holds the tables {' and '.join(known)} only")
        if unknown := sorted({key.replace("-", "_") for key in values} - known[f"[{table}]"]):
            raise ConfigError(f"config: {path}: [{table}] has no option {unknown[0]!r}")
    return {key.replace("-", "_"): value for key, value in tables.get(name, {}).items()}
