"""What each format makes of the shapes that models write, and how a model's format is found."""

from __future__ import annotations

from typing import Any

import pytest

from plait.errors import ConfigError, InvalidField
from plait.text.output import (
    FORMATS,
    Arguments,
    CallEnd,
    CallStart,
    Content,
    OutputDelta,
    tool_format,
    tool_schemas,
)
from plait.text.output.reasoning import REASONING
from tests.text.replies import DS, gathered, parser, read_every_way


def test_what_only_looks_like_a_call_is_content_in_full() -> None:
    for name, text in [
        ("hermes", "Write <tool_call> and then JSON. </tool_call> ends it."),
        ("hermes", '<tool_call>\n{"name": f}\n</tool_call>'),
        ("hermes", '<tool_call>{"arguments": {"a": 1}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "argum'),
        ("llama_json", '{"name": "Anna", "parameters": {"age": 3}}'),
        ("llama_json", '{"city": "Rome"} is JSON'),
        ("llama_json", 'Like {"name": "f", "parameters": {}}'),
        ("llama_json", "<|python_tag|>print(1)"),
        ("pythonic", "[1, 2, 3]"),
        ("pythonic", "[print(a=1)]"),
        ("pythonic", '[f("Rome")]'),
        ("mistral", "[TOOL_CALLS] is a token"),
        ("phi", "import functools\n@functools.cache"),
        ("olmo", "<function_calls> are written as f(x)"),
        ("kimi", "<|tool_calls_section_begin|><|tool_call_begin|>f"),
        ("deepseek", f"{DS['begin']}{DS['call']}f"),
        ("json", '```json\n{"a": 1}\n```'),
    ]:
        found = read_every_way(name, text)
        assert (found.content, found.names) == (text, []), text


def test_a_false_start_does_not_hide_the_call_behind_it() -> None:
    found = read_every_way("hermes", '<tool_call><tool_call>{"name": "f", "arguments": {}}</tool_call>')
    assert (found.content, found.calls) == ("<tool_call>", [("f", {})])


def test_a_call_that_breaks_inside_its_arguments_stays_one_and_says_so() -> None:
    found = read_every_way("hermes", '<tool_call>{"name": "f", "arguments": {"a": x}}</tool_call> Hm.')
    assert (found.names, found.arguments, found.complete) == (["f"], ['{"a": '], [False])
    assert found.content == "x}} Hm."


def test_a_call_cut_off_by_the_token_limit_keeps_what_it_has() -> None:
    found = read_every_way("hermes", '<tool_call>\n{"name": "f", "arguments": {"city": "Ro')
    assert (found.names, found.arguments, found.complete) == (["f"], ['{"city": "Ro'], [False])
    assert found.content == ""


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ('{"arguments": {"a": 1}, "name": "f"}', '{"a": 1}'),
        ('{"name": "f"}', "{}"),
        ('{"name": "f", "arguments": null}', "{}"),
        ('{"name": "f", "arguments": "{\\"a\\": 1}"}', '{"a": 1}'),
        ('{"id": 7, "type": "function", "name": "f", "parameters": { "a":1 }, "more": [1]}', '{ "a":1 }'),
        ('{"name": "f", "arguments": {"a": 1}', '{"a": 1}'),
        ('{"name": "f", "arguments": {"a": 1}}}', '{"a": 1}'),
        ('{"name": "f", "arguments": {"a": "two\nlines"}}', '{"a": "two\\nlines"}'),
        ('[{"name": "f", "arguments": {"a":1}},]', '{"a":1}'),
    ],
)
def test_the_shapes_that_models_give_a_call_in_json(written: str, arguments: str) -> None:
    found = read_every_way("hermes", f"<tool_call>\n{written}\n</tool_call>")
    assert (found.names, found.arguments, found.complete) == (["f"], [arguments], [True])
    assert found.content == ""


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("'it\\'s'", "it's"),
        ('"""a "quoted" one"""', 'a "quoted" one'),
        ('""', ""),
        ("'\\x41\\u00e9\\n\\d'", "Aé\n\\d"),
        ("1.", 1.0),
        (".5", 0.5),
        ("-3", -3),
        ("+1.5e3", 1500.0),
        ("(1, 'a')", [1, "a"]),
        ("{'a': {'b': [None, True, False]}}", {"a": {"b": [None, True, False]}}),
        ("[[], {}, ()]", [[], {}, []]),
        ("[1, 2,]", [1, 2]),
    ],
)
def test_python_literals_become_json(written: str, value: Any) -> None:
    assert read_every_way("lfm2", f"<|tool_call_start|>[f(a={written})]").calls == [("f", {"a": value})]


