"""JSON read while it is being written: what is given out is always the beginning of a valid text.

Nothing is parsed into objects and nothing is reformatted: the text of a value is passed on as it was
written. Only raw control characters inside strings, which JSON forbids and models write, become escapes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from plait.text.output.cursor import SPACE, Reading, TextCursor, read_whole

Sink = Callable[[str], None]

MAX_DEPTH = 128
"""Deeper nesting is refused: clients' JSON libraries do not read it either."""

_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
_WORDS = {"t": "true", "f": "false", "n": "null"}
_WHOLE_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?(?=[ \t\r\n,\]}])")
_DIGIT, _NONZERO = "0123456789", "123456789"
_NUMBER: dict[str, tuple[tuple[str, str], ...]] = {
    "start": (("-", "minus"), ("0", "zero"), (_NONZERO, "whole")),
    "minus": (("0", "zero"), (_NONZERO, "whole")),
    "zero": ((".", "point"), ("eE", "e")),
    "whole": ((_DIGIT, "whole"), (".", "point"), ("eE", "e")),
    "point": ((_DIGIT, "fraction"),),
    "fraction": ((_DIGIT, "fraction"), ("eE", "e")),
    "e": (("+-", "sign"), (_DIGIT, "power")),
    "sign": ((_DIGIT, "power"),),
    "power": ((_DIGIT, "power"),),
}
_COMPLETE = frozenset({"zero", "whole", "fraction", "power"})
_MAY_CLOSE = frozenset({"first key", "first item", "comma"})
_CLOSERS = {"{": "}", "[": "]"}
_MARKS = {"colon": ":", "comma": ","}
_SPACE_OR_NOTHING = frozenset({*SPACE, ""})
_MAY_OPEN = frozenset({"value", "first item"})
_KEYS = frozenset({"first key", "key"})


def json_value(cursor: TextCursor, sink: Sink) -> Reading[bool]:
    """Reads one value, passing its text to `sink`. False: it is not valid from the next character on.

    Nothing that could not go on validly is ever passed on; the offending character is not taken.
    """
    closers: list[str] = []
    expects = "value"
    while True:
        if closers and cursor.here() in _SPACE_OR_NOTHING:
            sink((yield from cursor.space()))
        char = cursor.here() or (yield from cursor.peek())
        closer = closers[-1] if closers else "none"
        if char == closer and expects in _MAY_CLOSE:
            sink(cursor.take(1))
            closers.pop()
            expects = "comma"
        elif expects in _MARKS:
            if char != _MARKS[expects]:
                return False
            sink(cursor.take(1))
            expects = "key" if expects == "comma" and closer == "}" else "value"
        elif char in _CLOSERS and expects in _MAY_OPEN:
            if len(closers) == MAX_DEPTH:
                return False
            closers.append(_CLOSERS[cursor.take(1)])
            sink(char)
            expects = "first key" if char == "{" else "first item"
        elif (yield from _scalar(cursor, sink, expects in _KEYS)):
            expects = "colon" if expects in _KEYS else "comma"
        else:
            return False
        if not closers:
            return True


def _scalar(cursor: TextCursor, sink: Sink, is_key: bool) -> Reading[bool]:
    char = cursor.here()
    if char == '"':
        return (yield from json_string(cursor, sink))
    if is_key:
        return False
    if number := cursor.run(_WHOLE_NUMBER):
        sink(number)
        return True
    for expected in _WORDS.get(char, ""):
        if (yield from cursor.peek()) != expected:
            return False
        sink(cursor.take(1))
    return char in _WORDS or (yield from _number(cursor, sink))


def _number(cursor: TextCursor, sink: Sink) -> Reading[bool]:
    state = "start"
    while True:
        char = cursor.here() or (yield from cursor.peek())
        following = next((then for chars, then in _NUMBER[state] if char and char in chars), None)
        if following is None:
            return state in _COMPLETE
        sink(cursor.take(1))
        state = following


def json_string(cursor: TextCursor, sink: Sink) -> Reading[bool]:
    """Reads a string that begins here, quotes included; False at the first character that is not valid."""
    sink(cursor.take(1))
    while True:
        char = cursor.here() or (yield from cursor.peek())
        if char == '"':
            sink(cursor.take(1))
            return True
        if char == "\\":
            escape = yield from _escape(cursor)
            if not escape:
                return False
            sink(escape)
        elif char == "":
            return False
        elif char < " ":
            sink(json.dumps(cursor.take(1))[1:-1])
        else:
            sink(cursor.run(_PLAIN))


def _escape(cursor: TextCursor) -> Reading[str]:
    """A whole escape: half of one cannot be passed on, for it may yet be none."""
    kind = yield from cursor.peek(2)
    if kind == "\\u":
        yield from cursor.peek(6)
    return cursor.run(_ESCAPE)


def json_text(cursor: TextCursor) -> Reading[str | None]:
    """The text of one whole value; None if it is not valid or not whole."""
    pieces: list[str] = []
    return "".join(pieces) if (yield from json_value(cursor, pieces.append)) else None


def is_json(text: str) -> bool:
    """Whether `text` is one valid JSON value as `json_value` reads it, with at most white space around."""
    return read_whole(text.strip(SPACE), lambda cursor: json_value(cursor, ignore))


def ignore(_: str) -> None:
    """A sink that drops its text."""
