"""`plait health`: it follows a server's port, TLS and hosts by the address file, and says what is wrong."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from plait.config import ServerConfig
from plait.errors import ConfigError
from plait.server.http.address_file import ServerAddress, local_address, read_address, write_address
from tests.patience import PATIENCE_S
from tests.server.conftest import Running, serving, start, wait_until
from tests.server.fake import fake_front

Run = Callable[..., Any]
TLS = Path(__file__).parents[1] / "server" / "http" / "tls"


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The address file, which the environment names as that of an image does."""
    path = tmp_path / "address"
    monkeypatch.setenv("PLAIT_ADDRESS_FILE", str(path))
    return path


def serve(file: Path, **options: Any) -> Running:
    return start(lambda report: fake_front(), ServerConfig(port=0, address_file=str(file), **options))


def test_a_server_with_tls_and_a_port_of_its_own_is_found(plait: Run, file: Path, tmp_path: Path) -> None:
    for name in ("one.pem", "one.key"):
        shutil.copy(TLS / name, tmp_path)
    running = serve(file, tls_cert=str(tmp_path / "one.pem"), tls_key=str(tmp_path / "one.key"))
    try:
        port = running.url.rpartition(":")[2]
        assert read_address(str(file)) == ServerAddress(f"https://127.0.0.1:{port}")
        result = plait("health")
        assert (result.code, result.out) == (0, f"https://127.0.0.1:{port}/live: up\n")
        assert wait_until(lambda: plait("health", "--ready").code == 0)
    finally:
        running.stop()
    assert not file.exists()
    ended = plait("health")
    assert ended.code != 0
    assert f"no server that runs has written {file}" in ended.err


def test_a_server_that_accepts_some_hosts_alone_is_called_by_one_of_them(plait: Run, file: Path) -> None:
    options = {"host": "0.0.0.0", "allowed_host": ("models.example.org",)}
    running = serve(file, **options)
    try:
        assert plait("health").code == 0
        port = running.url.rpartition(":")[2]
        refused = plait("health", "--url", f"http://127.0.0.1:{port}")
        assert refused.code == 1
        assert "/live answers 4" in refused.err
        config = replace(running.server.traffic.config, allowed_host=("other.example.org",))
        running.server._reread = lambda: config
        running.server.ask_reload()
        assert wait_until(lambda: read_address(str(file)).host == "other.example.org")
        assert plait("health").code == 0
    finally:
        running.stop()


def test_a_server_that_is_not_well_is_reported_with_its_state(plait: Run) -> None:
    front = fake_front()
    with serving(front) as client:
        assert plait("health", "--ready", "--url", client.base_url).code == 0
        front.loop.healthy = False  # type: ignore[misc]
        result = plait("health", "--ready", "--url", client.base_url)
        assert (result.code, result.out) == (1, "")
        assert result.err == f"plait: {client.base_url}/ready answers 503, unhealthy\n"
    assert "cannot be reached" in plait("health", "--url", client.base_url).err


def test_two_servers_on_the_command_line_are_one_too_many(plait: Run, file: Path) -> None:
    result = plait("health", "--url", "http://127.0.0.1:1", "--address-file", str(file))
    assert result.code == 2
    assert "give one of them" in result.err


@pytest.mark.parametrize("text", ["", "{}", "[1]", "http://127.0.0.1", '{"url": 1}', "[" * 4000])
def test_a_file_that_no_server_wrote_is_refused(plait: Run, file: Path, text: str) -> None:
    file.write_text(text)
    result = plait("health")
    assert result.code == 2
    assert "was not written by" in result.err


def test_a_file_that_cannot_be_written_ends_the_server_at_once(tmp_path: Path) -> None:
    path = tmp_path / "nowhere" / "address"
    config = ServerConfig(port=0, address_file=str(path))
    from plait.server.run import serve_front

    with pytest.raises(ConfigError, match=r"address_file: .*nowhere.* cannot be written"):
        serve_front(lambda report: pytest.fail("it loads"), config)
    assert os.listdir(tmp_path) == []


def test_the_file_of_a_later_server_stays(file: Path) -> None:
    running = serve(file)
    later = ServerAddress("http://127.0.0.1:1")
    write_address(str(file), later)
    running.stop()
    running.thread.join(PATIENCE_S)
    assert json.loads(file.read_text()) == {"url": later.url, "host": ""}


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("0.0.0.0", "http://127.0.0.1:80"),
        ("::", "http://[::1]:80"),
        ("fe80::1", "http://[fe80::1]:80"),
        ("10.0.0.5", "http://10.0.0.5:80"),
    ],
)
def test_an_address_is_one_of_this_machine(host: str, url: str) -> None:
    assert local_address("http", host, 80).url == url
