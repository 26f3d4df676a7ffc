"""The formats in which models write tool calls: one table, and how a model's own format is found.

A new format is one entry here; if it is of a new kind, it needs one more reader. Order matters: the first
entry that a template fits is taken, so the particular come before the general.
"""

from __future__ import annotations

import hashlib
import re
import string
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from plait.errors import ConfigError, InvalidField
from plait.text.chat.template import THOUGHTS, Message
from plait.text.output.call_grammar import (
    ARGUMENTS,
    NAME,
    NUMBER,
    Frame,
    Structure,
    begin_thinking,
    frame_call,
    json_frame,
    required_tools,
)
from plait.text.output.json_calls import CallSyntax, one_or_list
from plait.text.output.marked_calls import (
    DEEPSEEK,
    GLM,
    KIMI,
    function_tag,
    harmony,
    lines,
    mistral,
    tool_call,
)
from plait.text.output.python_calls import call_lines, call_list
from plait.text.output.reasoning import COHERE_END, COHERE_FINAL, HARMONY_FINAL, ReasoningFormat

_PLAIN_ID = re.compile(r"[A-Za-z0-9]+")
Tool = Mapping[str, object]
"""A tool as requests name it: `{"type": "function", "function": {"name": …, "parameters": …}}`."""


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """One format of tool calls.

    `syntax` is how its calls are read, `frame` how one that is demanded is written. `signs`: groups of texts;
    a chat template that holds all of a group is of this kind (None: one that holds the first marker that
    opens calls). `tokens`: control tokens that mean this kind
    where no template decides it. `id_length`: of the ids that its templates take; `plan`: the key under which
    they take what was thought before calls. `asides` (opening, closing), `final` and `final_end`: the markers
    of text next to calls, where that has markers.
    """

    name: str
    syntax: CallSyntax
    frame: Frame
    signs: tuple[tuple[str, ...], ...] | None = None
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

    def history(self, messages: Sequence[Message]) -> Sequence[Message]:
        """The conversation as templates of this kind take it: see `with_short_ids` and `with_plans`."""
        if self.plan:
            messages = with_plans(messages, self.plan)
        return messages if self.id_length is None else with_short_ids(messages, self.id_length)


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


