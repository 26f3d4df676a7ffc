"""Readers of calls written as JSON: one object, a list of them, or several with something in between."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

from plait.text.output.cursor import SPACE, Reading, TextCursor
from plait.text.output.deltas import ReplyBuilder
from plait.text.output.json_stream import ignore, is_json, json_text, json_value

Body = Callable[[ReplyBuilder], Reading[bool]]
"""Reads what follows a marker. False: from the cursor's `hold` on it was no call, and is content."""

_NAMES = frozenset({"name", "tool", "tool_name", "function"})
_ARGUMENTS = frozenset({"arguments", "parameters", "args", "input", "tool_input"})
_SEPARATORS = ",;"


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """How calls are found: a marker of `opens` and then what `body` reads, then perhaps one of `closes`.

    `bare`: characters that, at the start of the content, may begin a call without a marker.
    """

    body: Body
    opens: tuple[str, ...] = ()
    closes: tuple[str, ...] = ()
    inner: tuple[str, ...] = ()
    bare: str = ""

    @property
    def markers(self) -> tuple[str, ...]:
        """Every marker that must appear in the text."""
        return (*self.opens, *self.inner, *self.closes)


def call_object(reply: ReplyBuilder, known_only: bool = False) -> Reading[bool]:
    """`{"name": …, "arguments": {…}}`, keys in any order; `known_only`: an unknown name is no call.

    The call begins when its name is known and its arguments open; until then it is only a candidate.
    False: it was none, or it broke off inside its arguments.
    """
    cursor = reply.cursor
    name, early = "", ""
    if not (yield from cursor.skip("{")):
        return False
    while not (name and early):
        key = yield from _key(cursor)
        if key in _NAMES and not name:
            name = _decode_string((yield from json_text(cursor)))
            if not name or (known_only and name not in reply.tools):
                return False
        elif key in _ARGUMENTS and name:
            return (yield from call_arguments(reply, name)) and (yield from _rest(cursor))
        elif key in _ARGUMENTS:
            early = _as_object((yield from json_text(cursor)))
            if not early:
                return False
        elif key == "}":
            return bool(name) and tell(reply, name, "{}")
        elif key is None or not (yield from json_value(cursor, ignore)):
            return False
    return tell(reply, name, early) and (yield from _rest(cursor))


def call_arguments(reply: ReplyBuilder, name: str) -> Reading[bool]:
    """Read the arguments of the call `name`, which come next. False: they are no JSON object, or broke off.

    An object is emitted as it comes. A string that holds one, and null, are emitted when they are whole.
    """
    if (yield from reply.cursor.peek()) != "{":
        whole = _as_object((yield from json_text(reply.cursor)))
        return bool(whole) and tell(reply, name, whole)
    reply.begin(name)
    complete = yield from json_value(reply.cursor, reply.argue)
    reply.end(complete)
    return complete


def tell(reply: ReplyBuilder, name: str, arguments: str) -> bool:
    """A call that is known in whole. Always true, for readers to return."""
    reply.begin(name)
    reply.argue(arguments)
    reply.end(complete=True)
    return True


def one_or_list(known_only: bool = False) -> Body:
    """One object or a list of them; an empty list is no call, written in the right form."""

    def body(reply: ReplyBuilder) -> Reading[bool]:
        cursor = reply.cursor
        yield from cursor.space()
        if not (yield from cursor.skip("[")):
            return (yield from objects(reply, known_only))
        yield from cursor.space()
        if (yield from cursor.skip("]")):
            return not known_only
        found = yield from objects(reply, known_only, closer="]")
        return found and (yield from cursor.skip("]"))

    return body


def read_keyed_list(reply: ReplyBuilder) -> Reading[bool]:
    """`[{"name": {…}}, …]`: objects with one key, the tool's name, and its arguments."""
    cursor = reply.cursor
    yield from cursor.space()
    if not (yield from cursor.skip("[")):
        return False
    found = yield from cursor.skip("]")
    while not found:
        yield from cursor.space()
        name = (yield from _key(cursor)) if (yield from cursor.skip("{")) else None
        if not name or name == "}" or not (yield from call_arguments(reply, name)):
            return False
        yield from cursor.skip_spaced("}")
        if not (yield from cursor.skip(",")):
            found = yield from cursor.skip("]")
            break
    return found


def objects(reply: ReplyBuilder, known_only: bool, closer: str = "") -> Reading[bool]:
    """Objects one after the other, with white space, `,` or `;` between them."""
    while (yield from call_object(reply, known_only)):
        yield from reply.cursor.space()
        separated = (yield from reply.cursor.peek()) in tuple(_SEPARATORS)
        if separated:
            reply.cursor.take(1)
            yield from reply.cursor.space()
        following = yield from reply.cursor.peek()
        if following != "{":
            return not separated or bool(closer and following == closer)
    return False


def _key(cursor: TextCursor) -> Reading[str | None]:
    """The next key of an object, its colon taken too; "}" at the object's end; None if neither comes."""
    yield from cursor.space()
    if (yield from cursor.skip("}")):
        return "}"
    if (yield from cursor.skip(",")):
        yield from cursor.space()
    if (yield from cursor.peek()) != '"':
        return None
    key = _decode_string((yield from json_text(cursor)))
    yield from cursor.space()
    if not (yield from cursor.skip(":")):
        return None
    yield from cursor.space()
    return key


def _rest(cursor: TextCursor) -> Reading[bool]:
    """What an object still holds after its call. A call that is whole stays one whatever this is."""
    while (key := (yield from _key(cursor))) is not None and key != "}":
        if not (yield from json_value(cursor, ignore)):
            break
    return True


def _decode_string(text: str | None) -> str:
    """The string that a JSON text stands for; "" if it is none."""
    return str(json.loads(text)) if text and text[0] == '"' else ""


def _as_object(text: str | None) -> str:
    """The text of an object, which may have been written as a string, or as null; "" if it is none."""
    if text == "null":
        return "{}"
    inner = _decode_string(text) or text or ""
    return inner if inner.lstrip(SPACE)[:1] == "{" and is_json(inner) else ""
