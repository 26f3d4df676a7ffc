"""The server of the `mcp` package, where MCP_PYTHON names an interpreter that has it."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from plait.server.mcp import client as mcp_client
from plait.server.mcp.allowed import parse_url
from plait.server.mcp.client import McpClient
from tests.server.conftest import wait_until

PYTHON = os.environ.get("MCP_PYTHON")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(PYTHON is None, reason="MCP_PYTHON names no interpreter with the mcp package"),
]
SERVER = """
import sys
from mcp.server.mcpserver import MCPServer

server = MCPServer("demo")

@server.tool()
def add(a: int, b: int) -> str:
    "Adds two numbers."
    return str(a + b)

@server.tool()
def fail() -> str:
    raise ValueError("no luck")

options = {"stateless_http": True, "json_response": True} if sys.argv[2] == "json" else {}
server.run(transport="streamable-http", port=int(sys.argv[1]), **options)
"""


def is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture(params=["json", "events"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    script = tmp_path / "server.py"
    script.write_text(SERVER)
    process = subprocess.Popen([str(PYTHON), str(script), str(port), request.param])
    try:
        assert wait_until(lambda: is_open(port), 30)
        yield f"http://127.0.0.1:{port}/mcp"
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("version", ["", mcp_client.PLAIN_VERSION])
def test_its_tools_are_listed_and_called(url: str, version: str) -> None:
    async def run() -> None:
        client = McpClient(parse_url("demo", url))
        client._version = version
        assert [tool.name for tool in await client.list_tools()] == ["add", "fail"]
        assert (await client.call_tool("add", {"a": 2, "b": 3})).text == "5"
        assert (await client.call_tool("fail", {})).is_error
        client.close()
        await asyncio.gather(*mcp_client._farewells)

    asyncio.run(run())
