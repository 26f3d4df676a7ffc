"""`plait serve`: a model over HTTP, in OpenAI's words."""

from __future__ import annotations

from typing import Any

import click

from plait.cli.options import (
    common_options,
    config_options,
    engine_options,
    engine_settings,
    model_option,
    server_settings,
)
from plait.config import EngineConfig, ServerConfig


@click.command()
@model_option()
@config_options(ServerConfig)
@engine_options()
@common_options()
def serve(model: str, **given: Any) -> None:
    """Serve a model over the OpenAI API: /v1/chat/completions, /v1/completions, /v1/models, /health.

    Ctrl-C (or SIGTERM) stops it; requests that are running get --shutdown-timeout-s seconds to finish.
    """
    engine, server = EngineConfig(**engine_settings(given)), ServerConfig(**server_settings(given))
    from plait.server.run import serve as run_server

    run_server(model, engine, server)
