"""A server that is full: rejections are cheap, and what it writes goes out at once and in one part."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import logging
import re
import socket
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from plait.errors import QueueFull
from plait.request import SamplingParams
from plait.server.gateway.exchange import Exchange
from plait.server.gateway.request_context import Generation, RequestContext
from plait.server.http.connection import MOST_BYTES, Connection, TurnTransport
from tests.server.conftest import Client, serving, wait_until
from tests.server.fake import EchoLoop, fake_front
from tests.server.gateway.test_access_log import Kept, kept

__all__ = ["kept"]


class FullLoop(EchoLoop):
    is_full = True
    registry = CollectorRegistry()

    def check_capacity(self) -> None:
        if self.is_full:
            raise QueueFull("max_waiting (0) requests wait already; try again later")


@pytest.fixture
def loop() -> FullLoop:
    return FullLoop()


@pytest.fixture
def full(loop: FullLoop) -> Iterator[Client]:
    front = fake_front()
    front.loop = loop
    with serving(front, api_key=("alice:secret",), requests_per_minute=2) as client:
        client.headers["Authorization"] = "Bearer secret"
        yield client


@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/embeddings"]
)
def test_it_refuses_before_it_reads(full: Client, path: str) -> None:
    """The head alone is answered: the body never comes."""
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer secret\r\n"
    with socket.create_connection(full.address, timeout=20) as sock:
        sock.sendall(f"{head}Content-Type: application/json\r\nContent-Length: 1000\r\n\r\n".encode())
        answer = sock.recv(65536)
    assert answer.startswith(b"HTTP/1.1 429 ")
    assert b"retry-after: 1\r\n" in answer.lower()
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "queue_full"


def test_a_refusal_costs_a_key_nothing_and_others_know_the_key_first(full: Client, loop: FullLoop) -> None:
    assert [full.complete().status for _ in range(5)] == [429] * 5
    assert Client(full.base_url).complete().status == 401
    assert full.post("/tokenize", {"prompt": "a"}).status == 200
    loop.is_full = False
    assert full.complete().status == 200
    assert full.complete().error["code"] == "rate_limit_exceeded"


def test_a_refusal_in_anthropic_s_shape(full: Client) -> None:
    assert full.post("/v1/messages", {}).json["error"]["type"] == "rate_limit_error"


def test_a_crowd_is_one_line(full: Client, kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plait.server.gateway.middleware.CROWD_S", 0.05)
    for _ in range(5):
        full.complete()
    assert wait_until(lambda: any("were refused" in record.getMessage() for record in kept.records))
    assert not kept.fields(status=429)
    said = [r for r in kept.records if "were refused" in r.getMessage()]
    assert sum(int(str(r.getMessage()).split()[4]) for r in said) <= 5
    assert {r.levelno for r in said} == {logging.WARNING}


def test_small_answers_are_not_held_back_by_the_kernel(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With Nagle's algorithm a token would wait until the client has acknowledged the one before."""
    is_off, real = [], Connection.connection_made

    def connection_made(self: Connection, transport: Any) -> None:
        real(self, transport)
        sock = transport.get_extra_info("socket")
        is_off.append(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))

    monkeypatch.setattr(Connection, "connection_made", connection_made)
    assert client.get("/version").status == 200
    assert is_off
    assert all(is_off)


@pytest.mark.parametrize("chunked", [False, True])
def test_a_connection_lives_on_after_a_refusal_with_an_unread_body(full: Client, chunked: bool) -> None:
    connection = http.client.HTTPConnection(*full.address, timeout=20)
    with contextlib.closing(connection):
        for _ in range(3):
            body: Any = (piece for piece in [b"x" * 70_000, b"y" * 70_000]) if chunked else b"x" * 140_000
            headers = {**full.headers, "Content-Type": "application/json"}
            connection.request("POST", "/v1/completions", body, headers, encode_chunked=chunked)
            refused = connection.getresponse()
            assert (refused.status, json.loads(refused.read())["error"]["code"]) == (429, "queue_full")
            sock = connection.sock
            connection.request("GET", "/version")
            assert connection.getresponse().read().startswith(b"{")
            assert connection.sock is sock


HEAD = b"POST /v1/completions HTTP/1.%d\r\nHost: %s\r\n%sContent-Length: 2\r\n%s\r\n{}"
KEY = b"Authorization: Bearer secret\r\n"


def everything(address: tuple[str, int], sent: bytes) -> bytes:
    """What a server says until it closes the connection."""
    with socket.create_connection(address, timeout=20) as sock:
        sock.sendall(sent)
        return b"".join(iter(lambda: sock.recv(65536), b""))


