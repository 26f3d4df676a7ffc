"""Engine options as `--compare` takes them: written in one argument, or left at their defaults."""

from __future__ import annotations

import shlex
from typing import Any

import click
from click.core import ParameterSource

from plait.cli.common.options import engine_options, engine_settings
from plait.config import EngineConfig
from plait.errors import ConfigError


def find_changes(settings: dict[str, Any]) -> dict[str, Any]:
    """What differs from the defaults: another revision of Plait has defaults, and options, of its own."""
    plain = EngineConfig()
    return {name: value for name, value in settings.items() if value != getattr(plain, name)}


def parse_options(text: str) -> dict[str, Any]:
    """The engine options that are written in `text`, as EngineConfig has them. Raises ConfigError."""
    command = click.command("--compare")(engine_options()(lambda **given: given))
    try:
        context = command.make_context("--compare", shlex.split(text))
    except (click.UsageError, ValueError) as error:
        why = error.format_message() if isinstance(error, click.UsageError) else str(error)
        raise ConfigError(f"--compare {text!r}: {why}") from error
    settings = engine_settings(context.params)
    written = {
        name for name in context.params if context.get_parameter_source(name) is ParameterSource.COMMANDLINE
    }
    if "cpu" in written:
        written.add("device")
    return {name: value for name, value in settings.items() if name in written}
