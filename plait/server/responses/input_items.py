"""Items of an input as a chat's messages; tools, choices and formats in the places of a chat."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from msgspec import Struct, field

from plait.errors import InvalidField
from plait.server.api.parse_fields import string_of
from plait.server.responses.mcp_tools import name_with_label

ROLES = frozenset({"user", "assistant", "system", "developer"})
HEAD = frozenset({"system", "developer"})
REFUSED = "The user refused this call"
NameTool = Callable[[str, str], str]  # a server's label and its tool's name -> the name of a function
_TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}


class ResponseConversation(Struct):
    """Messages of a chat, and where in the client's input each began."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    places: list[str] = field(default_factory=list)
    name_tool: NameTool = name_with_label
    approvals: dict[str, Mapping[str, object]] = field(default_factory=dict)  # requests of them, by id
    _reasoning: str = ""

    def add(self, message: dict[str, Any], place: str) -> None:
        if self._reasoning and message["role"] == "assistant":
            message = {**message, "reasoning_content": self._reasoning}
        self._reasoning = ""
        self.messages.append(message)
        self.places.append(place)

    def think(self, text: str) -> None:
        """Add reasoning that came before the assistant's next message."""
        self._reasoning += text

    def call(self, call: Mapping[str, object], place: str) -> None:
        """Add a call of a tool to the assistant's last message, or as a message of its own."""
        last = self.messages[-1] if self.messages else {}
        if last.get("role") != "assistant" or self._reasoning:
            self.add({"role": "assistant", "content": None, "tool_calls": [call]}, place)
        else:
            last.setdefault("tool_calls", []).append(call)

    def call_server(self, call: Mapping[str, object], text: str, place: str) -> None:
        """Add a call of a server's tool with its result."""
        label, name, given = (string_of(call, one, place) for one in ("server_label", "name", "arguments"))
        call_id = string_of(call, "id", place)
        function = {"name": self.name_tool(label, name), "arguments": given}
        self.call({"id": call_id, "type": "function", "function": function}, place)
        self.add({"role": "tool", "tool_call_id": call_id, "content": text}, place)

    def instruct(self, text: str) -> None:
        """Add instructions at the front. Templates know one system message, so an old one is joined."""
        first = self.messages[0] if self.messages else {}
        if first.get("role") in HEAD and isinstance(first["content"], str):
            first["content"] = f"{text}\n\n{first['content']}"
        else:
            self.messages.insert(0, {"role": "system", "content": text})
            self.places.insert(0, "instructions")


def conversation(
    found: str | Sequence[object],
    instructions: str | None,
    earlier: Sequence[object] = (),
    output: Sequence[object] = (),
    name_tool: NameTool = name_with_label,
) -> ResponseConversation:
    """The chat that an input stands for. Raises InvalidField, naming the item.

    `earlier`: the items of the responses before it; `output`: those that its own response has made so far.
    `name_tool`: the function of a server's tool.
    """
    chat = ResponseConversation(name_tool=name_tool)
    for item in earlier:
        _take(chat, item, "previous_response_id")
    if isinstance(found, str):
        chat.add({"role": "user", "content": found}, "input")
    else:
        for i, item in enumerate(found):
            _take(chat, item, f"input[{i}]")
        if not chat.messages:
            raise InvalidField("input: it has no message; send at least one", "input")
    for item in output:
        _take(chat, item, "output")
    if instructions:
        chat.instruct(instructions)
    return chat


def check_items(items: Sequence[object]) -> None:
    """Raises InvalidField for an item that no conversation can have, naming its place in `items`."""
    chat = ResponseConversation()
    for i, item in enumerate(items):
        _take(chat, item, f"items[{i}]")


def _take(chat: ResponseConversation, item: object, at: str) -> None:
    if not isinstance(item, Mapping):
        raise InvalidField(f"{at}: it must be an object with a type", at)
    match item.get("type") or "message":
        case "message":
            role = item.get("role")
            if not isinstance(role, str) or role not in ROLES:
                roles = ", ".join(sorted(ROLES))
                raise InvalidField(f"{at}.role: {role!r:.80} is not one of {roles}", f"{at}.role")
            chat.add({"role": role, "content": _text(item.get("content"), f"{at}.content")}, at)
        case "function_call":
            function = {name: string_of(item, name, at) for name in ("name", "arguments")}
            call = {"id": string_of(item, "call_id", at), "type": "function", "function": function}
            chat.call(call, at)
        case "function_call_output":
            text = _text(item.get("output"), f"{at}.output")
            called = string_of(item, "call_id", at)
            chat.add({"role": "tool", "tool_call_id": called, "content": text}, at)
        case "reasoning":
            chat.think(_reasoning(item, at))
        case "mcp_call" | "mcp_approval_request" | "mcp_approval_response" | "mcp_list_tools" as kind:
            _take_server_item(chat, item, kind, at)
        case "item_reference":
            text = f"{at}: this item can no longer be referred to; send the item itself"
            raise InvalidField(text, at)
        case other:
            raise InvalidField(f"{at}.type: items of type {other!r:.80} are not supported", f"{at}.type")


