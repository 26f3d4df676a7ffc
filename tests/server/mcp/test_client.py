"""The client of MCP servers: both ways to answer, both kinds of versions, and servers that mean harm."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from plait.config import ServerConfig
from plait.errors import ConfigError
from plait.server.mcp import client as mcp_client
from plait.server.mcp import http_client
from plait.server.mcp.allowed import McpServers, parse_url
from plait.server.mcp.client import McpClient
from plait.server.mcp.errors import McpFailed, McpNotAllowed
from plait.server.mcp.messages import McpResult, McpTool
from tests.patience import PATIENCE_S
from tests.server.conftest import wait_until
from tests.server.mcp.mcp_server import McpTestServer, serving_mcp


@pytest.fixture(scope="module")
def mcp() -> Iterator[McpTestServer]:
    with serving_mcp() as server:
        yield server


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "MAX_ANSWER_BYTES", 1 << 20)


def use(mcp: McpTestServer, path: str, name: str = "", timeout_s: float = PATIENCE_S, **given: Any) -> Any:
    """The tools of a server, or the result of one call."""

    async def run() -> list[McpTool] | McpResult:
        client = McpClient(parse_url("it", mcp.url(path)), {}, timeout_s)
        try:
            return await (client.call_tool(name, given) if name else client.list_tools())
        finally:
            client.close()
            await asyncio.gather(*mcp_client._farewells)

    mcp.messages.clear()
    mcp.headers.clear()
    return asyncio.run(run())


@pytest.mark.parametrize("path", ["/json", "/events"])
def test_tools_are_listed_page_by_page_in_a_session_that_ends(mcp: McpTestServer, path: str) -> None:
    tools = use(mcp, path)
    assert [tool.name for tool in tools] == ["weather", "say", "fail", "long"]
    assert [tool.is_read_only for tool in tools] == [True, False, False, False]
    asked = [name for name in mcp.methods(path) if name != "reply"]
    assert asked == ["initialize", "notifications/initialized", "tools/list", "tools/list", "DELETE"]
    assert "mcp-session-id" not in mcp.headers[0]
    assert {h["mcp-session-id"] for h in mcp.headers[-2:]} == {mcp.begun[-1]}
    assert {h["mcp-protocol-version"] for h in mcp.headers[-2:]} == {"2025-06-18"}


def test_requests_of_the_server_are_answered_and_offer_nothing(mcp: McpTestServer) -> None:
    assert use(mcp, "/events", "weather", city="Bonn").text == "Rain in Bonn"
    replies = [message for _, message in mcp.messages if "method" not in message]
    assert {"jsonrpc": "2.0", "id": "p1", "result": {}} in replies
    (error,) = {reply["error"]["code"] for reply in replies if reply["id"] == "p2"}
    assert error == -32601


@pytest.mark.parametrize("path", ["/broken-stream", "/cut-stream"])
def test_a_stream_that_breaks_goes_on_from_its_last_whole_event(mcp: McpTestServer, path: str) -> None:
    assert use(mcp, path, "weather", city="Bonn").text == "late"
    assert mcp.methods(path).count("tools/call") == 1, "a call is never sent twice"


def test_a_server_without_a_handshake_is_spoken_to_as_it_wants(mcp: McpTestServer) -> None:
    assert use(mcp, "/plain", "weather", city="Bonn").text == "Rain in Bonn"
    assert mcp.methods("/plain") == ["initialize", "tools/call"]
    params, headers = mcp.messages[-1][1]["params"], mcp.headers[-1]
    assert params["_meta"]["io.modelcontextprotocol/protocolVersion"] == "2026-07-28"
    assert (headers["mcp-method"], headers["mcp-name"]) == ("tools/call", "weather")


def test_a_session_that_is_gone_begins_again(mcp: McpTestServer) -> None:
    assert use(mcp, "/forgetful", "weather", city="Bonn").text == "Rain in Bonn"
    assert mcp.methods("/forgetful").count("initialize") == 2


def test_a_failure_of_the_tool_is_a_result_and_one_of_the_server_an_error(mcp: McpTestServer) -> None:
    result = use(mcp, "/json", "fail")
    assert (result.is_error, result.text) == (True, "no luck today")
    with pytest.raises(McpFailed, match="error -32602: there is no tool nope") as caught:
        use(mcp, "/json", "nope")
    assert (caught.value.kind, caught.value.number) == ("mcp_protocol_error", -32602)


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("/endless", "over 1048576 bytes|10000 messages"),
        ("/no-line-end", "over 1048576 bytes"),
        ("/huge", "over 1048576 bytes"),
        ("/requests", "more than 16 requests of its own"),
        ("/head", "head of the answer has over"),
        ("/short", "ended early"),
        ("/circle", "comes back to a page"),
        ("/upgrade", "is no HTTP/1.1"),
        ("/redirect", "HTTP 307: redirects are not followed"),
        ("/html", "HTTP 200: its content is 'text/html'"),
        ("/no-json", "no JSON object"),
        ("/list", "no JSON object"),
        ("/deep", "deeper than 64 levels"),
        ("/compressed", "compressed"),
        ("/other-answer", "another request"),
        ("/no-result", "without a result"),
        ("/version", "speaks MCP '1999-01-01'; known are 2025-11-25"),
        ("/error", "error -32000: go away"),
        ("/down", "HTTP 503"),
        ("/locked", "HTTP 401: it wants authorization"),
    ],
)
def test_a_server_that_means_harm_is_an_error_that_says_so(mcp: McpTestServer, path: str, text: str) -> None:
    with pytest.raises(McpFailed, match=text):
        use(mcp, path)


@pytest.mark.parametrize("path", ["/silent", "/trickle"])
def test_a_slow_server_ends_in_time(mcp: McpTestServer, path: str) -> None:
    with pytest.raises(McpFailed, match=r"tools/list took longer than 0\.8 s"):
        use(mcp, path, timeout_s=0.8)  # which the first messages take, too


def test_a_server_that_is_not_there_is_an_error_without_its_address() -> None:
    async def run() -> None:
        await McpClient(parse_url("it", "http://127.0.0.1:9/mcp"), {}, 5).list_tools()

    with pytest.raises(McpFailed, match="it: no connection: ") as caught:
        asyncio.run(run())
    assert "127.0.0.1" not in str(caught.value)


def test_a_call_that_is_cancelled_is_cancelled_at_the_server(mcp: McpTestServer) -> None:
    async def run() -> None:
        client = McpClient(parse_url("it", mcp.url("/json")), {}, 5)
        await client.list_tools()
        client.server = parse_url("it", mcp.url("/silent"))
        task = asyncio.create_task(client.call_tool("say", {}))
        assert await asyncio.to_thread(wait_until, lambda: "tools/call" in mcp.methods("/silent"))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        client.close()
        said = "notifications/cancelled"
        assert await asyncio.to_thread(wait_until, lambda: said in mcp.methods("/silent"))

    mcp.messages.clear()
    asyncio.run(run())


def test_content_that_is_no_text_is_named() -> None:
    parts: list[dict[str, object]] = [
        {"type": "image", "data": "AAAA", "mimeType": "image/png"},
        {"type": "resource", "resource": {"uri": "file:///a", "text": "inside"}},
        {"type": "resource_link", "uri": "https://a.example/b", "name": "b"},
    ]
    lines = McpResult(parts).text.split("\n")
    assert lines[0].startswith("[image of type image/png: left out")
    assert lines[1:] == ["inside", "[b](https://a.example/b)"]
    assert McpResult(structured_content={"n": 1}).text == '{"n":1}'


def test_only_the_operators_addresses_are_called() -> None:
    config = ServerConfig(
        mcp_server=("a=https://One.example/mcp?x=1", "b=http://[::1]:9/"), mcp_token=("a=t",)
    )
    servers = McpServers.of(config)
    one = servers.by_url("https://one.example:443/mcp?x=1", "at")
    assert (one.label, one.token, one.authority, one.target) == ("a", "t", "one.example", "/mcp?x=1")
    assert servers.by_label("b", "at").authority == "[::1]:9"
    for url in (
        "http://one.example/mcp?x=1",
        "https://one.example/mcp",
        "https://one.example/mcp?x=1#f",
        "https://me@one.example/mcp?x=1",
        "https://one.example\\@evil.example/mcp?x=1",
        "https://one.example:444/mcp?x=1",
        "https://one.example/mcp?x=1 ",
        "file:///etc/passwd",
    ):
        with pytest.raises(McpNotAllowed, match="those that may be used are a, b; the operator allows"):
            servers.by_url(url, "at")
    with pytest.raises(McpNotAllowed, match="there is none; the operator allows one by --mcp-server"):
        McpServers().by_label("a", "at")


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"mcp_server": ("https://a.example",)}, "mcp_server: it is not LABEL=URL"),
        ({"mcp_server": ("a=ftp://a.example",)}, "it is not http://"),
        ({"mcp_server": ("a=http://u:p@a.example",)}, "no user, password"),
        ({"mcp_server": ("a=http://a.example:99999",)}, "its port"),
        ({"mcp_server": ("a=http://a.example", "a=http://b.example")}, "given twice"),
        ({"mcp_token": ("a=secret",)}, "mcp_token: a is the label of no mcp_server"),
        ({"mcp_server": ("a=http://a.example",), "mcp_token": ("a=",)}, "the TOKEN of a is empty"),
    ],
)
def test_options_that_cannot_be_are_refused(given: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text) as caught:
        McpServers.of(ServerConfig(**given))
    assert "secret" not in str(caught.value)
