"""Errors as clients read them: the one table from exception to HTTP status and OpenAI's error object.

A client's fault is never a 5xx: OpenAI's clients retry those.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
from starlette.responses import Response

from plait.errors import (
    CapacityError,
    ContextTooLong,
    DeadlineExceeded,
    EngineClosing,
    EngineError,
    EngineLost,
    ModelNotFound,
    PlaitError,
    RequestError,
    clip_text,
)
from plait.server.store.errors import StoreFull, StoreUnavailable

logger = logging.getLogger("plait.server")
RETRY_AFTER_S = 1
MAX_REASON = 300  # characters of a line of the log
_WORDS_OF_OTHERS = frozenset({"bad_template", "bad_grammar"})
_QUOTED = re.compile(r"""(?<!\w)('(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*")(?!\w)""")
LOST_RETRY_S = 10  # an engine that was lost is started again with long pauses, if at all


class BadBody(RequestError):
    """The body is not a JSON object, or it cannot be decoded."""

    code = "invalid_body"


class BodyTooLarge(RequestError):
    status = 413
    code = "body_too_large"


class BodyTimeout(RequestError):
    status = 408
    code = "body_timeout"


class UnsupportedMedia(RequestError):
    status = 415
    code = "unsupported_media_type"


class BadHost(RequestError):
    """The request has not exactly one Host: two readers could take it for requests to two servers."""

    code = "invalid_host"


class HostRefused(RequestError):
    status = 403
    code = "host_not_allowed"


class TooManyRequests(CapacityError):
    status = 429
    code = "too_many_requests"


class HeadTooLarge(RequestError):
    status = 431
    code = "headers_too_large"


class InvalidKey(RequestError):
    status = 401
    code = "invalid_api_key"


class AdminRefused(RequestError):
    """A path that manages the server, and no admin key is set."""

    status = 403
    code = "no_admin_key"


class ModelUnavailable(CapacityError):
    """A model that cannot be loaded now. `wait_s`: when to retry, None: retrying does not help."""

    code = "model_unavailable"

    def __init__(self, message: str, wait_s: float | None = None) -> None:
        super().__init__(message)
        self.wait_s = wait_s

    @property
    def headers(self) -> Mapping[str, str]:
        """What keeps clients from retrying in vain."""
        if self.wait_s is None:
            return {"x-should-retry": "false"}
        return {"Retry-After": str(max(1, math.ceil(self.wait_s))), "x-should-retry": "false"}


class RateLimited(CapacityError):
    """A key has reached its limits. `wait_s`: when to retry; `headers`: the limits."""

    status = 429
    code = "rate_limit_exceeded"

    def __init__(self, message: str, wait_s: float, headers: Mapping[str, str]) -> None:
        super().__init__(message)
        self.wait_s, self.headers = wait_s, headers


class NotReady(CapacityError):
    """The model is not there yet, or the server is stopping."""

    code = "not_ready"


_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    499: "cancelled",
    500: "server_error",
    503: "server_error",
    504: "server_error",
}
_AGAIN = {"Retry-After": str(RETRY_AFTER_S)}
_BY_STATUS = {404: "not_found", 405: "method_not_allowed"}


class ErrorObject(msgspec.Struct, kw_only=True, frozen=True):
    """OpenAI's error object, with all four keys. A prompt that is too long has llama.cpp's numbers, too."""

    message: str
    type: str
    param: str | None
    code: str | None
    n_prompt_tokens: int | msgspec.UnsetType = msgspec.UNSET
    n_ctx: int | msgspec.UnsetType = msgspec.UNSET


class ErrorBody(msgspec.Struct, kw_only=True, frozen=True):
    """The body of every answer that is not a 2xx."""

    error: ErrorObject


