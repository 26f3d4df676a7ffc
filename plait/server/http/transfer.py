"""What clients send and receive: heads and JSON bodies within bounds, server-sent events."""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from typing import Any, TypeVar

import msgspec
from msgspec import Struct
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from plait.config import KIB
from plait.errors import Cancelled
from plait.server.http.errors import (
    BadBody,
    BadHost,
    BodyTimeout,
    BodyTooLarge,
    HeadTooLarge,
    Problem,
    UnsupportedMedia,
    problem,
)

T = TypeVar("T")
MAX_HEAD_BYTES = 16 * KIB  # request line and headers; browsers and clients send less than 4 KiB
MAX_HEADERS = 100
MAX_DEPTH = 64
MAX_CONTAINERS = 100_000  # objects and lists: as many messages as may be, of ten each
BODY_TIMEOUT_S = 30.0  # between two parts of a body, and beyond the time that all of it takes at this rate:
MIN_BODY_RATE = 1024  # bytes per second
INLINE_BYTES = 64 * 1024  # larger bodies are decoded in a thread
LINGER_S, LINGER_BYTES = 1.0, 64 * 1024 * 1024

# Of a body without escapes: no text makes these go back. Python before 3.11.5 misreads possessive groups.
_STRING = re.compile(rb'"[^"]*"')
# So many strings and what is between them: one step of a scan, which other threads wait for.
_PART = re.compile(rb'(?:[^"]*"[^"]*"){0,4096}[^"]*')
_ROUND, _NOT_BRACKETS = bytes.maketrans(b"[]{}", b"()()"), bytes(set(range(256)) - set(b"[]{}"))
# Half of a pair without the other half, which no character is written with, as in "\ud800".
_HIGH, _LOW = rb"\\u[dD][89abAB][0-9a-fA-F]{2}", rb"\\u[dD][c-fC-F]"
_SURROGATE = re.compile(rb"%b(?!%b)|(?<!%b)%b" % (_HIGH, _LOW, _HIGH, _LOW))


def host_of(scope: Scope) -> str | None:
    """The Host header; HTTP/1.0 may have none. Raises BadHost where it is not one (RFC 9112, 3.2)."""
    found = [value.strip() for name, value in scope["headers"] if name == b"host"]
    if not found and scope["http_version"] == "1.0":
        return None
    if len(found) != 1 or not found[0]:
        sent = "an empty one" if len(found) == 1 else f"{len(found)}" if found else "none"
        raise BadHost(f"Host: the request has {sent}; send one, with the server's name")
    return str(found[0], "latin-1")


def check_head(scope: Scope) -> None:
    """Raises HeadTooLarge for a request line and headers that are out of bounds."""
    headers = scope["headers"]
    if len(headers) > MAX_HEADERS:
        raise HeadTooLarge(f"the request has {len(headers)} headers; send at most {MAX_HEADERS}")
    query = scope.get("query_string", b"")
    line = len(scope["method"]) + len(scope["raw_path"]) + (len(query) + 1 if query else 0) + 12
    size = line + sum(len(name) + len(value) + 4 for name, value in headers) + 2
    if size > MAX_HEAD_BYTES:
        raise HeadTooLarge(f"the request's headers take {size} bytes; send at most {MAX_HEAD_BYTES}")


async def read_object(request: Request, max_bytes: int, any_type: bool = False) -> dict[str, object]:
    """Read the JSON object in a request's body.

    `any_type`: Content-Type may say something else, or nothing, unless a browser's page sent the request.
    Raises UnsupportedMedia (415), BodyTooLarge (413), BodyTimeout (408), BadBody (400) and Cancelled.
    """
    if not any_type or is_of_page(request):
        _check_type(request)
    _check_headers(request, max_bytes)
    body = b"".join([piece async for piece in read_pieces(request, max_bytes)])
    if len(body) <= INLINE_BYTES:
        return decode_object(body)
    return await asyncio.to_thread(decode_object, body)


def decode_object(body: bytes) -> dict[str, object]:
    """A JSON object as plain values. Raises BadBody for anything that is not one."""
    if not body.strip():
        raise BadBody("the body is empty; send a JSON object")
    _check_structure(body)
    try:
        value = msgspec.json.decode(body)
    except RecursionError:
        raise BadBody(f"the body is nested deeper than {MAX_DEPTH} levels") from None
    except (msgspec.DecodeError, UnicodeDecodeError, ValueError) as error:
        if "out of range" in str(error):
            raise BadBody("the body has a number that no field can take: at most 1.8e308") from None
        hint = (
            "; a \\ud800 to \\udfff without its other half is no character" if _SURROGATE.search(body) else ""
        )
        raise BadBody(f"the body is not JSON that can be read: {error}{hint}") from None
    if not isinstance(value, dict):
        raise BadBody(f"the body is a JSON {_kind(value)}; send an object")
    return value


