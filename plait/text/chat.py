"""Conversations to token ids: what every chat template has in common.

A template's own markers become control tokens; what a user wrote never does, whatever it looks like.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from plait.errors import BadTemplate, InvalidField

Message = Mapping[str, Any]


class ChatTemplate(Protocol):
    """Renders conversations. `name` says where it came from; `stop_token_ids` end a turn in its format."""

    @property
    def name(self) -> str: ...
    @property
    def stop_token_ids(self) -> frozenset[int]: ...

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> list[int]:
        """Token ids of a conversation, with the opening of the model's reply if that is asked for.

        Raises BadTemplate with the template's own message, InvalidField for what it cannot take.
        """
        ...

    def close(self) -> None:
        """Gives back what the template holds; it can be used again afterwards."""
        ...


def normalized(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as templates expect them: contents are strings, tool arguments are objects.

    Raises InvalidField, naming the message, for contents that are not text.
    """
    if not messages:
        raise InvalidField("messages: there is none; send at least one", "messages")
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _message(message: Message, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InvalidField(f"{where}: {type(message).__name__} is not a message like {{'role': …}}", where)
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise InvalidField(f"{where}.role: {role!r} is not a role like 'user'", f"{where}.role")
    plain = {key: value for key, value in message.items() if value is not None or key == "content"}
    plain["content"] = _content(message.get("content"), f"{where}.content")
    if message.get("tool_calls"):
        if not isinstance(message["tool_calls"], list | tuple):
            at = f"{where}.tool_calls"
            raise InvalidField(f"{at}: {type(message['tool_calls']).__name__} is not a list of calls", at)
        calls = enumerate(message["tool_calls"])
        plain["tool_calls"] = [_tool_call(call, f"{where}.tool_calls[{i}]") for i, call in calls]
    return plain


def _content(content: Any, where: str) -> str | None:
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise InvalidField(f"{where}: {type(content).__name__} is neither text nor a list of parts", where)
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind != "text" or not isinstance(part.get("text"), str):
            raise InvalidField(f"{where}[{i}]: {kind!r} parts are not supported, only text", f"{where}[{i}]")
        texts.append(part["text"])
    return "\n".join(texts)


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise InvalidField(f"{where}: a tool call needs a function with a name and arguments", where)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError) as error:
            at = f"{where}.function.arguments"
            raise InvalidField(f"{at}: not JSON ({error})", at) from error
    return {**call, "function": {**function, "arguments": arguments}}


def refuse_unread(name: str, kwargs: Mapping[str, Any], tools: object, known: frozenset[str]) -> None:
    """Raises InvalidField for tools or template arguments that a template would not look at."""
    if tools and "tools" not in known:
        raise InvalidField(f"tools: the chat template {name!r} has no place for tools", "tools")
    unknown = sorted(set(kwargs) - known)
    if unknown:
        raise InvalidField(
            f"chat_template_kwargs: the chat template {name!r} does not read {unknown[0]!r}",
            "chat_template_kwargs",
        )


def message_text(message: Mapping[str, Any], i: int) -> str:
    """The content of a message that must be text. Raises BadTemplate."""
    content = message["content"]
    if content is None:
        raise BadTemplate(
            f"messages[{i}].content: this chat template has no place for tool calls; send text",
            f"messages[{i}].content",
        )
    return str(content)
