"""Readers of calls in which markers, not JSON, give the name: Mistral, DeepSeek, and XML-like ones."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass

from plait.text.output.call_grammar import Frame
from plait.text.output.cursor import SPACE, Reading, TextCursor, read_whole
from plait.text.output.deltas import ReplyBuilder
from plait.text.output.json_calls import Body, CallSyntax, call_arguments, one_or_list, tell
from plait.text.output.json_stream import Sink, is_json
from plait.text.output.parameters import alternatives, kinds
from plait.text.output.python_calls import python_value

_NAME = re.compile(r"[\w.:/-]+")
_CALL_ID = re.compile(r"\w+")
_KEY = re.compile(r"[^<>\n]+")
_PLAIN = re.compile(r"[^<\n]+")
_list = one_or_list()


def mistral(reply: ReplyBuilder) -> Reading[bool]:
    """`[{"name": …}]`, or `name[ARGS]{…}`, or `name[CALL_ID]id[ARGS]{…}`, or `name{…}`."""
    cursor = reply.cursor
    yield from cursor.space()
    if (yield from cursor.peek()) in ("[", "{"):
        return (yield from _list(reply))
    name = yield from cursor.word(_NAME)
    if not name:
        return False
    if (yield from cursor.skip("[CALL_ID]")):
        yield from cursor.word(_CALL_ID)
    yield from cursor.skip("[ARGS]")
    yield from cursor.space()
    return (yield from cursor.peek()) == "{" and (yield from call_arguments(reply, name))


@dataclass(frozen=True, slots=True)
class CallTokens:
    """The tokens of a format in which calls have tokens of their own; `read_one` reads one behind `call`."""

    read_one: Body
    begin: str
    call: str
    separator: str
    end: str
    close: str

    def syntax(self) -> CallSyntax:
        """How its calls are found and read."""
        return CallSyntax(self._read, (self.begin,), (self.close,), (self.call, self.separator, self.end))

    def frame(self, call: str, separator: str = "") -> Frame:
        """How its calls are written; `call`: the text of one, see `Frame`."""
        return Frame(f"{self.call}{call}{self.end}", self.begin, separator, self.close)

    def _read(self, reply: ReplyBuilder) -> Reading[bool]:
        """Calls up to the first that is none, or does not end."""
        cursor = reply.cursor
        yield from cursor.space()
        found = False
        while (yield from cursor.skip(self.call)):
            found = (yield from self.read_one(reply)) and (yield from cursor.skip(self.end))
            if not found:
                return False
            yield from cursor.space()
        return found


def _deepseek(reply: ReplyBuilder) -> Reading[bool]:
    """V3 names the kind before the separator and fences its JSON, V3.1 does neither."""
    cursor = reply.cursor
    name = yield from cursor.word(_NAME)
    if not (yield from cursor.skip(DEEPSEEK.separator)):
        return False
    if (yield from cursor.peek()) != "{":
        name = yield from cursor.word(_NAME)
        yield from cursor.skip_spaced("```json")
    found = bool(name) and (yield from call_arguments(reply, name))
    if found:
        yield from cursor.skip_spaced("```")
    return found


def _kimi(reply: ReplyBuilder) -> Reading[bool]:
    """`functions.name:index`, the separator and JSON."""
    cursor = reply.cursor
    yield from cursor.space()
    name = (yield from cursor.word(_NAME)).removeprefix("functions.").rsplit(":", 1)[0]
    yield from cursor.space()
    if not name or not (yield from cursor.skip(KIMI.separator)):
        return False
    yield from cursor.space()
    found = yield from call_arguments(reply, name)
    yield from cursor.space()
    return found


DEEPSEEK = CallTokens(
    _deepseek,
    begin="<｜tool▁calls▁begin｜>",  # the bars are full width, the low lines U+2581
    call="<｜tool▁call▁begin｜>",
    separator="<｜tool▁sep｜>",
    end="<｜tool▁call▁end｜>",
    close="<｜tool▁calls▁end｜>",
)
KIMI = CallTokens(
    _kimi,
    begin="<|tool_calls_section_begin|>",
    call="<|tool_call_begin|>",
    separator="<|tool_call_argument_begin|>",
    end="<|tool_call_end|>",
    close="<|tool_calls_section_end|>",
)


def harmony(reply: ReplyBuilder) -> Reading[bool]:
    """`name`, its channel and constraint in either order of writing, `<|message|>` and JSON."""
    cursor = reply.cursor
    name = yield from cursor.word(_NAME)
    for literal in ("<|channel|>", "commentary", "analysis", "<|constrain|>", "json"):
        yield from cursor.skip(literal)
        yield from cursor.space()
    found = name and (yield from cursor.skip("<|message|>"))
    yield from cursor.space()
    return bool(found) and (yield from call_arguments(reply, name))


@dataclass(frozen=True, slots=True)
class _Tags:
    """How an argument is written as text: `key`, its name, `named`, `value`, the value, and one of `ends`.

    `pads`: a line end on either side of the value is not its own.
    """

    key: str
    named: str
    value: str
    ends: tuple[str, ...]
    pads: bool


GLM = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
_GLM = _Tags(GLM[0], GLM[1], GLM[2], (GLM[3],), pads=False)
_QWEN = _Tags("<parameter=", ">", "", ("\n</parameter>", "</parameter>"), pads=True)


def tool_call(reply: ReplyBuilder) -> Reading[bool]:
    """The text in `<tool_call>`: JSON, `<function=name>` with parameters, or GLM's name and pairs."""
    cursor = reply.cursor
    yield from cursor.space()
    if (yield from cursor.skip("<function=")):
        return (yield from function_tag(reply))
    if (yield from cursor.peek()) in ("{", "["):
        return (yield from _list(reply))
    name = yield from cursor.word(_NAME)
    yield from cursor.space()
    if name and (yield from cursor.sees(_GLM.key)):
        return (yield from _arguments(reply, name, _GLM))
    return name in reply.tools and (yield from cursor.sees("</tool_call>")) and tell(reply, name, "{}")


