"""What the page calls: servers of the list, their tools, and one call, under the key of the page."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from plait.server import mcp_routes
from tests.contract.wire import Client
from tests.server.conftest import serving, wait_until
from tests.server.fake import fake_front
from tests.server.mcp.mcp_server import McpTestServer, serving_mcp


@pytest.fixture(scope="module")
def mcp() -> Iterator[McpTestServer]:
    with serving_mcp() as server:
        yield server


@pytest.fixture(scope="module")
def server(mcp: McpTestServer) -> Iterator[Client]:
    servers = tuple(f"{name}={mcp.url('/' + name)}" for name in ("json", "html", "silent"))
    options: Any = {"mcp_server": servers, "mcp_timeout_s": 20.0}
    with serving(fake_front(), **options) as client:
        yield client


def test_the_page_lists_servers_and_tools_and_calls_one(server: Client, mcp: McpTestServer) -> None:
    listed = server.get("/v1/mcp/servers")
    assert [one["label"] for one in listed.json["data"]] == ["json", "html", "silent"]
    assert b"127.0.0.1" not in listed.body
    tools = server.post("/v1/mcp/tools", {"server": "json"}).json["data"]
    assert [(tool["name"], tool["read_only"]) for tool in tools][:2] == [("weather", True), ("say", False)]
    given = {"server": "json", "name": "weather", "arguments": {"city": "Bonn"}}
    answer = server.post("/v1/mcp/call", given)
    assert answer.json == {"text": "Rain in Bonn", "is_error": False}
    assert mcp.calls() == [{"name": "weather", "arguments": {"city": "Bonn"}}]
    assert server.post("/v1/mcp/call", {"server": "json", "name": "fail"}).json["is_error"] is True


@pytest.mark.parametrize(
    ("body", "status", "param", "code"),
    [
        ({"server": "other", "name": "a"}, 400, "server", "mcp_server_not_allowed"),
        ({"server": "http://127.0.0.1/", "name": "a"}, 400, "server", "mcp_server_not_allowed"),
        ({"server": "json", "name": 3}, 400, "name", "invalid_value"),
        ({"server": "json", "name": "weather", "arguments": "{}"}, 400, "arguments", "invalid_value"),
        ({"server": "json", "name": "nope"}, 424, None, "mcp_server_failed"),
        ({"server": "html", "name": "a"}, 424, None, "mcp_server_failed"),
    ],
)
def test_calls_that_cannot_be_are_refused(
    server: Client, body: dict[str, Any], status: int, param: str | None, code: str
) -> None:
    answer = server.post("/v1/mcp/call", body)
    assert (answer.status, answer.error["param"], answer.error["code"]) == (status, param, code)


def test_a_key_has_so_many_calls_open(
    server: Client, mcp: McpTestServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mcp_routes, "MAX_OPEN_CALLS", 1)
    first = threading.Thread(target=server.post, args=("/v1/mcp/tools", {"server": "silent"}))
    first.start()
    assert wait_until(lambda: "initialize" in mcp.methods("/silent"))
    assert server.post("/v1/mcp/tools", {"server": "json"}).status == 429
    first.join()
    assert server.post("/v1/mcp/tools", {"server": "json"}).status == 200


def test_the_routes_are_behind_the_key() -> None:
    with serving(fake_front(), api_key="secret") as client:
        for answer in (client.get("/v1/mcp/servers"), client.post("/v1/mcp/call", {"server": "a"})):
            assert answer.status == 401