def _take_server_item(chat: ResponseConversation, item: Mapping[str, object], kind: str, at: str) -> None:
    """A list of tools is in no message, and a call that waits for consent was not made."""
    if kind == "mcp_call":
        chat.call_server(item, _server_output(item), at)
    elif kind == "mcp_approval_request":
        chat.approvals[string_of(item, "id", at)] = item
    elif kind == "mcp_approval_response":
        _take_approval(chat, item, at)


def _take_approval(chat: ResponseConversation, item: Mapping[str, object], at: str) -> None:
    """The model learns of a refused call; one that was approved becomes an `mcp_call`."""
    wanted = string_of(item, "approval_request_id", at)
    if wanted not in chat.approvals:
        text = f"{at}.approval_request_id: there is no mcp_approval_request {wanted!r:.80} before it"
        raise InvalidField(text, f"{at}.approval_request_id")
    if not isinstance(item.get("approve"), bool):
        raise InvalidField(f"{at}.approve: it must be true or false", f"{at}.approve")
    if item["approve"] is False:
        reason = item.get("reason")
        why = f": {reason}" if isinstance(reason, str) and reason else ""
        chat.call_server(chat.approvals[wanted], f"{REFUSED}{why}", at)


def _server_output(item: Mapping[str, object]) -> str:
    """What the model reads of a call: its output, or else its error."""
    if isinstance(output := item.get("output"), str):
        return output
    error = item.get("error")
    if not isinstance(error, Mapping):
        return error if isinstance(error, str) else "The call was not made."
    content = error.get("content")
    parts = content if isinstance(content, list) else []
    texts = [str(part.get("text", "")) for part in parts if isinstance(part, Mapping)]
    return "The call failed: " + ("\n".join(texts) or str(error.get("message", "")))


def _text(content: object, at: str) -> str:
    """Text, or a list of parts of text as one."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise InvalidField(f"{at}: it must be text, or a list of parts of text", at)
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if not isinstance(kind, str) or kind not in _TEXTS:
            raise InvalidField(f"{at}[{i}]: {kind!r:.80} parts are not supported, only text", f"{at}[{i}]")
        texts.append(string_of(part, _TEXTS[kind], f"{at}[{i}]"))
    return "\n".join(texts)


def _reasoning(item: Mapping[str, object], at: str) -> str:
    if item.get("encrypted_content") is not None:
        text = f"{at}.encrypted_content: it was not made here and cannot be read; send the content"
        raise InvalidField(text, f"{at}.encrypted_content")
    parts = item.get("content") or item.get("summary") or []
    if not isinstance(parts, list) or not all(isinstance(part, Mapping) for part in parts):
        raise InvalidField(f"{at}.content: it must be a list of parts of text", f"{at}.content")
    return "\n".join(string_of(part, "text", f"{at}.content[{i}]") for i, part in enumerate(parts))


def chat_tools(tools: Sequence[Any]) -> list[dict[str, Any]]:
    """Functions as a chat describes them. Raises InvalidField for tools that nothing here can run.

    Those of MCP servers are left out: they are known when the servers have listed them.
    """
    found = []
    for i, tool in enumerate(tools):
        kind = tool.get("type") if isinstance(tool, Mapping) else type(tool).__name__
        if kind == "mcp":
            continue
        if kind != "function":
            text = f"tools[{i}].type: {kind!r:.80} cannot be run here; send functions of yours, or mcp"
            raise InvalidField(text, f"tools[{i}].type")
        names = ("name", "description", "parameters", "strict")
        function = {name: tool[name] for name in names if tool.get(name) is not None}
        found.append({"type": "function", "function": function})
    return found


def chat_tool_choice(choice: str | Mapping[str, object], *, has_servers: bool = False) -> object:
    """`tool_choice` as a chat has it; with MCP servers it may name one of those. Raises InvalidField."""
    if isinstance(choice, str):
        return choice
    if choice.get("type") == "function" and isinstance(choice.get("name"), str):
        return {"type": "function", "function": {"name": choice["name"]}}
    if choice.get("type") == "allowed_tools" or (has_servers and choice.get("type") == "mcp"):
        return choice
    raise InvalidField(
        f"tool_choice: {choice!r:.80} is not supported; send 'none', 'auto', 'required' or a function",
        "tool_choice",
    )


def chat_format(found: Mapping[str, object]) -> dict[str, object]:
    """`text.format` as a chat's `response_format`."""
    if found.get("type") != "json_schema":
        return dict(found)
    names = ("name", "description", "schema", "strict")
    return {
        "type": "json_schema",
        "json_schema": {name: found[name] for name in names if found.get(name) is not None},
    }