def lines(reply: ReplyBuilder) -> Reading[bool]:
    """A tool's name alone in a line and a JSON object behind it, once or more."""
    cursor = reply.cursor
    found = True
    while found and (name := (yield from cursor.word(_NAME))):
        is_alone = name in reply.tools and "\n" in (yield from cursor.space())
        found = is_alone and (yield from cursor.peek()) == "{" and (yield from call_arguments(reply, name))
        yield from cursor.space() if found else ()
    return found


def function_tag(reply: ReplyBuilder) -> Reading[bool]:
    """`name>` and then parameters, or one JSON object, up to `</function>`."""
    cursor = reply.cursor
    name = yield from cursor.word(_NAME)
    if not name or not (yield from cursor.skip(">")):
        return False
    yield from cursor.space()
    if (yield from cursor.peek()) == "{":
        found = yield from call_arguments(reply, name)
    elif (yield from cursor.sees(_QWEN.key)):
        found = yield from _arguments(reply, name, _QWEN)
    else:
        found = (yield from cursor.sees("</function>")) and tell(reply, name, "{}")
    yield from cursor.space()
    yield from cursor.skip("</function>")
    return found


def _arguments(reply: ReplyBuilder, name: str, tags: _Tags) -> Reading[bool]:
    """Read the call `name`; its first argument comes next."""
    key = yield from _key(reply.cursor, tags)
    if not key:
        return False
    reply.begin(name)
    complete = yield from _pairs(reply, reply.tools.get(name, {}), key, tags)
    reply.end(complete)
    return complete


def _pairs(reply: ReplyBuilder, schema: Mapping[str, object], key: str, tags: _Tags) -> Reading[bool]:
    cursor, opening = reply.cursor, "{"
    while key:
        reply.argue(f"{opening}{json.dumps(key, ensure_ascii=False)}: ")
        if not (yield from _parameter(reply, _types(schema, key), tags)):
            return False
        yield from cursor.space()
        if not (yield from cursor.sees(tags.key)):
            break
        key, opening = (yield from _key(cursor, tags)), ", "
    complete = bool(key) and (yield from cursor.sees("</"))
    reply.argue("}" if complete else "")
    return complete


def _key(cursor: TextCursor, tags: _Tags) -> Reading[str]:
    """An argument's name, with all that comes before its value; "" if that is not what comes."""
    yield from cursor.skip(tags.key)
    name = (yield from cursor.word(_KEY)).strip(SPACE)
    if not (yield from cursor.skip(tags.named)):
        return ""
    if tags.value:
        yield from cursor.space()
    return name if (yield from cursor.skip(tags.value)) else ""


def _parameter(reply: ReplyBuilder, types: frozenset[str], tags: _Tags) -> Reading[bool]:
    """One value up to its closing tag. Text goes on as it comes; anything else when it is whole."""
    if types != {"string"}:
        pieces: list[str] = []
        whole = yield from _raw(reply.cursor, pieces.append, tags)
        reply.argue(convert_value("".join(pieces), types) if whole else "")
        return whole
    reply.argue('"')
    whole = yield from _raw(
        reply.cursor, lambda text: reply.argue(json.dumps(text, ensure_ascii=False)[1:-1]), tags
    )
    reply.argue('"' if whole else "")
    return whole


def _raw(cursor: TextCursor, sink: Sink, tags: _Tags) -> Reading[bool]:
    """Text up to its closing tag. False: the text ended first."""
    if tags.pads:
        yield from cursor.skip("\n")
    while char := (yield from cursor.peek()):
        for closing in tags.ends if char in "\n<" else ():
            if (yield from cursor.skip(closing)):
                return True
            if cursor.is_cut(closing):
                return False
        sink(cursor.run(_PLAIN) or cursor.take(1))
    return False


def convert_value(text: str, types: frozenset[str]) -> str:
    """The JSON of a bare value for a parameter that may have these JSON types (none: not known).

    What reads as JSON is JSON, what reads as Python becomes JSON, all else is a string. A parameter that may
    be a string is one, unless it may also be null and the value is null.
    """
    bare = text.strip(SPACE)
    if "string" in types and not (bare in ("null", "None") and "null" in types):
        return json.dumps(text, ensure_ascii=False)
    if is_json(bare):
        return bare
    pieces: list[str] = []
    as_python = read_whole(bare + " ", lambda cursor: _python(cursor, pieces.append))
    return "".join(pieces) if as_python else json.dumps(text, ensure_ascii=False)


def _python(cursor: TextCursor, sink: Sink) -> Reading[bool]:
    return (yield from python_value(cursor, sink)) and (yield from cursor.skip(" "))


def _types(schema: Mapping[str, object], key: str) -> frozenset[str]:
    """The JSON types that a tool's schema allows for one parameter; empty if it does not say."""
    properties = schema.get("properties")
    stated = properties.get(key) if isinstance(properties, Mapping) else None
    return frozenset().union(*map(kinds, alternatives(stated, schema)))
