"""A body becomes an object, or a refusal that says what is wrong with it."""

from __future__ import annotations

import pytest

from plait.server.body import MAX_DEPTH, decode_object
from plait.server.problems import BadBody


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
def test_what_is_never_closed_is_too_deep_as_well(opening: bytes) -> None:
    with pytest.raises(BadBody, match="nested deeper than 64"):
        decode_object(opening * 100_000)


def test_brackets_in_strings_are_text() -> None:
    text = b'\\"' + b"[" * 1000
    assert decode_object(b'{"a":"' + text + b'"}') == {"a": '"' + "[" * 1000}


@pytest.mark.parametrize("half", [b"\\ud800", b"\\uDFFF", b"\\uD83D x"])
def test_half_a_character_is_named_as_the_reason(half: bytes) -> None:
    with pytest.raises(BadBody, match="without its other half"):
        decode_object(b'{"prompt":"' + half + b'"}')
    assert decode_object(b'{"prompt":"\\ud83d\\ude42"}') == {"prompt": "🙂"}
