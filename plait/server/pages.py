"""The page at `/`, and the API as an OpenAPI 3.1 document and as a page, made from its types.

The page at `/` is a chat with the model and a live view of the engine, as static files of the package. It is
one more client of the API. It needs no build step and loads nothing from anywhere else: its
Content-Security-Policy makes browsers enforce that. Trusted Types keep its scripts from turning text into
markup.

`tools/print_openapi.py` prints the document; `docs/openapi.json` is that output. An endpoint that is not in
`operations` is in the document all the same, with the fields it reads.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from html import escape
from importlib import resources
from importlib.resources.abc import Traversable
from inspect import cleandoc
from typing import Any

import msgspec
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from plait.server.api.endpoint import Endpoint
from plait.server.gateway.request_context import Health, Readiness
from plait.server.http.transfer import EVENTS
from plait.server.operations import GETS, MCP, POSTS, STORED, Operation, Schema
from plait.version import __version__

POLICY = (
    "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; object-src 'none'; "
    "require-trusted-types-for 'script'; trusted-types plait-worker"
)
KINDS = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
    ".woff2": "font/woff2",
}


class Asset:
    """One file, as an ASGI endpoint. A browser that has it already gets 304.

    `make` is called in a thread, for the first request, and its bytes are kept: describing the API would take
    a twelfth of a startup, and few servers get such a request.
    """

    def __init__(self, make: Callable[[], bytes], kind: str, policy: str = POLICY) -> None:
        self._make, self._kind, self._policy = make, kind, policy
        self._body, self._tag = b"", ""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._tag:
            self._body = await run_in_threadpool(self._make)
            self._tag = f'"{hashlib.sha256(self._body).hexdigest()[:32]}"'
        is_known = self._tag in Headers(scope=scope).get("if-none-match", "")
        headers = {
            "Content-Type": self._kind,
            "Content-Security-Policy": self._policy,
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cross-Origin-Opener-Policy": "same-origin",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Cache-Control": "no-cache",
            "ETag": self._tag,
        }
        response = Response(b"" if is_known else self._body, 304 if is_known else 200, headers)
        await response(scope, receive, send)


def page_routes() -> list[Route]:
    """`/` and everything it loads, under `/page/`. Reads the files once, here."""
    found = []
    for name, file in _files(resources.files("plait.server") / "page"):
        kind = KINDS["." + name.rpartition(".")[2]]
        path = "/" if name == "index.html" else f"/page/{name}"
        found.append(Route(path, Asset(partial(bytes, file.read_bytes()), kind), methods=["GET"]))
    return found


def _files(folder: Traversable, prefix: str = "") -> Iterator[tuple[str, Traversable]]:
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if entry.is_dir():
            yield from _files(entry, f"{prefix}{entry.name}/")
        else:
            yield prefix + entry.name, entry


STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1 small { font-weight: normal; opacity: .7; }
h2, h3 { margin-top: 2rem; overflow-wrap: anywhere; }
code { font: .9em ui-monospace, monospace; }
.method { border: 1px solid; border-radius: .3em; padding: 0 .4em; margin-right: .4em; font-size: .8em; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; vertical-align: top; padding: .25rem .75rem .25rem 0;
  border-bottom: 1px solid #8884; overflow-wrap: anywhere; }
"""
_HASH = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
DOCS_POLICY = f"default-src 'none'; style-src 'sha256-{_HASH}'; base-uri 'none'; frame-ancestors 'none'"


def write_page(document: Mapping[str, Any]) -> bytes:
    """An OpenAPI document as one HTML page."""
    about = document["info"]
    title, version = escape(about["title"]), escape(about["version"])
    operations = [
        _operation_html(path, method, operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]
    types = [_type_html(name, schema) for name, schema in document["components"]["schemas"].items()]
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width">',
        f"<title>{title}: API</title><style>{STYLE}</style></head><body>",
        f"<h1>{title} <small>{version}</small></h1><p>{escape(about['description'])}</p>",
        '<p>To be read by machines: <a href="openapi.json">openapi.json</a>.</p>',
        "<h2>Operations</h2>",
        *operations,
        "<h2>Types</h2>",
        *types,
        "</body></html>\n",
    ]
    return "\n".join(parts).encode()


