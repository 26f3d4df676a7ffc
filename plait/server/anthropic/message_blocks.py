"""The input of /v1/messages as a chat: content blocks become messages, calls and results of tools."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct, field

from plait.engine.admission import MAX_CACHE_PLACES
from plait.errors import InvalidField
from plait.server.api.parse_fields import string_of
from plait.server.api.unread_keys import HARMLESS, list_keys

_MESSAGE_KEYS = frozenset({"role", "content"})
_BLOCK_KEYS = HARMLESS | {
    *("type", "text", "thinking", "signature", "name", "input", "tool_use_id", "content", "is_error"),
    *("caller", "toolset_name"),  # of blocks that another server made
}
# Input is always streamed as it comes.
_TOOL_KEYS = frozenset({"type", "name", "description", "input_schema", "strict", "eager_input_streaming"})


class MessageConversation(Struct):
    """Messages of a chat, and where in the client's input each began. `cached`: behind how many of them a
    block has `cache_control`."""

    messages: list[dict[str, object]] = field(default_factory=list)
    places: list[str] = field(default_factory=list)
    cached: list[int] = field(default_factory=list)

    def add(self, place: str, **message: object) -> None:
        self.messages.append(message)
        self.places.append(place)


def conversation(messages: Sequence[Any], system: str | Sequence[Any] | None) -> MessageConversation:
    """The chat that messages stand for. Raises InvalidField, naming the block."""
    chat = MessageConversation()
    if all(isinstance(one, Mapping) and one.get("role") == "system" for one in messages):
        raise InvalidField("messages: there is none of a user or an assistant; send at least one", "messages")
    if system:
        chat.add("system", role="system", content=_text(system, "system"))
        _mark_cached(chat, system, "system")
    for i, message in enumerate(messages):
        at = f"messages[{i}]"
        role = message.get("role") if isinstance(message, Mapping) else None
        if role not in ("user", "assistant", "system"):
            text = f"{at}.role: {role!r:.80} is not 'user', 'assistant' or 'system'"
            raise InvalidField(text, f"{at}.role")
        content = message.get("content")
        if isinstance(content, str):
            chat.add(at, role=role, content=content)
        elif not isinstance(content, list) or not content:
            raise InvalidField(f"{at}.content: it must be text, or a list of blocks", f"{at}.content")
        elif role == "system":
            chat.add(at, role=role, content=_text(content, f"{at}.content"))
        elif role == "user":
            _add_user(chat, content, at)
        else:
            _add_assistant(chat, content, at)
        _mark_cached(chat, content, f"{at}.content")
    if len(chat.cached) > MAX_CACHE_PLACES:
        text = f"cache_control: {len(chat.cached)} blocks have it; at most {MAX_CACHE_PLACES} may"
        raise InvalidField(text, "messages")
    return chat


def _mark_cached(chat: MessageConversation, content: object, at: str) -> None:
    """Remember that state is worth keeping behind what was added last, once for each block that says so."""
    for i, block in enumerate(content if isinstance(content, list) else ()):
        control = block.get("cache_control") if isinstance(block, Mapping) else None
        if control is None:
            continue
        check_cache_control(control, f"{at}[{i}].cache_control")
        chat.cached.append(len(chat.messages))


def check_cache_control(control: object, at: str) -> None:
    """Raises InvalidField for what marks no place of a cache."""
    if not isinstance(control, Mapping) or control.get("type") != "ephemeral":
        raise InvalidField(f'{at}: it must be {{"type": "ephemeral"}}', at)


def _add_user(chat: MessageConversation, blocks: Sequence[Any], at: str) -> None:
    """Add a user's message. Results of tools become messages of their own, before the user's text."""
    said = []
    for i, block in enumerate(blocks):
        place = f"{at}.content[{i}]"
        match _kind(block, place):
            case "text":
                said.append(string_of(block, "text", place))
            case "tool_result":
                called = string_of(block, "tool_use_id", place)
                found = block.get("content")
                text = _text(found, f"{place}.content") if found else ""
                if block.get("is_error"):
                    text = f"Error: {text}"
                chat.add(place, role="tool", tool_call_id=called, content=text)
            case other:
                raise _refuse_block(other, place)
    if said:
        chat.add(at, role="user", content="\n".join(said))


def _add_assistant(chat: MessageConversation, blocks: Sequence[Any], at: str) -> None:
    said, thought, calls = [], [], []
    for i, block in enumerate(blocks):
        place = f"{at}.content[{i}]"
        match _kind(block, place):
            case "text":
                said.append(string_of(block, "text", place))
            case "thinking":
                thought.append(string_of(block, "thinking", place))
            case "tool_use":
                calls.append(_call(block, place))
            case other:
                raise _refuse_block(other, place)
    more: dict[str, object] = {"tool_calls": calls} if calls else {}
    if thought:
        more["reasoning_content"] = "\n".join(thought)
    content = "\n".join(said) if said or not calls else None
    chat.add(at, role="assistant", content=content, **more)


def _call(block: Mapping[str, object], at: str) -> dict[str, object]:
    arguments = block.get("input")
    if not isinstance(arguments, dict):
        raise InvalidField(f"{at}.input: it must be an object", f"{at}.input")
    written = msgspec.json.encode(arguments).decode()
    function = {"name": string_of(block, "name", at), "arguments": written}
    return {"id": string_of(block, "id", at), "type": "function", "function": function}


def _text(content: object, at: str) -> str:
    """Text, or a list of text blocks as one."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidField(f"{at}: it must be text, or a list of text blocks", at)
    texts = []
    for i, block in enumerate(content):
        if (kind := _kind(block, f"{at}[{i}]")) != "text":
            raise _refuse_block(kind, f"{at}[{i}]")
        texts.append(string_of(block, "text", f"{at}[{i}]"))
    return "\n".join(texts)


