"""Objects of schemas have the properties that they name, and no others."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from plait.errors import BadGrammar
from plait.request import Grammar, JsonStyle
from plait.text.grammar.closed_objects import with_closed_objects
from plait.text.grammar.compiler import GrammarCompiler
from plait.text.grammar.source import library_form
from plait.text.tokenizers.hf import TokenizerFiles, load_hf_tokenizer
from tests.text.accepting import accepts

pytestmark = pytest.mark.timeout(120)
INT, TEXT = {"type": "integer"}, {"type": "string"}


@pytest.fixture(scope="module")
def compiler(byte_level: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GrammarCompiler]:
    path: Path = tmp_path_factory.mktemp("byte_level") / "tokenizer.json"
    byte_level.save(str(path))
    made = GrammarCompiler(load_hf_tokenizer(path, TokenizerFiles({"eos_token": "</s>"}, {})))
    yield made
    made.close()


def takes(compiler: GrammarCompiler, schema: Any, value: Any, *, is_open: bool = False) -> bool:
    grammar = replace(Grammar("json_schema", json.dumps(schema)), open_objects=is_open)
    return accepts(compiler, grammar, json.dumps(value))


def thing(*names: str, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": dict.fromkeys(names, INT), "required": [*names], **more}


PERSON = {**thing("age"), "title": "Person"}
CASES: dict[str, tuple[Any, Any, Any]] = {  # schema, a good value, one with a key too many
    "an object": (thing("a"), {"a": 1}, {"a": 1, "b": 2}),
    "one without a type": ({"properties": {"a": INT}}, {"a": 1}, {"b": 2}),
    "one without properties": (thing(), {}, {"b": 2}),
    "in a list": ({"type": "array", "items": thing("a")}, [{"a": 1}], [{"a": 1, "b": 2}]),
    "in an object": (
        {"type": "object", "properties": {"x": thing("a")}},
        {"x": {"a": 1}},
        {"x": {"a": 1, "b": 2}},
    ),
    "behind a reference": (
        {"$defs": {"P": PERSON}, "type": "object", "properties": {"p": {"$ref": "#/$defs/P"}}},
        {"p": {"age": 1}},
        {"p": {"age": 1, "b": 2}},
    ),
    "as pydantic wraps a reference": (
        {"$defs": {"P": PERSON}, "properties": {"p": {"allOf": [{"$ref": "#/$defs/P"}], "title": "x"}}},
        {"p": {"age": 1}},
        {"p": {"age": 1, "b": 2}},
    ),
    "one of a union": ({"anyOf": [thing("a"), thing("b")]}, {"b": 1}, {"b": 1, "c": 2}),
    "inherited": (
        {"$defs": {"P": PERSON}, "allOf": [{"$ref": "#/$defs/P"}, thing("b")]},
        {"age": 1, "b": 2},
        {"age": 1, "b": 2, "c": 3},
    ),
    "inherited twice": (
        {
            "$defs": {"P": PERSON, "Q": {"allOf": [{"$ref": "#/$defs/P"}, thing("b")]}},
            "allOf": [{"$ref": "#/$defs/Q"}, thing("c")],
        },
        {"age": 1, "b": 2, "c": 3},
        {"age": 1, "b": 2, "c": 3, "d": 4},
    ),
    "a parent elsewhere too": (
        {
            "$defs": {"P": PERSON},
            "allOf": [{"$ref": "#/$defs/P"}, {"properties": {"p": {"$ref": "#/$defs/P"}}, "required": ["p"]}],
        },
        {"age": 1, "p": {"age": 2}},
        {"age": 1, "p": {"age": 2, "b": 3}},
    ),
    "with a required name that it does not list": (
        {"properties": {"a": INT}, "required": ["a", "b"]},
        {"a": 1, "b": "any"},
        {"a": 1, "b": "any", "c": 2},
    ),
    "with such a name in a union": (
        {"properties": {"a": INT}, "anyOf": [{"required": ["b"]}, {"required": ["a"]}]},
        {"a": 1, "b": "any"},
        {"a": 1, "c": 2},
    ),
    "with such a name for a parent": (
        {"$defs": {"P": PERSON}, "$ref": "#/$defs/P", "required": ["b"]},
        {"age": 1, "b": "any"},
        {"age": 1, "b": "any", "c": 2},
    ),
    "inherited by an escaped reference": (
        {"definitions": {"a b": PERSON}, "allOf": [{"$ref": "#/definitions/a%20b"}, thing("b")]},
        {"age": 1, "b": 2},
        {"age": 1, "b": 2, "c": 3},
    ),
    "inherited by an absolute reference": (
        {
            "$id": "https://example.com/s",
            "$defs": {"P": PERSON},
            "allOf": [{"$ref": "https://example.com/s#/$defs/P"}, thing("b")],
        },
        {"age": 1, "b": 2},
        {"age": 1, "b": 2, "c": 3},
    ),
    "inherited from a list": (
        {"$defs": {"P": {"oneOf": [PERSON]}}, "allOf": [{"$ref": "#/$defs/P/oneOf/0"}, thing("b")]},
        {"age": 1, "b": 2},
        {"age": 1, "b": 2, "c": 3},
    ),
    "with a property that two describe": (
        {"allOf": [{"properties": {"p": thing("a")}}, {"properties": {"p": thing("b"), "q": thing("c")}}]},
        {"p": {"a": 1, "b": 2}, "q": {"c": 1}},
        {"p": {"a": 1, "b": 2}, "q": {"c": 1, "d": 2}},
    ),
    "with a list in such a property": (
        {
            "$defs": {"P": PERSON, "Q": {"properties": {"p": {"items": {"$ref": "#/$defs/P"}}}}},
            "allOf": [{"$ref": "#/$defs/Q"}, {"properties": {"p": {"items": thing("b")}}}],
        },
        {"p": [{"age": 1, "b": 2}]},
        {"p": [{"age": 1, "b": 2}], "q": 1},
    ),
    "with a property in each of a union": (
        {"allOf": [thing("k"), {"anyOf": [{"properties": {"p": thing(n)}} for n in "ab"]}]},
        {"k": 1, "p": {"b": 2}},
        {"k": 1, "p": {"b": 2, "c": 3}},
    ),
    "by pattern": (
        {"properties": {"a": INT}, "patternProperties": {"^x_": INT}},
        {"a": 1, "x_y": 2},
        {"a": 1, "y": 2},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_objects_with_properties_take_no_others_unless_they_are_open(
    compiler: GrammarCompiler, name: str
) -> None:
    schema, good, more = CASES[name]
    assert takes(compiler, schema, good)
    assert not takes(compiler, schema, more)
    assert takes(compiler, schema, good, is_open=True)
    assert takes(compiler, schema, more, is_open=True)


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"type": "object"}, {"any": 1}),
        ({"type": "object", "required": ["a"]}, {"a": 1, "b": 2}),
        (thing("a", additionalProperties=True), {"a": 1, "b": "x"}),
        (thing("a", additionalProperties=INT), {"a": 1, "b": 2}),
        ({"allOf": [thing("a", additionalProperties=True), thing("b")]}, {"a": 1, "b": 2, "c": 3}),
        ({"type": "object", "patternProperties": {"^x_": INT}}, {"x_y": 1, "z": "any"}),
        ({"allOf": [{"required": ["a"]}, {"required": ["b"]}]}, {"a": 1, "b": 2, "c": 3}),
    ],
)
def test_objects_stay_open_where_the_schema_says_so_or_names_nothing(
    compiler: GrammarCompiler, schema: Any, value: Any
) -> None:
    assert takes(compiler, schema, value)


@pytest.mark.parametrize(
    ("one", "other", "is_list"),
    [
        ({"properties": {"p": thing("a")}}, {"patternProperties": {"^p": thing("b")}}, False),
        ({"properties": {"p": thing("a")}}, {"additionalProperties": thing("b")}, False),
        ({"items": thing("a")}, {"items": thing("b")}, True),
    ],
)
def test_what_two_schemas_describe_without_its_name_stays_open(
    compiler: GrammarCompiler, one: Any, other: Any, is_list: bool
) -> None:
    both = {"a": 1, "b": 2}
    assert takes(compiler, {"allOf": [one, other]}, [both] if is_list else {"p": both})


@pytest.mark.parametrize(
    ("ref", "names"),
    [
        ("#p", {"$anchor": "p"}),
        ("https://example.com/p", {"$id": "https://example.com/p"}),
        ("#/$defs/P", {"$id": "https://example.com/p", "$defs": {"P": True}}),
    ],
)
def test_nothing_is_closed_where_a_combined_reference_may_lead_elsewhere(
    compiler: GrammarCompiler, ref: str, names: Any
) -> None:
    schema = {"$defs": {"P": {**PERSON, **names}}, "allOf": [{"$ref": ref}, thing("b")]}
    assert with_closed_objects(schema) == schema
    assert takes(compiler, schema, {"age": 1, "b": 2})


def test_what_is_only_data_is_no_schema() -> None:
    schema = {"enum": [{"properties": {"a": 1}}], "default": {"properties": {}}, "x": {"properties": {}}}
    assert with_closed_objects(schema) == schema


def test_references_in_circles_and_to_nowhere_come_to_an_end() -> None:
    for schema in (
        {"$ref": "#"},
        {"allOf": [{"$ref": "#"}, thing("a")]},
        {"allOf": [{"$ref": "#/$defs/none"}, thing("a")]},
        {"allOf": [{"$ref": "https://example.com/x"}, thing("a")], "$defs": 3, "properties": 3},
        {"properties": {"a": {"$ref": "#/properties/a"}}, "$ref": "#"},
    ):
        assert with_closed_objects(schema)


def nested(depth: int, text: str) -> dict[str, Any]:
    """A schema with a reference to every part of a path, each of which holds all further ones."""
    inner: dict[str, Any] = {"properties": {"x": INT}, "description": text}
    for _ in range(depth):
        inner = {"a": inner}
    return {**inner, "allOf": [{"$ref": "#" + "/a" * n} for n in range(1, depth + 1)] + [thing("b")]}


def test_a_schema_that_its_references_make_too_large_is_refused(compiler: GrammarCompiler) -> None:
    refused = "the schema is too large with its references followed; make it simpler"
    schema = nested(50, "x" * 250_000)
    with pytest.raises(ValueError, match=refused):
        with_closed_objects(schema)
    with pytest.raises(BadGrammar, match=refused):
        compiler.compile(Grammar("json_schema", json.dumps(schema)))
    name = "x" * 100_000
    parts = {"P": thing(name), **{f"Q{n}": {"allOf": [{"$ref": "#/$defs/P"}, thing("b")]} for n in range(50)}}
    with pytest.raises(ValueError, match=refused):
        with_closed_objects({"$defs": parts})
    source = json.dumps(nested(8, "x" * 1_000))
    assert library_form("json_schema", source, JsonStyle(), 10_000)
    with pytest.raises(ValueError, match=refused):
        library_form("json_schema", source, JsonStyle(), len(source))


def test_a_form_of_more_than_four_times_the_sources_limit_is_refused() -> None:
    source = json.dumps(["\x7f" * 1_000], ensure_ascii=False)
    assert library_form("choice", source, JsonStyle(), 2_000)
    with pytest.raises(ValueError, match="the grammar is too large; make it simpler"):
        library_form("choice", source, JsonStyle(), len(source))


def test_a_closed_recursion_keeps_its_definitions_once() -> None:
    text = {"description": "x" * 1_000}
    node = {"properties": {"next": {"allOf": [{"$ref": "#"}, thing("b")]}}, "$defs": {"Q": text}}
    assert json.dumps(with_closed_objects(node)).count(text["description"]) == 1


def test_a_schema_that_takes_too_long_to_close_is_refused() -> None:
    many = thing(*"abcdefghij")
    links = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}, many]} for i in range(80)}
    with pytest.raises(ValueError, match="more than 20000 parts"):
        with_closed_objects({"$defs": links, "$ref": "#/$defs/d0"})
    deep: Any = {}
    for _ in range(5_000):
        deep = {"items": deep}
    with pytest.raises(ValueError, match="nested too deeply"):
        with_closed_objects(deep)
