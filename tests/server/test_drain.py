"""Draining a server: running requests finish, new ones are rejected, and the server reports it."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from plait.cli.main import explain
from plait.config import ServerConfig
from plait.errors import EngineLost
from plait.frontend.frontend import Front
from tests.patience import PATIENCE_S
from tests.server.conftest import Client, Running, start, wait_until
from tests.server.fake import EchoLoop, fake_front

LONG = 1500  # tokens of a reply that outlasts every test unless it is hurried


@pytest.fixture
def running() -> Iterator[tuple[Running, Client, Front]]:
    front = fake_front()
    server = start(lambda report: front, ServerConfig(port=0))
    client = Client(server.url)
    assert wait_until(lambda: client.get("/ready").status == 200)
    yield server, client, front
    server.stop()


def stream(client: Client, text: str, max_tokens: int) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection(*client.address, timeout=30)
    asked = {"prompt": text, "stream": True, "ignore_eos": True, "max_tokens": max_tokens}
    connection.request("POST", "/v1/completions", json.dumps(asked), {"Content-Type": "application/json"})
    return connection.getresponse()


def hurry(front: Front) -> None:
    """End a slow reply."""
    assert isinstance(front.loop, EchoLoop)
    front.loop.hurry.set()


def is_stopping(running: Running) -> bool:
    return running.server.models.stopping


def test_while_streams_finish_new_requests_are_sent_elsewhere(
    running: tuple[Running, Client, Front],
) -> None:
    server, client, front = running
    response = stream(client, "SLOW", LONG)
    server.server.should_exit = True
    assert wait_until(lambda: client.get("/ready").status == 503)
    assert client.get("/ready").json == {"status": "stopping"}
    assert client.get("/health").json == {"status": "stopping"}
    assert client.get("/metrics").status != 404
    refused = client.complete("Hi")
    assert (refused.status, refused.error["code"]) == (503, "not_ready")
    assert refused.headers["retry-after"] == "1"
    assert refused.headers["connection"] == "close"
    hurry(front)
    events = response.read().decode()
    assert events.endswith("data: [DONE]\n\n")
    assert '"finish_reason":"length"' in events
    server.thread.join(PATIENCE_S)
    assert not server.thread.is_alive()


def test_a_flood_of_refused_requests_does_not_hold_the_end(running: tuple[Running, Client, Front]) -> None:
    server, client, _ = running
    response = stream(client, "SLOW", 20)
    over = threading.Event()

    def flood() -> None:
        while not over.is_set():
            try:
                client.complete("Hi")
            except OSError:
                return

    threads = [threading.Thread(target=flood) for _ in range(4)]
    server.server.should_exit = True
    for thread in threads:
        thread.start()
    try:
        assert response.read().endswith(b"data: [DONE]\n\n")
        server.thread.join(PATIENCE_S)
        assert not server.thread.is_alive()
    finally:
        over.set()
        for thread in threads:
            thread.join()


def ask(sock: socket.socket, more: bytes = b"") -> bytes:
    """Send a request; everything until the server closes."""
    sock.sendall(b"GET /ready HTTP/1.1\r\nHost: localhost\r\n" + more + b"\r\n")
    return b"".join(iter(lambda: sock.recv(65536), b""))


def test_who_has_connected_before_the_end_and_asks_in_it_is_answered(
    running: tuple[Running, Client, Front],
) -> None:
    server, client, _ = running
    with contextlib.ExitStack() as stack:
        fresh, used = (
            stack.enter_context(socket.create_connection(client.address, timeout=20)) for _ in range(2)
        )
        used.sendall(b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert used.recv(4096).startswith(b"HTTP/1.1 200 ")
        server.server.should_exit = True
        assert wait_until(lambda: is_stopping(server))
        for sock in (fresh, used):
            found = ask(sock)
            assert found.startswith(b"HTTP/1.1 503 ")
            assert b"connection: close" in found.lower()
    server.thread.join(PATIENCE_S)
    assert not server.thread.is_alive()


def test_a_head_that_is_not_whole_when_the_server_stops_is_answered(
    running: tuple[Running, Client, Front],
) -> None:
    server, client, _ = running
    with socket.create_connection(client.address, timeout=20) as sock:
        sock.sendall(b"GET /ready HTTP/1.1\r\nHo")
        assert client.get("/ready").status == 200  # so that the head has been read
        server.server.should_exit = True
        assert b"".join(iter(lambda: sock.recv(65536), b"")).startswith(b"HTTP/1.1 503 ")


def test_a_body_that_comes_after_its_refusal_does_not_reset_the_connection(
    running: tuple[Running, Client, Front],
) -> None:
    server, client, front = running
    response = stream(client, "SLOW", LONG)
    server.server.should_exit = True
    assert wait_until(lambda: is_stopping(server))
    with socket.create_connection(client.address, timeout=20) as sock:
        sock.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Content-Length: 20000\r\n\r\n"
        )
        assert sock.recv(65536).startswith(b"HTTP/1.1 503 ")
        for _ in range(4):  # the second write after a reset fails
            sock.sendall(b"x" * 5000)
            time.sleep(0.01)
        assert sock.recv(65536) == b""
    hurry(front)
    assert response.read().endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("busy", [False, True])
def test_of_those_who_connect_while_the_server_stops_none_is_reset(
    running: tuple[Running, Client, Front], busy: bool
) -> None:
    """A client is answered, or its connection is refused. `busy`: the event loop was kept from accepting."""
    server, client, _ = running
    answers: list[bytes] = []
    over = threading.Event()

    def probe() -> None:
        while not over.is_set():
            try:
                sock = socket.create_connection(client.address, timeout=20)
            except ConnectionRefusedError:
                return
            with sock:
                try:
                    answers.append(ask(sock, b"Connection: close\r\n"))
                except ConnectionError as error:
                    answers.append(repr(error).encode())

    threads = [threading.Thread(target=probe) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        assert wait_until(lambda: len(answers) > 8)
        server.server.should_exit = True
        if busy:
            server.server.servers[0].get_loop().call_soon_threadsafe(time.sleep, 0.3)
        server.thread.join(PATIENCE_S)
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert not [answer for answer in answers if not answer.startswith(b"HTTP/1.1 ")]


def test_live_is_neither_health_nor_ready() -> None:
    may_go_on = threading.Event()
    front = fake_front()
    loop: Any = front.loop

    def load(report: Any) -> Front:
        report("reading weights", 1, 2)
        assert may_go_on.wait(PATIENCE_S)
        return front

    server = start(load, ServerConfig(port=0, loading_timeout_s=0.3, api_key=("secret",)))
    client = Client(server.url)

    def live() -> tuple[int, str]:
        answer = client.get("/live")
        return answer.status, answer.json["status"]

    try:
        assert wait_until(lambda: live() == (503, "hangs"))
        may_go_on.set()
        assert wait_until(lambda: live() == (200, "up"))
        loop.healthy, loop.loading = False, ("starting another engine", 0, 1)
        assert (client.get("/health").status, client.get("/ready").status) == (503, 503)
        assert live() == (200, "restarting")
        loop.live = False
        assert live() == (503, "lost")
    finally:
        may_go_on.set()
        server.stop()


def test_an_engine_that_is_given_up_ends_the_server_with_a_code_of_its_own() -> None:
    front = fake_front()
    running = start(lambda report: front, ServerConfig(port=0))
    assert wait_until(lambda: Client(running.url).get("/ready").status == 200)
    loop: Any = front.loop
    loop.healthy, loop.fault = False, EngineLost("the engine's process has ended 6 times")
    running.thread.join(PATIENCE_S)
    assert [error.exit_code for error in running.raised if isinstance(error, EngineLost)] == [5]
    assert explain(running.raised[0]) == ("the engine's process has ended 6 times", 5)


def test_ready_is_not_health() -> None:
    may_go_on = threading.Event()
    front = fake_front()

    def load(report: object) -> Front:
        assert may_go_on.wait(PATIENCE_S)
        return front

    server = start(load, ServerConfig(port=0))
    client = Client(server.url)
    try:
        assert (client.get("/ready").status, client.get("/ready").json) == (503, {"status": "loading"})
        may_go_on.set()
        assert wait_until(lambda: client.get("/ready").status == 200)
        front.loop.healthy = False
        assert client.get("/ready").json == {"status": "unhealthy"}
    finally:
        may_go_on.set()
        server.stop()
