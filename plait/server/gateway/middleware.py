"""The outermost layer: path spelling, request ids, hosts, keys, bounds; and an end for each request.

`//` counts as `/`, and a trailing slash is as good as none: never a redirect that loses a body.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache

import msgspec
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from plait.config import KIB
from plait.errors import PlaitError, QueueFull
from plait.server.gateway.accounting import Traffic
from plait.server.gateway.request_context import SCOPE_KEY, Exchange, LoadingState
from plait.server.http.bodies import new_id
from plait.server.http.errors import (
    BadHost,
    HeadTooLarge,
    HostRefused,
    NotReady,
    Problem,
    TooManyRequests,
    problem,
)

MAX_OPEN_REQUESTS = 2048  # each has a task, a body in memory and perhaps a thread
MAX_HEAD_BYTES = 16 * KIB  # request line and headers; browsers and clients send less than 4 KiB
MAX_HEADERS = 100
MAX_LOGGED_PATH = 200
Refusal = Callable[[Problem], msgspec.Struct]
REQUEST_ID_HEADER = "x-request-id"
PUBLIC = frozenset(
    {"/health", "/ready", "/live", "/", "/docs", "/openapi.json"}
)  # and /page/…: the same for every client
WATCHED = frozenset(
    {"/health", "/ready", "/live", "/metrics"}
)  # answered also by a server that is full or stopping
HAS_ROOM = "plait.has_room"  # in a scope: `turned_away` has checked, and only the engine's queue checks again
_SANE_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_LOCAL_NAMES = frozenset({"localhost", "testserver"})


class Door:
    """Admits requests, and makes the error of those that it refuses.

    The application's `routes` are known. `refusals`: errors of other shapes, by path. `generating`: paths
    that need a place in the engine's queue. While it is full they are rejected before their bodies are read.
    A rejection must cost little, because its cost is taken from the requests that are served.
    """

    def __init__(
        self,
        traffic: Traffic,
        loading: LoadingState,
        routes: Iterable[BaseRoute] = (),
        refusals: Mapping[str, Refusal] | None = None,
        generating: Iterable[str] = (),
    ) -> None:
        self._traffic, self._loading = traffic, loading
        self._refusals, self._generating = refusals or {}, frozenset(generating)
        self._routes = [route for route in routes if isinstance(route, Route)]
        self._exact = {route.path for route in self._routes}

    def turned_away(self, scope: Scope) -> Response | None:
        """The answer to a request that the engine's full queue rejects; None: it takes the usual way.

        The answer is the same as that way would give, but it needs no task and no layers.
        """
        if scope["method"] != "POST":
            return None
        try:
            self._loading.check_room()
            scope[HAS_ROOM] = True
            return None
        except QueueFull as error:
            refusal: PlaitError = error
        except PlaitError:
            return None
        path, headers = self.path_of(scope), Headers(scope=scope)
        if path not in self._generating or "origin" in headers:  # a page's answer needs more headers
            return None
        exchange = self.exchange(scope, headers, path)
        self._traffic.begin()
        try:
            self._check_caller({**scope, "path": path}, headers, exchange)
            self._traffic.turn_away(exchange)
        except PlaitError as error:
            refusal = error
        exchange.reason = problem(refusal).reason
        answer = self.answer_to(refusal, path)
        answer.raw_headers.append((REQUEST_ID_HEADER.encode(), exchange.id.encode()))
        exchange.status = answer.status_code
        self._traffic.end(exchange)
        return answer

    def path_of(self, scope: Scope) -> str:
        """The path in one spelling: without a proxy's prefix, with the /v1 that some clients omit."""
        path, prefix = one_spelling(scope["path"]), self._traffic.config.root_path
        if prefix and (path == prefix or path.startswith(prefix + "/")):
            path = path[len(prefix) :] or "/"
        is_short = path not in self._exact and (f"/v1{path}" in self._exact or path.startswith("/models/"))
        return f"/v1{path}" if is_short else path

    def exchange(self, scope: Scope, headers: Headers, path: str) -> Exchange:
        given = headers.get(REQUEST_ID_HEADER, "")
        return Exchange(
            given if _SANE_ID.fullmatch(given) else new_id("req"),
            scope["method"],
            path[:MAX_LOGGED_PATH],
            headers.get("traceparent", ""),
            route=self._route(path),
        )

    def check(self, scope: Scope, headers: Headers, exchange: Exchange) -> None:
        """Raises the error of a request that can be refused by its headers alone."""
        self._check_caller(scope, headers, exchange)
        path = scope["path"]
        if exchange.method == "POST" and not self._is_public(path, exchange.method):
            if path in self._generating and HAS_ROOM not in scope:
                self._check_room(exchange)
            self._traffic.admit(exchange)

    def answer_to(self, error: PlaitError, path: str) -> Response:
        """An error in the words of that path's API."""
        return problem(error).response(self._refusals.get(path))

    def _check_caller(self, scope: Scope, headers: Headers, exchange: Exchange) -> None:
        """Raises the errors that do not depend on the engine's load."""
        self._check_host(_host(scope))
        _check_head(scope)
        path = scope["path"]
        if self._traffic.num_open > MAX_OPEN_REQUESTS and path not in WATCHED:
            raise TooManyRequests(f"{MAX_OPEN_REQUESTS} requests are open already; try again later")
        if self._loading.stopping and path not in WATCHED:
            raise NotReady("the server is stopping and takes no more requests")
        if not self._is_public(path, exchange.method):
            self._traffic.recognize(exchange, headers)

    def _check_room(self, exchange: Exchange) -> None:
        """Raises QueueFull, which does not count against the key's limits."""
        try:
            self._loading.check_room()
        except QueueFull:
            self._traffic.turn_away(exchange)
            raise

    def _is_public(self, path: str, method: str) -> bool:
        if path == "/metrics" and self._traffic.config.metrics_public:
            return True
        return method == "OPTIONS" or path in PUBLIC or path.startswith("/page/")

    def _check_host(self, host: str | None) -> None:
        config = self._traffic.config
        if host is None or (not config.allowed_host and not is_loopback(config.host)):
            return
        name = host_name(host)
        if name in {allowed.lower() for allowed in config.allowed_host}:
            return
        if is_loopback(config.host) and (
            name in _LOCAL_NAMES or name == config.host.lower() or is_loopback(name)
        ):
            return
        raise HostRefused(
            f"Host is {host[:200]!r}; this server answers to localhost and the names of --allowed-host only",
            "host",
        )

    def _route(self, path: str) -> str:
        """The route of a path: one of few names, for metrics."""
        if path.startswith("/page/"):
            return "/page"
        if path in self._exact:
            return path
        found = (route.path for route in self._routes if route.path_regex.match(path))
        return next(found, "other").replace(":path}", "}")


