"""What an MCP server says, as far as it is read: tools, results and errors, each within bounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

import msgspec

from plait.errors import clip_text
from plait.server.mcp.errors import McpFailed
from plait.typed_values import convert_to

Json = dict[str, object]
T = TypeVar("T")
MAX_SERVER_TOOLS = 1024  # of one server
MAX_TOOL_NAME = 256
LEFT_OUT = "[%s of type %s: left out, because the model reads text]"


class McpTool(msgspec.Struct, frozen=True, rename="camel"):
    """A tool as its server describes it. Every word of it is the server's, and not to be trusted."""

    name: str
    description: str | None = None
    input_schema: Json = {}
    annotations: Json | None = None

    @property
    def is_read_only(self) -> bool:
        """Whether the server says that the tool changes nothing."""
        return (self.annotations or {}).get("readOnlyHint") is True


class McpToolPage(msgspec.Struct, frozen=True, rename="camel"):
    tools: list[McpTool]
    next_cursor: str | None = None


class ServerHello(msgspec.Struct, frozen=True, rename="camel"):
    """The result of `initialize`."""

    protocol_version: str


class McpResult(msgspec.Struct, frozen=True, rename="camel"):
    """The result of a call."""

    content: list[Json] = []
    structured_content: object = None
    is_error: bool = False
    result_type: str = "complete"

    @property
    def text(self) -> str:
        """What the model reads of it: texts, a line for what is none, or else the structured content."""
        texts = [_text_of(part) for part in self.content]
        if not texts and self.structured_content is not None:
            return msgspec.json.encode(self.structured_content).decode()
        return "\n".join(texts)


class RpcError(msgspec.Struct, frozen=True):
    code: int
    message: str = ""
    data: object = None

    @property
    def supported_versions(self) -> Sequence[str]:
        """The protocol versions that a server names which refuses ours."""
        found = self.data.get("supported") if isinstance(self.data, Mapping) else None
        return [str(version) for version in found] if isinstance(found, list) else []


def _text_of(part: Mapping[str, object]) -> str:
    kind = part.get("type")
    if kind == "text" and isinstance(text := part.get("text"), str):
        return text
    if kind == "resource_link":
        return f"[{str(part.get('name', ''))[:200]}]({str(part.get('uri', ''))[:2000]})"
    held = part.get("resource")
    if kind == "resource" and isinstance(held, Mapping):
        if isinstance(text := held.get("text"), str):
            return text
        part = held
    return LEFT_OUT % (str(kind)[:40], str(part.get("mimeType", "unknown"))[:80])


def read_as(label: str, value: object, kind: type[T], what: str) -> T:
    """A value of a server as `kind`. Raises McpFailed that says what is wrong with it."""
    try:
        return convert_to(value, kind)
    except (msgspec.ValidationError, RecursionError) as error:
        text = f"{label}: {what} is not what MCP has: {clip_text(error, 150)}"
        raise McpFailed(text, "mcp_protocol_error", -32603) from None
