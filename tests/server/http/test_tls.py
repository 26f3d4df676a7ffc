"""https: its certificate is replaced while connections and streams live. These keys are for tests alone."""

from __future__ import annotations

import http.client
import json
import logging
import shutil
import socket
import ssl
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from plait.config import ServerConfig
from plait.errors import ConfigError
from plait.server.http import connection
from plait.server.http.listening import certificate
from tests.server.conftest import Running, start, wait_until
from tests.server.fake import EchoLoop, fake_front

FILES = Path(__file__).parent / "tls"


def put(name: str, folder: Path) -> None:
    shutil.copy(FILES / f"{name}.pem", folder / "cert.pem")
    shutil.copy(FILES / f"{name}.key", folder / "cert.key")


def config(folder: Path) -> ServerConfig:
    return ServerConfig(port=0, tls_cert=str(folder / "cert.pem"), tls_key=str(folder / "cert.key"))


def trusting(name: str) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(FILES / f"{name}.pem"))


def address(running: Running) -> tuple[str, int]:
    return "127.0.0.1", int(running.url.rpartition(":")[2])


def served_with(running: Running, name: str) -> bool:
    asking = http.client.HTTPSConnection(*address(running), timeout=20, context=trusting(name))
    try:
        asking.request("GET", "/version")
        return asking.getresponse().status == 200
    except ssl.SSLCertVerificationError:
        return False
    finally:
        asking.close()


def test_https_is_served_and_plain_http_is_not(tmp_path: Path) -> None:
    put("one", tmp_path)
    running = start(lambda report: fake_front(), config(tmp_path))
    try:
        assert running.url.startswith("https://")
        assert served_with(running, "one")
        assert not served_with(running, "two")
        with socket.create_connection(address(running), timeout=20) as sock:
            sock.sendall(b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert b"200" not in sock.recv(1000)
    finally:
        running.stop()


def test_a_handshake_that_does_not_come_ends_the_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "HEAD_TIMEOUT_S", 0.2)
    put("one", tmp_path)
    running = start(lambda report: fake_front(), config(tmp_path))
    try:
        with socket.create_connection(address(running), timeout=20) as sock:
            assert sock.recv(10) == b""
    finally:
        running.stop()


def test_a_client_that_keeps_its_connection_does_not_keep_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It answers the end of TLS never, or when it sends its next request."""
    monkeypatch.setattr(connection, "LINGER_S", 0.05)
    put("one", tmp_path)
    running = start(lambda report: fake_front(), config(tmp_path))
    idle = http.client.HTTPSConnection(*address(running), timeout=20, context=trusting("one"))
    try:
        idle.request("GET", "/version")
        assert idle.getresponse().read()
        leave = threading.Timer(10, idle.close)
        leave.start()
    finally:
        running.stop()
    leave.cancel()
    idle.close()
    assert not [record.message for record in caplog.records if record.levelno >= logging.ERROR]


@pytest.mark.parametrize("asked", [True, False])
def test_a_new_certificate_is_used_and_open_streams_go_on(tmp_path: Path, asked: bool) -> None:
    put("one", tmp_path)
    running = start(lambda report: fake_front(), config(tmp_path))
    try:
        assert wait_until(lambda: bool(running.server.models.fronts()))
        (front,) = running.server.models.fronts().values()
        stream = http.client.HTTPSConnection(*address(running), timeout=20, context=trusting("one"))
        body = {"prompt": "SLOW", "stream": True, "ignore_eos": True, "max_tokens": 1500}
        headers = {"Content-Type": "application/json"}
        stream.request("POST", "/v1/completions", json.dumps(body), headers)
        response = stream.getresponse()
        put("two", tmp_path)
        if asked:
            running.server.ask_reload()
        assert wait_until(lambda: served_with(running, "two"))
        assert not served_with(running, "one")
        assert isinstance(front.loop, EchoLoop)
        front.loop.hurry.set()
        assert response.read().endswith(b"data: [DONE]\n\n")
        stream.close()
    finally:
        running.stop()


@pytest.mark.parametrize("broken", ["cert.pem", "cert.key"])
def test_a_broken_certificate_is_not_taken(tmp_path: Path, broken: str) -> None:
    put("one", tmp_path)
    running = start(lambda report: fake_front(), config(tmp_path))
    try:
        assert served_with(running, "one")
        shutil.copy(FILES / ("two" + Path(broken).suffix), tmp_path / broken)
        running.server._reread = lambda: replace(config(tmp_path), requests_per_minute=7)
        running.server.ask_reload()
        assert wait_until(lambda: not running.server._should_reload)
        assert served_with(running, "one")
        assert running.server.traffic.config.requests_per_minute is None  # all is taken, or nothing
    finally:
        running.stop()


def test_files_that_cannot_be_used_are_refused_by_name(tmp_path: Path) -> None:
    put("one", tmp_path)
    (tmp_path / "cert.key").write_text("no key")
    with pytest.raises(ConfigError, match=r"tls_cert, tls_key: .*cert\.pem"):
        certificate(config(tmp_path))
    (tmp_path / "cert.key").unlink()
    with pytest.raises(ConfigError, match="cannot be used"):
        certificate(config(tmp_path))
    with pytest.raises(ConfigError, match="give both"):
        ServerConfig(tls_cert="a.pem")
