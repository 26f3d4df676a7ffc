"""Adapters that are loaded and unloaded while the model runs, in vLLM's fields."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from plait.errors import CheckpointError, ConfigError, InvalidField, ModelNotFound
from plait.server.api.endpoint import Endpoint
from plait.server.api.parse_fields import field_names, parse_as
from plait.server.gateway.request_context import RequestContext


class LoadAdapterRequest(msgspec.Struct, kw_only=True, frozen=True):
    """POST /v1/load_lora_adapter. `lora_path` is relative to --lora-folder, or inside of it."""

    lora_name: str
    lora_path: str


class UnloadAdapterRequest(msgspec.Struct, kw_only=True, frozen=True):
    """POST /v1/unload_lora_adapter."""

    lora_name: str


class AdapterReply(msgspec.Struct, frozen=True):
    """What was done, in vLLM's words."""

    message: str


LOAD_FIELDS, UNLOAD_FIELDS = field_names(LoadAdapterRequest), field_names(UnloadAdapterRequest)


def load_adapter(context: RequestContext, body: Mapping[str, object]) -> AdapterReply:
    """Load an adapter under a name. Raises InvalidField, with why its files cannot be used."""
    asked, front = parse_as(body, LoadAdapterRequest), context.front
    folder = _check_allowed(context)
    if asked.lora_name in (front.name, context.model):
        raise InvalidField(
            f"lora_name: {asked.lora_name!r} is the model's own name; choose another", "lora_name"
        )
    if "\0" in asked.lora_path or len(asked.lora_path) > 4096:
        raise InvalidField("lora_path: it is no path", "lora_path")
    try:
        front.served_adapters.load(asked.lora_name, asked.lora_path)
    except (CheckpointError, ConfigError) as error:
        text = str(error).replace(f"{Path(folder).resolve()}/", "")  # where the folder is, is not for clients
        raise InvalidField(text, "lora_path") from error
    return AdapterReply(f"Success: LoRA adapter {asked.lora_name!r} added successfully.")


def unload_adapter(context: RequestContext, body: Mapping[str, object]) -> AdapterReply:
    """Take an adapter's name away; its open requests go on. Raises ModelNotFound."""
    asked = parse_as(body, UnloadAdapterRequest)
    _check_allowed(context)
    try:
        context.front.served_adapters.unload(asked.lora_name)
    except ModelNotFound as error:
        text = f"lora_name: {error}; GET /v1/models lists what is"
        raise error.reword(text, "lora_name") from error
    return AdapterReply(f"Success: LoRA adapter {asked.lora_name!r} removed successfully.")


def _check_allowed(context: RequestContext) -> str:
    """The folder of adapters. Raises InvalidField where requests may not change them."""
    if context.front.lora_folder is None:
        raise InvalidField(
            "adapters are not changed at run time here; start the server with --lora-folder DIR"
        )
    return context.front.lora_folder


ENDPOINTS = (
    Endpoint("/v1/load_lora_adapter", LOAD_FIELDS, answer=load_adapter),
    Endpoint("/v1/unload_lora_adapter", UNLOAD_FIELDS, answer=unload_adapter),
)
