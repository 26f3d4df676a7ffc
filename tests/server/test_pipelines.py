"""HTTP pipelining: answers to requests sent ahead come in order and whole, and end with their client."""

from __future__ import annotations

import json
import re
import socket
import struct
import time

import pytest

from plait.config import ServerConfig
from plait.server.http import connection, transfer
from plait.server.http.connection import TurnTransport
from tests.server.conftest import Client, serving, start, wait_until
from tests.server.fake import EchoLoop, fake_front

GET = b"GET /v1/models/%s HTTP/1.1\r\nHost: localhost\r\n%s\r\n"
OFFER = b"Connection: Upgrade\r\nUpgrade: h2c\r\n"


def stream_that_hangs(client: Client) -> socket.socket:
    """A connection with an answer that has begun, and goes on with comments until it is cancelled."""
    raw = json.dumps({"prompt": "HANG", "stream": True}).encode()
    sock = socket.create_connection(client.address, timeout=20)
    sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n")
    sock.sendall(b"Content-Length: %d\r\n\r\n" % len(raw) + raw)
    seen = b""
    while b": ping" not in seen:
        seen += sock.recv(4096)
    return sock


def everything(sock: socket.socket) -> bytes:
    return b"".join(iter(lambda: sock.recv(65536), b""))


@pytest.mark.parametrize("pieces", [1, 2, 61, 1000])
def test_offers_of_another_protocol_can_follow_each_other(client: Client, pieces: int) -> None:
    asked = [
        (b"fake", OFFER),
        (b"a", OFFER),
        (b"fake", b""),
        (b"b", OFFER),
        (b"fake", b"Connection: close\r\n"),
    ]
    sent = b"".join(GET % one for one in asked)
    with socket.create_connection(client.address, timeout=20) as sock:
        for i in range(pieces):
            sock.sendall(sent[len(sent) * i // pieces : len(sent) * (i + 1) // pieces])
            time.sleep(0.2 / pieces)
        found = everything(sock)
    assert re.findall(rb"HTTP/1.1 (\d+) ", found) == [b"200", b"404", b"200", b"404", b"200"]


def test_too_many_offers_end_the_connection_like_any_requests(client: Client) -> None:
    with socket.create_connection(client.address, timeout=20) as sock:
        sock.sendall(GET % (b"fake", OFFER) * (connection.MAX_PIPELINED + 2))
        assert b"sent ahead of their answers" in everything(sock)


@pytest.mark.parametrize("target", [b"/", b"http://localhost/", b"localhost:80"])
def test_connect_is_refused_whatever_it_names(client: Client, target: bytes) -> None:
    with socket.create_connection(client.address, timeout=20) as sock:
        sock.sendall(b"CONNECT %s HTTP/1.1\r\nHost: localhost\r\n\r\n" % target)
        assert everything(sock).startswith(b"HTTP/1.1 400 ")


def test_who_leaves_cancels_the_request_that_runs_and_not_only_the_last_that_was_sent(
    client: Client, engine: EchoLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "PING_S", 0.02)
    sock = stream_that_hangs(client)
    sock.sendall(GET % (b"fake", b""))
    time.sleep(0.05)
    assert engine.stats()["running"] == 1
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()
    assert wait_until(lambda: engine.stats()["running"] == 0)


@pytest.mark.parametrize("ahead", [1, 5])
def test_who_leaves_while_others_wait_is_noticed_though_nothing_is_written(
    client: Client, engine: EchoLoop, ahead: int
) -> None:
    raw = b'{"prompt": "HANG"}'
    with socket.create_connection(client.address, timeout=20) as sock:
        sock.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        )
        sock.sendall(b"Content-Length: %d\r\n\r\n" % len(raw) + raw)
        assert wait_until(lambda: engine.stats()["running"] == 1)
        sock.sendall(GET % (b"fake", b"") * ahead)
        time.sleep(0.05)
    try:
        assert wait_until(lambda: engine.stats()["running"] == 0)
    finally:
        for request in engine.requests:
            engine.cancel(request.id)


def test_nothing_is_written_into_an_answer_that_has_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "PING_S", 0.02)
    front = fake_front()
    running = start(lambda report: front, ServerConfig(port=0))
    client = Client(running.url, front.name)
    try:
        assert wait_until(lambda: client.get("/health").status == 200)
        with stream_that_hangs(client) as sock:
            sock.sendall(b"this is no request\r\n\r\n")
            assert b"HTTP/1.1" not in everything(sock)
        assert wait_until(lambda: front.loop.stats()["running"] == 0)
        assert wait_until(lambda: not running.server.server_state.connections)
    finally:
        running.stop()


def test_who_is_refused_and_reads_nothing_does_not_hold_its_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connection, "LINGER_S", 0.05)
    monkeypatch.setattr(connection, "FLUSH_S", 0.05)
    aborted = list[TurnTransport]()
    with serving(fake_front()) as client:
        monkeypatch.setattr(TurnTransport, "close", lambda self: None)  # as if it were waiting
        abort = TurnTransport.abort

        def counted(self: TurnTransport) -> None:
            aborted.append(self)
            abort(self)

        monkeypatch.setattr(TurnTransport, "abort", counted)
        with socket.create_connection(client.address, timeout=20) as sock:
            sock.sendall(b"this is no request\r\n\r\n")
            assert wait_until(lambda: bool(aborted))
        monkeypatch.undo()
