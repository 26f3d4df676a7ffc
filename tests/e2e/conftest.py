"""Real servers, as a user starts them: `plait serve` in a process of its own."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from plait.frontend.frontend import Front
from tests.e2e import browser
from tests.server.conftest import serving
from tests.server.fake import fake_front

ROOT = Path(__file__).resolve().parents[2]
NANO_HYBRID = ROOT / "examples" / "nano-hybrid"


@pytest.fixture(scope="session")
def driver() -> Iterator[browser.QuietDriver]:
    with browser.launched_once() as found:
        yield found


@pytest.fixture(scope="module")
def chromium(driver: browser.QuietDriver) -> Iterator[Any]:
    driver.wake()
    yield driver.chromium
    driver.rest()


@pytest.fixture
def page(chromium: Any) -> Iterator[Any]:
    with browser.tab(chromium) as found:
        yield found


@pytest.fixture(scope="module")
def front() -> Front:
    return fake_front()


@pytest.fixture(scope="module")
def url(front: Front) -> Iterator[str]:
    """The address of a server over the fake model."""
    with serving(front) as client:
        yield client.base_url + "/"


@dataclass(frozen=True)
class Server:
    url: str
    process: subprocess.Popen[str]

    def get(self, path: str) -> dict[str, Any]:
        with urllib.request.urlopen(self.url + path, timeout=30) as answer:
            found: dict[str, Any] = json.load(answer)
        return found


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
    return port


@contextlib.contextmanager
def serve(model: Path | str, *options: str) -> Iterator[Server]:
    """A running server that says it is healthy; stopped with SIGTERM at the end, which must exit with 0."""
    port = free_port()
    plait = [sys.executable, "-m", "plait.cli.main"]
    command = [*plait, "serve", "--model", str(model), "--port", str(port), "--cpu", *options]
    # A pipe without a reader would stop the server when it is full.
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stderr=log, stdout=log, text=True)
        server = Server(f"http://127.0.0.1:{port}", process)
        try:
            _wait_until_healthy(server)
            yield server
            process.terminate()
            assert process.wait(60) == 0
        finally:
            process.kill()
            process.wait()
            log.seek(0)
            print(log.read())  # noqa: T201  pytest shows it if a test fails


@pytest.fixture(scope="session")
def nano_server() -> Iterator[Server]:
    """The nano hybrid for sixteen sequences, for tests that need no options of their own."""
    with serve(NANO_HYBRID, "--max-num-seqs", "16") as running:
        yield running


def _wait_until_healthy(server: Server, timeout_s: float = 120) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        assert server.process.poll() is None, "the server ended; see its log"
        with contextlib.suppress(urllib.error.URLError, ConnectionError):
            if server.get("/health")["status"] == "ok":
                return
        time.sleep(0.1)
    raise TimeoutError(f"{server.url} did not become healthy in {timeout_s} s")