def without_times(answer: bytes) -> list[bytes]:
    """Lines of an answer, sorted. uvicorn before 0.54 also says that it closes, as was requested."""
    old = tuple(map(int, version("uvicorn").split(".")[:2])) < (0, 54)
    changing = (b"date:", b"x-request-id: req", *((b"connection: close",) if old else ()))
    return sorted(line for line in answer.split(b"\r\n") if not line.startswith(changing))


@pytest.mark.parametrize("version", [0, 1])
@pytest.mark.parametrize(
    ("host", "key", "status"), [(b"localhost", KEY, 429), (b"localhost", b"", 401), (b"evil", KEY, 403)]
)
def test_the_short_way_and_the_usual_one_give_the_same_answer(
    full: Client, monkeypatch: pytest.MonkeyPatch, version: int, host: bytes, key: bytes, status: int
) -> None:
    tasks, real = [], HttpToolsProtocol._start_asgi_task

    def started(self: Any, cycle: Any, app: Any) -> None:
        tasks.append(cycle)
        real(self, cycle, app)

    monkeypatch.setattr(HttpToolsProtocol, "_start_asgi_task", started)
    sent = HEAD % (version, host, key, b"Connection: close\r\n")
    short = everything(full.address, sent)
    assert not tasks
    monkeypatch.setattr(Connection, "_start_asgi_task", started)
    usual = everything(full.address, sent)
    assert len(tasks) == 1
    assert short.startswith(b"HTTP/1.1 %d " % status)
    assert without_times(short) == without_times(usual)


def test_refusals_and_answers_come_in_the_order_of_their_requests(full: Client) -> None:
    refused, other = HEAD % (1, b"localhost", KEY, b""), b"GET /version HTTP/1.1\r\nHost: localhost\r\n"
    sent = refused * 3 + other + KEY + b"\r\n" + refused + other + KEY + b"Connection: close\r\n\r\n"
    answers = re.findall(rb"HTTP/1.1 (\d+) ", everything(full.address, sent))
    assert answers == [b"429"] * 3 + [b"200", b"429", b"200"]


def test_the_id_that_a_client_gave_comes_with_a_refusal(full: Client) -> None:
    sent = HEAD % (1, b"localhost", KEY, b"X-Request-Id: mine-1\r\nConnection: close\r\n")
    assert b"\r\nx-request-id: mine-1\r\n" in everything(full.address, sent)


def test_refusals_are_counted(full: Client) -> None:
    for _ in range(3):
        full.complete()
    text = full.get("/metrics").body.decode()
    assert 'plait_http_requests_total{method="POST",route="/v1/completions",status="429"} 3.0' in text
    assert "plait_http_requests_open 1.0" in text  # the one for these numbers


class Wire:
    """Stands for a transport."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.end = ""

    def is_closing(self) -> bool:
        return False

    def write(self, piece: bytes) -> None:
        self.written.append(piece)

    def can_write_eof(self) -> bool:
        return False

    def close(self) -> None:
        self.end = "closed"

    def abort(self) -> None:
        self.end = "aborted"


async def write(transport: Any, *pieces: bytes) -> None:
    for piece in pieces:
        transport.write(piece)


def test_what_a_turn_writes_is_one_piece() -> None:
    async def turns() -> list[bytes]:
        wire: Any = Wire()
        transport = TurnTransport(wire, asyncio.get_running_loop())
        await write(transport, b"a", b"", b"b")
        assert wire.written == []
        await asyncio.sleep(0)
        await write(transport, b"x" * MOST_BYTES, b"c")
        assert len(wire.written) == 2
        transport.close()
        await asyncio.sleep(0)
        assert wire.end == "closed"
        return [*wire.written]

    assert asyncio.run(turns()) == [b"ab", b"x" * MOST_BYTES, b"c"]


def test_what_is_cut_off_is_not_written() -> None:
    async def turns() -> None:
        wire: Any = Wire()
        transport = TurnTransport(wire, asyncio.get_running_loop())
        await write(transport, b"a")
        transport.abort()
        await asyncio.sleep(0)
        assert (wire.written, wire.end) == ([], "aborted")

    asyncio.run(turns())


def test_patience_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plait.server.gateway.request_context.PATIENCE_S", 0.02)
    monkeypatch.setattr("plait.server.gateway.request_context.RETRY_S", 0.005)
    front = fake_front()
    request = front.prepare("FULL", SamplingParams(max_tokens=1))

    async def ask() -> None:
        context = RequestContext(front, front.name, Exchange("r", "POST", "/v1/embeddings"))
        await Generation.start(context, [request], None, waits=True)

    with pytest.raises(QueueFull):
        asyncio.run(ask())
