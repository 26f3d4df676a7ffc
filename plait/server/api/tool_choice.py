"""Which tools a request lets the model call: OpenAI's `allowed_tools`, in both of its spellings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from plait.errors import InvalidField

if TYPE_CHECKING:
    from plait.text.reply_format import Speech

Tool = Mapping[str, Any]
XML_TOOLS = "xml_tools"
AT = "tool_choice.allowed_tools"


def allow_tools(tools: Sequence[Tool], choice: Any) -> tuple[list[Any], Any]:
    """The tools that may be called, and the choice among them: any other choice leaves both as they are.

    The template gets those tools alone. Raises InvalidField for an unknown mode, and for a tool that is not
    there.
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


def from_template_kwargs(
    tools: Sequence[Tool], kwargs: Mapping[str, Any], speech: Speech
) -> tuple[Sequence[Tool], Mapping[str, Any]]:
    """Tools, and the template's arguments without those of SmolLM3 that are tools.

    They reach the template and the parser of calls as tools of the request do. A bare function is accepted,
    as in that model's own examples. Raises InvalidField.
    """
    found, at = kwargs.get(XML_TOOLS), f"chat_template_kwargs.{XML_TOOLS}"
    if found is None or XML_TOOLS not in speech.variables:
        return tools, kwargs
    if not isinstance(found, list) or not all(isinstance(tool, Mapping) for tool in found):
        raise InvalidField(f"{at}: it must be a list of tools", at)
    if tools and found:
        raise InvalidField(f"{at}: the request has tools already; send them in one place", at)
    wrapped = [tool if "function" in tool else {"type": "function", "function": tool} for tool in found]
    return tools or wrapped, {name: value for name, value in kwargs.items() if name != XML_TOOLS}


def _name(tool: Any, at: str) -> str:
    name = _function(tool).get("name") or (tool.get("name") if isinstance(tool, Mapping) else None)
    if not isinstance(name, str):
        raise InvalidField(f'{at}: it must be {{"type": "function", "function": {{"name": …}}}}', at)
    return name


def _function(tool: Any) -> Mapping[str, Any]:
    found = tool.get("function") if isinstance(tool, Mapping) else None
    return found if isinstance(found, Mapping) else {}
