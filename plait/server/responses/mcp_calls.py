"""Calls of MCP servers' tools for one response: the sessions, what a call came to, and what was approved."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import UNSET, Struct

from plait.errors import InvalidField, RequestError, clip_text
from plait.server.api.parse_fields import string_of
from plait.server.http.transfer import decode_object, new_id
from plait.server.mcp.client import McpClient
from plait.server.mcp.errors import McpFailed
from plait.server.mcp.messages import MAX_SERVER_TOOLS, McpTool
from plait.server.responses.items import OutputItem, server_call
from plait.server.responses.mcp_tools import OfferedTool, RequestedServer
from plait.server.responses.state import Item
from plait.typed_values import convert_to

INVALID_PARAMS = -32602
MAX_ERROR_CHARS = 4000  # of a tool's own words for what failed
_SNAKE = {"input_schema": "inputSchema"}


class PendingCall(Struct, frozen=True):
    """A call that the client has approved and that no item says was made."""

    approval_id: str
    label: str
    name: str
    arguments: str

    def item(self, item_id: str) -> OutputItem:
        """The item of the call while it is made."""
        named = (self.label, self.name)
        return server_call(item_id, "in_progress", named, self.arguments, self.approval_id)


def read_pending(
    sent: str | Sequence[Item], earlier: Sequence[Item], servers: Sequence[RequestedServer]
) -> list[PendingCall]:
    """The calls that an input approves. Raises InvalidField.

    One approval is one call: where an item says that it was made, it is not made again.
    """
    if isinstance(sent, str):
        return []
    items = [*earlier, *sent]
    requests = {str(item.get("id")): item for item in items if item.get("type") == "mcp_approval_request"}
    made = {str(item.get("approval_request_id")) for item in items if item.get("type") == "mcp_call"}
    labels, found = {source.label for source in servers}, []
    for i, item in enumerate(sent):
        wanted, at = str(item.get("approval_request_id")), f"input[{i}]"
        if item.get("type") != "mcp_approval_response" or item.get("approve") is not True or wanted in made:
            continue
        made.add(wanted)
        request = requests[wanted]  # the conversation has been read, so it is there
        label = string_of(request, "server_label", at)
        if label not in labels:
            text = f"{at}: it approves a call of {label!r:.80}; send that mcp tool in tools again"
            raise InvalidField(text, at)
        name, arguments = string_of(request, "name", at), string_of(request, "arguments", at)
        found.append(PendingCall(wanted, label, name, arguments))
    return found


def list_item(source: RequestedServer) -> OutputItem:
    """The item of a list before its server has answered."""
    found = OutputItem(new_id("mcpl", "_"), UNSET, "mcp_list_tools")
    return msgspec.structs.replace(found, server_label=source.label, tools=[], error=None)


def show_tool(tool: McpTool) -> Item:
    """A tool as such an item has it."""
    return {
        "name": tool.name,
        "description": tool.description,
        "input_schema": tool.input_schema,
        "annotations": tool.annotations,
    }


class McpCaller:
    """The sessions of one response. A failure is never raised: it is what the item says."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._clients: dict[str, McpClient] = {}

    def find_list(self, source: RequestedServer, items: Sequence[Item]) -> list[McpTool] | None:
        """The tools that an earlier item lists; None: none does, so the server has to."""
        for item in reversed(items):
            if item.get("type") != "mcp_list_tools" or item.get("server_label") != source.label:
                continue
            tools = item.get("tools")
            if item.get("error") is not None or not isinstance(tools, list):
                return None
            if len(tools) > MAX_SERVER_TOOLS:  # no server's list: a client's own words
                return None
            try:
                shown = [{_SNAKE.get(k, k): v for k, v in tool.items()} for tool in tools]
                return convert_to(shown, list[McpTool])
            except (msgspec.ValidationError, AttributeError):
                return None
        return None

    async def list_tools(self, source: RequestedServer) -> tuple[list[McpTool], str]:
        """All tools of a server, and "" or else why there are none."""
        try:
            return await self._client(source).list_tools(), ""
        except McpFailed as error:
            return [], str(error)

    async def call(self, item: OutputItem, tool: OfferedTool | None) -> OutputItem:
        """The item of a call once it was made. `tool` None: the server has no such tool."""
        name, arguments = str(item.name), str(item.arguments)
        if tool is None:
            text = f"{item.server_label} has no tool {name!r:.80} that may be called"
            return self.fail(item, McpFailed(text, "mcp_protocol_error", INVALID_PARAMS))
        try:
            given = decode_object(arguments.encode() or b"{}")
        except RequestError as error:
            text = f"the arguments are no JSON object: {clip_text(error, 100)}"
            return self.fail(item, McpFailed(text, "mcp_protocol_error", INVALID_PARAMS))
        try:
            result = await self._client(tool.source).call_tool(name, given)
        except McpFailed as error:
            return self.fail(item, error)
        if result.is_error:
            return self.refuse(item, clip_text(result.text, MAX_ERROR_CHARS))
        return msgspec.structs.replace(item, status="completed", output=result.text)

    def refuse(self, item: OutputItem, text: str) -> OutputItem:
        """The item of a call that came to nothing, in the words of the tool or of this server."""
        content = [{"type": "text", "text": text}]
        error = {"type": "mcp_tool_execution_error", "content": content}
        return msgspec.structs.replace(item, status="failed", output=None, error=error)

    def fail(self, item: OutputItem, failure: McpFailed) -> OutputItem:
        """The item of a call that the server has not answered as it should."""
        error = {"type": failure.kind, "code": failure.number, "message": str(failure)}
        return msgspec.structs.replace(item, status="failed", output=None, error=error)

    def close(self) -> None:
        """End the sessions."""
        for client in self._clients.values():
            client.close()
        self._clients.clear()

    def _client(self, source: RequestedServer) -> McpClient:
        if source.label not in self._clients:
            self._clients[source.label] = McpClient(source.server, source.headers, self._timeout_s)
        return self._clients[source.label]
