"""A demanded call: what the grammar lets through is read as that call, and nothing else gets through."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer, grammar_from

from plait.errors import InvalidField
from plait.text.grammar.call_lark import as_lark
from plait.text.grammar.strict_tools import hold_calls
from plait.text.output import FORMATS, call_grammar
from plait.text.output.call_grammar import LINE, FormatMarker, Json, OneOf, Repeated, Text
from plait.text.output.reasoning import REASONING
from tests.text.output.written_calls import WRITERS
from tests.text.replies import DS, read_every_way

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "unit": {"type": "string", "enum": ["C", "F"]},
        "days": {"type": "integer"},
    },
    "required": ["city"],
    "additionalProperties": False,
}
FREE = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "boolean"}}}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "ask", "parameters": FREE}},
]
NAMED = {"type": "function", "function": {"name": "weather"}}
BYTES = LLTokenizer("byte")

ONE = '{"city": "Rom\\"e", "days": 2}'
WRITTEN = {
    "agent": f'<|function|>{{"name": "weather", "arguments": {ONE}}}<|/function|>',
    "deepseek": (
        f"{DS['begin']}{DS['call']}function{DS['sep']}weather\n```json\n{ONE}\n```{DS['end']}{DS['close']}"
    ),
    "deepseek_v31": f"{DS['begin']}{DS['call']}weather{DS['sep']}{ONE}{DS['end']}{DS['close']}",
    "mistral": f'[TOOL_CALLS] [{{"name": "weather", "arguments": {ONE}}}]',
    "mistral_list": f'[TOOL_CALLS][{{"name": "weather", "arguments": {ONE}}}]',
    "mistral_ids": f"[TOOL_CALLS]weather[CALL_ID]a1B2c3D4e[ARGS]{ONE}",
    "mistral_args": f"[TOOL_CALLS]weather[ARGS]{ONE}",
    "qwen_xml": (
        '<tool_call>\n<function=weather>\n<parameter=city>\nRom"e\n</parameter>\n'
        "<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>"
    ),
    "glm": (
        '<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Rom"e</arg_value>\n'
        "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>"
    ),
    "hermes": f'<tool_call>\n{{"name": "weather", "arguments": {ONE}}}\n</tool_call>',
    "lfm2": '<|tool_call_start|>[weather(city="Rom\\"e", days=2)]<|tool_call_end|>',
    "granite": f'<|tool_call|>[{{"name": "weather", "arguments": {ONE}}}]',
    "nemotron": f'<TOOLCALL>[{{"name": "weather", "arguments": {ONE}}}]</TOOLCALL>',
    "minimax": f'<tool_calls>\n{{"name": "weather", "arguments": {ONE}}}\n</tool_calls>',
    "cohere": (
        '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "weather", "parameters": '
        f"{ONE}}}\n]<|END_ACTION|>"
    ),
    "command": f'Action: ```json\n[{{"tool_name": "weather", "parameters": {ONE}}}]\n```',
    "glm4": f"weather\n{ONE}",
    "jamba": f'<tool_calls>[{{"name": "weather", "arguments": {ONE}}}]</tool_calls>',
    "function_tag": f"<function=weather>{ONE}</function>",
    "kimi": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
        f"{ONE}<|tool_call_end|><|tool_calls_section_end|>"
    ),
    "olmo": '<function_calls>\nweather(city="Rom\\"e", days=2)\n</function_calls>',
    "phi": f'functools[{{"name": "weather", "arguments": {ONE}}}]',
    "harmony": f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{ONE}<|call|>",
    "pythonic": '[weather(city="Rom\\"e", days=2)]',
    "llama_json": f'{{"name": "weather", "parameters": {ONE}}}',
    "json": f'{{"name": "weather", "arguments": {ONE}}}',
}

DEMANDED = ("weather", {"city": 'Rom"e', "days": 2})
WRITTEN |= {name: write([DEMANDED]) for name, write in WRITERS.items()}
TEXTS = {name for name, form in FORMATS.items() if form.frame.style == "tags"}
"""Formats in which a value of a wrong type is written as bare text."""
OTHERWISE = {name for name, form in FORMATS.items() if form.syntax.bare} | {"phi", "kimi_k3"}
"""Formats of which calls are held in another way, or not at all."""


def lets_through(name: str, text: str, choice: Any = NAMED, **options: Any) -> bool:
    structure = call_grammar(FORMATS[name], TOOLS, choice, **options)
    assert structure is not None
    matcher = LLMatcher(BYTES, grammar_from("lark", as_lark(structure, {})))
    assert not matcher.is_error(), matcher.get_error()
    tokens = BYTES.tokenize_str(text)
    return (
        matcher.validate_tokens(tokens) == len(tokens)
        and matcher.consume_tokens(tokens)
        and matcher.is_accepting()
    )


def test_every_format_is_here() -> None:
    assert WRITTEN.keys() == FORMATS.keys()


@pytest.mark.parametrize("name", FORMATS)
def test_the_demanded_call_is_let_through_and_read(name: str) -> None:
    assert lets_through(name, WRITTEN[name])
    found = read_every_way(name, WRITTEN[name], tools=TOOLS)
    assert found.calls == [("weather", {"city": 'Rom"e', "days": 2})]
    assert found.content == ""


@pytest.mark.parametrize("name", FORMATS)
def test_nothing_but_the_demanded_call_is_let_through(name: str) -> None:
    written = WRITTEN[name]
    for other in (
        "",
        "Hello",
        f"Hello {written}",
        written[:-1],
        written.replace("weather", "ask"),
        written.replace("2", '"two"' if name not in TEXTS else "two"),
        written.replace("city", "town"),
        f"{written} and more",
    ):
        assert not lets_through(name, other), other


@pytest.mark.parametrize("name", FORMATS)
def test_required_means_any_tool_and_several_only_where_that_is_allowed(name: str) -> None:
    structure = call_grammar(FORMATS[name], TOOLS, "required")
    assert structure is not None
    assert any(isinstance(part, Repeated) for part in structure)
    assert lets_through(name, WRITTEN[name], "required")
    alone = call_grammar(FORMATS[name], TOOLS, "required", parallel=False)
    assert alone is not None
    assert not any(isinstance(part, Repeated) for part in alone)
    separator = FORMATS[name].frame.separator.replace(LINE, "\n")
    if not FORMATS[name].frame.opening:
        twice = WRITTEN[name] + separator + WRITTEN[name]
        assert lets_through(name, twice, "required")
        assert not lets_through(name, twice, "required", parallel=False)
        assert len(read_every_way(name, twice, tools=TOOLS).calls) == 2


@pytest.mark.parametrize(
    "arguments", ["", "a=1", "b=true", "a=1, b=true"], ids=["none", "first", "second", "both"]
)
def test_optional_keywords_may_be_left_out_wherever_they_stand(arguments: str) -> None:
    ask = {"type": "function", "function": {"name": "ask"}}
    text = f"[ask({arguments})]"
    assert lets_through("pythonic", text, ask)
    assert not lets_through("pythonic", f"[ask({arguments},)]", ask)
    assert read_every_way("pythonic", text, tools=TOOLS).complete == [True]


def test_a_value_of_an_enumeration_is_one_of_its_texts() -> None:
    rows = "<parameter=city>\nx\n</parameter>\n<parameter=unit>\n{}\n</parameter>\n"
    text = f"<tool_call>\n<function=weather>\n{rows}</function>\n</tool_call>"
    assert lets_through("qwen_xml", text.format("C"))
    assert not lets_through("qwen_xml", text.format("K"))


def test_thinking_may_come_before_the_demanded_call() -> None:
    call = WRITTEN["hermes"]
    think = {"reasoning": REASONING["think"]}
    assert lets_through("hermes", f"<think>Rome, 1 < 2.</think>\n{call}", **think)
    assert lets_through("hermes", call, **think)
    assert not lets_through("hermes", f"Rome.</think>{call}", **think)
    assert lets_through("hermes", f"Rome.\n</think>\n\n{call}", **think, starts_open=True)
    assert not lets_through("hermes", call, **think, starts_open=True)


def test_the_structure_is_plain_parts() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    schema = {"type": "object", "properties": {}}
    call = (FormatMarker("[TOOL_CALLS]"), Text("f"), FormatMarker("[ARGS]"), Json(schema))
    assert call_grammar(FORMATS["mistral_args"], tools, "required", parallel=False) == (OneOf((call,)),)


def test_a_marker_that_is_a_control_token_is_that_token() -> None:
    structure = call_grammar(FORMATS["hermes"], TOOLS, NAMED, reasoning=REASONING["think"], starts_open=True)
    assert structure is not None
    source = as_lark(structure, {"<tool_call>": 7, "</think>": 9})
    assert "<[7]>" in source
    assert "<[9]>" in source
    assert "<tool_call>" not in source
    assert '"\\n</tool_call>"' not in source  # still a marker, though it is written as text
    assert '"</tool_call>"' in source


@pytest.mark.parametrize("choice", [None, "auto", "none"])
def test_nothing_is_demanded_unless_requested(choice: Any) -> None:
    assert call_grammar(FORMATS["hermes"], TOOLS, choice) is None


@pytest.mark.parametrize(
    "choice", ["any", {"type": "function", "function": {"name": "dig"}}, {"type": "allowed_tools"}, 3, {}]
)
def test_a_choice_that_cannot_be_honoured_is_refused_by_name(choice: Any) -> None:
    with pytest.raises(InvalidField, match="tool_choice: ") as error:
        call_grammar(FORMATS["hermes"], TOOLS, choice)
    assert error.value.param == "tool_choice"


def test_a_call_cannot_be_demanded_without_tools() -> None:
    with pytest.raises(InvalidField, match="there are no tools"):
        call_grammar(FORMATS["hermes"], [], "required")


def test_references_in_a_schema_still_find_their_definitions() -> None:
    schema = {
        "type": "object",
        "properties": {"p": {"$ref": "#/$defs/point"}},
        "required": ["p"],
        "$defs": {"point": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}},
    }
    tool = {"type": "function", "function": {"name": "go", "parameters": schema}}
    structure = call_grammar(FORMATS["pythonic"], [tool], "required")
    assert structure is not None
    matcher = LLMatcher(BYTES, grammar_from("lark", as_lark(structure, {})))
    assert matcher.consume_tokens(BYTES.tokenize_str(f"[go(p={json.dumps({'x': 1})})]"))
    assert matcher.is_accepting()


@pytest.mark.parametrize("name", FORMATS)
def test_a_call_that_is_begun_must_be_one_where_a_marker_begins_it(name: str) -> None:
    form = FORMATS[name]
    demanded = call_grammar(form, TOOLS, "required")
    assert demanded is not None
    structure = hold_calls(demanded, form.syntax.opens, ())
    assert (structure is None) == (name in OTHERWISE)
    if structure is None:
        return
    matcher = LLMatcher(BYTES, grammar_from("lark", as_lark(structure, {})))
    assert not matcher.is_error(), matcher.get_error()

    def passes(text: str) -> bool:
        one, tokens = matcher.deep_copy(), BYTES.tokenize_str(text)
        return (
            one.validate_tokens(tokens) == len(tokens) and one.consume_tokens(tokens) and one.is_accepting()
        )

    written = WRITTEN[name]
    assert all(passes(text) for text in ("", "Hello [x] <y>", written, f"Hello {written}"))
    wrong = "two" if name in TEXTS else '"two"'
    assert not passes(f"Hello {written.replace('2', wrong)}")
    assert not passes(f"{form.syntax.opens[0]} nothing")


def test_a_control_token_within_a_marker_cannot_be_kept_out_of_text() -> None:
    form = FORMATS["harmony"]
    demanded = call_grammar(form, TOOLS, "required")
    assert demanded is not None
    assert hold_calls(demanded, form.syntax.opens, {"<|channel|>"}, None, form.asides) is None


def test_free_text_before_a_control_token_needs_no_exception() -> None:
    form = FORMATS["granite"]
    demanded = call_grammar(form, TOOLS, "required")
    assert demanded is not None
    structure = hold_calls(demanded, form.syntax.opens, {"<|tool_call|>"})
    assert structure is not None
    source = as_lark(structure, {"<|tool_call|>": 7})
    assert "<[7]>" in source
    assert "~/(?s:.*)(<tool_call>)(?s:.*)/" in source