class Edge:
    """Wraps the application: each request that its `door` admits has an id, and its end is reported."""

    def __init__(self, app: ASGIApp, door: Door, traffic: Traffic, loading: LoadingState) -> None:
        self._app, self._door, self._traffic, self._loading = app, door, traffic, loading

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers, path = Headers(scope=scope), self._door.path_of(scope)
        exchange = self._door.exchange(scope, headers, path)
        scope = {**scope, "path": path, "raw_path": path.encode(), SCOPE_KEY: exchange}
        self._traffic.begin()
        try:
            app: ASGIApp = self._app
            try:
                self._door.check(scope, headers, exchange)
                if not self._loading.stopping:
                    self._traffic.work(exchange)
            except PlaitError as error:
                exchange.reason = problem(error).reason
                app = self._door.answer_to(error, path)
            await app(scope, receive, self._named(exchange, send))
        finally:
            self._traffic.end(exchange)

    def _named(self, exchange: Exchange, send: Send) -> Send:
        """`send` with the headers that every answer has."""

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                exchange.status = message["status"]
                headers = MutableHeaders(scope=message)
                headers[REQUEST_ID_HEADER] = exchange.id
                if exchange.account is not None:
                    headers.update(exchange.account.headers())
                if self._loading.stopping:
                    headers["Connection"] = "close"
            await send(message)

        return named


def one_spelling(path: str) -> str:
    """A path without doubled and trailing slashes."""
    return "/" + "/".join(part for part in path.split("/") if part)


def host_name(host: str) -> str:
    """The name in a Host header, without port and brackets, in lower case."""
    host = host.strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.rpartition(":")[0] if host.count(":") == 1 else host


@lru_cache(maxsize=64)
def is_loopback(host: str) -> bool:
    """Whether an address or a name means this machine only."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _host(scope: Scope) -> str | None:
    """The Host header; HTTP/1.0 may have none. Raises BadHost where it is not one (RFC 9112, 3.2)."""
    found = [value.strip() for name, value in scope["headers"] if name == b"host"]
    if not found and scope["http_version"] == "1.0":
        return None
    if len(found) != 1 or not found[0]:
        sent = "an empty one" if len(found) == 1 else f"{len(found)}" if found else "none"
        raise BadHost(f"Host: the request has {sent}; send one, with the server's name")
    return str(found[0], "latin-1")


def _check_head(scope: Scope) -> None:
    headers = scope["headers"]
    if len(headers) > MAX_HEADERS:
        raise HeadTooLarge(f"the request has {len(headers)} headers; send at most {MAX_HEADERS}")
    query = scope.get("query_string", b"")
    line = len(scope["method"]) + len(scope["raw_path"]) + (len(query) + 1 if query else 0) + 12
    size = line + sum(len(name) + len(value) + 4 for name, value in headers) + 2
    if size > MAX_HEAD_BYTES:
        raise HeadTooLarge(f"the request's headers take {size} bytes; send at most {MAX_HEAD_BYTES}")
