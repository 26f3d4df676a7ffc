"""SIGHUP: keys, limits and the log level are read again, and nothing that runs notices."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from plait.config import ServerConfig
from plait.errors import ConfigError
from plait.server.gateway.middleware import RELOADED, Traffic
from plait.server.run import serve_front
from tests.patience import PATIENCE_S
from tests.server.conftest import Client, wait_until
from tests.server.fake import fake_front

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import sys
from plait.config import ServerConfig
from plait.server.run import serve_front
from tests.server.fake import fake_front

config = ServerConfig(port=0, api_key_file=sys.argv[1])
serve_front(lambda report: fake_front(), config, lambda server: print(server.url, flush=True))
"""


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    file = tmp_path / "keys"
    file.write_text("alice: one\n")
    return file


@pytest.fixture
def process(keys: Path) -> Iterator[tuple[subprocess.Popen[str], Client]]:
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(keys)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stdout is not None
        client = Client(child.stdout.readline().strip(), headers={"x-api-key": "one"})
        assert wait_until(lambda: client.get("/v1/models").status == 200)
        try:
            yield child, client
        finally:
            child.kill()


def status(client: Client, key: str) -> int:
    return client.request("GET", "/v1/models", headers={"x-api-key": key}).status


def test_a_hangup_reads_keys_again_and_streams_go_on(
    process: tuple[subprocess.Popen[str], Client], keys: Path
) -> None:
    child, client = process
    connection = http.client.HTTPConnection(*client.address, timeout=30)
    body = {"prompt": "SLOW", "stream": True, "ignore_eos": True, "max_tokens": 60}
    headers = {"Content-Type": "application/json", "x-api-key": "one"}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    response = connection.getresponse()
    assert response.status == 200
    keys.write_text("bob: two rpm=1\n")
    child.send_signal(signal.SIGHUP)
    assert wait_until(lambda: status(client, "two") == 200)
    assert status(client, "one") == 401
    asked = json.dumps({"prompt": "Hi", "max_tokens": 1}).encode()
    client.headers = {"x-api-key": "two"}
    assert [client.post("/v1/completions", asked).status for _ in range(2)] == [200, 429]
    events = response.read().decode()
    assert '"finish_reason":"length"' in events
    assert events.endswith("data: [DONE]\n\n")
    keys.write_text("bob: two\n")
    child.send_signal(signal.SIGHUP)
    assert wait_until(lambda: client.post("/v1/completions", asked).status == 200)
    connection.close()
    child.terminate()
    assert child.wait(PATIENCE_S) == 0


@pytest.mark.parametrize("text", ["", "no/name: x", None])
def test_keys_that_cannot_be_read_change_nothing(
    process: tuple[subprocess.Popen[str], Client], keys: Path, text: str | None
) -> None:
    child, client = process
    if text is None:
        keys.unlink()
    else:
        keys.write_text(text)
    child.send_signal(signal.SIGHUP)
    assert not wait_until(lambda: status(client, "one") != 200, 0.5)
    assert status(client, "") == 401
    child.terminate()
    assert child.wait(PATIENCE_S) == 0


def test_only_what_may_change_is_taken_and_the_rest_is_named(caplog: pytest.LogCaptureFixture) -> None:
    config = ServerConfig(requests_per_minute=5, log_level="info")
    traffic = Traffic(config)
    traffic.reload(
        replace(config, host="0.0.0.0", port=1, root_path="/x", requests_per_minute=6, log_level="debug")
    )
    assert traffic.config == replace(config, requests_per_minute=6, log_level="debug")
    assert "reload: host, port, root_path: what is new takes effect at the next startup" in caplog.text
    assert traffic.limits.account(traffic.keyring.anybody).headers()["x-ratelimit-limit-requests"] == "6"
    assert set(RELOADED) <= {*ServerConfig.__dataclass_fields__}


def test_a_reload_that_fails_keeps_keys_and_limits(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("alice: one rpm=3\n")
    traffic = Traffic(ServerConfig(api_key_file=str(file)))
    before = traffic.keyring
    file.write_text("alice: one rpm=none\n")
    with pytest.raises(ConfigError, match="rpm="):
        traffic.reload(traffic.config)
    assert traffic.keyring is before


def test_a_server_without_readable_keys_does_not_start(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    config = ServerConfig(port=port, api_key_file=str(tmp_path / "missing"))
    with pytest.raises(ConfigError, match="api_key_file"):
        serve_front(lambda report: fake_front(), config)
    socket.create_server(("127.0.0.1", port)).close()  # no process listens there
