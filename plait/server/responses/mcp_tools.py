"""The `mcp` tools of a request: which server, which of its tools, and which of them need consent.

Without a word of the client every call does. What a server says of its tools (`readOnlyHint`) counts only
where the client has written so.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec
from msgspec import Struct

from plait.errors import InvalidField
from plait.server.api.parse_fields import parse_as
from plait.server.mcp.allowed import LABEL, McpServer, McpServers
from plait.server.mcp.messages import McpTool

MAX_SENT_HEADERS, MAX_HEADER_CHARS = 32, 4096
REDACTED = "<redacted>"
_HEADER_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,100}")
_HEADER_VALUE = re.compile(r"[\x20-\x7e\x80-\xff]*")
_OURS = frozenset(
    {
        *("host", "connection", "content-length", "transfer-encoding", "te", "trailer", "upgrade", "expect"),
        *("keep-alive", "accept", "accept-encoding", "content-type", "content-encoding", "last-event-id"),
        *("mcp-session-id", "mcp-protocol-version", "mcp-method", "mcp-name", "user-agent", "origin"),
    }
)
_FUNCTION_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_OTHER = re.compile(r"[^A-Za-z0-9_-]+")
_NOT_HERE = ("connector_id", "tunnel_id", "defer_loading")


class ToolFilter(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Tools by their names, by what the server says of them, or both."""

    tool_names: list[str] | None = None
    read_only: bool | None = None

    def matches(self, tool: McpTool) -> bool:
        if self.tool_names is None and self.read_only is None:
            return False
        is_named = self.tool_names is None or tool.name in self.tool_names
        return is_named and (self.read_only is None or self.read_only == tool.is_read_only)


