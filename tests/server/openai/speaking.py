"""A chat template that thinks and calls tools, in Hermes' way, for the fake engine and for the real one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tests.server.fake import TurnTemplate

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather somewhere.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 6},
                "days": {"type": "integer", "minimum": 0, "maximum": 9},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
TOOLS = [WEATHER, CLOCK]


def said_call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


class SpeakingTemplate(TurnTemplate):
    """Records what it renders in `asked`, the last at the end."""

    name, source = "speaking", "{{ tools }} <tool_call> <think> </think> {{ enable_thinking }}"
    variables = frozenset({"messages", "tools", "enable_thinking", "add_generation_prompt"})

    def __init__(self) -> None:
        self.asked: list[tuple[Sequence[Mapping[str, Any]], dict[str, Any]]] = []

    def render(self, messages: Sequence[Mapping[str, Any]], /, **options: Any) -> list[int]:
        self.asked.append((messages, options))
        return super().render(messages)
