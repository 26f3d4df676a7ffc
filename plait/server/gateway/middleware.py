"""Each request is admitted by its head, counted, and logged at its end; `edge` calls this.

It checks path spelling, request ids, hosts, keys and bounds. `//` counts as `/`, and a trailing slash is as
good as none: never a redirect that loses a body.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Protocol

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import Scope

from plait.config import ServerConfig, option_names
from plait.errors import PlaitError, QueueFull
from plait.server.gateway.access_log import DroppedLines, LogWriter
from plait.server.gateway.api_keys import Key, Keyring, RateLimits, read_admin_key, read_keys
from plait.server.gateway.exchange import Exchange
from plait.server.gateway.request_log import RequestLog
from plait.server.gateway.served_models import ServedModels
from plait.server.gateway.vllm_metrics import PerRequest
from plait.server.http.errors import AdminRefused, InvalidKey, NotReady, Problem, TooManyRequests, problem
from plait.server.http.hosts import check_host
from plait.server.http.transfer import check_head, host_of, new_id

MAX_OPEN_REQUESTS = 2048  # each has a task, a body in memory and perhaps a thread
MAX_LOGGED_PATH = 200
Refusal = Callable[[Problem], msgspec.Struct]
REQUEST_ID_HEADER = "x-request-id"
PUBLIC = frozenset(
    {"/health", "/ready", "/live", "/", "/docs", "/openapi.json"}
)  # and /page/…: the same for every client
WITH_ID = ("/models/", "/responses/", "/chat/completions/", "/files/", "/batches/")
# Answered also by a server that is full or stopping.
WATCHED = frozenset({"/health", "/ready", "/live", "/metrics"})
# In a scope: `reject_early` has checked, and only the engine's queue checks again.
HAS_CAPACITY = "plait.has_capacity"
_SANE_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
logger = logging.getLogger("plait.server")
CROWD_S = 1.0  # all requests that a full queue rejected in this time are one line of the log
SETTLE_S, SETTLE_EVERY_S = 2.0, 0.02  # the engine reports a choice that a stop string ended a step later
LATENCIES_S = (0.001, 0.005, 0.02, 0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0, 600.0)
RELOADED = (
    *("api_key", "api_key_file", "requests_per_minute", "tokens_per_minute", "max_requests_per_key"),
    *("metrics_public", "metrics_vllm_names", "allowed_host", "log_file", "log_format", "log_level"),
    "admin_key",
)
METHODS = frozenset({"GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE", "PATCH"})


class Recorder(Protocol):
    """Receives each request that has ended, for traces."""

    def record(self, exchange: Exchange, ended_ns: int) -> None: ...


class Traffic:
    """Admission, metrics and log of all requests. Everything here runs on the event loop's thread."""

    def __init__(
        self,
        config: ServerConfig,
        recorder: Recorder | None = None,
        log: LogWriter | None = None,
        *,
        names_models: bool = False,
        labels: Mapping[str, str] | None = None,
    ) -> None:
        """`names_models`: metrics of requests have the label `model`, "" where none was found.

        `labels`: of every sample, where several servers are scraped as one.
        """
        self.labels = dict(labels or {})
        self._names_models = names_models
        models = ["model"] if names_models else []
        self.config, self._recorder = config, recorder
        self.keyring = read_keys(config)
        read_admin_key(config)
        self.limits = RateLimits(_all_keys(self.keyring))
        self.log = RequestLog()
        self._open: dict[int, Exchange] = {}
        self.num_working = 0
        self._num_rejected = 0
        self._settling: dict[str, tuple[Exchange, float, int]] = {}
        self.per_request = PerRequest()
        self.registry = CollectorRegistry()
        self._requests = Counter(
            "plait_http_requests",
            "HTTP requests that were answered.",
            ["route", "method", "status", *models],
            registry=self.registry,
        )
        self._ended = Counter(
            "plait_http_requests_ended",
            "HTTP requests by how they ended: finished, cancelled (the client left), rejected, error.",
            ["route", "outcome", *models],
            registry=self.registry,
        )
        self._in_flight = Gauge("plait_http_requests_open", "HTTP requests in work.", registry=self.registry)
        self._seconds = Histogram(
            "plait_http_request_seconds",
            "From the headers of a request to the end of its answer.",
            ["route", *models],
            buckets=LATENCIES_S,
            registry=self.registry,
        )
        self.registry.register(DroppedLines(log))

    def reload(self, config: ServerConfig) -> None:
        """Apply the options in `RELOADED` as they are now. Raises ConfigError, and keeps the old ones."""
        fixed = [name for name in option_names(ServerConfig) if name not in RELOADED]
        changed = [name for name in fixed if getattr(config, name) != getattr(self.config, name)]
        config = replace(self.config, **{name: getattr(config, name) for name in RELOADED})
        keyring = read_keys(config)
        read_admin_key(config)
        if bool(keyring) != bool(self.keyring):
            logger.warning("keys are %s from now on", "required" if keyring else "no longer required")
        self.keyring, self.config = keyring, config
        self.limits.change(_all_keys(keyring))
        if changed:
            logger.warning("reload: %s: what is new takes effect at the next startup", ", ".join(changed))

    def recognize(self, exchange: Exchange, headers: Mapping[str, str]) -> None:
        """Find the API key of a request. Raises InvalidKey."""
        key = self.keyring.find(headers)
        if key is None:
            sent = "authorization" in headers or "x-api-key" in headers
            text = "the API key is not one of this server's" if sent else "an API key is needed"
            raise InvalidKey(f"{text}; send it as `Authorization: Bearer KEY` or `x-api-key: KEY`")
        exchange.key = key
        self.limits.account(key).see()

    def is_admin(self, headers: Mapping[str, str]) -> bool:
        """Whether a request has the admin key."""
        return self.config.admin_key is not None and read_admin_key(self.config).find(headers) is not None

    def recognize_admin(self, exchange: Exchange, headers: Mapping[str, str]) -> None:
        """Check the admin key, which no other key replaces. Raises AdminRefused and InvalidKey."""
        if self.config.admin_key is None:
            raise AdminRefused(
                "this path needs an admin key, and --admin-key sets none here: start the server with one"
            )
        key = read_admin_key(self.config).find(headers)
        if key is None:
            raise InvalidKey("this path needs the server's admin key; send it as `Authorization: Bearer KEY`")
        exchange.key, exchange.is_admin = key, True

    def admit(self, exchange: Exchange) -> None:
        """Count a request against its key's limits. Raises RateLimited."""
        account = self.limits.account(exchange.key)
        account.admit()
        exchange.account = account

    def reject(self, exchange: Exchange) -> None:
        """Count a request that the full queue rejects: a line of the log for each would cost more."""
        exchange.is_rejected = True
        self._num_rejected += 1
        if self._num_rejected == 1:
            asyncio.get_running_loop().call_later(CROWD_S, self._tell_of_crowd)

    def work(self, exchange: Exchange) -> None:
        """Count an admitted request: the server waits for it when it stops."""
        exchange.is_working = True
        self.num_working += 1

    def begin_inner(self, exchange: Exchange) -> None:
        """Count work that the server does for a key after its request, until `end`. It is never refused."""
        exchange.is_whole = True
        self.begin(exchange)
        self.work(exchange)
        if exchange.account is not None:
            exchange.account.num_open += 1

    @property
    def num_open(self) -> int:
        return len(self._open)

    def open_exchanges(self) -> list[Exchange]:
        """The requests that have not ended, the oldest first."""
        return list(self._open.values())

    def begin(self, exchange: Exchange) -> None:
        self._open[id(exchange)] = exchange
        self._in_flight.inc()

    def end(self, exchange: Exchange) -> None:
        """Account for a request that has ended: its answer is sent, or the client has left."""
        self._open.pop(id(exchange), None)
        self.num_working -= exchange.is_working
        self._in_flight.dec()
        if exchange.account is not None:
            exchange.account.leave()
        if exchange.release is not None:
            exchange.release()
        seconds = time.monotonic() - exchange.began_s
        method = exchange.method if exchange.method in METHODS else "other"
        model = [exchange.model] if self._names_models else []
        self._requests.labels(exchange.route, method, str(exchange.status), *model).inc()
        self._ended.labels(exchange.route, exchange.outcome, *model).inc()
        self._seconds.labels(exchange.route, *model).observe(seconds)
        self._settling[exchange.id + str(id(exchange))] = (exchange, seconds, time.time_ns())
        self._settle(exchange, time.monotonic() + SETTLE_S)

    def flush(self) -> None:
        """Log the requests that have ended, although the engine has not reported all of their choices."""
        for exchange, _, _ in [*self._settling.values()]:
            self._tell(exchange)
        self._tell_of_crowd()

    def _tell_of_crowd(self) -> None:
        if self._num_rejected:
            logger.warning("the queue was full: %d requests were refused", self._num_rejected)
        self._num_rejected = 0

    def _settle(self, exchange: Exchange, deadline: float) -> None:
        if exchange.is_settled or time.monotonic() > deadline:
            self._tell(exchange)
        else:
            asyncio.get_running_loop().call_later(SETTLE_EVERY_S, self._settle, exchange, deadline)

    def _tell(self, exchange: Exchange) -> None:
        known = self._settling.pop(exchange.id + str(id(exchange)), None)
        if known is None:
            return
        _, seconds, ended_ns = known
        if exchange.account is not None:
            exchange.account.pay(sum(trace.num_output_tokens for trace in exchange.traces()))
        self.log.record(exchange, seconds)
        self.per_request.record(exchange, ended_ns)
        if self._recorder is not None:
            self._recorder.record(exchange, ended_ns)


