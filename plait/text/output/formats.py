"""The formats in which models write tool calls: one table, and how a model's own format is found.

A new format is one entry here; if it is of a new kind, it needs one more reader. Order matters: the first
entry that a template fits is taken, so the particular come before the general.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from plait.errors import ConfigError, InvalidField
from plait.text.chat.template import Message
from plait.text.output.call_grammar import (
    NUMBER,
    Frame,
    Structure,
    begin_thinking,
    frame_call,
    json_frame,
    required_tools,
)
from plait.text.output.history import with_plans, with_short_ids
from plait.text.output.json_calls import one_or_list
from plait.text.output.marked_calls import (
    DEEPSEEK,
    GLM,
    KIMI,
    deepseek,
    function_tag,
    harmony,
    kimi,
    lines,
    mistral,
    tool_call,
)
from plait.text.output.parser import CallSyntax, OutputParser
from plait.text.output.python_calls import call_lines, call_list
from plait.text.output.reasoning import COHERE_END, COHERE_FINAL, HARMONY_FINAL, ReasoningFormat

Tool = Mapping[str, Any]
"""A tool as requests name it: `{"type": "function", "function": {"name": …, "parameters": …}}`."""


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """One format of tool calls.

    `syntax` is how its calls are read, `frame` how one that is demanded is written. `signs`: groups of texts;
    a chat template that holds all of a group is of this kind. `tokens`: control tokens that mean this kind
    where no template decides it. `id_length`: of the ids that its templates take; `plan`: the key under which
    they take what was thought before calls. `asides` (opening, closing), `final` and `final_end`: the markers
    of text next to calls, where that has markers.
    """

    name: str
    syntax: CallSyntax
    frame: Frame
    signs: tuple[tuple[str, ...], ...] = ()
    tokens: tuple[str, ...] = ()
    id_length: int | None = None
    plan: str = ""
    asides: tuple[tuple[str, str], ...] = ()
    final: str = ""
    final_end: str = ""

    @property
    def markers(self) -> frozenset[str]:
        """Every marker that must appear in the text: see `OutputParser.shown`."""
        return frozenset(self.syntax.markers)

    def parser(
        self,
        tools: Sequence[Tool],
        make_id: Callable[[], str],
        *,
        reasoning: ReasoningFormat | None = None,
        starts_open: bool = False,
        may_think: bool = True,
        parallel: bool = True,
    ) -> OutputParser:
        """A reader for one reply. `tools` are the request's; `make_id` gives a new id for each call.

        `parallel=False`: at most one call is emitted. See `OutputParser` for the rest.
        """
        return OutputParser(
            calls=self.syntax,
            reasoning=reasoning,
            tools=tool_schemas(tools),
            make_id=make_id,
            starts_open=starts_open,
            may_think=may_think,
            most_calls=None if parallel else 1,
        )

    def history(self, messages: Sequence[Message]) -> Sequence[Message]:
        """The conversation as templates of this kind take it: see `with_short_ids` and `with_plans`."""
        if self.plan:
            messages = with_plans(messages, self.plan)
        return messages if self.id_length is None else with_short_ids(messages, self.id_length)


def tool_schemas(tools: Sequence[Tool]) -> dict[str, Mapping[str, Any]]:
    """Name → JSON schema of the arguments. Raises InvalidField for what is not a tool with a name."""
    schemas: dict[str, Mapping[str, Any]] = {}
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


_object_or_list = one_or_list()
_deepseek = CallSyntax(
    deepseek,
    (DEEPSEEK["begin"],),
    (DEEPSEEK["close"],),
    (DEEPSEEK["call"], DEEPSEEK["separator"], DEEPSEEK["end"]),
)
_mistral = CallSyntax(mistral, ("[TOOL_CALLS]",), (), ("[ARGS]", "[CALL_ID]"))
FORMATS: Mapping[str, ToolFormat] = {
    form.name: form
    for form in (
        ToolFormat(
            "agent",
            CallSyntax(_object_or_list, ("<|function|>",), ("<|/function|>",)),
            frame=json_frame(separator="\n", tag="<|function|>"),
            signs=(("<|function|>",),),
            tokens=("<|function|>", "<|/function|>"),
        ),
        ToolFormat(
            "deepseek",
            _deepseek,
            frame=Frame(
                before=f"{DEEPSEEK['call']}function{DEEPSEEK['separator']}",
                between="\n```json\n",
                after=f"\n```{DEEPSEEK['end']}",
                opening=DEEPSEEK["begin"],
                separator="\n",
                closing=DEEPSEEK["close"],
            ),
            signs=((DEEPSEEK["begin"], "```json"),),
            tokens=(DEEPSEEK["begin"],),
        ),
        ToolFormat(
            "deepseek_v31",
            _deepseek,
            frame=Frame(
                before=DEEPSEEK["call"],
                between=DEEPSEEK["separator"],
                after=DEEPSEEK["end"],
                opening=DEEPSEEK["begin"],
                closing=DEEPSEEK["close"],
            ),
            signs=((DEEPSEEK["begin"],),),
        ),
        ToolFormat(
            "mistral_args",
            _mistral,
            frame=Frame("[TOOL_CALLS]", "[ARGS]", ""),
            signs=(("[TOOL_CALLS]", "[ARGS]"),),
            tokens=("[TOOL_CALLS]", "[ARGS]"),
            id_length=9,
        ),
        ToolFormat(
            "mistral",
            _mistral,
            frame=json_frame("[TOOL_CALLS] [", "]"),
            signs=(("[TOOL_CALLS]",),),
            tokens=("[TOOL_CALLS]",),
            id_length=9,
        ),
        ToolFormat(
            "qwen_xml",
            CallSyntax(tool_call, ("<tool_call>",), ("</tool_call>",)),
            frame=Frame(
                "<tool_call>\n<function=", ">\n", "</function>\n</tool_call>", separator="\n", style="xml"
            ),
            signs=(("<tool_call>", "<function="),),
        ),
        ToolFormat(
            "glm",
            CallSyntax(tool_call, ("<tool_call>",), ("</tool_call>",), GLM),
            frame=Frame("<tool_call>", "", "</tool_call>", style="glm"),
            signs=(("<tool_call>", "<arg_key>"),),
            tokens=("<tool_call>", "<arg_key>"),
        ),
        ToolFormat(
            "hermes",
            CallSyntax(tool_call, ("<tool_call>",), ("</tool_call>",)),
            frame=json_frame(separator="\n", tag="<tool_call>"),
            signs=(("<tool_call>",),),
        ),
        ToolFormat(
            "lfm2",
            CallSyntax(call_list(), ("<|tool_call_start|>",), ("<|tool_call_end|>",)),
            frame=Frame(
                before="",
                between="(",
                after=")",
                opening="<|tool_call_start|>[",
                separator=", ",
                closing="]<|tool_call_end|>",
                style="python",
            ),
            signs=(("<|tool_call_start|>",),),
            tokens=("<|tool_call_start|>",),
        ),
        ToolFormat(
            "granite",
            CallSyntax(_object_or_list, ("<|tool_call|>", "<tool_call>"), ("<|/tool_call|>", "</tool_call>")),
            frame=json_frame("<|tool_call|>[", "]"),
            signs=(("<|tool_call|>",),),
            tokens=("<|tool_call|>",),
        ),
        ToolFormat(
            "nemotron",
            CallSyntax(_object_or_list, ("<TOOLCALL>",), ("</TOOLCALL>",)),
            frame=json_frame("<TOOLCALL>[", "]</TOOLCALL>"),
            signs=(("<TOOLCALL>",),),
        ),
        ToolFormat(
            "minimax",
            CallSyntax(_object_or_list, ("<tool_calls>",), ("</tool_calls>",)),
            frame=json_frame("<tool_calls>\n", "\n</tool_calls>", "\n"),
            signs=tuple(("<tool_calls>", f"<tool_calls>{gap}{{") for gap in ("\n", "\\n", "")),
        ),
        ToolFormat(
            "jamba",
            CallSyntax(_object_or_list, ("<tool_calls>",), ("</tool_calls>",)),
            frame=json_frame("<tool_calls>[", "]</tool_calls>"),
            signs=(("<tool_calls>",),),
        ),
        ToolFormat(
            "function_tag",
            CallSyntax(function_tag, ("<function=",), ("</function>",)),
            frame=Frame("<function=", ">", "</function>"),
            signs=(("<function=", "</function>"),),
        ),
        ToolFormat(
            "kimi",
            CallSyntax(
                kimi, (KIMI["begin"],), (KIMI["close"],), (KIMI["call"], KIMI["separator"], KIMI["end"])
            ),
            frame=Frame(
                before=f"{KIMI['call']}functions.",
                between=f":{NUMBER}{KIMI['separator']}",
                after=KIMI["end"],
                opening=KIMI["begin"],
                closing=KIMI["close"],
            ),
            signs=((KIMI["begin"],),),
            tokens=(KIMI["begin"],),
        ),
        ToolFormat(
            "olmo",
            CallSyntax(call_lines, ("<function_calls>",), ("</function_calls>",)),
            frame=Frame("", "(", ")", "<function_calls>\n", "\n", "\n</function_calls>", "python"),
            signs=(("<function_calls>",),),
        ),
        ToolFormat(
            "phi",
            CallSyntax(_object_or_list, ("functools",)),
            frame=json_frame("functools[", "]"),
            signs=(("functools[",),),
        ),
        ToolFormat(
            "harmony",
            CallSyntax(
                harmony,
                (
                    "<|channel|>commentary to=functions.",
                    "<|channel|>analysis to=functions.",
                    "<|start|>assistant to=functions.",
                ),
                ("<|call|>",),
                ("<|constrain|>", "<|message|>"),
            ),
            frame=Frame("<|channel|>commentary to=functions.", " <|constrain|>json<|message|>", "<|call|>"),
            signs=(("<|channel|>", "to=functions."), ("<|channel|>", "<|constrain|>")),
            tokens=("<|channel|>", "<|constrain|>", "<|call|>"),
            asides=(
                ("<|channel|>analysis<|message|>", "<|end|>"),
                ("<|channel|>commentary<|message|>", "<|end|>"),
            ),
            final=HARMONY_FINAL,
        ),
        ToolFormat(
            "cohere",
            CallSyntax(_object_or_list, ("<|START_ACTION|>",), ("<|END_ACTION|>",)),
            frame=Frame(
                before=f'{{"tool_call_id": "{NUMBER}", "tool_name": "',
                between='", "parameters": ',
                after="}",
                opening="<|START_ACTION|>[\n    ",
                separator=",\n    ",
                closing="\n]<|END_ACTION|>",
                name_in_json=True,
            ),
            signs=(("<|START_ACTION|>",),),
            tokens=("<|START_ACTION|>", "<|END_ACTION|>"),
            plan="tool_plan",
            final=COHERE_FINAL,
            final_end=COHERE_END,
        ),
        ToolFormat(
            "command",
            CallSyntax(one_or_list(known_only=True), ("Action: ```json",), ("```",)),
            frame=json_frame("Action: ```json\n[", "]\n```", name="tool_name", key="parameters"),
            signs=(("Action:", "tool_name"),),
        ),
        ToolFormat(
            "glm4",
            CallSyntax(lines, bare=string.ascii_letters + string.digits + "_"),
            frame=Frame("", "\n", "", separator="\n", style="line"),
            signs=(("[gMASK]", "<|observation|>", "tools"),),
        ),
        ToolFormat(
            "pythonic",
            CallSyntax(call_list(known_only=True), ("<|python_start|>",), ("<|python_end|>",), bare="["),
            frame=Frame("", "(", ")", opening="[", separator=", ", closing="]", style="python"),
            signs=(("[func_name1(",), ("<|python_start|>",)),
            tokens=("<|python_start|>",),
        ),
        ToolFormat(
            "llama_json",
            CallSyntax(call_list(known_only=True), ("<|python_tag|>",), bare="{"),
            frame=json_frame(separator="; ", key="parameters"),
            signs=(("<|python_tag|>",), ('"parameters": dictionary',)),
            tokens=("<|python_tag|>",),
        ),
        ToolFormat(
            "json",
            CallSyntax(one_or_list(known_only=True), ("```json",), ("```",), bare="{["),
            json_frame(separator="\n"),
        ),
    )
}


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
            raise ConfigError(f"tool format {name!r} is not known; there are {', '.join(FORMATS)}, and none")
        return FORMATS[name]
    for form in FORMATS.values():
        if any(all(sign in template for sign in group) for group in form.signs):
            return form
    for form in FORMATS.values():
        if form.tokens and all(token in special_tokens for token in form.tokens):
            return form
    return FORMATS["json"] if "tools" in template else None


def call_grammar(
    form: ToolFormat,
    tools: Sequence[Tool],
    choice: Any,
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
