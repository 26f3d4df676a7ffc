"""Every bound of a connection, a head, a body and a request, on both sides of its edge, over real sockets."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import struct
import time
from collections.abc import Iterator
from typing import Any

import pytest
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from plait.server.api.validate import MAX_LOGIT_BIAS, MAX_MESSAGES, MAX_STOP_TOKEN_IDS, MAX_STOPS
from plait.server.gateway import request_context
from plait.server.http import connection, transfer
from plait.server.http.connection import READ_BYTES
from plait.server.openai.completions import MAX_CHOICES
from tests.server.conftest import Client, serving, wait_until
from tests.server.fake import EchoLoop, fake_front

POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


def answer(sock: socket.socket) -> bytes:
    """Everything until the server closes the connection."""
    return b"".join(iter(lambda: sock.recv(65536), b""))


@contextlib.contextmanager
def connected(client: Client) -> Iterator[socket.socket]:
    with socket.create_connection(client.address, timeout=20) as sock:
        yield sock


def head(size: int) -> bytes:
    """A request with a head of `size` bytes."""
    start = b"GET /version HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nX: "
    return start + b"x" * (size - len(start) - 4) + b"\r\n\r\n"


@pytest.mark.parametrize("pieces", [1, 2])
@pytest.mark.parametrize(("more", "status"), [(0, b"200"), (1, b"431")])
def test_a_head_has_so_many_bytes(client: Client, more: int, status: bytes, pieces: int) -> None:
    sent = head(transfer.MAX_HEAD_BYTES + more)
    with connected(client) as sock:
        sock.sendall(sent[: len(sent) // pieces])
        if pieces == 2:
            time.sleep(0.02)
            sock.sendall(sent[len(sent) // 2 :])
        assert answer(sock).split()[1] == status


def test_a_target_counts_like_headers(client: Client) -> None:
    with connected(client) as sock:
        sock.sendall(
            b"GET /version?" + b"x" * transfer.MAX_HEAD_BYTES + b" HTTP/1.1\r\nHost: localhost\r\n\r\n"
        )
        assert answer(sock).startswith(b"HTTP/1.1 431 ")


@pytest.mark.parametrize(("more", "status"), [(0, b"200"), (1, b"431")])
def test_a_head_has_so_many_headers(client: Client, more: int, status: bytes) -> None:
    lines = b"".join(b"X%d: 1\r\n" % i for i in range(transfer.MAX_HEADERS - 2 + more))
    with connected(client) as sock:
        sock.sendall(b"GET /version HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n" + lines + b"\r\n")
        found = answer(sock)
    assert found.split()[1] == status
    assert b"x-request-id: " in found


def test_a_megabyte_of_headers_is_refused_and_ends_the_connection(client: Client) -> None:
    with connected(client) as sock:
        sock.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * (1 << 20))
        found = answer(sock)
    assert found.startswith(b"HTTP/1.1 431 ")
    assert b'"code":"headers_too_large"' in found
    assert client.get("/health").status == 200


def test_who_was_refused_is_not_read_for_ever(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "LINGER_S", 0.1)
    with connected(client) as sock:
        sent = sock.send(b"no HTTP at all\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            for _ in range(500):
                sent += sock.send(b"x" * 1024)
                time.sleep(0.01)
    assert sent < 400 * 1024


@pytest.mark.parametrize("sent", [b"a:\r\n" * 200_000, b"x" * 800_000])
def test_a_head_that_is_too_long_is_not_parsed(
    client: Client, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    parsed: list[int] = []
    real = HttpToolsProtocol.data_received
    monkeypatch.setattr(
        HttpToolsProtocol,
        "data_received",
        lambda self, piece: (parsed.append(len(piece)), real(self, piece))[1],
    )
    with connected(client) as sock:
        with contextlib.suppress(OSError):
            sock.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n" + sent + b"\r\n")
        with contextlib.suppress(ConnectionResetError):
            assert not answer(sock).startswith(b"HTTP/1.1 200")
    assert sum(parsed) <= transfer.MAX_HEAD_BYTES + READ_BYTES


CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n"


def test_a_trailer_is_bounded(client: Client) -> None:
    with connected(client) as sock:
        with contextlib.suppress(OSError):
            sock.sendall(CHUNKED + b"X: ")
            for _ in range(64):
                sock.sendall(b"x" * 1024)
                time.sleep(0.001)
        found = answer(sock)
    assert found.startswith(b"HTTP/1.1 400 ")
    assert b"what follows the body is too long" in found


def test_a_trailer_is_not_a_header(client: Client) -> None:
    body = b'{"prompt": "Hi", "max_tokens": 1}'
    sent = POST + b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n" % (len(body), body)
    with connected(client) as sock:
        sock.sendall(sent + b"0\r\nX-Request-Id: from-the-trailer\r\n\r\n")
        found = answer(sock)
    assert found.startswith(b"HTTP/1.1 200 ")
    assert b"from-the-trailer" not in found


def test_too_many_requests_sent_ahead_end_the_connection(client: Client) -> None:
    with connected(client) as sock:
        sock.sendall(b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n" * (connection.MAX_PIPELINED + 2))
        found = answer(sock)
    assert b"HTTP/1.1 400 " in found
    assert b"sent ahead of their answers" in found


@pytest.mark.parametrize("pieces", [1, 3])
def test_an_offer_of_another_protocol_is_passed_over(client: Client, pieces: int) -> None:
    body = b'{"prompt": "Hi", "max_tokens": 1}'
    offer = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"
    sent = POST + offer + b"Content-Length: %d\r\n\r\n" % len(body) + body
    sent += b"GET /version HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    with connected(client) as sock:
        for i in range(pieces):
            sock.sendall(sent[len(sent) * i // pieces : len(sent) * (i + 1) // pieces])
            time.sleep(0.02)
        assert re.findall(rb"HTTP/1.1 (\d+) ", answer(sock)) == [b"200", b"200"]


def test_connect_is_no_method_here(client: Client) -> None:
    with connected(client) as sock:
        sock.sendall(b"CONNECT example.org:443 HTTP/1.1\r\nHost: example.org\r\n\r\n")
        assert answer(sock).startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 64,  # a client that speaks TLS
        b"GET / HTTP/9.9\r\nHost: localhost\r\n\r\n",
        b"GET /version HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
        b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\nContent-Length: 1\r\n\r\n0\r\n\r\n",
    ],
)
def test_what_is_not_http_is_said_to_be_that(client: Client, sent: bytes) -> None:
    with connected(client) as sock:
        sock.sendall(sent)
        found = answer(sock)
    assert found.startswith(b"HTTP/1.1 400 ")
    assert json.loads(found.partition(b"\r\n\r\n")[2])["error"]["message"].startswith(
        "this is not HTTP/1.1: "
    )


def test_a_body_in_tiny_chunks_is_parsed_a_little_at_a_time(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    real = connection.Connection.data_received
    monkeypatch.setattr(
        connection.Connection,
        "data_received",
        lambda self, data: (sizes.append(len(data)), real(self, data))[1],
    )
    sent = b'{"prompt": "Hi", "max_tokens": 1, "user": "' + b"x" * 40_000 + b'"}'
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in sent) + b"0\r\n\r\n"
    with connected(client) as sock:
        sock.sendall(POST + b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks)
        assert answer(sock).startswith(b"HTTP/1.1 200 ")
    assert max(sizes) <= READ_BYTES


def test_a_body_that_drips_is_408(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "BODY_TIMEOUT_S", 0.15)
    monkeypatch.setattr(transfer, "MIN_BODY_RATE", 1_000_000)
    with connected(client) as sock:
        sock.sendall(POST + b"Content-Length: 9999\r\n\r\n{")
        with contextlib.suppress(OSError):
            for _ in range(60):
                sock.sendall(b" ")
                time.sleep(0.01)
        assert answer(sock).startswith(b"HTTP/1.1 408 ")


def test_a_body_that_comes_fast_enough_is_taken(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "BODY_TIMEOUT_S", 1.5)
    monkeypatch.setattr(transfer, "MIN_BODY_RATE", 1)
    sent = json.dumps({"prompt": "Hi", "max_tokens": 1}).encode()
    with connected(client) as sock:
        sock.sendall(POST + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(sent))
        for i in range(0, len(sent), 4):  # together longer than the timeout, each piece in time
            sock.sendall(sent[i : i + 4])
            time.sleep(0.2)
        assert answer(sock).startswith(b"HTTP/1.1 200 ")


def test_idle_and_dripping_connections_delay_no_one_and_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HEAD_TIMEOUT_S", 1.0)
    with serving(fake_front()) as client, contextlib.ExitStack() as stack:
        socks = [stack.enter_context(connected(client)) for _ in range(250)]
        for i, sock in enumerate(socks):
            sock.sendall(b"P" if i % 2 else b"")
        assert client.complete("Hi", max_tokens=2).status == 200
        for sock in socks[1::2]:
            with contextlib.suppress(OSError):
                sock.sendall(b"O")
        for sock in socks:
            with contextlib.suppress(ConnectionResetError):
                assert answer(sock) == b""


def unread(client: Client, asked: dict[str, Any]) -> socket.socket:
    """A request with an answer that its client does not read."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
    sock.connect(client.address)
    raw = json.dumps(asked).encode()
    sock.sendall(POST + b"Content-Length: %d\r\n\r\n" % len(raw) + raw)
    return sock