class RequestGate:
    """Admits requests, and makes the error of those that it refuses.

    The application's `routes` are known. `refusals`: errors of other shapes, by path. `generating`: paths
    that need a place in the engine's queue. While it is full they are rejected before their bodies are read.
    `managing`: paths that need the admin key; `either`: paths that do more for it than for others.
    A rejection must cost little, because its cost is taken from the requests that are served.
    """

    def __init__(
        self,
        traffic: Traffic,
        models: ServedModels,
        routes: Iterable[BaseRoute] = (),
        refusals: Mapping[str, Refusal] | None = None,
        generating: Iterable[str] = (),
        managing: Iterable[str] = (),
        either: Iterable[str] = (),
    ) -> None:
        self._traffic, self._models = traffic, models
        self._refusals, self._generating = refusals or {}, frozenset(generating)
        self._managing, self._either = frozenset(managing), frozenset(either)
        self._routes = [route for route in routes if isinstance(route, Route)]
        self._exact = {route.path for route in self._routes}

    def reject_early(self, scope: Scope) -> Response | None:
        """The answer to a request that the engine's full queue rejects; None: it takes the usual way.

        The answer is the same as that way would give, but it needs no task and no layers.
        """
        if scope["method"] != "POST":
            return None
        try:
            self._models.check_capacity()
            scope[HAS_CAPACITY] = True
            return None
        except QueueFull as error:
            refusal: PlaitError = error
        except PlaitError:
            return None
        path, headers = self.path_of(scope), Headers(scope=scope)
        if path not in self._generating or "origin" in headers:  # a page's answer needs more headers
            return None
        exchange = self.exchange(scope, headers, path)
        self._traffic.begin(exchange)
        try:
            self._check_caller({**scope, "path": path}, headers, exchange)
            self._traffic.reject(exchange)
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
        is_short = path not in self._exact and (f"/v1{path}" in self._exact or path.startswith(WITH_ID))
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
        if exchange.is_admin:
            return
        if exchange.method == "POST" and not self._is_public(path, exchange.method):
            if path in self._generating and HAS_CAPACITY not in scope:
                self._check_capacity(exchange)
            self._traffic.admit(exchange)

    def answer_to(self, error: PlaitError, path: str) -> Response:
        """An error in the words of that path's API."""
        return problem(error).response(self._refusals.get(path))

    def _check_caller(self, scope: Scope, headers: Headers, exchange: Exchange) -> None:
        """Raises the errors that do not depend on the engine's load."""
        check_host(self._traffic.config, host_of(scope))
        check_head(scope)
        path = scope["path"]
        if self._traffic.num_open > MAX_OPEN_REQUESTS and path not in WATCHED:
            raise TooManyRequests(f"{MAX_OPEN_REQUESTS} requests are open already; try again later")
        if self._models.stopping and path not in WATCHED:
            raise NotReady("the server is stopping and takes no more requests")
        if exchange.method != "OPTIONS" and (
            path in self._managing or (path in self._either and self._traffic.is_admin(headers))
        ):
            self._traffic.recognize_admin(exchange, headers)
        elif not self._is_public(path, exchange.method):
            self._traffic.recognize(exchange, headers)

    def _check_capacity(self, exchange: Exchange) -> None:
        """Raises QueueFull, which does not count against the key's limits."""
        try:
            self._models.check_capacity()
        except QueueFull:
            self._traffic.reject(exchange)
            raise

    def _is_public(self, path: str, method: str) -> bool:
        if path == "/metrics" and self._traffic.config.metrics_public:
            return True
        return method == "OPTIONS" or path in PUBLIC or path.startswith("/page/")

    def _route(self, path: str) -> str:
        """The route of a path: one of few names, for metrics."""
        if path.startswith("/page/"):
            return "/page"
        if path in self._exact:
            return path
        found = (route.path for route in self._routes if route.path_regex.match(path))
        return next(found, "other").replace(":path}", "}")


def _all_keys(keyring: Keyring) -> tuple[Key, ...]:
    return (*keyring.keys, keyring.anybody)


def one_spelling(path: str) -> str:
    """A path without doubled and trailing slashes."""
    return "/" + "/".join(part for part in path.split("/") if part)
