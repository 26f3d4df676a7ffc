"""The outermost layer: paths in one spelling, request ids, allowed hosts, a bound on open requests.

`//` counts as `/`, and a trailing slash is as good as none: never a redirect that loses a body.
"""

from __future__ import annotations

import ipaddress
import re

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from plait.server.generation import new_id
from plait.server.problems import HostRefused, TooManyRequests, problem

MAX_OPEN_REQUESTS = 2048
REQUEST_ID_HEADER = "x-request-id"
_SANE_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_LOCAL_NAMES = frozenset({"localhost", "testserver"})


class Edge:
    """Wraps the application. `host`: the address the server is bound to."""

    def __init__(self, app: ASGIApp, host: str) -> None:
        self._app, self._host, self._local = app, host, is_loopback(host)
        self._open = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get(REQUEST_ID_HEADER, "")
        request_id = given if _SANE_ID.fullmatch(given) else new_id("req")

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[REQUEST_ID_HEADER] = request_id
            await send(message)

        path = one_spelling(scope["path"])
        scope = {**scope, "path": path, "raw_path": path.encode()}
        self._open += 1
        try:
            await self._chosen(headers)(scope, receive, named)
        finally:
            self._open -= 1

    def _chosen(self, headers: Headers) -> ASGIApp:
        host = headers.get("host")
        if self._local and host and not self._allowed(host):
            text = f"Host is {host[:200]!r}; a server on the loopback address answers to localhost only"
            return problem(HostRefused(text, "host")).response()
        if self._open > MAX_OPEN_REQUESTS:
            text = f"{MAX_OPEN_REQUESTS} requests are open already; try again later"
            return problem(TooManyRequests(text)).response()
        return self._app

    def _allowed(self, host: str) -> bool:
        name = host_name(host)
        return name in _LOCAL_NAMES or name == self._host.lower() or is_loopback(name)


def one_spelling(path: str) -> str:
    """A path without doubled and trailing slashes."""
    return "/" + "/".join(part for part in path.split("/") if part)


def host_name(host: str) -> str:
    """The name in a Host header, without port and brackets, in lower case."""
    host = host.strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.rpartition(":")[0] if host.count(":") == 1 else host


def is_loopback(host: str) -> bool:
    """Whether an address or a name means this machine only."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
