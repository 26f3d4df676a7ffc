"""Readers of calls in Gemma's own notation, `call:name{key:<|"|>text<|"|>,n:2}`.

Keys have no quotes, texts have a marker on both sides and no escapes, all else is as in JSON. It becomes JSON
as it comes.
"""

from __future__ import annotations

import json
import re

from plait.text.output.call_grammar import ARGUMENTS, NAME, Frame
from plait.text.output.cursor import Reading, TextCursor
from plait.text.output.deltas import ReplyBuilder
from plait.text.output.json_calls import Body, CallSyntax
from plait.text.output.json_stream import MAX_DEPTH, Sink, is_json

_NAME = re.compile(r"[\w.:/-]+")
_KEY = re.compile(r"[^:,{}\[\]<>\n]+")
_ATOM = re.compile(r"[\w.+-]+")
_WORDS = {"True": "true", "False": "false", "None": "null"}
_CLOSERS = {"{": "}", "[": "]"}

GEMMA4 = ("<|tool_call>", "<tool_call|>", '<|"|>')
FUNCTION_GEMMA = ("<start_function_call>", "<end_function_call>", "<escape>")


def gemma_syntax(opening: str, closing: str, quote: str) -> CallSyntax:
    """How its calls are found and read. `quote`: the marker on both sides of a text."""
    return CallSyntax(read_gemma(quote, closing), (opening,), (closing,), (quote,))


def gemma_frame(opening: str, closing: str, quote: str) -> Frame:
    """How its calls are written."""
    return Frame(f"{opening}call:{NAME}{{{ARGUMENTS}}}{closing}", style="quoted", quote=quote)


def read_gemma(quote: str, closing: str) -> Body:
    """`call:name{…}` and the closing marker."""

    def body(reply: ReplyBuilder) -> Reading[bool]:
        cursor = reply.cursor
        yield from cursor.space()
        if not (yield from cursor.skip("call:")):
            return False
        name = yield from cursor.word(_NAME)
        if not name or (yield from cursor.peek()) != "{":
            return False
        reply.begin(name)
        complete = yield from _read_value(cursor, reply.argue, quote)
        reply.end(complete)
        if complete:
            yield from cursor.space()
            yield from cursor.skip(closing)
        return complete

    return body


def _read_value(cursor: TextCursor, sink: Sink, quote: str) -> Reading[bool]:
    """One value as JSON; False: it is none, from the next character on."""
    closers: list[str] = []
    fresh = True  # nothing is in the innermost bracket yet
    while True:
        yield from cursor.space()
        if closers and (yield from cursor.skip(closers[-1])):
            sink(closers.pop())
            fresh = False
        else:
            if closers and not fresh:
                if not (yield from cursor.skip(",")):
                    return False
                yield from cursor.space()
                sink(", ")
            if closers[-1:] == ["}"] and not (yield from _read_key(cursor, sink, quote)):
                return False
            opened = yield from _read_item(cursor, sink, quote, closers)
            if opened is None:
                return False
            fresh = opened
        if not closers:
            return True


def _read_key(cursor: TextCursor, sink: Sink, quote: str) -> Reading[bool]:
    if (yield from cursor.sees(quote)):
        found = yield from _read_text(cursor, sink, quote)
    else:
        name = (yield from cursor.word(_KEY)).strip()
        found = bool(name)
        sink(json.dumps(name, ensure_ascii=False) if found else "")
    yield from cursor.space()
    found = found and (yield from cursor.skip(":"))
    sink(": " if found else "")
    yield from cursor.space()
    return found


def _read_item(cursor: TextCursor, sink: Sink, quote: str, closers: list[str]) -> Reading[bool | None]:
    """The next value, or the bracket that opens one: True for a bracket, None if neither comes."""
    char = yield from cursor.peek()
    if char and char in _CLOSERS:
        if len(closers) == MAX_DEPTH:
            return None
        closers.append(_CLOSERS[cursor.take(1)])
        sink(char)
        return True
    if (yield from cursor.sees(quote)):
        return False if (yield from _read_text(cursor, sink, quote)) else None
    atom = yield from cursor.ahead(_ATOM)
    text = "" if cursor.is_cut(atom) else _WORDS.get(atom, atom)  # at the end of the text it may lack its own
    if not is_json(text):
        return None
    cursor.take(len(atom))
    sink(text)
    return False


def _read_text(cursor: TextCursor, sink: Sink, quote: str) -> Reading[bool]:
    """A text and the marker on its other side. False: the reply ended first."""
    cursor.take(len(quote))
    plain = re.compile(f"[^{re.escape(quote[0])}]+")
    sink('"')
    while not (yield from cursor.skip(quote)):
        if not (yield from cursor.peek()) or cursor.is_cut(quote):
            return False
        sink(json.dumps(cursor.run(plain) or cursor.take(1), ensure_ascii=False)[1:-1])
    sink('"')
    return True