def _operation_html(path: str, method: str, operation: Mapping[str, Any]) -> str:
    lines = [
        f'<h3 id="{escape(operation["operationId"])}"><span class="method">{method.upper()}</span>'
        f"<code>{escape(path)}</code></h3><p>{escape(operation['summary'])}</p>"
    ]
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
    if body is not None:
        lines.append(f"<p>Takes {_kind_html(body)}.</p>")
    for kind, content in operation["responses"]["200"]["content"].items():
        shown = _kind_html(content["schema"]) if "$ref" in content.get("schema", {}) else ""
        text = content.get("schema", {}).get("description", "")
        lines.append(f"<p>Answers with <code>{escape(kind)}</code> {shown} {escape(text)}</p>")
    return "\n".join(lines)


def _type_html(name: str, schema: Mapping[str, Any]) -> str:
    required = set(schema.get("required", ()))
    rows = [
        f"<tr><td><code>{escape(field)}</code></td><td>{_kind_html(found)}</td>"
        f"<td>{'required' if field in required else _default(found)}</td>"
        f"<td>{escape(found.get('description', ''))}</td></tr>"
        for field, found in schema.get("properties", {}).items()
    ]
    text = escape(schema.get("description", ""))
    return (
        f'<h3 id="{escape(name)}"><code>{escape(name)}</code></h3><p>{text}</p><table>{"".join(rows)}</table>'
    )


def _kind_html(schema: Mapping[str, Any]) -> str:
    """A schema in a few words, with links to the types it names."""
    if "$ref" in schema:
        name = escape(str(schema["$ref"]).rpartition("/")[2])
        return f'<a href="#{name}"><code>{name}</code></a>'
    if "anyOf" in schema:
        return " or ".join(_kind_html(one) for one in schema["anyOf"])
    if "enum" in schema:
        return " or ".join(f"<code>{escape(repr(value))}</code>" for value in schema["enum"])
    if schema.get("type") == "array":
        return f"list of {_kind_html(schema.get('items', {}))}"
    inner = schema.get("additionalProperties")
    if isinstance(inner, Mapping) and inner:
        return f"object of {_kind_html(inner)}"
    return escape(str(schema.get("type", "anything")))


def _default(schema: Mapping[str, object]) -> str:
    return f"default <code>{escape(repr(schema['default']))}</code>" if "default" in schema else "optional"


SCHEMA = "#/components/schemas/{name}"
TITLE = "Plait"
ABOUT = (
    "An inference engine for hybrid language models, behind OpenAI's API. In requests a null equals "
    "absence; unknown fields are accepted and named in the header x-plait-ignored; a known field that cannot "
    "be honoured is refused by name."
)