@pytest.mark.parametrize("written", ["open('x')", "1 + 1", "f'{x}'", "01", "{1: 2}", "nan", "'\\x4'", "a"])
def test_python_that_is_no_literal_breaks_the_call(written: str) -> None:
    found = read_every_way("lfm2", f"<|tool_call_start|>[f(a={written})]<|tool_call_end|>")
    assert (found.names, found.complete) == (["f"], [False])


def test_a_number_that_may_still_grow_is_kept_back() -> None:
    reader = parser("pythonic")
    told = gathered([d for c in "[f(a=-1" for d in reader.push(c)])
    assert told.arguments == ['{"a": ']


def test_bare_values_follow_the_schema_of_the_tool() -> None:
    types = {"s": "string", "n": "integer", "o": "object", "u": ["string", "null"]}
    properties: dict[str, Any] = {key: {"type": kind} for key, kind in types.items()}
    properties["e"] = {"anyOf": [{"type": "string"}]}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": properties}}}
    rows = {"s": "5", "n": "5", "o": "{'a': None}", "u": "null", "e": "7", "x": "[1]", "y": "plain"}
    body = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in rows.items())
    text = f"<tool_call>\n<function=f>\n{body}</function>\n</tool_call>"
    (call,) = read_every_way("qwen_xml", text, tools=[tool]).calls
    assert call[1] == {"s": "5", "n": 5, "o": {"a": None}, "u": None, "e": "7", "x": [1], "y": "plain"}


def test_arguments_are_emitted_as_they_come() -> None:
    reader = parser("hermes")
    told: list[list[OutputDelta]] = []
    for piece in ['<tool_call>\n{"name": "f", "argu', 'ments": {"city": "Par', 'is"}', "}\n</tool_call>"]:
        told.append(reader.push(piece))
    assert told == [
        [],
        [CallStart(0, "call_0", "f"), Arguments(0, '{"city": "Par')],
        [Arguments(0, 'is"}'), CallEnd(0, complete=True)],
        [],
    ]
    assert reader.finish() == []


def test_content_is_held_back_only_while_it_may_be_a_marker_or_white_space_at_one() -> None:
    reader = parser("hermes")
    assert reader.push("a <tool_") == [Content("a")]
    assert reader.push("kit>") == [Content(" <tool_kit>")]
    assert reader.push(" \n") == []
    assert reader.push("b") == [Content(" \nb")]


def test_one_call_at_most_where_parallel_calls_are_forbidden() -> None:
    text = '<tool_call>{"name": "f", "arguments": {}}</tool_call>' * 2
    reader = parser("hermes", parallel=False)
    assert not reader.has_enough
    found = gathered([*reader.push(text), *reader.finish()])
    assert reader.has_enough
    assert (found.names, found.content) == (["f"], "")


def test_a_call_that_is_not_whole_is_not_the_one_that_is_allowed() -> None:
    cut = '<tool_call>{"name": "f", "arguments": {"a": '
    reader = parser("hermes", parallel=False)
    found = gathered([*reader.push(cut), *reader.finish()])
    assert (found.complete, reader.has_enough) == ([False], False)
    reader = parser("hermes", parallel=False)
    whole = '<tool_call>{"name": "search", "arguments": {}}</tool_call>'
    found = gathered([*reader.push(f"{cut}x}}}}</tool_call>{whole}{whole}"), *reader.finish()])
    assert (found.names, found.complete, reader.has_enough) == (["f", "search"], [False, True], True)


@pytest.mark.parametrize("length", range(len("<tool_call>"), len('<tool_call>\n{"name": "f", "arg') + 1))
def test_what_a_limit_cut_before_the_call_was_known_is_no_content(length: int) -> None:
    text = '<tool_call>\n{"name": "f", "arg'[:length]
    reader = parser("hermes")
    assert gathered([*reader.push(f"Well. {text}"), *reader.finish(is_cut=True)]).content.rstrip() == "Well."
    reader = parser("hermes")
    assert gathered([*reader.push(text), *reader.finish()]).content == text  # the model ended it like that


def test_a_fence_after_a_bare_call_is_content() -> None:
    found = read_every_way("json", '{"name": "f", "arguments": {}}\nSee:\n```python\n1\n```')
    assert (found.names, found.content) == (["f"], "See:\n```python\n1\n```")


