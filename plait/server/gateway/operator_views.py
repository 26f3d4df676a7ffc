"""What an operator sees behind the admin key: keys and their usage, limits, open requests, ended ones.

Keys have names here and no secrets, requests have counts and no texts. `models/admin` loads and unloads.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType

from plait.errors import InvalidField
from plait.server.gateway.exchange import Exchange
from plait.server.gateway.middleware import MAX_OPEN_REQUESTS, Traffic
from plait.server.gateway.request_log import MAX_LOGGED
from plait.server.gateway.served_models import ServedModels
from plait.typed_values import convert_to

LOGGED_AT_ONCE = 100  # without a limit in the query
Amount = Annotated[int, msgspec.Meta(ge=0)]
Seconds = Annotated[float, msgspec.Meta(ge=0)]


class KeyUsage(msgspec.Struct, kw_only=True, frozen=True):
    """A key's limits and usage since the server started; what has no limit is left out.

    `name`: "" for all clients of a server without keys. `last_used`: seconds since 1970.
    """

    name: str
    requests_per_minute: Amount | UnsetType = UNSET
    remaining_requests: Amount | UnsetType = UNSET
    tokens_per_minute: Amount | UnsetType = UNSET
    remaining_tokens: Amount | UnsetType = UNSET
    max_requests: Amount | UnsetType = UNSET
    num_open_requests: Amount = 0
    num_requests: Amount = 0
    last_used: Seconds | UnsetType = UNSET


class KeyUsages(msgspec.Struct, kw_only=True, frozen=True):
    """`needed`: whether a request needs one of these keys."""

    object: Literal["list"] = "list"
    needed: bool
    data: list[KeyUsage]


class ModelLimits(msgspec.Struct, kw_only=True, frozen=True):
    """`max_model_len` in tokens; `max_open_requests`: requests that run or wait in its engine."""

    max_model_len: Amount
    max_open_requests: Amount


class ServerLimits(msgspec.Struct, kw_only=True, frozen=True):
    """Bounds of the whole server, of each key that has no others, and of each loaded model."""

    max_open_requests: Amount
    max_connections: Amount
    max_body_bytes: Amount
    shutdown_timeout_s: Seconds
    requests_per_minute: Amount | UnsetType = UNSET
    tokens_per_minute: Amount | UnsetType = UNSET
    max_requests_per_key: Amount | UnsetType = UNSET
    models: dict[str, ModelLimits] = {}


class OpenRequestFacts(msgspec.Struct, kw_only=True, frozen=True):
    """A request that has not ended.

    `open`: it has not reached an engine: its body is read, its model loaded, or it needs none. `waiting`: it
    waits there, or its prompt is computed. `generating`: tokens have come.
    """

    id: str
    method: str
    path: str
    key: str
    model: str
    state: Literal["open", "waiting", "generating"]
    seconds: Seconds
    prompt_tokens: Amount = 0
    output_tokens: Amount = 0


class EngineLoad(msgspec.Struct, kw_only=True, frozen=True):
    """Choices of requests that run in an engine, and that wait there."""

    running: Amount
    waiting: Amount


class OpenRequests(msgspec.Struct, kw_only=True, frozen=True):
    """All open requests, the oldest first, and the load of each loaded model's engine."""

    object: Literal["list"] = "list"
    data: list[OpenRequestFacts]
    engines: dict[str, EngineLoad]


class LoggedRequest(msgspec.Struct, kw_only=True, frozen=True):
    """A request that has ended; `time`: when it began, in seconds since 1970. The log has the same fields."""

    time: Seconds
    id: str
    method: str
    path: str
    status: int = 0
    ms: Seconds = 0.0
    key: str = ""
    model: str = ""
    load_ms: Seconds | UnsetType = UNSET
    reason: str = ""
    prompt_tokens: Amount = 0
    cached_tokens: Amount = 0
    output_tokens: Amount = 0
    finish: list[str] = []
    queue_ms: float | UnsetType = UNSET
    ttft_ms: float | UnsetType = UNSET


class LoggedRequests(msgspec.Struct, kw_only=True, frozen=True):
    """Requests that have ended, the latest first; of the last `capacity` at most."""

    object: Literal["list"] = "list"
    capacity: Amount = MAX_LOGGED
    data: list[LoggedRequest]


