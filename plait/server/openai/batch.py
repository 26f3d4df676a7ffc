"""Many requests from a file, in OpenAI's batch format, through the application itself: no socket, no server.

A line of the input is `{"custom_id", "method", "url", "body"}`, a line of the output `{"id", "custom_id",
"response": {"status_code", "request_id", "body"}, "error"}`; they come in the order in which they are done.
A response lists fields of its request that the endpoint ignored, if there were any: `ignored_fields`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import msgspec
from msgspec import Struct
from starlette.types import ASGIApp, Message

from plait.errors import ConfigError, RequestError
from plait.server.api.parse_fields import rename_params
from plait.server.api.reply import WARNING_HEADER
from plait.server.api.validate import IGNORED_HEADER
from plait.server.http.transfer import decode_object, new_id

METHOD = "POST"
MAX_ID_CHARS = 512
STREAMS_BY_DEFAULT = frozenset({"/api/chat", "/api/generate"})  # and a batch has no streams
BUSY = frozenset({429, 503})
PAUSES_S = (0.1, 0.5, 1.0, 5.0, 10.0)  # before a request that was rejected because of load is retried


class Line(Struct, frozen=True):
    """One request of the file; `fault`: why the line is no request."""

    number: int
    custom_id: str | None
    url: str = ""
    body: bytes = b""
    fault: str = ""


@dataclass(slots=True)
class Counts:
    """The progress of a batch."""

    done: int = 0
    failed: int = 0


def lines(file: Iterable[bytes]) -> Iterator[Line]:
    """The requests of a file; empty lines are none."""
    for number, text in enumerate(file, 1):
        if text.strip():
            yield read_line(number, text)


def read_line(number: int, text: bytes) -> Line:
    """One line that is not empty."""
    try:
        found = decode_object(text)
    except RequestError as error:
        return Line(number, None, fault=f"line {number}: {error}")
    name = found.get("custom_id")
    if not isinstance(name, str) or not 1 <= len(name) <= MAX_ID_CHARS:
        fault = f"line {number}: custom_id must be a string of 1 to {MAX_ID_CHARS} characters"
        return Line(number, None, fault=fault)
    if found.get("method", METHOD) != METHOD:
        return Line(number, name, fault=f"line {number}: method {found['method']!r:.40} is not {METHOD!r}")
    url, body = found.get("url"), found.get("body")
    if not isinstance(url, str) or not url.startswith("/"):
        return Line(number, name, fault=f"line {number}: url must be a path like /v1/chat/completions")
    if not isinstance(body, dict):
        return Line(number, name, fault=f"line {number}: body must be a JSON object")
    if _streams(body):
        return Line(number, name, fault=f"line {number}: stream: a batch has no streams; leave it out")
    if url in STREAMS_BY_DEFAULT:
        body = {**body, "stream": False}
    return Line(number, name, url, msgspec.json.encode(body))


def _streams(body: dict[str, object]) -> bool:
    try:
        return bool(rename_params(body).get("stream"))
    except RequestError:
        return False  # the endpoint says what is wrong with it


async def run(
    app: ASGIApp,
    requests: Iterable[Line],
    write: Callable[[bytes], object],
    *,
    at_once: int,
    on_done: Callable[[Counts], None],
    fault: Callable[[], BaseException | None] = lambda: None,
) -> Counts:
    """Answer every request, at most `at_once` at a time. `write` gets one line for each, as it is done.

    Raises what `write` raises, and what `fault` gives: why nothing can be answered any more. An error of one
    request is in its own line.
    """
    counts, source = Counts(), iter(requests)

    async def work() -> None:
        # Workers share the iterator: a file of any length is read as it is needed.
        for line in source:
            answer = await answer_line(app, line, fault, PAUSES_S)
            if fault() is not None:
                return
            failed = has_failed(answer)
            write(msgspec.json.encode(answer) + b"\n")
            counts.done, counts.failed = counts.done + 1, counts.failed + failed
            on_done(counts)

    if at_once < 1:
        raise ConfigError(f"at_once: {at_once} requests at a time are none; ask for at least 1")
    async with asyncio.TaskGroup() as group:
        for _ in range(at_once):
            group.create_task(work())
    if (lost := fault()) is not None:
        raise lost
    return counts


def has_failed(answer: Mapping[str, object]) -> bool:
    """Whether a line of output is an error."""
    response = answer["response"]
    return not (isinstance(response, dict) and response["status_code"] < 400)


async def answer_line(
    app: ASGIApp, line: Line, fault: Callable[[], BaseException | None], pauses_s: Iterable[float]
) -> dict[str, object]:
    """The line of output for one line of input. `pauses_s`: before it is tried again while there is load."""
    found: dict[str, object] = {"id": new_id("batch_req", "_"), "custom_id": line.custom_id}
    if line.fault:
        return {**found, "response": None, "error": {"code": "invalid_request", "message": line.fault}}
    status, headers, body = await post_json(app, line.url, line.body)
    for pause_s in pauses_s:
        if status not in BUSY or headers.get(b"x-should-retry") == b"false" or fault() is not None:
            break
        await asyncio.sleep(pause_s)
        status, headers, body = await post_json(app, line.url, line.body)
    answer: object = msgspec.Raw(body) if _is_json(headers) else body.decode(errors="replace")
    request_id = headers.get(b"x-request-id", b"").decode("latin-1")
    response = {"status_code": status, "request_id": request_id, "body": answer}
    if ignored := headers.get(IGNORED_HEADER.encode()):
        response["ignored_fields"] = ignored.decode("latin-1").split(",")
    if warning := headers.get(WARNING_HEADER.encode()):
        response["warning"] = warning.decode("latin-1")
    return {**found, "response": response, "error": None}


async def post_json(app: ASGIApp, path: str, body: bytes) -> tuple[int, dict[bytes, bytes], bytes]:
    """One POST of JSON to an application: (status, headers, body)."""
    arriving, sent = iter([{"type": "http.request", "body": body, "more_body": False}]), list[Message]()

    async def receive() -> Message:
        for message in arriving:
            return message
        await asyncio.Event().wait()  # the client never disconnects, and may be waited for again and again
        raise AssertionError("a client that never disconnects has done so")

    async def send(message: Message) -> None:
        sent.append(message)

    await app(_scope(path, len(body)), receive, send)
    whole = b"".join(m.get("body", b"") for m in sent if m["type"] == "http.response.body")
    start = next(m for m in sent if m["type"] == "http.response.start")
    return start["status"], dict(start["headers"]), whole


def _scope(path: str, length: int) -> dict[str, object]:
    """An ASGI scope as of a client on this machine. `state` is what servers give an application."""
    headers = [
        (b"host", b"127.0.0.1"),
        (b"content-type", b"application/json"),
        (b"content-length", str(length).encode()),
    ]
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": METHOD,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": headers,
        "client": ("127.0.0.1", 0),
        "server": ("127.0.0.1", 0),
        "state": {},
    }


def _is_json(headers: dict[bytes, bytes]) -> bool:
    return headers.get(b"content-type", b"").startswith(b"application/json")
