"""The API as a page to read: operations and types, plain HTML without scripts and with nothing to load."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from html import escape
from typing import Any

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
POLICY = f"default-src 'none'; style-src 'sha256-{_HASH}'; base-uri 'none'; frame-ancestors 'none'"


def page(document: Mapping[str, Any]) -> bytes:
    """An OpenAPI document as one HTML page."""
    about = document["info"]
    title, version = escape(about["title"]), escape(about["version"])
    operations = [
        _operation(path, method, told)
        for path, methods in document["paths"].items()
        for method, told in methods.items()
    ]
    types = [_type(name, schema) for name, schema in document["components"]["schemas"].items()]
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


def _operation(path: str, method: str, told: Mapping[str, Any]) -> str:
    lines = [
        f'<h3 id="{escape(told["operationId"])}"><span class="method">{method.upper()}</span>'
        f"<code>{escape(path)}</code></h3><p>{escape(told['summary'])}</p>"
    ]
    body = told.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
    if body is not None:
        lines.append(f"<p>Takes {_kind(body)}.</p>")
    for kind, content in told["responses"]["200"]["content"].items():
        shown = _kind(content["schema"]) if "$ref" in content.get("schema", {}) else ""
        text = content.get("schema", {}).get("description", "")
        lines.append(f"<p>Answers with <code>{escape(kind)}</code> {shown} {escape(text)}</p>")
    return "\n".join(lines)


def _type(name: str, schema: Mapping[str, Any]) -> str:
    required = set(schema.get("required", ()))
    rows = [
        f"<tr><td><code>{escape(field)}</code></td><td>{_kind(told)}</td>"
        f"<td>{'required' if field in required else _default(told)}</td>"
        f"<td>{escape(told.get('description', ''))}</td></tr>"
        for field, told in schema.get("properties", {}).items()
    ]
    text = escape(schema.get("description", ""))
    return (
        f'<h3 id="{escape(name)}"><code>{escape(name)}</code></h3><p>{text}</p><table>{"".join(rows)}</table>'
    )


def _kind(schema: Mapping[str, Any]) -> str:
    """A schema in a few words, with links to the types it names."""
    if "$ref" in schema:
        name = escape(str(schema["$ref"]).rpartition("/")[2])
        return f'<a href="#{name}"><code>{name}</code></a>'
    if "anyOf" in schema:
        return " or ".join(_kind(one) for one in schema["anyOf"])
    if "enum" in schema:
        return " or ".join(f"<code>{escape(repr(value))}</code>" for value in schema["enum"])
    if schema.get("type") == "array":
        return f"list of {_kind(schema.get('items', {}))}"
    inner = schema.get("additionalProperties")
    if isinstance(inner, Mapping) and inner:
        return f"object of {_kind(inner)}"
    return escape(str(schema.get("type", "anything")))


def _default(schema: Mapping[str, Any]) -> str:
    return f"default <code>{escape(repr(schema['default']))}</code>" if "default" in schema else "optional"
