"""Lists what users of the command line and of the HTTP API write and read, one name a line.

    python tools/list_surface.py           # print it
    python tools/list_surface.py --write   # after adding a name on purpose: update tests/surface.txt

Taken from the code: options from click's commands, fields from the OpenAPI document and the endpoints' own
lists. `tests/test_surface.py` compares it with the committed list. A name that vanishes breaks a user's
script, so it takes the deprecation of docs/deprecation.md.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import click

from plait.cli.main import cli
from plait.config import ServerConfig
from plait.server.api.parse_fields import NAMES, REFUSED, REPORTED
from plait.server.api.unsupported_params import UNREAD
from plait.server.app import ENDPOINTS, create_app
from plait.server.gateway.request_context import LoadingState
from plait.server.pages import document

COMMITTED = Path(__file__).resolve().parent.parent / "tests" / "surface.txt"
Json = Mapping[str, Any]


def list_options(command: click.Command, path: str) -> Iterator[str]:
    """Commands, their arguments, options with each fixed value, and environment variables."""
    yield path
    for param in command.params:
        names = [*param.opts, *param.secondary_opts]
        if isinstance(param, click.Argument):
            yield f"{path} [{param.name}]"
            continue
        yield from (f"{path} {name}" for name in names)
        if isinstance(param.type, click.Choice):
            yield from (f"{path} {names[0]} {value}" for value in param.type.choices)
        if isinstance(param.envvar, str):
            yield f"{path} ${param.envvar}"
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            found = command.get_command(context, name)
            assert found is not None
            yield from list_options(found, f"{path} {name}")


def list_fields(schema: Json, named: Json, at: str = "", seen: tuple[str, ...] = ()) -> Iterator[str]:
    """Dotted names of all fields of a JSON schema; `[]` is an item of a list, `*` any key of an object."""
    if reference := schema.get("$ref"):
        if reference not in seen:
            yield from list_fields(named[reference.rpartition("/")[2]], named, at, (*seen, reference))
        return
    for choice in (*schema.get("anyOf", ()), *schema.get("oneOf", ())):
        yield from list_fields(choice, named, at, seen)
    for name, part in schema.get("properties", {}).items():
        yield f"{at}.{name}".lstrip(".")
        yield from list_fields(part, named, f"{at}.{name}", seen)
    for key, mark in (("items", "[]"), ("additionalProperties", ".*")):
        if isinstance(part := schema.get(key), dict):
            yield from list_fields(part, named, at + mark, seen)


def list_operations(openapi: Json) -> Iterator[str]:
    """Endpoints, and the fields of their requests, replies and events."""
    named = openapi["components"]["schemas"]
    for path, methods in openapi["paths"].items():
        for method, operation in methods.items():
            where = f"{method.upper()} {path}"
            yield where
            bodies = {"request": operation.get("requestBody", {}).get("content", {})}
            bodies["reply"] = operation["responses"]["200"]["content"]
            for part, content in bodies.items():
                schema = content.get("application/json", {}).get("schema", {})
                yield from (f"{where} {part} {name}" for name in list_fields(schema, named))
            # An event stream has no schema in OpenAPI; its description names the type of its events.
            events = bodies["reply"].get("text/event-stream", {}).get("schema", {}).get("description", "")
            for name in (word for word in re.findall(r"\w+", events) if word in named):
                yield from (f"{where} event {field}" for field in list_fields(named[name], named))


def list_surface() -> list[str]:
    """All of it, sorted, each name once."""
    found = {*list_options(cli, "plait"), *list_operations(document(ENDPOINTS))}
    found.update(f"POST {e.path} request {name}" for e in ENDPOINTS for name in e.fields)
    found.update(f"alias {name} = {ours}" for name, ours in NAMES.items())
    found.update(f"known field {name}" for name in (*UNREAD, *REFUSED, *REPORTED))
    for route in create_app(LoadingState(), ServerConfig()).routes:
        methods = sorted((getattr(route, "methods", None) or {"GET"}) - {"HEAD"})
        path = getattr(route, "path", "").replace(":path", "")
        if not path.startswith("/page/"):  # the page's own files
            found.update(f"{method} {path}" for method in methods)
    return sorted(found)


def compare(committed: set[str], found: set[str]) -> list[str]:
    """What is wrong, by name: vanished ones first."""
    gone = [f"vanished: {name}; users rely on it, see docs/deprecation.md" for name in committed - found]
    new = [f"new: {name}; run: python tools/list_surface.py --write" for name in found - committed]
    return sorted(gone, reverse=True) + sorted(new)


def main() -> int:
    text = "\n".join(list_surface()) + "\n"
    if sys.argv[1:] == ["--write"]:
        COMMITTED.write_text(text, encoding="utf-8")
    else:
        sys.stdout.write(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