_object_or_list = one_or_list()
_deepseek = DEEPSEEK.syntax()
_mistral = CallSyntax(mistral, ("[TOOL_CALLS]",), (), ("[ARGS]", "[CALL_ID]"))
_HARMONY = ("commentary to=functions.", "analysis to=functions.")
FORMATS: Mapping[str, ToolFormat] = {
    form.name: form
    for form in (
        ToolFormat(
            "agent",
            CallSyntax(_object_or_list, ("<|function|>",), ("<|/function|>",)),
            json_frame(separator="\n", tag="<|function|>"),
            tokens=("<|function|>", "<|/function|>"),
        ),
        ToolFormat(
            "deepseek",
            _deepseek,
            DEEPSEEK.frame(f"function{DEEPSEEK.separator}{NAME}\n```json\n{ARGUMENTS}\n```", "\n"),
            signs=((DEEPSEEK.begin, "```json"),),
            tokens=(DEEPSEEK.begin,),
        ),
        ToolFormat("deepseek_v31", _deepseek, DEEPSEEK.frame(f"{NAME}{DEEPSEEK.separator}{ARGUMENTS}")),
        ToolFormat(
            "mistral_args",
            _mistral,
            Frame(f"[TOOL_CALLS]{NAME}[ARGS]{ARGUMENTS}"),
            signs=(("[TOOL_CALLS]", "[ARGS]"),),
            tokens=("[TOOL_CALLS]", "[ARGS]"),
            id_length=9,
        ),
        ToolFormat(
            "mistral",
            _mistral,
            json_frame("[TOOL_CALLS] [", "]"),
            tokens=("[TOOL_CALLS]",),
            id_length=9,
        ),
        ToolFormat(
            "qwen_xml",
            CallSyntax(tool_call, ("<tool_call>",), ("</tool_call>",)),
            Frame(
                f"<tool_call>\n<function={NAME}>\n{ARGUMENTS}</function>\n</tool_call>",
                separator="\n",
                style="xml",
            ),
            signs=(("<tool_call>", "<function="),),
        ),
        ToolFormat(
            "glm",
            CallSyntax(tool_call, ("<tool_call>",), ("</tool_call>",), GLM),
            Frame(f"<tool_call>{NAME}{ARGUMENTS}</tool_call>", style="glm"),
            signs=(("<tool_call>", "<arg_key>"),),
            tokens=("<tool_call>", "<arg_key>"),
        ),
        ToolFormat(
            "hermes",
            CallSyntax(tool_call, ("<tool_call>",), ("</tool_call>",)),
            json_frame(separator="\n", tag="<tool_call>"),
        ),
        ToolFormat(
            "lfm2",
            CallSyntax(call_list(), ("<|tool_call_start|>",), ("<|tool_call_end|>",)),
            Frame(f"{NAME}({ARGUMENTS})", "<|tool_call_start|>[", ", ", "]<|tool_call_end|>", "python"),
            tokens=("<|tool_call_start|>",),
        ),
        ToolFormat(
            "granite",
            CallSyntax(_object_or_list, ("<|tool_call|>", "<tool_call>"), ("<|/tool_call|>", "</tool_call>")),
            json_frame("<|tool_call|>[", "]"),
            tokens=("<|tool_call|>",),
        ),
        ToolFormat(
            "nemotron",
            CallSyntax(_object_or_list, ("<TOOLCALL>",), ("</TOOLCALL>",)),
            json_frame("<TOOLCALL>[", "]</TOOLCALL>"),
        ),
        ToolFormat(
            "minimax",
            CallSyntax(_object_or_list, ("<tool_calls>",), ("</tool_calls>",)),
            json_frame("<tool_calls>\n", "\n</tool_calls>", "\n"),
            signs=tuple(("<tool_calls>", f"<tool_calls>{gap}{{") for gap in ("\n", "\\n", "")),
        ),
        ToolFormat(
            "jamba",
            CallSyntax(_object_or_list, ("<tool_calls>",), ("</tool_calls>",)),
            json_frame("<tool_calls>[", "]</tool_calls>"),
        ),
        ToolFormat(
            "function_tag",
            CallSyntax(function_tag, ("<function=",), ("</function>",)),
            Frame(f"<function={NAME}>{ARGUMENTS}</function>"),
            signs=(("<function=", "</function>"),),
        ),
        ToolFormat(
            "kimi",
            KIMI.syntax(),
            KIMI.frame(f"functions.{NAME}:{NUMBER}{KIMI.separator}{ARGUMENTS}"),
            tokens=(KIMI.begin,),
        ),
        ToolFormat(
            "olmo",
            CallSyntax(call_lines, ("<function_calls>",), ("</function_calls>",)),
            Frame(f"{NAME}({ARGUMENTS})", "<function_calls>\n", "\n", "\n</function_calls>", "python"),
        ),
        ToolFormat(
            "phi",
            CallSyntax(_object_or_list, ("functools",)),
            json_frame("functools[", "]"),
            signs=(("functools[",),),
        ),
        ToolFormat(
            "harmony",
            CallSyntax(
                harmony,
                (*(f"<|channel|>{text}" for text in _HARMONY), "<|start|>assistant to=functions."),
                ("<|call|>",),
                ("<|constrain|>", "<|message|>"),
            ),
            Frame(f"<|channel|>{_HARMONY[0]}{NAME} <|constrain|>json<|message|>{ARGUMENTS}<|call|>"),
            signs=(("<|channel|>", "to=functions."), ("<|channel|>", "<|constrain|>")),
            tokens=("<|channel|>", "<|constrain|>", "<|call|>"),
            asides=tuple(
                (f"<|channel|>{channel}<|message|>", "<|end|>") for channel in ("analysis", "commentary")
            ),
            final=HARMONY_FINAL,
        ),
        ToolFormat(
            "cohere",
            CallSyntax(_object_or_list, ("<|START_ACTION|>",), ("<|END_ACTION|>",)),
            Frame(
                f'{{"tool_call_id": "{NUMBER}", "tool_name": "{NAME}", "parameters": {ARGUMENTS}}}',
                "<|START_ACTION|>[\n    ",
                ",\n    ",
                "\n]<|END_ACTION|>",
                name_in_json=True,
            ),
            tokens=("<|START_ACTION|>", "<|END_ACTION|>"),
            plan="tool_plan",
            final=COHERE_FINAL,
            final_end=COHERE_END,
        ),
        ToolFormat(
            "command",
            CallSyntax(one_or_list(known_only=True), ("Action: ```json",), ("```",)),
            json_frame("Action: ```json\n[", "]\n```", name="tool_name", key="parameters"),
            signs=(("Action:", "tool_name"),),
        ),
        ToolFormat(
            "glm4",
            CallSyntax(lines, bare=string.ascii_letters + string.digits + "_"),
            Frame(f"{NAME}\n{ARGUMENTS}", separator="\n", style="line"),
            signs=(("[gMASK]", "<|observation|>", "tools"),),
        ),
        ToolFormat(
            "pythonic",
            CallSyntax(call_list(known_only=True), ("<|python_start|>",), ("<|python_end|>",), bare="["),
            Frame(f"{NAME}({ARGUMENTS})", "[", ", ", "]", "python"),
            signs=(("[func_name1(",), ("<|python_start|>",)),
            tokens=("<|python_start|>",),
        ),
        ToolFormat(
            "llama_json",
            CallSyntax(call_list(known_only=True), ("<|python_tag|>",), bare="{"),
            json_frame(separator="; ", key="parameters"),
            signs=(("<|python_tag|>",), ('"parameters": dictionary',)),
            tokens=("<|python_tag|>",),
        ),
        ToolFormat(
            "json",
            CallSyntax(one_or_list(known_only=True), ("```json",), ("```",), bare="{["),
            json_frame(separator="\n"),
            signs=(),
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


def with_short_ids(messages: Sequence[Message], length: int) -> list[Message]:
    """The same messages, every call's id `length` letters and digits long.

    Equal ids stay equal, in calls and in the answers to them; ids that fit already stay as they are. What is
    not a list of calls is left for `normalize_messages` to refuse.
    """
    return [_shorten_ids(m, length) if isinstance(m, Mapping) else m for m in messages]


def with_plans(messages: Sequence[Message], key: str) -> list[Message]:
    """The same messages; those with calls also have the thinking or text before the calls under `key`."""
    return [_set_plan(m, key) if isinstance(m, Mapping) and m.get("tool_calls") else m for m in messages]


def _set_plan(message: Message, key: str) -> Message:
    plan = next((text for name in (key, *THOUGHTS, "content") if (text := message.get(name))), None)
    return {**message, key: plan} if isinstance(plan, str) else message


def _shorten_ids(message: Message, length: int) -> Message:
    changed: dict[str, object] = dict(message)
    if isinstance(answered := message.get("tool_call_id"), str):
        changed["tool_call_id"] = _short(answered, length)
    calls = message.get("tool_calls")
    if isinstance(calls, Sequence) and not isinstance(calls, str):
        changed["tool_calls"] = [_shorten_id(call, length) for call in calls]
    return changed


def _shorten_id(call: Any, length: int) -> object:
    known = isinstance(call, Mapping) and isinstance(call.get("id"), str)
    return {**call, "id": _short(call["id"], length)} if known else call


def _short(call_id: str, length: int) -> str:
    if len(call_id) == length and _PLAIN_ID.fullmatch(call_id):
        return call_id
    return hashlib.blake2b(call_id.encode("utf-8", "surrogatepass"), digest_size=length).hexdigest()[:length]
