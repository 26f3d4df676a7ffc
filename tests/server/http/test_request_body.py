"""Parsing a request body: it becomes an object, or a refusal that says what is wrong with it."""

from __future__ import annotations

import pytest

from plait.server.http.errors import BadBody
from plait.server.http.transfer import MAX_CONTAINERS, MAX_DEPTH, decode_object


def nested(depth: int) -> bytes:
    """An object with lists in it: `depth` levels."""
    return b'{"a":' + b"[" * (depth - 1) + b"]" * (depth - 1) + b"}"


def test_the_deepest_body_is_taken_and_one_level_more_is_not() -> None:
    wide = b'{"a":[' + b",".join([nested(MAX_DEPTH - 2)] * 3) + b"]}"
    assert decode_object(nested(MAX_DEPTH))
    assert decode_object(wide)
    for body in (nested(MAX_DEPTH + 1), b'{"a":' * (MAX_DEPTH + 1) + b"1" + b"}" * (MAX_DEPTH + 1)):
        with pytest.raises(BadBody, match="nested deeper than 64"):
            decode_object(body)


@pytest.mark.parametrize("opening", [b"[", b'{"a":'])
@pytest.mark.parametrize("number", [20_000, 90_000])
def test_what_is_never_closed_is_too_deep_as_well(opening: bytes, number: int) -> None:
    with pytest.raises(BadBody, match="nested deeper than 64"):
        decode_object(opening * number)


def test_objects_and_lists_are_counted_before_they_are_read() -> None:
    def holding(number: int) -> bytes:
        return b'{"a":[' + b",".join([b'{"b":"[{"}'] * (number - 2)) + b"]}"

    assert len(decode_object(holding(MAX_CONTAINERS))["a"]) == MAX_CONTAINERS - 2
    with pytest.raises(BadBody, match="more than 100000 objects and lists"):
        decode_object(holding(MAX_CONTAINERS + 1))
    with pytest.raises(BadBody, match="objects and lists"):
        decode_object(b"[" * 1_000_000)


def test_brackets_in_strings_are_text() -> None:
    text = b'\\"' + b"[" * 1000
    assert decode_object(b'{"a":"' + text + b'"}') == {"a": '"' + "[" * 1000}


@pytest.mark.parametrize("half", [b"\\ud800", b"\\uDFFF", b"\\uD83D x"])
def test_half_a_character_is_named_as_the_reason(half: bytes) -> None:
    with pytest.raises(BadBody, match="without its other half"):
        decode_object(b'{"prompt":"' + half + b'"}')
    assert decode_object(b'{"prompt":"\\ud83d\\ude42"}') == {"prompt": "🙂"}


@pytest.mark.parametrize("rest", [b"NaN", b"[}", b'"a'])
def test_whole_characters_are_not_named_as_the_reason(rest: bytes) -> None:
    with pytest.raises(BadBody) as refused:
        decode_object(b'{"prompt":"\\ud83d\\ude42\\uD83D\\uDE42","seed":' + rest + b"}")
    assert "half" not in str(refused.value)
