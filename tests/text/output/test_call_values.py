"""Arguments that are written as bare text: what the grammar lets through is what the reader makes valid."""

from __future__ import annotations

import itertools
import json
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher, LLTokenizer, grammar_from

from plait.text.grammar.call_lark import as_lark
from plait.text.output import FORMATS, call_grammar
from tests.text.replies import read_every_way

BYTES = LLTokenizer("byte")
WRAPPED = {
    "qwen_xml": "<tool_call>\n<function=f>\n<parameter=p>\n{}\n</parameter>\n</function>\n</tool_call>",
    "glm": "<tool_call>f\n<arg_key>p</arg_key>\n<arg_value>{}</arg_value>\n</tool_call>",
}
COLOURS = {"enum": ["red", "light blue"], "type": "string"}
NAME = {"type": "string", "minLength": 1, "maxLength": 4}
ROWS: list[tuple[dict[str, Any], list[str], list[str]]] = [
    (
        {"type": "string", "maxLength": 4},
        ["", "Rome", "größ", "a\nb", '"a"', "🙂🙂🙂🙂"],
        ["Paris", "🙂🙂🙂🙂🙂"],
    ),
    ({"type": "string", "minLength": 3}, ["abc", "a" * 300], ["ab", ""]),
    ({"type": "string", "minLength": 20}, ["x" * 20], ["x</parameter>" + "y" * 20]),
    ({"type": "string", "maxLength": 5000}, ["x" * 5000, "", "<p>\n"], ["x" * 5001]),
    ({"type": "string", "minLength": 3, "maxLength": 5000}, ["xyz", "x" * 5000], ["xy", "x" * 5001]),
    ({"type": "string", "minLength": 2}, ["ab", "a\n", "</"], ["a", ""]),
    ({"type": "string", "maxLength": 10_000_000}, ["abc"], []),
    ({"type": "string", "pattern": "^[a-z]+/[0-9]{2}$"}, ["ab/12"], ["ab/1", "Ab/12", "ab/123"]),
    ({"type": "string", "pattern": "[0-9]"}, ["a1b", "1"], ["ab"]),
    ({"type": "string", "pattern": "^a|b$"}, ["a", "b"], ["x"]),
    ({"type": "string", "pattern": "^x", "maxLength": 3}, ["xyz"], ["xyzz", "y"]),
    ({"type": "string", "format": "date"}, ["2024-02-03"], ["soon", "2024-2-3"]),
    ({"type": "string", "format": "uuid"}, ["12345678-1234-1234-1234-123456789abc"], ["12345678"]),
    ({"const": "on"}, ["on"], ["off", '"on"']),
    (COLOURS, ["red", "light blue"], ["blue", '"red"']),
    ({"enum": ["1", "2"]}, ["1"], ["3", '"1"']),
    ({"enum": [1, 2]}, ["1"], ["3", "one"]),
    ({"anyOf": [NAME, {"type": "null"}]}, ["Rome", "null"], ["Paris", ""]),
    ({"type": ["string", "null"]}, ["Rome", "null"], []),
    ({"anyOf": [COLOURS, {"type": "null"}]}, ["red", "null"], ["blue"]),
    ({"allOf": [{"$ref": "#/$defs/colours"}]}, ["red"], ["blue"]),
    ({"$ref": "#/$defs/colours"}, ["red"], ["blue"]),
    ({"anyOf": [NAME, {"type": "integer"}]}, ["Rome", "12"], ["Paris", "12345"]),
    ({"type": "integer", "maximum": 9}, ["7"], ["12", "x"]),
    ({"type": "array", "items": {"type": "string"}}, ['["a"]'], ["a", "[a]"]),
]


def tool(schema: dict[str, Any]) -> dict[str, Any]:
    whole = {"type": "object", "properties": {"p": schema}, "required": ["p"], "$defs": {"colours": COLOURS}}
    return {"type": "function", "function": {"name": "f", "parameters": whole}}


def matcher(name: str, schema: dict[str, Any], special: dict[str, int] | None = None) -> LLMatcher:
    structure = call_grammar(FORMATS[name], [tool(schema)], "required")
    assert structure is not None
    found = LLMatcher(BYTES, grammar_from("lark", as_lark(structure, special or {})))
    assert not found.is_error(), found.get_error()
    return found


def passes(found: LLMatcher, text: str) -> bool:
    one, tokens = found.deep_copy(), BYTES.tokenize_str(text)
    return one.validate_tokens(tokens) == len(tokens) and one.consume_tokens(tokens) and one.is_accepting()


@pytest.mark.parametrize("name", WRAPPED)
@pytest.mark.parametrize(("schema", "good", "bad"), ROWS, ids=[json.dumps(row[0])[:60] for row in ROWS])
def test_a_value_is_held_to_its_schema_and_read_as_one(
    name: str, schema: dict[str, Any], good: list[str], bad: list[str]
) -> None:
    found = matcher(name, schema)
    for value in good:
        text = WRAPPED[name].format(value)
        assert passes(found, text), value
        ((_, arguments),) = read_every_way(name, text, tools=[tool(schema)]).calls
        jsonschema.validate(arguments, tool(schema)["function"]["parameters"])
    for value in bad:
        closing = {"qwen_xml": "parameter", "glm": "arg_value"}[name]
        assert not passes(found, WRAPPED[name].format(value.replace("parameter", closing))), value


@pytest.mark.parametrize("name", WRAPPED)
def test_a_value_ends_where_the_reader_ends_it(name: str) -> None:
    ends = {"qwen_xml": "</parameter>", "glm": "</arg_value>"}
    assert not passes(matcher(name, {"type": "string"}), WRAPPED[name].format(f"a{ends[name]}b"))


def test_glm_breaks_lines_or_does_not() -> None:
    schema = {"type": "string", "maxLength": 4}
    for first, second, third, fourth in itertools.product(("\n", ""), repeat=4):
        call = (
            f"<tool_call>f{first}<arg_key>p</arg_key>{second}<arg_value>Rome</arg_value>{third}</tool_call>"
        )
        assert passes(matcher("glm", schema), call + fourth + call)
        assert len(read_every_way("glm", call + fourth + call, tools=[tool(schema)]).calls) == 2


def test_the_tags_of_glm_may_be_control_tokens() -> None:
    structure = call_grammar(FORMATS["glm"], [tool(NAME)], "required", parallel=False)
    assert structure is not None
    tags = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
    source = as_lark(structure, {tag: 300 + i for i, tag in enumerate(tags)})
    assert not any(tag in source for tag in tags)
    assert "(?s:.{1,4})" in source


def test_calls_of_command_have_numbers() -> None:
    one = '{"tool_call_id": "%s", "tool_name": "f", "parameters": {"p": "a"}}'
    text = "<|START_ACTION|>[\n    " + ",\n    ".join([one % 0, one % 1]) + "\n]<|END_ACTION|>"
    assert passes(matcher("cohere", NAME), text)
    assert len(read_every_way("cohere", text, tools=[tool(NAME)]).calls) == 2
    assert not passes(matcher("cohere", NAME), text.replace('"1"', '"x"'))


def test_a_schema_that_refers_to_itself_says_nothing() -> None:
    loop = {"anyOf": [{"$ref": "#/$defs/loop"}] * 9}
    whole = {"type": "object", "properties": {"p": {"$ref": "#/$defs/loop"}}, "$defs": {"loop": loop}}
    text = WRAPPED["glm"].format("[1]")
    named = {"type": "function", "function": {"name": "f", "parameters": whole}}
    assert read_every_way("glm", text, tools=[named]).calls == [("f", {"p": [1]})]