def list_keys(traffic: Traffic, models: ServedModels, query: Mapping[str, str]) -> KeyUsages:
    """Every key with its limits and usage."""
    keyring = traffic.keyring
    found = []
    for key in keyring.keys or (keyring.anybody,):
        account, allowance = traffic.limits.account(key), key.allowance
        requests, tokens = account.count_remaining()
        found.append(
            KeyUsage(
                name=key.name,
                requests_per_minute=_leave_out_none(allowance.requests_per_minute),
                remaining_requests=_leave_out_none(requests),
                tokens_per_minute=_leave_out_none(allowance.tokens_per_minute),
                remaining_tokens=_leave_out_none(tokens),
                max_requests=_leave_out_none(allowance.max_requests),
                num_open_requests=max(account.num_open, 0),
                num_requests=account.num_requests,
                last_used=UNSET if account.last_used is None else account.last_used,
            )
        )
    return KeyUsages(needed=bool(keyring), data=found)


def list_limits(traffic: Traffic, models: ServedModels, query: Mapping[str, str]) -> ServerLimits:
    """The bounds that hold now."""
    config = traffic.config
    return ServerLimits(
        max_open_requests=MAX_OPEN_REQUESTS,
        max_connections=config.max_connections,
        max_body_bytes=config.max_body_bytes,
        shutdown_timeout_s=config.shutdown_timeout_s,
        requests_per_minute=_leave_out_none(config.requests_per_minute),
        tokens_per_minute=_leave_out_none(config.tokens_per_minute),
        max_requests_per_key=_leave_out_none(config.max_requests_per_key),
        models={
            name: ModelLimits(max_model_len=front.max_model_len, max_open_requests=front.max_open)
            for name, front in models.fronts().items()
        },
    )


def list_requests(traffic: Traffic, models: ServedModels, query: Mapping[str, str]) -> OpenRequests:
    """What is open now, but for requests of the operator."""
    now = time.monotonic()
    shown = [one for one in traffic.open_exchanges() if not one.route.startswith("/admin/")]
    engines = {}
    for name, front in models.fronts().items():
        stats = front.stats()
        running, waiting = stats.get("num_running", 0), stats.get("num_waiting", 0)
        engines[name] = EngineLoad(running=max(running, 0), waiting=max(waiting, 0))
    return OpenRequests(data=[_open_request(one, now) for one in shown], engines=engines)


def list_logged(traffic: Traffic, models: ServedModels, query: Mapping[str, str]) -> LoggedRequests:
    """The last requests; the query's `id` and `key` choose, `limit` bounds. Raises InvalidField."""
    text = query.get("limit", str(LOGGED_AT_ONCE))
    is_number = text.isascii() and text.isdigit() and len(text) <= 6
    if not is_number or not 1 <= int(text) <= MAX_LOGGED:
        raise InvalidField(f"limit: send a whole number from 1 to {MAX_LOGGED}", "limit")
    found = traffic.log.find(int(text), id=query.get("id", ""), key=query.get("key", ""))
    return LoggedRequests(data=convert_to(found, list[LoggedRequest]))


def _open_request(exchange: Exchange, now: float) -> OpenRequestFacts:
    num_arrived = sum(stream.num_arrived for stream in exchange.streams)
    started: Literal["waiting", "generating"] = "generating" if num_arrived else "waiting"
    return OpenRequestFacts(
        id=exchange.id,
        method=exchange.method,
        path=exchange.path,
        key=exchange.key.name,
        model=exchange.model,
        state=started if exchange.streams else "open",
        seconds=round(max(now - exchange.began_s, 0.0), 3),
        prompt_tokens=sum(len(stream.request.prompt_token_ids) for stream in exchange.streams),
        output_tokens=num_arrived,
    )


def _leave_out_none(limit: int | None) -> int | UnsetType:
    return UNSET if limit is None else limit


class OperatorView(Struct, frozen=True):
    """`GET path` for the admin key; `answer` gets the query."""

    path: str
    answer: Callable[[Traffic, ServedModels, Mapping[str, str]], msgspec.Struct]


VIEWS = (
    OperatorView("/admin/keys", list_keys),
    OperatorView("/admin/limits", list_limits),
    OperatorView("/admin/requests", list_requests),
    OperatorView("/admin/log", list_logged),
)