async def linger(request: Request) -> None:
    """Read and drop the rest of a refused body for a moment, so that its sender gets the answer."""
    left = LINGER_BYTES
    try:
        async with asyncio.timeout(LINGER_S):
            while left > 0:
                message = await request.receive()
                left -= len(message.get("body", b""))
                if message["type"] != "http.request" or not message.get("more_body", False):
                    return
    except TimeoutError:
        return


async def refuse_body(request: Request, response: Response, send: Send) -> None:
    """Answer first and end the response a moment later: closing on a body in flight would lose the answer."""
    await send(
        {"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers}
    )
    await send({"type": "http.response.body", "body": response.body, "more_body": True})
    await linger(request)
    await send({"type": "http.response.body", "body": b"", "more_body": False})


def is_of_page(request: Request) -> bool:
    """Whether a browser sent it for a page, which cannot leave these headers out.

    Pages may send text and forms to any server; what says that it is JSON they may send only to their own.
    """
    return any(name in request.headers for name in ("origin", "sec-fetch-site", "sec-fetch-mode"))


def _check_type(request: Request) -> None:
    kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        advice = "send application/json (curl: -H 'Content-Type: application/json')"
        raise UnsupportedMedia(f"Content-Type is {kind[:100]!r}; {advice}")


def _check_headers(request: Request, max_bytes: int) -> None:
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in {"", "identity"}:
        raise UnsupportedMedia(f"Content-Encoding is {encoding[:100]!r}; send the body as it is")
    length = request.headers.get("content-length", "0")
    if length.isascii() and length.isdigit() and int(length[:20]) > max_bytes:
        raise too_large(max_bytes)


async def read_pieces(request: Request, max_bytes: int) -> AsyncIterator[bytes]:
    """A body as it arrives. Raises BodyTooLarge, BodyTimeout and Cancelled."""
    size = 0
    stream = aiter(request.stream())
    began = time.monotonic()
    try:
        while True:
            slowest = began + BODY_TIMEOUT_S + size / MIN_BODY_RATE - time.monotonic()
            async with asyncio.timeout(min(BODY_TIMEOUT_S, slowest)):
                piece = await anext(stream, None)
            if piece is None:
                return
            size += len(piece)
            if size > max_bytes:
                raise too_large(max_bytes)
            yield piece
    except TimeoutError:
        text = f"the body stopped for {BODY_TIMEOUT_S:g} s or came slower than {MIN_BODY_RATE} bytes/s"
        raise BodyTimeout(text) from None
    except ClientDisconnect:
        raise Cancelled("the client went away") from None


def too_large(max_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(f"the body is larger than {max_bytes} bytes; the server's --max-body-bytes sets it")


def _check_structure(body: bytes) -> None:
    """Raises BadBody for JSON that is costly to decode, before it is. The decoder finds invalid JSON."""
    if body.count(b"[") + body.count(b"{") <= MAX_DEPTH:
        return
    left, at = b"", 0
    body = body.replace(rb"\\", b"").replace(rb"\"", b"")
    while (found := _PART.match(body, at)) and found.end() > at:
        left, at = left + _STRING.sub(b"", found[0]).translate(_ROUND, _NOT_BRACKETS), found.end()
        if left.count(b"(") > MAX_CONTAINERS:
            raise BadBody(f"the body has more than {MAX_CONTAINERS} objects and lists; send less")
    for _ in range(MAX_DEPTH):  # takes the innermost level each time
        left, before = left.replace(b"()", b""), len(left)
        if len(left) == before:
            return
    if b"()" in left:
        raise BadBody(f"the body is nested deeper than {MAX_DEPTH} levels")


def _kind(value: object) -> str:
    names = {list: "array", str: "string", bool: "boolean", type(None): "null"}
    return names.get(type(value), "number")


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client goes away. Raises Cancelled then.

    The body must have been read, so that `receive` returns only when the client leaves.
    """
    running = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(wait_disconnect(receive))
    try:
        await asyncio.wait({running, watching}, return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            return running.result()
        raise Cancelled("the client went away")
    finally:
        await cancel_tasks(running, watching)


async def wait_disconnect(receive: Receive) -> None:
    """Wait until the client has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def cancel_tasks(*tasks: asyncio.Future[Any]) -> None:
    """Cancel tasks and wait until they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def new_id(prefix: str, mark: str = "-") -> str:
    """`prefix`-… with 122 random bits, of letters and digits."""
    return f"{prefix}{mark}{uuid.uuid4().hex}"


logger = logging.getLogger("plait.server")
PING_S = 15.0  # silence after which a comment is sent, so that proxies keep the connection open
REQUEST_ID = "plait.request_id"  # of a scope: the id of its request, for the log
SEND_TIMEOUT_S = 60.0  # a client that reads nothing for so long is disconnected
_ENCODE = msgspec.json.Encoder().encode
DONE = b"data: [DONE]\n\n"


def frame(body: object) -> bytes:
    """One event. JSON holds no raw line break, so it is one line."""
    return b"data: " + _ENCODE(body) + b"\n\n"


def event_frame(body: Any) -> bytes:
    """One event under its own name, which is its `type`."""
    return b"event: " + str(body.type).encode() + b"\n" + frame(body)


def json_line(body: object) -> bytes:
    """One object in a line of its own."""
    return _ENCODE(body) + b"\n"


class StreamForm(Struct, frozen=True):
    """How a stream is written: one event by `frame`, its end by `done`, and `ping` in a long silence."""

    media_type: str
    frame: Callable[[Any], bytes]
    done: bytes = b""
    ping: bytes = b": ping\n\n"


EVENTS = StreamForm("text/event-stream", frame, DONE)
UNMARKED_EVENTS = StreamForm("text/event-stream", frame)  # llama.cpp's: the last event says that it is that
NAMED_EVENTS = StreamForm("text/event-stream", event_frame)
# Lines have no comments; a space before an object is part of no value.
JSON_LINES = StreamForm("application/x-ndjson", json_line, ping=b" ")


class EventStream(Response):
    """A streamed response of events. `close` is awaited at its end: done, failed or disconnected.

    `failed`: the events that report a failure, if they are not OpenAI's error object.
    """

    def __init__(
        self,
        bodies: AsyncIterator[msgspec.Struct],
        close: Callable[[], Awaitable[None]],
        failed: Callable[[Problem], Iterable[msgspec.Struct]] = lambda found: (found.body(),),
        form: StreamForm = EVENTS,
    ) -> None:
        self.media_type, self._form = form.media_type, form
        self.status_code, self.body, self.background = 200, b"", None
        self._bodies, self._close, self._failed, self._last_sent = bodies, close, failed, 0.0
        self._sending_since: float | None = None
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        self._last_sent = time.monotonic()
        pump = asyncio.ensure_future(self._pump(send))
        watch = self._watch(send, scope.get(REQUEST_ID, ""))
        others = asyncio.ensure_future(wait_disconnect(receive)), asyncio.ensure_future(watch)
        try:
            await asyncio.wait({pump, *others}, return_when=asyncio.FIRST_COMPLETED)
            if pump.done():
                pump.result()
        finally:
            await cancel_tasks(pump, *others)
            await self._close()

    async def _pump(self, send: Send) -> None:
        try:
            async for body in self._bodies:
                await self._send(send, self._form.frame(body))
        except Exception as error:
            for body in self._failed(problem(error)):
                await self._send(send, self._form.frame(body))
        if self._form.done:
            await self._send(send, self._form.done)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, send: Send, data: bytes) -> None:
        self._sending_since = time.monotonic()
        await send({"type": "http.response.body", "body": data, "more_body": True})
        self._last_sent, self._sending_since = time.monotonic(), None

    async def _watch(self, send: Send, request_id: str) -> None:
        """Break long silences; returns when the client reads nothing. A timer for each event costs more."""
        while True:
            since, silence = self._sending_since, time.monotonic() - self._last_sent
            if since is not None:
                if time.monotonic() - since >= SEND_TIMEOUT_S:
                    break
                await asyncio.sleep(SEND_TIMEOUT_S / 4)
            elif silence >= PING_S:
                try:
                    async with asyncio.timeout(SEND_TIMEOUT_S):  # no other timer limits this send
                        await self._send(send, self._form.ping)
                except TimeoutError:
                    break
            else:
                await asyncio.sleep(min(PING_S - silence, SEND_TIMEOUT_S / 4))
        text = "%s: the client read nothing for %g s; its stream was ended"
        logger.warning(text, request_id, SEND_TIMEOUT_S)
