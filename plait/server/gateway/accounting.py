"""All HTTP traffic of a server: admission of clients, open requests, and what is logged at their end."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from plait.config import ServerConfig
from plait.server.gateway.access_log import LogWriter, log_request, shows_requests
from plait.server.gateway.api_keys import Keyring, RateLimits, read_keys
from plait.server.gateway.request_context import Exchange
from plait.server.gateway.vllm_metrics import PerRequest
from plait.server.http.errors import InvalidKey

logger = logging.getLogger("plait.server")
CROWD_S = 1.0  # all requests that a full queue rejected in this time are one line of the log
SETTLE_S, SETTLE_EVERY_S = 2.0, 0.02  # the engine reports a choice that a stop string ended a step later
LATENCIES_S = (0.001, 0.005, 0.02, 0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0, 600.0)
RELOADED = (
    *("api_key", "api_key_file", "requests_per_minute", "tokens_per_minute", "max_requests_per_key"),
    *("metrics_public", "metrics_vllm_names", "allowed_host", "log_file", "log_format", "log_level"),
)
METHODS = frozenset({"GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE", "PATCH"})


class Recorder(Protocol):
    """Receives each request that has ended, for traces."""

    def record(self, exchange: Exchange, ended_ns: int) -> None: ...


class Traffic:
    """Admission, metrics and log of all requests. Everything here runs on the event loop's thread."""

    def __init__(
        self, config: ServerConfig, recorder: Recorder | None = None, log: LogWriter | None = None
    ) -> None:
        self.config, self._recorder = config, recorder
        self.keyring = read_keys(config)
        self.limits = RateLimits(_all(self.keyring))
        self.num_open = self.num_working = 0
        self._num_turned_away = 0
        self._settling: dict[str, tuple[Exchange, float, int]] = {}
        self.per_request = PerRequest()
        self.registry = CollectorRegistry()
        self._requests = Counter(
            "plait_http_requests",
            "HTTP requests that were answered.",
            ["route", "method", "status"],
            registry=self.registry,
        )
        self._in_flight = Gauge("plait_http_requests_open", "HTTP requests in work.", registry=self.registry)
        self._seconds = Histogram(
            "plait_http_request_seconds",
            "From the headers of a request to the end of its answer.",
            ["route"],
            buckets=LATENCIES_S,
            registry=self.registry,
        )
        self.registry.register(Dropped(log))

    def reload(self, config: ServerConfig) -> None:
        """Apply the options in `RELOADED` as they are now. Raises ConfigError, and keeps the old ones."""
        config = replace(self.config, **{name: getattr(config, name) for name in RELOADED})
        keyring = read_keys(config)
        if bool(keyring) != bool(self.keyring):
            logger.warning("keys are %s from now on", "asked for" if keyring else "no longer asked for")
        self.keyring, self.config = keyring, config
        self.limits.change(_all(keyring))

    def recognize(self, exchange: Exchange, headers: Mapping[str, str]) -> None:
        """Find the API key of a request. Raises InvalidKey."""
        key = self.keyring.find(headers)
        if key is None:
            sent = "authorization" in headers or "x-api-key" in headers
            text = "the API key is not one of this server's" if sent else "an API key is needed"
            raise InvalidKey(f"{text}; send it as `Authorization: Bearer KEY` or `x-api-key: KEY`")
        exchange.key = key

    def admit(self, exchange: Exchange) -> None:
        """Count a request against its key's limits. Raises RateLimited."""
        account = self.limits.account(exchange.key)
        account.admit()
        exchange.account = account

    def turn_away(self, exchange: Exchange) -> None:
        """Count a request that the full queue rejects: a line of the log for each would cost more."""
        exchange.is_turned_away = True
        self._num_turned_away += 1
        if self._num_turned_away == 1:
            asyncio.get_running_loop().call_later(CROWD_S, self._tell_of_crowd)

    def work(self, exchange: Exchange) -> None:
        """Count an admitted request: the server waits for it when it stops."""
        exchange.is_working = True
        self.num_working += 1

    def begin(self) -> None:
        self.num_open += 1
        self._in_flight.inc()

    def end(self, exchange: Exchange) -> None:
        """Account for a request that has ended: its answer is sent, or the client has left."""
        self.num_open -= 1
        self.num_working -= exchange.is_working
        self._in_flight.dec()
        if exchange.account is not None:
            exchange.account.leave()
        seconds = time.monotonic() - exchange.began_s
        method = exchange.method if exchange.method in METHODS else "other"
        self._requests.labels(exchange.route, method, str(exchange.status)).inc()
        self._seconds.labels(exchange.route).observe(seconds)
        self._settling[exchange.id + str(id(exchange))] = (exchange, seconds, time.time_ns())
        self._settle(exchange, time.monotonic() + SETTLE_S)

    def flush(self) -> None:
        """Log the requests that have ended, although the engine has not reported all of their choices."""
        for exchange, _, _ in [*self._settling.values()]:
            self._tell(exchange)
        self._tell_of_crowd()

    def _tell_of_crowd(self) -> None:
        if self._num_turned_away:
            logger.warning("the queue was full: %d requests were refused", self._num_turned_away)
        self._num_turned_away = 0

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
        if shows_requests(exchange.route, is_quiet=exchange.is_turned_away):
            log_request(log_fields(exchange, seconds), exchange.route, is_quiet=exchange.is_turned_away)
        self.per_request.record(exchange, ended_ns)
        if self._recorder is not None:
            self._recorder.record(exchange, ended_ns)


class Dropped(Collector):
    """A metric: the lines that a log could not take."""

    def __init__(self, log: LogWriter | None) -> None:
        self._log = log

    def collect(self) -> Iterator[Metric]:
        text = "Lines of the log that were dropped: it was not read, or could not be written."
        yield CounterMetricFamily("plait_log_lines_dropped", text, self._log.num_dropped if self._log else 0)


def log_fields(exchange: Exchange, seconds: float) -> dict[str, Any]:
    """The fields of a request's line in the log; times in milliseconds."""
    traces = [*exchange.traces()]
    starts = [t.first_scheduled_s - t.arrival_s for t in traces if t.first_scheduled_s is not None]
    firsts = [t.first_token_s - t.arrival_s for t in traces if t.first_token_s is not None]
    found: dict[str, Any] = {
        "id": exchange.id,
        "method": exchange.method,
        "path": exchange.path,
        "status": exchange.status,
        "ms": round(seconds * 1000, 1),
        "key": exchange.key.name,
        "model": exchange.model,
        "reason": exchange.reason,
    }
    if exchange.streams:
        found |= {
            "prompt_tokens": sum(len(stream.request.prompt_token_ids) for stream in exchange.streams),
            "cached_tokens": sum(t.num_cached_tokens for t in traces if t.index == 0),
            "output_tokens": sum(t.num_output_tokens for t in traces),
            "finish": tuple(t.finish_reason for t in traces),
            "queue_ms": round(min(starts) * 1000, 1) if starts else None,
            "ttft_ms": round(min(firsts) * 1000, 1) if firsts else None,
        }
    return found


def _all(keyring: Keyring) -> Iterable[Any]:
    return (*keyring.keys, keyring.anybody)