def test_without_tools_the_markers_are_ordinary_text() -> None:
    text = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    assert read_every_way("hermes", text, tools=[]).content == text
    reader = parser("hermes", tools=[])
    assert not reader.markers
    assert reader.push("a \n") == [Content("a \n")], "nothing needs to be held back"
    assert reader.push("") == []


def test_the_markers_that_must_be_shown_are_named() -> None:
    markers = parser("mistral", reasoning=REASONING["mistral"]).markers
    assert markers == {"[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]"}


@pytest.mark.parametrize(
    ("template", "tokens", "name"),
    [
        ("{{ '<tool_call>' }}", (), "hermes"),
        ("<tool_call>\n<function=example>", (), "qwen_xml"),
        ("[TOOL_CALLS]", (), "mistral"),
        (f"{DS['begin']} ```json", (), "deepseek"),
        (f"{DS['begin']} tools", (), "deepseek_v31"),
        ("[TOOL_CALLS] [CALL_ID] [ARGS]", (), "mistral_ids"),
        ("[TOOL_CALLS] [ARGS]", (), "mistral_args"),
        ("{{ '[TOOL_CALLS][' }}", (), "mistral_list"),
        ("<|channel|> to=functions.", (), "harmony"),
        ("<|tool_calls_section_begin|>", (), "kimi"),
        ("<function_calls>\nf(a=1)\n</function_calls>", (), "olmo"),
        ("formatted as functools[{", (), "phi"),
        ('{"name": function name, "parameters": dictionary of arguments}', (), "llama_json"),
        ("[func_name1(a=1)]", (), "pythonic"),
        ("<|tool_call|> tools", (), "granite"),
        ("<|python_tag|>", (), "llama_json"),
        ("<|tool_call_start|>", (), "lfm2"),
        ("{{ tools }}", (), "json"),
        ("{{ messages }}", (), None),
        ("{{ tools }}", ("<|python_tag|>",), "llama_json"),
        ("", ("<|python_tag|>", "<|function|>", "<|/function|>", DS["begin"]), "agent"),
    ],
)
def test_the_format_is_found_in_the_template_then_in_the_vocabulary(
    template: str, tokens: tuple[str, ...], name: str | None
) -> None:
    found = tool_format(template, tokens)
    assert (found and found.name) == name


def test_a_format_can_be_named_or_refused() -> None:
    chosen = tool_format("<tool_call>", (), "mistral")
    assert chosen is FORMATS["mistral"]
    assert tool_format("<tool_call>", (), "none") is None
    with pytest.raises(
        ConfigError, match=r"'xml' is not known; there are dsml_v32, dsml.*, and none; without the option"
    ):
        tool_format("", (), "xml")


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ([{}], "tools[0]"),
        ([{"function": {"name": ""}}], "tools[0]"),
        ([{"function": {"name": "f", "parameters": 1}}], "tools[0].function.parameters"),
        ([{"function": {"name": "f"}}] * 2, "tools[1].function.name"),
    ],
)
def test_a_tool_that_is_none_is_refused_by_name(tools: list[Any], param: str) -> None:
    with pytest.raises(InvalidField) as error:
        tool_schemas(tools)
    assert error.value.param == param


def test_mistral_takes_ids_of_nine_letters_and_digits_back() -> None:
    call = {"id": "call_0123456789", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "assistant", "content": None, "tool_calls": [call, {**call, "id": "abcdefgh1"}]},
        {"role": "tool", "tool_call_id": "call_0123456789", "content": "1"},
        {"role": "tool", "tool_call_id": "abcdefgh1", "content": "2"},
    ]
    fitted = FORMATS["mistral"].history(messages)
    first, second = fitted[0]["tool_calls"]
    assert first["id"] == fitted[1]["tool_call_id"] != second["id"]
    assert second["id"] == fitted[2]["tool_call_id"] == "abcdefgh1"
    assert len(first["id"]) == 9
    assert first["id"].isalnum()
    assert messages[0]["tool_calls"] == [call, {**call, "id": "abcdefgh1"}], "the client's own were changed"
    assert FORMATS["hermes"].history(messages) is messages
    odd = [{"role": "assistant", "tool_calls": "none"}, {"role": "assistant", "tool_calls": [1]}, 3]
    assert FORMATS["mistral"].history(odd) == odd
