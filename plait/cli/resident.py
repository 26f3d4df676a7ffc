"""`plait ps`, `plait load` and `plait stop`: the models of a running server, over HTTP."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping

import click

from plait.cli.common.format_model import bytes_text
from plait.cli.common.options import (
    Decorator,
    common_options,
    json_option,
    options,
    server_options,
    url_option,
    write_json,
)
from plait.cli.common.progress import Status
from plait.cli.common.server_client import ServerClient, ServerError

LOOK_S = 0.2  # between two looks at a model that is loading
Card = Mapping[str, object]
HEADS = ("NAME", "STATUS", "CONTEXT", "MEMORY", "REQUESTS", "UNTIL", "ABILITIES", "ALIASES")


def admin_options() -> Decorator:
    """`--url` and the key that manages models."""
    key = click.option(
        "--api-key",
        "--admin-key",
        "api_key",
        envvar=("PLAIT_ADMIN_KEY", "PLAIT_API_KEY"),
        show_envvar=True,
        help="the server's admin key",
    )
    return options([url_option(), key])


@click.command()
@server_options()
@json_option("what /v1/models says")
@common_options()
def ps(url: str, api_key: str | None, as_json: bool) -> None:
    """Show the models of a running server: loaded or not, their contexts, memory, and open requests.

    \b
    plait ps
    plait ps --url http://10.0.0.5:8080 --api-key KEY
    """
    cards = list_cards(ServerClient(url, api_key), "/v1/models")
    if as_json:
        write_json(cards)
        return
    rows = [HEADS, *(describe(card) for card in cards)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(HEADS))]
    for row in rows:
        line = "  ".join(f"{text:<{width}}" for text, width in zip(row, widths, strict=True))
        sys.stdout.write(line.rstrip() + "\n")
    for card in cards:  # below the table: one long cause would make each of its lines too wide
        if why := error_of(card) or progress_of(card):
            sys.stdout.write(f"{_clean(card.get('id'))}: {stage_of(card)}: {_clean(why)}\n")


@click.command()
@click.argument("name")
@click.option("--wait/--no-wait", default=True, help="wait until it is loaded")
@admin_options()
@common_options()
def load(name: str, wait: bool, url: str, api_key: str | None) -> None:
    """Have a running server load a model, also one that failed a moment ago. It needs the admin key.

    \b
    plait load big
    """
    client = ServerClient(url, api_key)
    card = manage(client, "load", name)
    with Status(f"loading {name}", is_quiet=not wait) as status:
        while wait and stage_of(card) != "loaded":
            if stage_of(card) in ("failed", "unloaded"):
                raise ServerError(f"{name} was not loaded: {error_of(card) or 'it was unloaded again'}")
            if (progress := progress_of(card)) is not None:
                status.say(progress)
            time.sleep(LOOK_S)
            cards = list_cards(client, "/admin/models")
            card = next((one for one in cards if one.get("id") == card.get("id")), {})
    sys.stdout.write(f"{card.get('id', name)}: {stage_of(card)}\n")


@click.command()
@click.argument("name")
@admin_options()
@common_options()
def stop(name: str, url: str, api_key: str | None) -> None:
    """Have a running server unload a model when its open requests have ended. It needs the admin key.

    \b
    plait stop big
    """
    card = manage(ServerClient(url, api_key), "unload", name)
    stage = stage_of(card)
    after = " until its open requests have ended" if stage == "loaded" else ""
    sys.stdout.write(f"{card.get('id', name)}: {stage}{after}\n")


def manage(client: ServerClient, what: str, name: str) -> Card:
    """Have a model loaded or unloaded: it as the server describes it. Raises RequestError, ServerError."""
    status, found = client.request("POST", f"/admin/models/{what}", {"model": name})
    client.check(status, found)
    card = found.get("model") if isinstance(found, dict) else None
    if not isinstance(card, dict):
        raise ServerError(f"{client.url} answers, and is no server of several models")
    return card


def list_cards(client: ServerClient, path: str) -> list[Card]:
    """The models as the server lists them. Raises ServerError."""
    status, found = client.request("GET", path)
    client.check(status, found)
    cards = found.get("data") if isinstance(found, dict) else None
    if not isinstance(cards, list):
        raise ServerError(f"{client.url} answers, and is no server of models: {path} has no list")
    return [card for card in cards if isinstance(card, dict)]


def describe(card: Card) -> tuple[str, ...]:
    """A row of `plait ps`; what the server does not say is empty."""
    memory, expires = card.get("memory"), card.get("expires")
    until = ""
    if isinstance(expires, int | float):
        until = f"{max(expires - time.time(), 0):.0f} s"
    is_loaded = stage_of(card) == "loaded"
    about = "" if is_loaded else "~"  # of one that is not loaded: what it would take
    return (
        _clean(card.get("id")),
        _clean(stage_of(card)),
        _clean(card.get("max_model_len", "")),
        f"{about}{bytes_text(memory)}" if isinstance(memory, int) else "",
        _clean(card.get("num_open_requests", "")),
        until if until or not is_loaded else "for ever",
        _join(card.get("capabilities")),
        _join(card.get("aliases")),
    )


def stage_of(card: Card) -> str:
    """loaded, loading, unloaded or failed; a server that does not say it has its model loaded."""
    status = card.get("status")
    return str(status.get("value")) if isinstance(status, dict) else "loaded"


def error_of(card: Card) -> str:
    """Why the last attempt to load a model failed."""
    status = card.get("status")
    return str(status.get("error") or "") if isinstance(status, dict) else ""


def progress_of(card: Card) -> str | None:
    """How far loading is."""
    status = card.get("status")
    progress = status.get("progress") if isinstance(status, dict) else None
    if not isinstance(progress, dict):
        return None
    return _clean(f"{progress.get('text')}: {progress.get('done')} of {progress.get('total')}")


def _join(names: object) -> str:
    return _clean(", ".join(str(name) for name in names)) if isinstance(names, list) else ""


def _clean(value: object) -> str:
    """A server's text without what a terminal would obey."""
    return "".join(c if c.isprintable() else "?" for c in str(value))[:200]
