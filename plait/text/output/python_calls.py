"""Readers of calls written as Python, `[f(a=1, b="x"), g()]`, with literals that become JSON as they come.

Nothing is evaluated. Strings (with Python's escapes), numbers, True, False, None, lists, tuples and dicts are
turned into JSON one character run at a time, always the same way: `, ` and `: ` between items.
"""

from __future__ import annotations

import json
import re
import sys

from plait.text.output.cursor import Reading, TextCursor
from plait.text.output.deltas import ReplyBuilder
from plait.text.output.json_calls import Body, objects
from plait.text.output.json_stream import MAX_DEPTH, Sink

_NAME = re.compile(r"[\w.]+")
_ATOM = re.compile(r"[\w.+-]+")
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?")
_FLOAT = re.compile(r"([+-]?)(\d*)(\.?)(\d*)((?:[eE][+-]?\d+)?)")
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_PLAIN = re.compile(r"[^\\'\"\n\r]+")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "0": "\0", "\n": ""}
_HEX = {"x": 2, "u": 4, "U": 8}
_CLOSERS = {"[": "]", "(": ")", "{": "}"}


def call_list(known_only: bool = False) -> Body:
    """`[f(a=1), g()]`, or the JSON forms that the same models fall into: objects, or a list of them.

    `known_only`: a name that is not among the tools is no call.
    """

    def body(reply: ReplyBuilder) -> Reading[bool]:
        cursor = reply.cursor
        yield from cursor.space()
        if not (yield from cursor.skip("[")):
            return (yield from objects(reply, known_only))
        yield from cursor.space()
        as_json = (yield from cursor.peek()) == "{"
        read = objects(reply, known_only, "]") if as_json else _calls(reply, known_only)
        return (yield from read) and (yield from cursor.skip("]"))

    return body


def call_list_or_lines(reply: ReplyBuilder) -> Reading[bool]:
    """`[f(a=1), g()]`, or the same without a list: see `call_lines`."""
    yield from reply.cursor.space()
    as_list = (yield from reply.cursor.peek()) == "["
    return (yield from call_list()(reply) if as_list else call_lines(reply))


def call_lines(reply: ReplyBuilder) -> Reading[bool]:
    """`f(a=1)` and further calls on lines of their own or behind `;`, without a list around them."""
    yield from reply.cursor.space()
    while (yield from _call(reply, known_only=False)):
        yield from reply.cursor.skip_spaced(";")
        if not _NAME.match((yield from reply.cursor.peek())):
            return True
    return False


def _calls(reply: ReplyBuilder, known_only: bool) -> Reading[bool]:
    """Calls up to the list's closing bracket."""
    cursor = reply.cursor
    while (yield from _call(reply, known_only)):
        yield from cursor.space()
        if not (yield from cursor.skip(",")):
            return True
        yield from cursor.space()
    return False


def _call(reply: ReplyBuilder, known_only: bool) -> Reading[bool]:
    """`name(key=value, …)`; it begins at its first key, or at the bracket that ends it."""
    cursor = reply.cursor
    name = yield from cursor.word(_NAME)
    if not name or (known_only and name not in reply.tools) or not (yield from cursor.skip("(")):
        return False
    yield from cursor.space()
    key = ""
    if (yield from cursor.peek()) != ")":
        key = yield from _keyword(cursor)
        if not key:
            return False
    reply.begin(name)
    reply.argue("{")
    complete = yield from _arguments(reply, key)
    reply.end(complete)
    return complete


def _arguments(reply: ReplyBuilder, key: str) -> Reading[bool]:
    cursor = reply.cursor
    while key:
        reply.argue(f"{json.dumps(key, ensure_ascii=False)}: ")
        if not (yield from python_value(cursor, reply.argue)):
            return False
        yield from cursor.space()
        if not (yield from cursor.skip(",")):
            break
        yield from cursor.space()
        if (yield from cursor.peek()) == ")":
            break
        key = yield from _keyword(cursor)
        if not key:
            return False
        reply.argue(", ")
    if not (yield from cursor.skip(")")):
        return False
    reply.argue("}")
    return True


def _keyword(cursor: TextCursor) -> Reading[str]:
    """`key=`; "" if that is not what comes."""
    key = yield from cursor.word(_NAME)
    yield from cursor.space()
    found = key and (yield from cursor.skip("="))
    yield from cursor.space()
    return key if found else ""


