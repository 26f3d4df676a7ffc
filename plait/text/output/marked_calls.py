"""Readers of calls in which markers, not JSON, give the name: Mistral, DeepSeek, Kimi, Solar and others."""

from __future__ import annotations

import re

from msgspec import Struct

from plait.text.output.call_grammar import Frame
from plait.text.output.cursor import Reading
from plait.text.output.deltas import ReplyBuilder
from plait.text.output.json_calls import Body, CallSyntax, call_arguments, one_or_list

_NAME = re.compile(r"[\w.:/-]+")
_CALL_ID = re.compile(r"\w+")
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


class CallTokens(Struct, frozen=True):
    """The tokens of a format in which calls have tokens of their own; `read_one` reads one behind `call`.

    `named`: the token before a call's name, where there is one.
    """

    read_one: Body
    begin: str
    call: str
    separator: str
    end: str
    close: str
    named: str = ""

    def syntax(self) -> CallSyntax:
        """How its calls are found and read."""
        inner = tuple(token for token in (self.call, self.named, self.separator, self.end) if token)
        return CallSyntax(self._read, (self.begin,), (self.close,), inner)

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


def lines(reply: ReplyBuilder) -> Reading[bool]:
    """A tool's name alone in a line and a JSON object behind it, once or more."""
    cursor = reply.cursor
    found = True
    while found and (name := (yield from cursor.word(_NAME))):
        is_alone = name in reply.tools and "\n" in (yield from cursor.space())
        found = is_alone and (yield from cursor.peek()) == "{" and (yield from call_arguments(reply, name))
        yield from cursor.space() if found else ()
    return found


def read_named_json(between: str, after: str = "", *, text_name: str = "") -> Body:
    """A tool's name, `between` and a JSON object, then perhaps `after`; white space around each is free.

    `text_name`: under this name content is written in place of arguments; it is passed over.
    """

    def body(reply: ReplyBuilder) -> Reading[bool]:
        cursor = reply.cursor
        yield from cursor.space()
        name = yield from cursor.word(_NAME)
        if text_name and name == text_name:
            yield from cursor.space()
            yield from cursor.skip(between.strip())
            return True
        lines_passed = "\n" in (yield from cursor.space())
        if name not in reply.tools or not (lines_passed or between.strip()):
            return False
        found = yield from cursor.skip(between.strip())
        yield from cursor.space()
        found = found and (yield from cursor.peek()) == "{" and (yield from call_arguments(reply, name))
        if found:
            yield from cursor.space()
            yield from cursor.skip(after)
        return found

    return body


def _solar(reply: ReplyBuilder) -> Reading[bool]:
    """A call's id, the token before its name, the name, the token before its arguments, and JSON."""
    cursor = reply.cursor
    yield from cursor.word(_CALL_ID)
    if not (yield from cursor.skip(SOLAR.named)):
        return False
    name = yield from cursor.word(_NAME)
    found = name and (yield from cursor.skip(SOLAR.separator))
    yield from cursor.space()
    return bool(found) and (yield from call_arguments(reply, name))


SOLAR = CallTokens(
    _solar,
    begin="<|tool_calls|>",
    call="<|tool_call:begin|>",
    separator="<|tool_call:args|>",
    end="<|tool_call:end|>",
    close="<|calls|>",
    named="<|tool_call:name|>",
)