LARGE = {"prompt": "x", "max_tokens": 1500, "ignore_eos": True, "logprobs": 20}  # more than half a megabyte


@pytest.fixture
def lost(monkeypatch: pytest.MonkeyPatch) -> list[connection.Connection]:
    """Connections of large requests that have ended; the kernel keeps little for those who do not read."""
    found: list[connection.Connection] = []
    made, ended = connection.Connection.connection_made, connection.Connection.connection_lost

    def connection_made(self: connection.Connection, wire: Any) -> None:
        wire.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        made(self, wire)

    def connection_lost(self: connection.Connection, exc: Exception | None) -> None:
        if self.cycle and b"content-length" in dict(self.headers):
            found.append(self)
        ended(self, exc)

    monkeypatch.setattr(connection.Connection, "connection_made", connection_made)
    monkeypatch.setattr(connection.Connection, "connection_lost", connection_lost)
    return found


def test_a_stream_that_no_client_reads_waits_in_a_bounded_buffer_and_is_cut(
    lost: list[connection.Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "READ_TIMEOUT_S", 0.3)
    sizes: list[int] = []
    pause = connection.Connection.pause_writing

    def pause_writing(self: connection.Connection) -> None:
        sizes.append(self.transport.get_write_buffer_size())
        pause(self)

    monkeypatch.setattr(connection.Connection, "pause_writing", pause_writing)
    front = fake_front()
    with serving(front) as client, unread(client, {**LARGE, "stream": True}):
        assert wait_until(lambda: len(sizes) > 0)
        assert client.get("/v1/models").status == 200
        assert wait_until(lambda: len(lost) == 1)
        assert wait_until(lambda: front.stats()["running"] == 0)
        assert client.complete("Hi", max_tokens=2).status == 200
    assert max(sizes) < connection.WRITE_BUFFER_BYTES + 16 * 1024
    assert transfer.SEND_TIMEOUT_S >= 10  # it was the connection that gave up


def test_an_answer_that_no_client_reads_is_cut(
    lost: list[connection.Connection], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(connection, "READ_TIMEOUT_S", 0.2)
    with serving(fake_front()) as client, unread(client, LARGE):
        assert wait_until(lambda: len(lost) == 1)
    assert re.search(r"req\S+: the client read nothing for 0.2 s", caplog.text)


def test_an_answer_that_is_read_slowly_but_read_is_not_cut(
    lost: list[connection.Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[Any] = []
    pause = connection.Connection.pause_writing

    def pause_writing(self: connection.Connection) -> None:
        pause(self)
        waits.append(self._unread)

    monkeypatch.setattr(connection.Connection, "pause_writing", pause_writing)
    asked = {**LARGE, "max_tokens": 400, "stream": True}
    with serving(fake_front()) as client, unread(client, asked) as sock:
        seen = b""
        while not seen.endswith(b"0\r\n\r\n") and (piece := sock.recv(20_000)):
            seen += piece
    assert b"data: [DONE]" in seen
    assert len(waits) > 1
    assert all(wait.cancelled() for wait in waits)  # each time as soon as the client had read on


def test_the_end_of_an_answer_that_no_client_reads_does_not_hold_its_connection(
    lost: list[connection.Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "HEAD_TIMEOUT_S", 0.2)
    monkeypatch.setattr(connection, "FLUSH_S", 0.1)
    with serving(fake_front()) as client, unread(client, LARGE):
        assert wait_until(lambda: len(lost) == 1)


def test_a_client_that_resets_its_connection_disturbs_no_one(client: Client, engine: EchoLoop) -> None:
    for _ in range(20):
        sock = unread(client, {"prompt": "SLOW " * 50, "max_tokens": 500, "stream": True})
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        sock.close()
    assert wait_until(lambda: engine.stats()["running"] == 0)
    assert client.complete("Hi", max_tokens=2).status == 200


@pytest.mark.parametrize(
    ("field", "most", "value"),
    [
        ("stop", MAX_STOPS, lambda n: ["zz"] * n),
        ("logit_bias", MAX_LOGIT_BIAS, lambda n: {f"{i % 256:04d}{i // 256}": 0 for i in range(n)}),
        ("stop_token_ids", MAX_STOP_TOKEN_IDS, lambda n: [1] * n),
        ("prompt", MAX_CHOICES, lambda n: ["x"] * n),
    ],
)
def test_lists_are_bounded_in_number(client: Client, field: str, most: int, value: Any) -> None:
    asked = {"prompt": "Hi", "max_tokens": 1}
    assert client.post("/v1/completions", {**asked, field: value(most + 1)}).error["param"] == field
    if field != "logit_bias":
        assert client.post("/v1/completions", {**asked, field: value(most)}).status == 200


def test_messages_are_bounded_in_number(client: Client) -> None:
    message = {"role": "user", "content": ""}
    asked = {"messages": [message] * MAX_MESSAGES, "max_tokens": 1}
    assert client.post("/v1/chat/completions", asked).error["code"] == "context_length_exceeded"
    asked["messages"] = [message] * (MAX_MESSAGES + 1)
    refused = client.post("/v1/chat/completions", asked)
    assert (refused.status, refused.error["param"]) == (400, "messages")


def test_all_choices_together_are_bounded_in_tokens(
    client: Client, engine: EchoLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_context, "MAX_OUTPUT_TOKENS", 24)
    known = len(engine.requests)
    assert client.complete(["a", "b"], n=3, max_tokens=4).status == 200
    assert len(engine.requests) == known + 2
    refused = client.complete(["a", "b"], n=3, max_tokens=5)
    assert (refused.status, refused.error["param"]) == (400, "max_tokens")
    assert "30 tokens" in refused.error["message"]
    assert client.chat("Hi", max_tokens=25).error["param"] == "max_tokens"
    assert len(engine.requests) == known + 2


def test_a_prefix_of_a_proxy_is_taken_off() -> None:
    with serving(fake_front(), root_path="/llm") as client:
        for path in ("/llm/v1/models", "/llm//v1/models/", "/v1/models", "/llm/v1/models/fake"):
            assert client.get(path).status == 200, path
        assert client.get("/llm").headers["content-type"].startswith("text/html")
        assert client.get("/llmv1/models").status == 404
        assert client.get("/llm/llm/v1/models").status == 404


def test_pipelined_requests_are_answered_in_their_order(client: Client) -> None:
    get = b"GET /v1/models/%s HTTP/1.1\r\nHost: localhost\r\n%s\r\n"
    with connected(client) as sock:
        sock.sendall(get % (b"fake", b"") + get % (b"other", b"") + get % (b"fake", b"Connection: close\r\n"))
        found = answer(sock)
    assert [part.split()[0] for part in found.split(b"HTTP/1.1 ")[1:]] == [b"200", b"404", b"200"]


def test_http_1_0_gets_whole_answers_and_streams(client: Client) -> None:
    for stream in (b"false", b"true"):
        raw = b'{"prompt": "Hi", "max_tokens": 2, "stream": ' + stream + b"}"
        with connected(client) as sock:
            sock.sendall(
                POST.replace(b"HTTP/1.1", b"HTTP/1.0") + b"Content-Length: %d\r\n\r\n" % len(raw) + raw
            )
            found = answer(sock)
        assert found.split()[1] == b"200"
        assert (b"data: [DONE]" in found) == (stream == b"true")


def test_a_client_that_waits_for_100_gets_it(client: Client) -> None:
    raw = b'{"prompt": "Hi", "max_tokens": 2}'
    with connected(client) as sock:
        sock.sendall(
            POST + b"Connection: close\r\nExpect: 100-continue\r\nContent-Length: %d\r\n\r\n" % len(raw)
        )
        assert sock.recv(1000).startswith(b"HTTP/1.1 100 ")
        sock.sendall(raw)
        assert answer(sock).startswith(b"HTTP/1.1 200 ")