@dataclass(frozen=True, slots=True)
class Problem:
    """An error as a client gets it: `body` is OpenAI's error object, with all four keys.

    `more`: keys of other servers, which may have another `type`, too.
    """

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    more: Mapping[str, Any] = field(default_factory=dict)

    def body(self) -> ErrorBody:
        kind = _TYPES.get(self.status, "invalid_request_error")
        found = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return ErrorBody(error=ErrorObject(**{**found, **self.more}))

    @property
    def reason(self) -> str:
        """The reason, for the log: without a client's text (it is in quotes) and without a template's."""
        where = f"{self.code or 'refused'}{f' ({self.param})' if self.param else ''}"
        if self.code in _WORDS_OF_OTHERS:
            return where
        return f"{where}: {_QUOTED.sub('...', self.message)}"[:MAX_REASON]

    def response(self, shape: Callable[[Problem], msgspec.Struct] | None = None) -> Response:
        """`shape`: makes the body, where it is not OpenAI's error object."""
        return json_response(shape(self) if shape else self.body(), self.status, self.headers)


def problem(error: BaseException) -> Problem:
    """The answer to an exception. One that is not for clients is logged and named an internal error.

    Texts are cut by `clip_text`: a client's own words may be in them.
    """
    found = _problem(error)
    return replace(found, message=clip_text(found.message))


def _problem(error: BaseException) -> Problem:
    match error:
        case ModelNotFound():
            return Problem(404, str(error), error.param or "model", error.code)
        case InvalidKey():
            return Problem(401, str(error), None, error.code, {"WWW-Authenticate": "Bearer"})
        case RateLimited():
            return Problem(429, str(error), None, error.code, _later(error.wait_s, error.headers))
        case RequestError():
            more = _too_long(error) if isinstance(error, ContextTooLong) else {}
            return Problem(
                error.status, str(error), error.param, error.code, _close_headers(error.status), more
            )
        # Clients would ask twice more: for what their own limit ended, or for a reply that cannot be stored.
        case DeadlineExceeded() | StoreFull() | StoreUnavailable():
            return Problem(error.status, str(error), None, error.code, {"x-should-retry": "false"})
        case CapacityError() | EngineClosing():
            again = error.headers if isinstance(error, ModelUnavailable) else _AGAIN
            return Problem(error.status, str(error), None, error.code, again)
        case EngineLost():
            return Problem(503, str(error), None, error.code, {"Retry-After": str(LOST_RETRY_S)})
        case EngineError():
            return Problem(500, str(error), None, error.code)
        case PlaitError():
            logger.error("a request failed: %s", error, exc_info=error)
            return Problem(500, str(error), None, error.code or "internal_error")
    logger.error("a request failed: %s", type(error).__name__, exc_info=error)
    text = f"internal error ({type(error).__name__}); the server's log has the details"
    return Problem(500, text, None, "internal_error")


def http_problem(status: int, message: str, headers: Mapping[str, str] | None = None) -> Problem:
    """The error of a request that never reached a handler: unknown paths and wrong methods."""
    return Problem(status, message, None, _BY_STATUS.get(status), headers or {})


def json_response(body: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A JSON response; everything in `body` must be finite."""
    return Response(msgspec.json.encode(body), status, dict(headers or {}), "application/json")


def _too_long(error: ContextTooLong) -> Mapping[str, object]:
    """llama.cpp's words, by its `type`; OpenAI's clients know the error by its `code`."""
    if error.num_prompt_tokens is None or error.max_model_len is None:
        return {}
    numbers = {"n_prompt_tokens": error.num_prompt_tokens, "n_ctx": error.max_model_len}
    return {"type": "exceed_context_size_error", **numbers}


def _close_headers(status: int) -> Mapping[str, str]:
    # The rest of such a body is not read, so the connection cannot carry another request.
    return {"Connection": "close"} if status in {408, 413, 431} else {}


def _later(wait_s: float, headers: Mapping[str, str]) -> Mapping[str, str]:
    """OpenAI's clients read milliseconds where there are any; others read whole seconds."""
    wait = {"Retry-After": str(max(1, math.ceil(wait_s))), "retry-after-ms": str(math.ceil(wait_s * 1000))}
    return {**headers, **wait}
