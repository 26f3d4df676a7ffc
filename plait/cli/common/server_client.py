"""The client of a running server: its models, and streamed replies, over OpenAI's API."""

from __future__ import annotations

import json
import ssl
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from plait.cli.common.progress import Clock
from plait.errors import ConfigError, EngineError, PlaitError, RequestError

if TYPE_CHECKING:
    from plait.frontend.deltas import Delta

CONNECT_S, READ_S = 5.0, 600.0  # a reply may wait for a place, and for its prompt
MAX_BODY = 8 << 20  # bytes of a reply that is read at once
MAX_LINE = 1 << 20  # bytes of a line of a stream: one event


class ServerError(PlaitError):
    """A server could not be reached, or did not answer as a server of models does."""


class ServerClient:
    """A server of models at `url`; `api_key` is sent to it. Raises ConfigError for what is no address.

    Each request has a connection of its own: one that was left in the middle disturbs no other. `read_s`:
    seconds that it may be silent; `host`: the name to call it by, where that is not the one in `url`.
    """

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        *,
        read_s: float = READ_S,
        host: str = "",
        checks_certificate: bool = True,
    ) -> None:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        try:
            self.host, port = parts.hostname, parts.port
        except ValueError as error:
            raise ConfigError(f"url: {url!r} is no address: {error}") from None
        if parts.scheme not in ("http", "https") or not self.host:
            raise ConfigError(f"url: {url!r} is no address; write http://127.0.0.1:8080")
        self._is_secure = parts.scheme == "https"
        self.port = port or (443 if self._is_secure else 80)
        self._path = parts.path.rstrip("/").removesuffix("/v1")
        self._read_s, self._checks_certificate = read_s, checks_certificate
        self._headers = {"Content-Type": "application/json", **({"Host": host} if host else {})}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self.url = f"{parts.scheme}://{parts.netloc}{self._path}"
        self._open: HTTPConnection | None = None

    def request(self, method: str, path: str, body: object = None) -> tuple[int, object]:
        """(status, the JSON of the reply, or None). Raises ServerError."""
        response = self._send(method, path, body)
        try:
            text = response.read(MAX_BODY)
        except (OSError, HTTPException) as error:
            raise ServerError(f"{self.url} broke its reply off: {error}") from error
        finally:
            self.close()
        with suppress(ValueError, RecursionError):
            found: object = json.loads(text)
            return response.status, found
        return response.status, None

    def models(self) -> dict[str, int]:
        """The models by name, with the tokens of their contexts (0: it is not known). Raises ServerError."""
        status, found = self.request("GET", "/v1/models")
        self.check(status, found)
        entries = found.get("data") if isinstance(found, dict) else None
        if not isinstance(entries, list):
            raise ServerError(f"{self.url} answers, and is no server of models: /v1/models has no list")
        named = [each for each in entries if isinstance(each, dict) and isinstance(each.get("id"), str)]
        lengths = [each.get("max_model_len") for each in named]
        return {
            each["id"]: length if isinstance(length, int) else 0
            for each, length in zip(named, lengths, strict=True)
        }

    def chat(self, model: str, messages: list[dict[str, str]], params: Mapping[str, object]) -> StreamedReply:
        """A streamed reply. Raises RequestError where it is refused, else ServerError."""
        from plait.frontend.deltas import Delta  # now: the first token would wait for it

        clock = Clock(0)
        body = {**params, "model": model, "messages": messages, "stream": True}
        response = self._send(
            "POST", "/v1/chat/completions", {**body, "stream_options": {"include_usage": True}}
        )
        if response.status != 200:
            with suppress(ValueError, OSError, HTTPException, RecursionError):
                found = json.loads(response.read(MAX_BODY))
                self.check(response.status, found)
            self.check(response.status, None)
        return StreamedReply(self, response, clock, Delta)

    def check(self, status: int, body: object) -> None:
        """Raise what the reply says, where it is no success."""
        if status < 400:
            return
        error = body.get("error") if isinstance(body, dict) else None
        text = error.get("message") if isinstance(error, dict) else error
        message = " ".join(str(text).split())[:500] if text else f"{self.url} answers with status {status}"
        if status in (401, 403):
            name = "admin" if "admin key" in message else "api"
            message += f" (--{name}-key, or PLAIT_{name.upper()}_KEY, is the key that is sent)"
        raise RequestError(message) if status in (400, 404, 413, 422) else ServerError(message)

    def close(self) -> None:
        """Leave what is being read: the server stops generating it."""
        connection, self._open = self._open, None
        if connection is not None:
            connection.close()

    def _send(self, method: str, path: str, body: object) -> HTTPResponse:
        self.close()
        assert self.host is not None
        connection: HTTPConnection
        patience_s = min(CONNECT_S, self._read_s)
        if self._is_secure:
            context = ssl.create_default_context()
            if not self._checks_certificate:
                context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            connection = HTTPSConnection(self.host, self.port, timeout=patience_s, context=context)
        else:
            connection = HTTPConnection(self.host, self.port, timeout=patience_s)
        self._open = connection
        text = None if body is None else json.dumps(body).encode()
        try:
            connection.connect()
            connection.sock.settimeout(self._read_s)
            connection.request(method, self._path + path, text, self._headers)
            return connection.getresponse()
        except (OSError, HTTPException) as error:
            self.close()
            why = getattr(error, "strerror", None) or error
            hint = (
                "; `plait serve MODEL` starts a server" if isinstance(error, ConnectionRefusedError) else ""
            )
            raise ServerError(f"{self.url} cannot be reached: {why}{hint}") from error


class StreamedReply:
    """The deltas of a reply; iterate it once."""

    def __init__(
        self, client: ServerClient, response: HTTPResponse, clock: Clock, make: Callable[..., Delta]
    ) -> None:
        self._client, self._response, self.clock, self._make = client, response, clock, make

    def cancel(self) -> None:
        self._client.close()

    def __iter__(self) -> Iterator[Delta]:
        """Raises ServerError where the stream ends without its last event, or has what is no event."""
        written = 0
        try:
            for event in self._events():
                if isinstance(usage := event.get("usage"), dict):
                    self.clock.prompt_tokens(int(usage.get("prompt_tokens") or 0))
                if text := content_of(event):
                    written += 1
                    yield self._make(0, text, num_tokens=written)
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise ServerError(f"{self._client.url} sent an event that cannot be read: {error}") from error
        finally:
            self._client.close()

    def _events(self) -> Iterator[dict[str, object]]:
        while True:
            try:
                line = self._response.readline(MAX_LINE)
            except (OSError, HTTPException) as error:
                raise ServerError(f"{self._client.url} broke its reply off: {error}") from error
            if not line:
                raise ServerError(f"{self._client.url} broke its reply off, before its end")
            if not line.startswith(b"data:"):
                continue
            text = line.removeprefix(b"data:").strip()
            if text == b"[DONE]":
                return
            event = json.loads(text)
            if not isinstance(event, dict):
                raise ValueError("it is no object")
            if fault := event.get("error"):
                raise EngineError(str(fault.get("message") if isinstance(fault, dict) else fault))
            yield event


def content_of(event: dict[str, object]) -> str:
    """The text that an event adds. Raises ValueError for what is no event of a chat."""
    choices = event.get("choices") or []
    if not isinstance(choices, list):
        raise ValueError("its choices are no list")
    deltas = [each.get("delta") or {} for each in choices]
    return "".join(str(delta.get("content") or "") for delta in deltas)
