"""How a model's own format of tool calls is found, and the tools and calls of a request in it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from plait.errors import InvalidField
from plait.text.output.call_formats import ToolFormat
from plait.text.output.call_grammar import Structure, begin_thinking, frame_call, required_tools
from plait.text.output.format_table import FORMATS
from plait.text.output.reasoning import ReasoningFormat, unknown_format

Tool = Mapping[str, object]
"""A tool as requests name it: `{"type": "function", "function": {"name": …, "parameters": …}}`."""


def tool_schemas(tools: Sequence[Tool]) -> dict[str, Mapping[str, object]]:
    """Name → JSON schema of the arguments. Raises InvalidField for what is not a tool with a name."""
    schemas: dict[str, Mapping[str, object]] = {}
    for i, tool in enumerate(tools):
        at = f"tools[{i}]"
        function = tool.get("function") if isinstance(tool, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(name, str) or not name:
            raise InvalidField(f"{at}: a tool needs a function with a name", at)
        if name in schemas:
            raise InvalidField(f"{at}: there is a tool {name!r} already", f"{at}.function.name")
        schema = function.get("parameters")
        if schema is not None and not isinstance(schema, Mapping):
            raise InvalidField(f"{at}: its parameters are not a JSON schema", f"{at}.function.parameters")
        schemas[name] = schema or {"type": "object", "properties": {}}
    return schemas


def tool_format(
    template: str, special_tokens: Collection[str] = (), name: str | None = None
) -> ToolFormat | None:
    """The format in which a model writes tool calls, or None. `name` chooses one; "none" chooses none.

    Found in the text of its chat template; failing that, by the control tokens of its vocabulary; failing
    that, a template that mentions tools at all gets "json". Raises ConfigError for an unknown name.
    """
    if name == "none":
        return None
    if name is not None:
        if name not in FORMATS:
            raise unknown_format("tool", name, FORMATS)
        return FORMATS[name]
    for form in FORMATS.values():
        signs = (form.syntax.opens[:1],) if form.signs is None else form.signs
        if any(all(sign in template for sign in group) for group in signs):
            return form
    for form in FORMATS.values():
        if form.tokens and all(token in special_tokens for token in form.tokens):
            return form
    return FORMATS["json"] if "tools" in template else None


def call_grammar(
    form: ToolFormat,
    tools: Sequence[Tool],
    choice: object,
    *,
    parallel: bool = True,
    reasoning: ReasoningFormat | None = None,
    starts_open: bool = False,
) -> Structure | None:
    """What a reply must be under `tool_choice`; None where no call is demanded.

    "required": one call or, if `parallel`, several, of any tool; a named function: one call of it. Thinking
    may come first. Raises InvalidField for a choice that cannot be honoured.
    """
    schemas = tool_schemas(tools)
    names = required_tools(schemas, choice)
    if not names:
        return None
    several = parallel and choice == "required"
    calls = frame_call(form.frame, form.markers, {name: schemas[name] for name in names}, several)
    return (*begin_thinking(reasoning, starts_open), *calls)