def document(endpoints: Iterable[Endpoint]) -> dict[str, object]:
    """The OpenAPI document of the fixed GET routes and of `endpoints`."""
    paths: dict[str, dict[str, object]] = {
        path: {"get": _get(path, operation)} for path, operation in GETS.items()
    }
    operations = [*GETS.values()]
    for endpoint in endpoints:
        operation = POSTS.get(endpoint.path, Operation(f"{endpoint.method} {endpoint.path}"))
        operations.append(operation)
        paths[endpoint.path] = {endpoint.method.lower(): _post(endpoint, operation)}
    for (method, path), operation in (*STORED.items(), *MCP.items()):
        operations.append(operation)
        paths[path] = {**paths.get(path, {}), method.lower(): _describe_stored(method, path, operation)}
    return {
        "openapi": "3.1.0",
        "info": {"title": TITLE, "version": __version__, "description": ABOUT},
        "paths": paths,
        "components": {
            "schemas": _schemas(operations),
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
        "security": [{}, {"bearer": []}, {"x-api-key": []}],
    }


def api_routes(endpoints: Sequence[Endpoint]) -> list[Route]:
    """GET /openapi.json, and GET /docs: the same document as an HTML page that loads nothing."""

    @cache
    def describe() -> dict[str, object]:
        return document(endpoints)

    def write_json() -> bytes:
        return encode_document(describe())

    def write_html() -> bytes:
        return write_page(describe())

    return [
        Route("/openapi.json", Asset(write_json, "application/json"), methods=["GET"]),
        Route("/docs", Asset(write_html, "text/html; charset=utf-8", DOCS_POLICY), methods=["GET"]),
    ]


def _get(path: str, operation: Operation) -> dict[str, object]:
    found = _operation(path, operation)
    if names := re.findall(r"{(\w+)}", path):
        found["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    if operation.reply in {Health, Readiness}:
        found["responses"]["503"] = {"description": "Not now", "content": _json(_ref(operation.reply))}
    return found


def _describe_stored(method: str, path: str, operation: Operation) -> dict[str, object]:
    found = _get(path, operation)
    found["operationId"] = f"{method.lower()}_{found['operationId']}"
    if operation.body is not None:
        found["requestBody"] = {"required": True, "content": _json(_ref(operation.body))}
    elif (method, path) == ("POST", "/v1/files"):
        form = {"properties": {"file": {"type": "string", "format": "binary"}, "purpose": {"type": "string"}}}
        schema = {"type": "object", "required": ["file", "purpose"], **form}
        found["requestBody"] = {"required": True, "content": {"multipart/form-data": {"schema": schema}}}
    return found


def _post(endpoint: Endpoint, operation: Operation) -> dict[str, object]:
    if operation.body is not None:
        body = _ref(operation.body)
    else:
        body = {"type": "object", "properties": {name: {} for name in sorted(endpoint.fields)}}
    return {**_operation(endpoint.path, operation), "requestBody": {"required": True, "content": _json(body)}}


def _operation(path: str, operation: Operation) -> dict[str, Any]:
    content = _json(_ref(operation.reply)) if operation.reply else {"*/*": {}}
    if operation.stream is not None:
        content[operation.form.media_type] = {"schema": {"type": "string", "description": _events(operation)}}
    refusal = {"description": "A refusal that says why", "content": _json(_ref(operation.refusal))}
    return {
        "operationId": "_".join(part.strip("{}") for part in path.split("/") if part),
        "summary": operation.summary,
        "responses": {
            "200": {"description": "Done", "content": content},
            "4XX": refusal,
            "5XX": {**refusal, "description": "The server's fault, or no capacity now"},
        },
    }


def _events(operation: Operation) -> str:
    stream = operation.stream
    if stream is None or isinstance(stream, str):
        return stream or ""
    if operation.form is not EVENTS:
        return f"Lines of JSON, each a {stream.__name__}; the last has `done`. Without stream: one of them."
    return (
        f"With stream: events of one line each, `data: ` and a {stream.__name__}; the last is `data: [DONE]`."
    )


def _schemas(operations: Iterable[Operation]) -> dict[str, object]:
    operations = [*operations]
    sent = [
        kind for operation in operations for kind in (operation.reply, operation.stream, operation.refusal)
    ]
    replies = _components(kind for kind in sent if kind is not None and not isinstance(kind, str))
    for found in replies.values():  # what has a default in a reply is always sent
        fields = found["properties"]
        found["required"] = [
            name for name in fields if name in found["required"] or "default" in fields[name]
        ]
        for field in fields.values():
            field.pop("default", None)
    return dict(
        sorted(
            {**_components(operation.body for operation in operations if operation.body), **replies}.items()
        )
    )


def _schema_of_any(kind: type) -> dict[str, object]:
    if kind is not object:
        raise NotImplementedError
    return {"description": "any JSON value"}


def _components(kinds: Iterable[Schema]) -> dict[str, Any]:
    _, found = msgspec.json.schema_components(kinds, schema_hook=_schema_of_any, ref_template=SCHEMA)
    for schema in found.values():  # older versions of Python keep the indentation of docstrings
        if about := schema.get("description"):
            schema["description"] = cleandoc(about)
    return found


def _ref(kind: Schema) -> dict[str, object]:
    return {"$ref": SCHEMA.format(name=kind.__name__)}


def _json(found: Mapping[str, object]) -> dict[str, object]:
    return {"application/json": {"schema": found}}


def encode_document(found: Mapping[str, object]) -> bytes:
    return msgspec.json.format(msgspec.json.encode(found), indent=2) + b"\n"