class ApprovalFilter(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    always: ToolFilter | None = None
    never: ToolFilter | None = None


class McpToolParam(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """One `mcp` tool of /v1/responses. It names its server by `server_url`, or else by `server_label`."""

    type: Literal["mcp"]
    server_label: str
    server_url: str | None = None
    server_description: str | None = None
    headers: dict[str, str] | None = None
    authorization: str | None = None
    allowed_tools: list[str] | ToolFilter | None = None
    require_approval: Literal["always", "never"] | ApprovalFilter | None = None
    allowed_callers: list[Literal["direct"]] | None = None


class RequestedServer(Struct, frozen=True):
    """A server of a request, with what its client has set for it. `headers` may hold secrets."""

    label: str
    server: McpServer
    headers: Mapping[str, str]
    allowed: ToolFilter | None
    approval: ApprovalFilter | Literal["always", "never"]

    def choose(self, tools: Sequence[McpTool]) -> list[McpTool]:
        """The tools that the model may call."""
        return [tool for tool in tools if self.allowed is None or self.allowed.matches(tool)]

    def needs_consent(self, tool: McpTool) -> bool:
        """Whether the client must approve each call."""
        if isinstance(self.approval, ApprovalFilter):
            always, never = self.approval.always, self.approval.never
            if always is not None and always.matches(tool):
                return True
            return never is None or not never.matches(tool)
        return self.approval == "always"


def read_servers(tools: Sequence[object], servers: McpServers) -> list[RequestedServer]:
    """The servers in `tools`, which may hold other tools, too. Raises InvalidField and McpNotAllowed."""
    found: list[RequestedServer] = []
    for i, tool in enumerate(tools):
        if isinstance(tool, Mapping) and tool.get("type") == "mcp":
            one = _read_server(tool, servers, f"tools[{i}]")
            if any(other.label == one.label for other in found):
                at = f"tools[{i}].server_label"
                raise InvalidField(f"{at}: there is a server {one.label!r} already", at)
            found.append(one)
    return found


def _read_server(tool: Mapping[str, object], servers: McpServers, at: str) -> RequestedServer:
    for name in _NOT_HERE:
        if tool.get(name):
            raise InvalidField(f"{at}.{name}: it is not supported; send server_url", f"{at}.{name}")
    sent = {name: value for name, value in tool.items() if value is not None and name not in _NOT_HERE}
    try:
        asked = parse_as(sent, McpToolParam)
    except InvalidField as error:
        place = f"{at}.{error.param}" if error.param else at
        raise error.reword(f"{at}.{error}" if error.param else f"{at}: {error}", place) from None
    if not LABEL.fullmatch(asked.server_label):
        text = f"{at}.server_label: send a letter, then at most 63 letters, digits, _ and -"
        raise InvalidField(text, f"{at}.server_label")
    if asked.server_url is None:
        server = servers.by_label(asked.server_label, f"{at}.server_label")
    else:
        server = servers.by_url(asked.server_url, f"{at}.server_url")
    allowed = asked.allowed_tools
    if isinstance(allowed, list):
        allowed = ToolFilter(tool_names=allowed)
    approval = asked.require_approval or "always"
    return RequestedServer(asked.server_label, server, _read_headers(asked, at), allowed, approval)


def _read_headers(asked: McpToolParam, at: str) -> dict[str, str]:
    """Headers for the server. Raises InvalidField for one that is not the client's to set."""
    found = {}
    for name, value in (asked.headers or {}).items():
        place = f"{at}.headers"
        if not _HEADER_NAME.fullmatch(name) or name.lower() in _OURS:
            raise InvalidField(f"{place}: {name!r:.80} cannot be set here; leave it out", place)
        found[name] = value
    if asked.authorization is not None:
        if any(name.lower() == "authorization" for name in found):
            text = f"{at}.authorization: headers has Authorization already; send one of them"
            raise InvalidField(text, f"{at}.authorization")
        found["Authorization"] = f"Bearer {asked.authorization}"
    if len(found) > MAX_SENT_HEADERS:
        text = f"{at}.headers: {len(found)} are more than {MAX_SENT_HEADERS}"
        raise InvalidField(text, f"{at}.headers")
    for name, value in found.items():
        if len(value) > MAX_HEADER_CHARS or not _HEADER_VALUE.fullmatch(value):
            limit = f"at most {MAX_HEADER_CHARS} characters of Latin-1 without line breaks"
            raise InvalidField(f"{at}.headers: the value of {name!r:.80} is not {limit}", f"{at}.headers")
    return found


def redact(tool: Mapping[str, object]) -> dict[str, object]:
    """A tool as a response shows it: without what the client sent for its server alone."""
    found = {name: value for name, value in tool.items() if name != "authorization"}
    if tool.get("type") == "mcp" and isinstance(headers := tool.get("headers"), Mapping):
        found["headers"] = dict.fromkeys(headers, REDACTED)
    return found


@dataclass(frozen=True, slots=True)
class OfferedTool:
    """A server's tool as a function of the model. `name`: which the model calls it by."""

    source: RequestedServer
    tool: McpTool
    name: str

    def as_function(self) -> dict[str, object]:
        function: dict[str, object] = {"name": self.name}
        if self.tool.description:
            function["description"] = self.tool.description
        if self.tool.input_schema:
            function["parameters"] = self.tool.input_schema
        return {"type": "function", "function": function}


def offer_tools(
    listed: Sequence[tuple[RequestedServer, Sequence[McpTool]]], taken: frozenset[str]
) -> list[OfferedTool]:
    """All tools under names that differ, also from the client's own functions (`taken`).

    A name that is no function's, or that is there twice, gets its server's label before it. So no server can
    stand in for a function of the client, or for another server's tool.
    """
    all_tools = [(source, tool) for source, tools in listed for tool in source.choose(tools)]
    names = Counter(tool.name for _, tool in all_tools)
    used, found = set(taken), []
    for source, tool in all_tools:
        is_plain = _FUNCTION_NAME.fullmatch(tool.name) and names[tool.name] == 1
        name = tool.name if is_plain and tool.name not in used else name_with_label(source.label, tool.name)
        stem, number = name, 1
        while name in used or (name != tool.name and name in names):
            number += 1
            name = f"{stem[:60]}_{number}"
        used.add(name)
        found.append(OfferedTool(source, tool, name))
    return found


def name_with_label(label: str, name: str) -> str:
    """A tool's name as that of a function, with its server's before it."""
    return f"{label}__{_OTHER.sub('_', name)}"[:64]


def choose_among(choice: str | Mapping[str, object], offered: Mapping[str, OfferedTool]) -> object:
    """`tool_choice` as a chat has it, once the servers' tools have names. Raises InvalidField."""
    if isinstance(choice, str):
        return choice
    match choice.get("type"):
        case "mcp":
            names = _names_of(choice, offered)
            return _allow("required", names)
        case "allowed_tools":
            listed = choice.get("tools")
            entries = listed if isinstance(listed, list) else []
            names = [name for entry in entries for name in _names_of(entry, offered)]
            return _allow(choice.get("mode"), names)
        case "function":
            return {"type": "function", "function": {"name": choice["name"]}}
    return choice


def _allow(mode: object, names: Sequence[str]) -> dict[str, object]:
    return {"type": "allowed_tools", "mode": mode, "tools": [{"type": "function", "name": n} for n in names]}


def _names_of(entry: object, offered: Mapping[str, OfferedTool]) -> list[str]:
    """The functions that an entry of `tool_choice` names: of a server all, or one."""
    if not isinstance(entry, Mapping) or entry.get("type") != "mcp":
        name = entry.get("name") if isinstance(entry, Mapping) else None
        return [str(name)]
    label, name = entry.get("server_label"), entry.get("name")
    found = [
        one.name
        for one in offered.values()
        if one.source.label == label and (name is None or one.tool.name == name)
    ]
    if not found:
        what = f"the tool {name!r:.80}" if name is not None else "a tool"
        raise InvalidField(f"tool_choice: the server {label!r:.80} has not got {what}", "tool_choice")
    return found
