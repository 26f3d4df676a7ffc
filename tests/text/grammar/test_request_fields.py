"""Every spelling in which a client asks for structured output, and requests that misuse one."""

from __future__ import annotations

import json
from typing import Any

import pytest

from plait.errors import BadGrammar, InvalidField
from plait.request import Grammar
from plait.text.grammar.request_fields import grammar_from

SCHEMA = {"type": "object", "properties": {"größe": {"type": "integer"}}}
TEXT = json.dumps(SCHEMA, ensure_ascii=False)
ANY_OBJECT = '{"type": "object"}'
GBNF = 'root ::= "a"'
LARK = 'start: "a"'


@pytest.mark.parametrize(
    ("body", "kind", "source", "param"),
    [
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
            "json_schema",
            TEXT,
            "response_format.json_schema.schema",
        ),
        ({"response_format": {"type": "json_object"}}, "json_schema", ANY_OBJECT, "response_format"),
        (
            {"response_format": {"type": "json_object", "schema": SCHEMA}},
            "json_schema",
            TEXT,
            "response_format.schema",
        ),
        ({"structured_outputs": {"json": SCHEMA}}, "json_schema", TEXT, "structured_outputs.json"),
        ({"structured_outputs": {"json": TEXT}}, "json_schema", TEXT, "structured_outputs.json"),
        (
            {"structured_outputs": {"json_object": True, "regex": None}},
            "json_schema",
            ANY_OBJECT,
            "structured_outputs.json_object",
        ),
        ({"structured_outputs": {"regex": "a+"}}, "regex", "a+", "structured_outputs.regex"),
        ({"structured_outputs": {"choice": ["a", "é"]}}, "choice", '["a", "é"]', "structured_outputs.choice"),
        ({"structured_outputs": {"grammar": GBNF}}, "gbnf", GBNF, "structured_outputs.grammar"),
        ({"guided_json": SCHEMA}, "json_schema", TEXT, "guided_json"),
        ({"guided_json": True}, "json_schema", "true", "guided_json"),
        ({"guided_regex": "a+"}, "regex", "a+", "guided_regex"),
        ({"guided_choice": ["a"]}, "choice", '["a"]', "guided_choice"),
        ({"guided_grammar": LARK}, "lark", LARK, "guided_grammar"),
        ({"grammar": GBNF}, "gbnf", GBNF, "grammar"),
        ({"grammar": '%llguidance {}\nstart: "::="'}, "lark", '%llguidance {}\nstart: "::="', "grammar"),
        ({"json_schema": SCHEMA}, "json_schema", TEXT, "json_schema"),
        ({"format": "json"}, "json_schema", ANY_OBJECT, "format"),
        ({"format": SCHEMA}, "json_schema", TEXT, "format"),
    ],
)
def test_each_spelling_asks_for_its_grammar(body: dict[str, Any], kind: Any, source: str, param: str) -> None:
    found = grammar_from({"model": "m", **body})
    assert found == Grammar(kind, source)
    assert found is not None
    assert found.param == param


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"response_format": None, "guided_json": None, "format": None},
        {"response_format": {"type": "text"}},
        {"structured_outputs": {}},
        {"structured_outputs": {"regex": None, "json_object": False}},
        {"grammar": "", "format": ""},
    ],
)
def test_free_text_asks_for_none(body: dict[str, Any]) -> None:
    assert grammar_from(body) is None


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({"response_format": "json"}, "response_format", "is not an object"),
        ({"response_format": ""}, "response_format", "is not an object"),
        ({"response_format": {"type": "sound"}}, "response_format.type", "'sound' is not 'text'"),
        ({"response_format": {}}, "response_format.type", "None is not"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "required"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema",
            "required",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": 3}}},
            "response_format.json_schema.schema",
            "3 is not a JSON schema",
        ),
        (
            {"structured_outputs": {"structural_tag": "x"}},
            "structured_outputs.structural_tag",
            "known are json",
        ),
        ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs", "json and regex"),
        ({"structured_outputs": {"json_object": "yes"}}, "structured_outputs.json_object", "true or false"),
        ({"guided_regex": 3}, "guided_regex", "regular expression"),
        ({"guided_regex": ""}, "guided_regex", "regular expression"),
        ({"guided_choice": "a"}, "guided_choice", "list of strings"),
        ({"guided_choice": []}, "guided_choice", "at least one"),
        ({"guided_choice": ["a", 1]}, "guided_choice[1]", "1 is not a string"),
        ({"guided_choice": ["a", ""]}, "guided_choice[1]", "text in it"),
        ({"guided_grammar": ["a"]}, "guided_grammar", "text of a grammar"),
        ({"format": "yaml"}, "format", "neither 'json' nor"),
        ({"grammar": LARK, "guided_regex": "a"}, "grammar", "guided_regex says already"),
    ],
)
def test_a_misused_field_is_named(body: dict[str, Any], param: str, says: str) -> None:
    with pytest.raises(InvalidField, match=says) as refusal:
        grammar_from(body)
    assert refusal.value.param == param


@pytest.mark.parametrize(
    ("options", "is_open", "space"),
    [
        ({}, None, None),
        ({"disable_additional_properties": False}, True, None),
        ({"disable_additional_properties": True, "disable_any_whitespace": True}, False, "none"),
        ({"disable_any_whitespace": False}, None, None),
    ],
)
def test_a_request_may_say_how_its_json_is_written(options: Any, is_open: Any, space: Any) -> None:
    for body in (
        {"structured_outputs": {"json": {}, **options}},
        {"response_format": {"type": "json_object"}, "structured_outputs": options},
    ):
        found = grammar_from(body)
        assert found is not None
        assert (found.open_objects, found.space) == (is_open, space)
    with pytest.raises(InvalidField, match="3 is not true or false"):
        grammar_from({"guided_json": {}, "structured_outputs": {"disable_any_whitespace": 3}})


def test_a_schema_that_json_cannot_write_is_refused() -> None:
    deep: dict[str, Any] = {}
    for _ in range(100_000):
        deep = {"items": deep}
    for schema, says in (
        (deep, "nested too deeply"),
        ({"enum": [float("nan")]}, "as JSON"),
        ({"enum": {1}}, "as JSON"),
    ):
        with pytest.raises(BadGrammar, match=says) as refusal:
            grammar_from({"guided_json": schema})
        assert refusal.value.param == "guided_json"
    while deep:  # one by one: Python would take it apart recursively
        deep = deep.pop("items")
