"""The page at `/`: a chat with the model and a live view of the engine, as static files of the package.

The page is one more client of the API. It needs no build step and loads nothing from anywhere else: its
Content-Security-Policy makes browsers enforce that. Trusted Types keep its scripts from turning text into
markup.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from importlib import resources
from importlib.resources.abc import Traversable

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

POLICY = (
    "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; object-src 'none'; "
    "require-trusted-types-for 'script'"
)
KINDS = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


class Asset:
    """One file, as an ASGI endpoint. A browser that has it already gets 304."""

    def __init__(self, body: bytes, kind: str, policy: str = POLICY) -> None:
        self._body, self._kind, self._policy = body, kind, policy
        self._tag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
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


def routes() -> list[Route]:
    """`/` and everything it loads, under `/page/`. Reads the files once, here."""
    found = []
    for name, file in _files(resources.files("plait.server") / "page"):
        kind = KINDS["." + name.rpartition(".")[2]]
        path = "/" if name == "index.html" else f"/page/{name}"
        found.append(Route(path, Asset(file.read_bytes(), kind), methods=["GET"]))
    return found


def _files(folder: Traversable, prefix: str = "") -> Iterator[tuple[str, Traversable]]:
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if entry.is_dir():
            yield from _files(entry, f"{prefix}{entry.name}/")
        else:
            yield prefix + entry.name, entry
