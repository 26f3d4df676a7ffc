"""What the page calls: the servers that may be used, the tools of one, and one call of a tool.

A page may load nothing from elsewhere, so its calls go through this server, and only to those of the
operator's list. The page asks for consent; a call that comes here is one that a user or a client has made.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Literal, TypeVar

import msgspec
from msgspec import Struct, field
from starlette.requests import Request
from starlette.responses import Response

from plait.errors import InvalidField
from plait.server.api.schema import JsonValue
from plait.server.gateway.exchange import SCOPE_KEY, Exchange
from plait.server.http.errors import TooManyRequests, json_response
from plait.server.http.transfer import read_object, until_disconnect
from plait.server.mcp.allowed import McpServers
from plait.server.mcp.client import McpClient
from plait.server.mcp.messages import Json, McpTool
from plait.typed_values import convert_to

T = TypeVar("T")
MAX_OPEN_CALLS = 16  # of one key, or of all that have none


class McpServerCard(msgspec.Struct, kw_only=True, frozen=True):
    """One server that may be used. Its address stays with the operator."""

    label: str


class McpServerList(msgspec.Struct, kw_only=True, frozen=True):
    object: Literal["list"] = "list"
    data: list[McpServerCard]


class ToolsRequest(msgspec.Struct, kw_only=True, frozen=True):
    """POST /v1/mcp/tools. `server`: its label."""

    server: str


class ToolCard(msgspec.Struct, kw_only=True, frozen=True):
    """A tool in the words of its server."""

    name: str
    description: str
    input_schema: dict[str, JsonValue]
    read_only: bool


class ToolList(msgspec.Struct, kw_only=True, frozen=True):
    object: Literal["list"] = "list"
    data: list[ToolCard]


class CallRequest(msgspec.Struct, kw_only=True, frozen=True):
    """POST /v1/mcp/call: one call of one tool."""

    server: str
    name: str
    arguments: dict[str, JsonValue] = {}


class CallAnswer(msgspec.Struct, kw_only=True, frozen=True):
    """What a call came to. `is_error`: the tool says that it failed."""

    text: str
    is_error: bool


class McpDesk(Struct):
    """What the routes share: the servers, the largest body, and how many calls each key has open."""

    servers: McpServers
    max_body_bytes: int
    num_open: Counter[str] = field(default_factory=Counter)

    def client(self, label: str) -> McpClient:
        """A session of its own. Raises McpNotAllowed."""
        return McpClient(self.servers.by_label(label, "server"), timeout_s=self.servers.timeout_s)


Answer = Callable[[McpDesk, Json], Coroutine[None, None, msgspec.Struct]]


async def list_servers(desk: McpDesk, body: Json) -> McpServerList:
    """The servers of the operator's list."""
    return McpServerList(data=[McpServerCard(label=label) for label in desk.servers.labels])


async def list_tools(desk: McpDesk, body: Json) -> ToolList:
    """The tools of one server. Raises McpFailed."""
    client = desk.client(_read(body, ToolsRequest).server)
    try:
        return ToolList(data=[_card(tool) for tool in await client.list_tools()])
    finally:
        client.close()


async def call_tool(desk: McpDesk, body: Json) -> CallAnswer:
    """Call one tool once. Raises McpFailed."""
    asked = _read(body, CallRequest)
    client = desk.client(asked.server)
    try:
        found = await client.call_tool(asked.name, asked.arguments)
        return CallAnswer(text=found.text, is_error=found.is_error)
    finally:
        client.close()


def _card(tool: McpTool) -> ToolCard:
    return ToolCard(
        name=tool.name,
        description=tool.description or "",
        input_schema=tool.input_schema,
        read_only=tool.is_read_only,
    )


def _read(body: Mapping[str, object], kind: type[T]) -> T:
    try:
        return convert_to(body, kind)
    except msgspec.ValidationError as error:
        what, _, place = str(error).partition(" - at `$.")
        param = place.rstrip("`") or None
        raise InvalidField(f"{param}: {what}" if param else what, param) from None


class McpRoute(Struct, frozen=True):
    """`method path`, which answers from the servers of the list."""

    method: Literal["GET", "POST"]
    path: str
    answer: Answer

    def handler(self, desk: McpDesk) -> Callable[[Request], Awaitable[Response]]:
        async def handle(request: Request) -> Response:
            if self.method == "GET":
                return json_response(await self.answer(desk, {}))
            body = await read_object(request, desk.max_body_bytes)
            exchange: Exchange = request.scope[SCOPE_KEY]
            key = exchange.key.name
            if desk.num_open[key] >= MAX_OPEN_CALLS:
                text = f"{MAX_OPEN_CALLS} calls of MCP servers are open already; wait until one is done"
                raise TooManyRequests(text)
            desk.num_open[key] += 1
            try:
                return json_response(await until_disconnect(request.receive, self.answer(desk, body)))
            finally:
                desk.num_open[key] -= 1

        return handle


MCP = (
    McpRoute("GET", "/v1/mcp/servers", list_servers),
    McpRoute("POST", "/v1/mcp/tools", list_tools),
    McpRoute("POST", "/v1/mcp/call", call_tool),
)