def _kind(block: object, at: str) -> str:
    kind = block.get("type") if isinstance(block, Mapping) else None
    if not isinstance(kind, str):
        raise InvalidField(f"{at}: it must be an object with a type", at)
    return kind


def _refuse_block(kind: str, at: str) -> InvalidField:
    return InvalidField(f"{at}: {kind!r:.80} blocks are not supported here", at)


def list_unread(messages: Sequence[object], system: object, tools: Sequence[object]) -> list[str]:
    """Keys of messages, blocks and tools that nothing reads, each once: `tools.input_examples`."""
    blocks = _contents(messages)
    results = [block for block in blocks if isinstance(block, Mapping) and block.get("type") == "tool_result"]
    return [
        *list_keys(system if isinstance(system, list) else (), _BLOCK_KEYS, "system"),
        *list_keys(messages, _MESSAGE_KEYS, "messages"),
        *list_keys(blocks, _BLOCK_KEYS, "messages.content"),
        *list_keys(_contents(results), _BLOCK_KEYS, "messages.content.content"),
        *list_keys(tools, _TOOL_KEYS, "tools"),
    ]


def _contents(objects: Iterable[object]) -> list[object]:
    """The parts of which lists of contents are."""
    lists = (one.get("content") for one in objects if isinstance(one, Mapping))
    return [part for parts in lists if isinstance(parts, list) for part in parts]


def chat_tools(tools: Sequence[object]) -> list[dict[str, Any]]:
    """Tools as a chat describes them. Raises InvalidField for tools that are run by others."""
    found = []
    for i, tool in enumerate(tools):
        at = f"tools[{i}]"
        if not isinstance(tool, Mapping):
            raise InvalidField(f"{at}: it must be an object with a name", at)
        if tool.get("type") not in (None, "custom"):
            text = f"{at}.type: {tool['type']!r:.80} cannot be run here; only tools of the client can"
            raise InvalidField(text, f"{at}.type")
        function = {"name": string_of(tool, "name", at), "parameters": tool.get("input_schema") or {}}
        function |= {name: tool[name] for name in ("description", "strict") if tool.get(name)}
        found.append({"type": "function", "function": function})
    return found


def chat_tool_choice(choice: Mapping[str, object]) -> dict[str, object]:
    """`tool_choice` and `parallel_tool_calls` of a chat. Raises InvalidField."""
    found: dict[str, object] = {}
    match choice.get("type"):
        case "auto" | "none" as kind:
            found["tool_choice"] = kind
        case "any":
            found["tool_choice"] = "required"
        case "tool":
            name = string_of(choice, "name", "tool_choice")
            found["tool_choice"] = {"type": "function", "function": {"name": name}}
        case other:
            text = f"tool_choice.type: {other!r:.80} is not one of auto, any, tool, none"
            raise InvalidField(text, "tool_choice.type")
    if choice.get("disable_parallel_tool_use"):
        found["parallel_tool_calls"] = False
    return found


def convert_thinking(found: Mapping[str, object]) -> dict[str, object]:
    """`thinking` in the words of a chat. Raises InvalidField."""
    sent: dict[str, object] = {}
    match found.get("type"):
        case "disabled":
            sent["reasoning_effort"] = "none"
        case "enabled":
            budget = found.get("budget_tokens")
            if type(budget) is not int or budget < 1:
                at = "thinking.budget_tokens"
                raise InvalidField(f"{at}: it must be a whole number of at least 1", at)
            sent["thinking_token_budget"] = budget
        case None if found:
            raise InvalidField("thinking.type: it is required", "thinking.type")
        case None | "adaptive":
            pass
        case other:
            text = f"thinking.type: {other!r:.80} is not one of enabled, disabled, adaptive"
            raise InvalidField(text, "thinking.type")
    if found.get("display") == "omitted":
        sent["include_reasoning"] = False
    return sent


def keeps_context(value: object) -> bool:
    """Whether this `context_management` takes nothing out of a conversation: agents always send such ones."""
    edits = value.get("edits") if isinstance(value, Mapping) else None
    return isinstance(edits, list) and all(
        isinstance(edit, Mapping)
        and str(edit.get("type")).startswith("clear_thinking_")
        and edit.get("keep") == "all"
        for edit in edits
    )


def chat_output(found: Mapping[str, object], form: Mapping[str, object] | None = None) -> dict[str, object]:
    """`output_config` in the words of a chat; `form`: its format under an older name. Raises InvalidField."""
    if form is not None:
        if found.get("format") not in (None, form):
            text = "output_format: output_config.format is another one; send one of them"
            raise InvalidField(text, "output_format")
        found = {**found, "format": form}
    sent: dict[str, object] = {}
    for name, value in found.items():
        if value is None:
            continue
        if name == "effort":
            sent["reasoning_effort"] = value
        elif name == "format" and isinstance(value, Mapping) and value.get("type") == "json_schema":
            schema = {"name": "output", "schema": value.get("schema")}
            sent["response_format"] = {"type": "json_schema", "json_schema": schema}
        else:
            at = f"output_config.{name}"
            raise InvalidField(f"{at}: this server cannot honour it; leave it out", at)
    return sent
