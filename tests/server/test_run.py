"""The life of a server: it answers while the model loads, drains at a signal to stop, exits with 0."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from plait.config import ServerConfig
from plait.errors import BadFile, ConfigError
from plait.server.run import listen
from tests.patience import PATIENCE_S
from tests.server.conftest import Client, start, wait_until
from tests.server.fake import fake_front

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import sys
from plait.config import ServerConfig
from plait.server.run import serve_front
from tests.server.fake import fake_front

serve_front(lambda report: fake_front(), ServerConfig(port=0, shutdown_timeout_s=float(sys.argv[1])),
            lambda server: print(server.url, flush=True))
print("ended", flush=True)
"""


def test_health_says_how_far_loading_is() -> None:
    may_go_on = threading.Event()

    def load(report: Any) -> Any:
        report("reading weights", 3, 8)
        assert may_go_on.wait(PATIENCE_S)
        return fake_front()

    running = start(load, ServerConfig(port=0, served_model_name="alias"))
    client = Client(running.url)
    try:
        assert wait_until(lambda: client.get("/health").json.get("progress", {}).get("done") == 3)
        answer = client.get("/health")
        assert answer.status == 503
        assert answer.json == {
            "status": "loading",
            "progress": {"text": "reading weights", "done": 3, "total": 8},
        }
        refused = client.complete("Hi")
        assert (refused.status, refused.error["code"]) == (503, "not_ready")
        assert refused.headers["retry-after"] == "1"
        assert client.get("/v1/models").status == 503
        assert client.get("/version").status == 200
        may_go_on.set()
        assert wait_until(lambda: client.get("/health").status == 200)
        assert client.get("/health").json["engine"] == {"running": 0, "waiting": 0}
        assert client.get("/health").json["status"] == "ok"
        assert client.get("/v1/models").json["data"][0]["id"] == "alias"
        assert client.complete("Hi", model="alias", max_tokens=2).json["model"] == "alias"
        assert client.complete("Hi", model="fake").status == 404
    finally:
        may_go_on.set()
        running.stop()
    assert running.raised == []


def test_a_model_that_cannot_be_loaded_ends_the_server_with_its_error() -> None:
    def load(report: Any) -> Any:
        raise BadFile("model.safetensors: the file ends early")

    running = start(load, ServerConfig(port=0))
    running.thread.join(PATIENCE_S)
    assert [str(error) for error in running.raised] == ["model.safetensors: the file ends early"]


def test_a_model_that_arrives_after_the_end_is_closed() -> None:
    front, may_go_on = fake_front(), threading.Event()

    def load(report: Any) -> Any:
        assert may_go_on.wait(PATIENCE_S)
        return front

    running = start(load, ServerConfig(port=0))
    threading.Timer(0.3, may_go_on.set).start()
    running.stop()
    assert wait_until(lambda: not front.healthy)


def test_stopping_ends_the_loading_and_waits_for_its_thread() -> None:
    began, ended = threading.Event(), threading.Event()

    def load(report: Any) -> Any:
        try:
            for done in range(10_000):
                report("loading weights", done, 10_000)
                began.set()
                time.sleep(0.01)
        finally:
            ended.set()

    running = start(load, ServerConfig(port=0))
    assert began.wait(PATIENCE_S)
    running.stop()
    assert ended.is_set()
    assert running.raised == []


@pytest.mark.parametrize(
    ("options", "is_open"),
    [({"host": "0.0.0.0"}, True), ({"host": "0.0.0.0", "api_key": ("k",)}, False), ({}, False)],
)
def test_an_address_that_others_reach_without_a_key_is_reported(
    options: dict[str, Any], is_open: bool, caplog: pytest.LogCaptureFixture
) -> None:
    start(lambda report: fake_front(), ServerConfig(port=0, **options)).stop()
    assert ("every client that reaches 0.0.0.0 may use it" in caplog.text) == is_open


def test_an_unhealthy_engine_shows() -> None:
    front = fake_front()
    running = start(lambda report: front, ServerConfig(port=0))
    client = Client(running.url)
    assert wait_until(lambda: client.get("/health").status == 200)
    front.loop.healthy = False
    assert client.get("/health").status == 503
    assert client.get("/health").json["status"] == "unhealthy"
    running.stop()


def test_a_taken_port_is_an_error_that_says_so() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"127\.0\.0\.1:{port}: [^(]*; choose.*--port"):
            listen("127.0.0.1", port)
    with pytest.raises(ConfigError):
        listen("no such host..", 0)


@pytest.fixture
def process(request: pytest.FixtureRequest) -> Iterator[tuple[subprocess.Popen[str], Client]]:
    command = [sys.executable, "-c", PROGRAM, str(getattr(request, "param", 10 * PATIENCE_S))]
    with subprocess.Popen(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        client = Client(child.stdout.readline().strip())
        assert wait_until(lambda: client.get("/health").status == 200)
        try:
            yield child, client
        finally:
            child.kill()


def open_stream(client: Client, text: str) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection(*client.address, timeout=30)
    asked = {"prompt": text, "stream": True, "ignore_eos": True, "max_tokens": 60}
    connection.request("POST", "/v1/completions", json.dumps(asked), {"Content-Type": "application/json"})
    response = connection.getresponse()
    assert response.status == 200
    return response


def refuses(client: Client) -> bool:
    """Whether a server that stops takes no more requests."""
    try:
        return client.get("/health").status == 503
    except OSError:
        return True


@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_streams_finish(process: tuple[subprocess.Popen[str], Client], sig: int) -> None:
    child, client = process
    response = open_stream(client, "SLOW")
    child.send_signal(sig)
    assert wait_until(lambda: refuses(client))
    events = response.read().decode()
    assert events.endswith("data: [DONE]\n\n")
    assert '"finish_reason":"length"' in events
    assert child.wait(PATIENCE_S) == 0
    assert child.stdout is not None
    assert child.stdout.read() == "ended\n"


@pytest.mark.parametrize("process", [0.2], indirect=True)
def test_a_stream_that_takes_too_long_ends_with_an_error(
    process: tuple[subprocess.Popen[str], Client],
) -> None:
    child, client = process
    response = open_stream(client, "HANG")
    child.terminate()
    events = response.read().decode()
    assert "the server is stopping" in events
    assert events.endswith("data: [DONE]\n\n")
    assert child.wait(PATIENCE_S) == 0


def test_a_second_signal_does_not_wait(process: tuple[subprocess.Popen[str], Client]) -> None:
    child, client = process
    response = open_stream(client, "HANG")
    child.terminate()
    assert wait_until(lambda: refuses(client))  # two signals at once may arrive as one
    child.terminate()
    assert child.wait(PATIENCE_S) == 0
    response.close()


def test_an_idle_server_stops_at_once(process: tuple[subprocess.Popen[str], Client]) -> None:
    child, _ = process
    child.terminate()
    assert child.wait(PATIENCE_S) == 0


def test_http_answers_before_the_large_libraries_are_read() -> None:
    """They take longer to import than everything that a first answer needs."""
    code = "import sys, plait.cli.serve, plait.server.run; print(sorted(sys.modules))"
    loaded = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in ("torch", "numpy", "numba", "jinja2", "tokenizers", "llguidance"):
        assert f"'{name}'" not in loaded.stdout, name
