"""Which tools a request lets the model call: OpenAI's `allowed_tools`, in both of its spellings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from plait.errors import InvalidField

Tool = Mapping[str, Any]
AT = "tool_choice.allowed_tools"


def allowed(tools: Sequence[Tool], choice: Any) -> tuple[list[Any], Any]:
    """The tools that may be called, and the choice among them: any other choice leaves both as they are.

    The model is told of those tools alone. Raises InvalidField for an unknown mode, and for a tool that is
    not there.
    """
    if not isinstance(choice, Mapping) or choice.get("type") != "allowed_tools":
        return [*tools], choice
    found = choice.get("allowed_tools", choice)  # a chat nests it, /v1/responses does not
    mode, listed = (found.get("mode"), found.get("tools")) if isinstance(found, Mapping) else (None, None)
    if mode not in ("auto", "required"):
        raise InvalidField(f"{AT}.mode: it must be 'auto' or 'required'", f"{AT}.mode")
    if not isinstance(listed, list) or not listed:
        raise InvalidField(f"{AT}.tools: it must be a list of tools, and not empty", f"{AT}.tools")
    names = {_name(tool, f"{AT}.tools[{i}]") for i, tool in enumerate(listed)}
    kept = [tool for tool in tools if _function(tool).get("name") in names]
    if len(kept) < len(names):
        known = {_function(tool).get("name") for tool in kept}
        missing = sorted(names - known)[0]
        raise InvalidField(f"{AT}.tools: there is no tool {missing!r:.80} in tools", f"{AT}.tools")
    return kept, mode


def _name(tool: Any, at: str) -> str:
    name = _function(tool).get("name") or (tool.get("name") if isinstance(tool, Mapping) else None)
    if not isinstance(name, str):
        raise InvalidField(f'{at}: it must be {{"type": "function", "function": {{"name": …}}}}', at)
    return name


def _function(tool: Any) -> Mapping[str, Any]:
    found = tool.get("function") if isinstance(tool, Mapping) else None
    return found if isinstance(found, Mapping) else {}
