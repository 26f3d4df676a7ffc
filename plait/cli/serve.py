"""`plait serve`: a model over HTTP, in OpenAI's words."""

from __future__ import annotations

import logging
import os
import tomllib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
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
    models_option,
    server_settings,
)
from plait.config import EngineConfig, ServerConfig, option_names
from plait.errors import ConfigError, check_unicode
from plait.worker.start_process import StartedProcess, new_spare, start_process

Reread = Callable[[], ServerConfig]
log = logging.getLogger("plait")
TABLES: Mapping[str, type] = {"server": ServerConfig, "engine": EngineConfig}


@click.command(cls=GroupedCommand)
@models_option()
@config_file_option()
@config_options(ServerConfig)
@engine_options()
@common_options()
@click.pass_context
def serve(ctx: click.Context, /, model: tuple[str, ...], config: str | None, **given: Any) -> None:
    """Serve models over the OpenAI API: /v1/chat/completions, /v1/completions, /v1/models, /health.

    Ctrl-C (or SIGTERM) stops it; requests that are running get --shutdown-timeout-s seconds to finish.
    SIGHUP has it read --config, --api-key-file and the certificate again. What is given here wins over
    the environment (PLAIT_PORT for --port, and so on), which wins over [server] and [engine] of --config;
    `plait config` shows it. [models.NAME] of that file is for one model, and wins for it.

    \b
    plait serve ./model
    plait serve ./model --host 0.0.0.0 --api-key-file keys.txt
    plait serve org/name:Q4_K_M --max-model-len 8192 --max-num-seqs 32
    plait serve small,gpt-4=./model big=org/name:Q4_K_M --models-dir ./models
    """
    check_unicode("model", model)
    explicit = {name for name in given if ctx.get_parameter_source(name) is not ParameterSource.DEFAULT}

    def server_config() -> ServerConfig:
        return ServerConfig(**merge_settings(server_settings(given), explicit, read_table(config, "server")))

    def reread() -> ServerConfig:
        found = server_config()
        new = merge_settings(own, explicit, read_table(config, "engine"))
        report_changes(settings, new, tables, read_model_tables(config))
        return found

    own = engine_settings(given)
    settings = merge_settings(own, explicit, read_table(config, "engine"))
    server, tables = server_config(), read_model_tables(config)
    if is_plain(model, tables, server):
        serve_one(model[0], EngineConfig(**settings), server, reread)
        return
    serve_named(ctx, model, tables, settings, reread)


def report_changes(
    settings: Mapping[str, object],
    new: Mapping[str, object],
    tables: Mapping[str, Mapping[str, object]],
    new_tables: Mapping[str, Mapping[str, object]],
) -> None:
    """Log which options of engines a file has now, and the engines that run have not."""
    changed = [f"[engine] {name}" for name in _list_changes(settings, new)]
    for model in sorted({*tables, *new_tables}):
        names = _list_changes(tables.get(model, {}), new_tables.get(model, {}))
        changed += [f"[models.{model}] {name}" for name in names]
    if changed:
        log.warning("reload: %s: what is new takes effect at the next startup", ", ".join(changed))


def _list_changes(old: Mapping[str, object], new: Mapping[str, object]) -> list[str]:
    return [name for name in sorted({*old, *new}) if old.get(name) != new.get(name)]


def is_plain(words: Sequence[str], tables: Mapping[str, object], server: ServerConfig) -> bool:
    """Whether it is one model without a name of its own, so that nothing else need be imported."""
    given = (server.models_dir, server.keep_alive, server.models_memory, server.max_loaded_models)
    is_one = len(words) == 1 and "=" not in words[0]
    return is_one and not tables and all(value is None for value in given)


def serve_one(model: str, engine: EngineConfig, server: ServerConfig, reread: Reread) -> None:
    """Serve one model, which is loaded at startup and stays."""
    begun = begin_engine(engine)
    from plait.server.run import run_server

    run_server(model, engine, server, reread=reread, begun=begun)


def serve_named(
    ctx: click.Context,
    words: Sequence[str],
    tables: Mapping[str, Mapping[str, object]],
    settings: Mapping[str, object],
    reread: Reread,
) -> None:
    """Serve models with names and options of their own; one that nothing else is requested of as `serve_one`.

    Raises ConfigError.
    """
    from plait.cli.common.served_models import list_named, make_catalog, needs_pool

    server, models = reread(), list_named(words, tables)
    if not models and server.models_dir is None:
        raise click.UsageError(
            "name a model with --model: a directory, a .safetensors or .gguf file, or a Hub id", ctx
        )
    begun = begin_engine(models[0].engine(settings)) if models else None
    if not needs_pool(models, server):
        one = models[0]
        from plait.server.run import run_server

        def reread_named() -> ServerConfig:
            return name_server(reread(), one.name)

        run_server(one.source, one.engine(settings), reread_named(), reread=reread_named, begun=begun)
        return
    catalog = make_catalog(models, tables, settings, server)
    from plait.server.run_models import run_models

    run_models(catalog, server, reread, begun)


def name_server(server: ServerConfig, name: str | None) -> ServerConfig:
    """The server's options with the name of NAME=PATH. Raises ConfigError for two names."""
    if name is None:
        return server
    if server.served_model_name not in (None, name):
        raise ConfigError(f"served_model_name: the model is named {name!r} already; leave one of them out")
    return replace(server, served_model_name=name)


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
    tables = _read_file(path)
    kinds = dict(TABLES)
    if "cluster" in tables:
        from plait.cluster.config import ClusterConfig

        kinds["cluster"] = ClusterConfig
    known = {f"[{table}]": set(option_names(kind)) for table, kind in kinds.items()}
    for table, values in tables.items():
        if table == "models" and isinstance(values, dict):
            continue
        if table not in kinds or not isinstance(values, dict):
            shown = f"{', '.join(known)} and [models.NAME]"
            raise ConfigError(f"config: {path} has {table!r}; it holds the tables {shown} only")
        if unknown := sorted({key.replace("-", "_") for key in values} - known[f"[{table}]"]):
            raise ConfigError(f"config: {path}: [{table}] has no option {unknown[0]!r}")
    return {key.replace("-", "_"): value for key, value in tables.get(name, {}).items()}


def read_model_tables(path: str | None) -> dict[str, Mapping[str, object]]:
    """The tables [models.NAME] of the file. Raises ConfigError for what is no option of a model."""
    if path is None or not (found := _read_file(path).get("models")):
        return {}
    from plait.cli.common.served_models import check_table

    return {name: check_table(path, name, table) for name, table in found.items()}


def _read_file(path: str) -> dict[str, dict[str, object]]:
    try:
        return tomllib.loads(Path(path).read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"config: {path} cannot be read: {error}") from error