def python_value(cursor: TextCursor, sink: Sink) -> Reading[bool]:
    """Reads one literal and passes it on as JSON; False: it is none, from the next character on."""
    closers: list[str] = []
    fresh = True  # nothing is in the innermost bracket yet
    while True:
        yield from cursor.space()
        char = yield from cursor.peek()
        if closers and char == closers[-1]:
            fresh = _close(cursor, sink, closers)
        elif closers and not fresh and not (yield from _comma(cursor)):
            return False
        elif closers and (yield from cursor.peek()) == closers[-1]:
            continue  # a comma may come before the closing bracket
        else:
            if closers and not fresh:
                sink(", ")
            if closers[-1:] == ["}"] and not (yield from _dict_key(cursor, sink)):
                return False
            opened = yield from _item(cursor, sink, closers)
            if opened is None:
                return False
            fresh = opened
        if not closers:
            return True


def _close(cursor: TextCursor, sink: Sink, closers: list[str]) -> bool:
    cursor.take(1)
    sink("}" if closers.pop() == "}" else "]")
    return False


def _comma(cursor: TextCursor) -> Reading[bool]:
    found = yield from cursor.skip(",")
    yield from cursor.space()
    return found


def _item(cursor: TextCursor, sink: Sink, closers: list[str]) -> Reading[bool | None]:
    """The next literal, or the bracket that opens one: True for a bracket, None if neither comes."""
    char = yield from cursor.peek()
    if char and char in _CLOSERS:
        if len(closers) == MAX_DEPTH:
            return None
        cursor.take(1)
        closers.append(_CLOSERS[char])
        sink("{" if char == "{" else "[")
        return True
    if char and char in "'\"":
        return False if (yield from _string(cursor, sink)) else None
    atom = yield from cursor.ahead(_ATOM)
    text = "" if cursor.is_cut(atom) else _number(atom)  # at the end of the text it may lack its own end
    if not text:
        return None
    cursor.take(len(atom))
    sink(text)
    return False


def _number(text: str) -> str:
    """The JSON of a Python number or constant; "" if it is none."""
    if text in _WORDS or _NUMBER.fullmatch(text):
        return _WORDS.get(text, text)
    parts = _FLOAT.fullmatch(text)
    if not parts or not (parts[2] or parts[4]) or not parts[3]:
        return ""
    sign, whole, _, fraction, power = parts.groups()
    written = f"{sign.replace('+', '')}{whole or '0'}.{fraction or '0'}{power}"
    return written if _NUMBER.fullmatch(written) else ""


def _dict_key(cursor: TextCursor, sink: Sink) -> Reading[bool]:
    if (yield from cursor.peek()) not in ("'", '"') or not (yield from _string(cursor, sink)):
        return False
    yield from cursor.space()
    found = yield from cursor.skip(":")
    if found:
        sink(": ")
        yield from cursor.space()
    return found


def _string(cursor: TextCursor, sink: Sink) -> Reading[bool]:
    """A string in one or three quotes; a line end inside one quote is taken as it is meant."""
    quote = cursor.take(1)
    end = quote * 3 if (yield from cursor.peek(2)) == quote * 2 else quote
    cursor.take(len(end) - 1)
    sink('"')
    while not (yield from cursor.skip(end)):
        char = yield from cursor.peek()
        if cursor.is_cut(end):
            return False
        if char != "\\":
            sink(_escape_text(cursor.run(_PLAIN) or cursor.take(1)))
        elif not (yield from _escape(cursor, sink)):
            return False
    sink('"')
    return True


def _escape(cursor: TextCursor, sink: Sink) -> Reading[bool]:
    """One escape; a backslash before any other character stands for itself, as in Python."""
    kind = (yield from cursor.peek(2))[1:]
    digits = _HEX.get(kind, 0)
    if digits:
        code = (yield from cursor.peek(2 + digits))[2:]
        if not re.fullmatch(f"[0-9a-fA-F]{{{digits}}}", code) or int(code, 16) > sys.maxunicode:
            return False
        cursor.take(2 + digits)
        sink(_escape_text(chr(int(code, 16))))
    elif kind:
        cursor.take(2)
        sink(_escape_text(_ESCAPES.get(kind, kind if kind in "\\'\"" else f"\\{kind}")))
    return bool(kind)


def _escape_text(text: str) -> str:
    """`text` as written inside a JSON string; half a surrogate pair, which UTF-8 cannot write, as \\u…"""
    plain = not any("\ud800" <= char <= "\udfff" for char in text)
    return json.dumps(text, ensure_ascii=not plain)[1:-1]
