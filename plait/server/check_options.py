"""Options of the engine and of the server that contradict each other."""

from __future__ import annotations

from collections.abc import Iterable

from plait.config import EngineConfig, ServerConfig
from plait.errors import ConfigError
from plait.server.http.hosts import is_loopback
from plait.text.chat.template_file import check_template_option
from plait.text.output import tool_format
from plait.text.output.reasoning import reasoning_format


def check_formats(tools: str | None, reasoning: str | None) -> None:
    """Raises ConfigError for a name that no format has: loading a model first may take minutes."""
    for find, name in ((tool_format, tools), (reasoning_format, reasoning)):
        find("", (), name)


def check_options(engine: EngineConfig, server: ServerConfig) -> None:
    """Raises ConfigError for an option of the engine and one of the server that contradict each other."""
    check_formats(server.tool_call_parser, server.reasoning_parser)
    has_keys = bool(server.api_key or server.api_key_file)
    if engine.lora_folder is not None and not has_keys and not is_loopback(server.host):
        raise ConfigError(
            "lora_folder: on an address that others reach, requests may change adapters only with a key; set "
            "--api-key or --api-key-file"
        )
    if server.kv_events is not None and not engine.prefix_cache:
        raise ConfigError("kv_events: they are of the prefix cache, and prefix_cache is off")


def check_templates(engines: Iterable[EngineConfig]) -> None:
    """Raises ConfigError for a chat template that no model can be served with; each is tried once."""
    for option in {engine.chat_template for engine in engines}:
        check_template_option(option)
