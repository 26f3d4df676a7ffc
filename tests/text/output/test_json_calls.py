"""Incremental JSON parsing of tool calls: exactly the valid texts, and nothing else is ever passed on."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from plait.text.output.cursor import TextCursor
from plait.text.output.json_stream import MAX_DEPTH, is_json, json_value
from tests.text.replies import is_beginning_of_json, parses

VALUE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
SHAPES = [
    "{",
    "}",
    "[",
    "]",
    ",",
    ":",
    '"',
    "\\",
    "\\u12",
    "aB",
    "é",
    "0",
    "-",
    "1",
    ".",
    "e",
    "+",
    "true",
    "nul",
]
GARBAGE = st.lists(st.sampled_from([*SHAPES, '"a"', '{"k":', " ", "\n"]), max_size=12).map("".join)


def read(pieces: list[str]) -> tuple[bool, str]:
    """(whether a whole value was read, what was passed on), however the text was cut."""
    cursor, out = TextCursor(), list[str]()
    reading = json_value(cursor, out.append)
    try:
        next(reading)
        for piece in pieces:
            cursor.push(piece)
            next(reading)
        cursor.ended = True
        next(reading)
    except StopIteration as done:
        return bool(done.value), "".join(out)
    raise AssertionError("it waits although the text has ended")


@settings(deadline=None)
@given(GARBAGE)
@example('{"a":1,}')
@example("[1,]")
@example("01")
@example("-")
@example("1.e5")
@example('{"a" 1}')
@example("{1:2}")
@example("{}{}")
def test_what_json_accepts_is_accepted_and_nothing_else(text: str) -> None:
    if "\n" in text and '"' in text:  # a raw line end inside a string is repaired: see below
        return
    assert is_json(text) == parses(text)


@settings(deadline=None)
@given(GARBAGE, st.integers(1, 5))
def test_only_the_beginning_of_a_valid_text_is_passed_on(text: str, step: int) -> None:
    whole, told = read([text[i : i + step] for i in range(0, len(text), step)])
    assert (whole, told) == read([text]), "the cut changed what was read"
    assert parses(told) if whole else is_beginning_of_json(told)


@settings(deadline=None)
@given(VALUE, st.sampled_from([None, 1]), st.booleans(), st.integers(1, 7))
def test_a_value_passes_character_by_character_as_it_was_written(
    value: Any, indent: int | None, ascii_only: bool, step: int
) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=ascii_only)
    assert read([*(text[i : i + step] for i in range(0, len(text), step)), "  rest"]) == (True, text)


@settings(deadline=None)
@given(VALUE.map(json.dumps), st.data())
def test_a_cut_value_is_the_beginning_of_the_whole_one(text: str, data: st.DataObject) -> None:
    _, told = read([text[: data.draw(st.integers(0, len(text)))]])
    assert text.startswith(told)
    assert is_beginning_of_json(told)


def test_a_raw_line_end_in_a_string_becomes_an_escape() -> None:
    assert read(['{"a": "one\n', 'two\t"}']) == (True, '{"a": "one\\ntwo\\t"}')


def test_half_an_escape_is_kept_back() -> None:
    assert read(['"a\\u12']) == (False, '"a')
    assert read(['"a\\', 'n"']) == (True, '"a\\n"')
    assert read(['"a\\', 'x"']) == (False, '"a')


@pytest.mark.parametrize("depth", [MAX_DEPTH, MAX_DEPTH + 1])
def test_nesting_has_a_limit(depth: int) -> None:
    assert is_json("[" * depth + "]" * depth) == (depth == MAX_DEPTH)
