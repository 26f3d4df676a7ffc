"""How a chat template takes tool calls, found by rendering some with it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from plait.errors import BadTemplate
from plait.text.chat.sandbox import TemplateEnded

_ARGUMENTS = {"probe_key": "probe value"}
_TEXT = json.dumps(_ARGUMENTS)
_IDS = ("abcdefgh1", "abcdefgh2")  # as long as Mistral's templates demand
TOOL = {
    "type": "function",
    "function": {
        "name": "probe_tool",
        "description": "A tool.",
        "parameters": {"type": "object", "properties": {"probe_key": {}}},
    },
}
QUESTION = {"role": "user", "content": "probe question"}
Render = Callable[[Sequence[Mapping[str, Any]]], str]


@dataclass(frozen=True, slots=True)
class CallsTaken:
    """`as_text`: arguments must be JSON text, not an object; `several`: a message may hold more than one."""

    as_text: bool = False
    several: bool = True


def probe_calls(render: Render) -> CallsTaken:
    """How a template takes calls. `render` renders messages, and raises BadTemplate where it refuses them.

    Raises TemplateEnded when `render` does.
    """
    as_object, as_text = _render_calls(render, _ARGUMENTS), _render_calls(render, _TEXT)
    wants_text = not _holds_arguments(as_object) and _TEXT in as_text
    arguments: Any = _TEXT if wants_text else _ARGUMENTS
    works_at_all = bool(as_text if wants_text else as_object)
    return CallsTaken(wants_text, not works_at_all or bool(_render_calls(render, arguments, arguments)))


def _holds_arguments(text: str) -> bool:
    """Whether the key and the value are there, and not as Python would print them."""
    return all(part in text for item in _ARGUMENTS.items() for part in item) and str(_ARGUMENTS) not in text


def _render_calls(render: Render, *arguments: Any) -> str:
    """A conversation with these calls; "" if it is refused."""
    named = list(zip(_IDS, arguments, strict=False))
    calls = [
        {"id": i, "type": "function", "function": {"name": "probe_tool", "arguments": a}} for i, a in named
    ]
    answers = [
        {"role": "tool", "tool_call_id": i, "name": "probe_tool", "content": "probe answer"} for i, _ in named
    ]
    try:
        return render([QUESTION, {"role": "assistant", "content": "", "tool_calls": calls}, *answers])
    except TemplateEnded:
        raise  # what does not end once is not tried again
    except BadTemplate:
        return ""
