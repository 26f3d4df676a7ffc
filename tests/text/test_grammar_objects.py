"""Objects of schemas have the properties that they name, and no others."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from plait.text.grammar.compiler import GrammarCompiler
from plait.text.grammar.grammar import Grammar
from plait.text.grammar.objects import with_closed_objects
from plait.text.hf_tokenizer import TokenizerFiles, load_hf_tokenizer

pytestmark = pytest.mark.timeout(120)
INT, TEXT = {"type": "integer"}, {"type": "string"}


@pytest.fixture(scope="module")
def compiler(byte_level: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GrammarCompiler]:
    path: Path = tmp_path_factory.mktemp("byte_level") / "tokenizer.json"
    byte_level.save(str(path))
    made = GrammarCompiler(load_hf_tokenizer(path, TokenizerFiles({"eos_token": "</s>"}, {})))
    yield made
    made.close()


def accepts(compiler: GrammarCompiler, schema: Any, value: Any, *, is_open: bool = False) -> bool:
    grammar = replace(Grammar("json_schema", json.dumps(schema)), open_objects=is_open)
    state = compiler.compile(grammar).state()
    ids = compiler.vocabulary.tokenizer.encode(json.dumps(value), add_special=False)
    if state.accepts(ids) < len(ids):
        return False
    for token_id in ids:
        state.accept(token_id)
    return state.may_stop


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
    assert accepts(compiler, schema, good)
    assert not accepts(compiler, schema, more)
    assert accepts(compiler, schema, good, is_open=True)
    assert accepts(compiler, schema, more, is_open=True)


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"type": "object"}, {"any": 1}),
        ({"type": "object", "required": ["a"]}, {"a": 1, "b": 2}),
        (thing("a", additionalProperties=True), {"a": 1, "b": "x"}),
        (thing("a", additionalProperties=INT), {"a": 1, "b": 2}),
        ({"allOf": [thing("a", additionalProperties=True), thing("b")]}, {"a": 1, "b": 2, "c": 3}),
        ({"type": "object", "patternProperties": {"^x_": INT}}, {"x_y": 1, "z": "any"}),
    ],
)
def test_objects_stay_open_where_the_schema_says_so_or_names_nothing(
    compiler: GrammarCompiler, schema: Any, value: Any
) -> None:
    assert accepts(compiler, schema, value)


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
