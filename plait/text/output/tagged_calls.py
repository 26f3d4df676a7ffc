"""Readers of calls in which tags hold the name and each argument, as text or as JSON: XML and its kin."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from msgspec import Struct
from msgspec.structs import replace

from plait.text.output.call_grammar import ARGUMENTS, LINE, NAME, NUMBER, Frame
from plait.text.output.cursor import SPACE, Reading, TextCursor, read_whole
from plait.text.output.deltas import ReplyBuilder
from plait.text.output.json_calls import CallSyntax, call_arguments, one_or_list, tell
from plait.text.output.json_stream import Sink, json_value
from plait.text.output.parameters import JSON_TYPES, ArgumentTags, alternatives, kinds
from plait.text.output.python_calls import python_value

_NAME = re.compile(r"[\w.:/-]+")
_WORD = re.compile(r"[A-Za-z]+")
_DIGITS = re.compile(r"[0-9]+")
_KEY, _QUOTED_KEY = re.compile(r"[^<>\n]+"), re.compile(r'[^<>\n"]+')
_PLAIN = re.compile(r"[^<\n]+")
_ANY: frozenset[str] = frozenset()  # types of a parameter of which nothing is known
_list = one_or_list()

GLM_TAGS = ArgumentTags("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
QWEN_TAGS = ArgumentTags("<parameter=", ">", "", "</parameter>", pads=True)


class TaggedCalls(Struct, frozen=True):
    """A format of calls between tags: `begin`, then calls, then `end`; both "" where each call stands alone.

    A call is `call`, its name, `named` (which may hold `NUMBER`), its arguments in `tags`, and `close`.
    """

    begin: str
    call: str
    named: str
    tags: ArgumentTags
    close: str
    end: str = ""

    def syntax(self) -> CallSyntax:
        """How its calls are found and read."""
        inner = (self.call, *self.named.split(NUMBER), self.close, *self.tags.markers)
        opens, closes = (self.begin or self.call,), (self.end or self.close,)
        return CallSyntax(self._read, opens, closes, tuple(text for text in inner if text.strip('" \n')))

    def frame(self, leads: tuple[str, ...] = ()) -> Frame:
        """How its calls are written."""
        call = f"{self.call}{NAME}{self.named}{LINE}{ARGUMENTS}{self.close}"
        opening, closing = (self.begin + LINE if self.begin else ""), (LINE + self.end if self.end else "")
        return Frame(call, opening, LINE, closing, "tags", tags=self.tags, leads=leads)

    def _read(self, reply: ReplyBuilder) -> Reading[bool]:
        """Calls up to the first that is none, or does not end."""
        cursor = reply.cursor
        yield from cursor.space()
        if not self.begin:
            return (yield from self._read_one(reply))
        found = False
        while (yield from cursor.skip(self.call)):
            found = yield from self._read_one(reply)
            if not found:
                return False
            yield from cursor.space()
        return found

    def _read_one(self, reply: ReplyBuilder) -> Reading[bool]:
        cursor = reply.cursor
        yield from cursor.space()
        if (yield from cursor.peek()) in ("{", "["):
            found = yield from _list(reply)
            if self.begin:
                yield from cursor.space()
                yield from cursor.skip(self.close)
            return found
        name = yield from cursor.word(_NAME)
        for n, text in enumerate(self.named.split(NUMBER)):
            if n:
                yield from cursor.word(_DIGITS)
            if not name or not (yield from cursor.skip(text)):
                return False
        yield from cursor.space()
        return (yield from read_body(reply, name, self.tags, self.close))


def read_body(reply: ReplyBuilder, name: str, tags: ArgumentTags, close: str) -> Reading[bool]:
    """The arguments of the call `name` and what closes it; they may also be one JSON object, or missing."""
    cursor = reply.cursor
    if (yield from cursor.sees(tags.key)):
        found = yield from read_tags(reply, name, tags)
    elif (yield from cursor.peek()) == "{":
        found = yield from call_arguments(reply, name)
    else:
        found = (yield from cursor.sees(close)) and tell(reply, name, "{}")
    yield from cursor.space()
    yield from cursor.skip(close)
    return found


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
    if name and (yield from cursor.sees(GLM_TAGS.key)):
        return (yield from read_tags(reply, name, GLM_TAGS))
    return name in reply.tools and (yield from cursor.sees("</tool_call>")) and tell(reply, name, "{}")


def function_tag(reply: ReplyBuilder) -> Reading[bool]:
    """`name>` and then parameters, or one JSON object, up to `</function>`."""
    cursor = reply.cursor
    name = yield from cursor.word(_NAME)
    if not name or not (yield from cursor.skip(">")):
        return False
    yield from cursor.space()
    return (yield from read_body(reply, name, QWEN_TAGS, "</function>"))


def read_tags(reply: ReplyBuilder, name: str, tags: ArgumentTags) -> Reading[bool]:
    """Read the call `name`; its first argument comes next."""
    found = yield from _key(reply.cursor, tags)
    if found is None:
        return False
    reply.begin(name)
    complete = yield from _pairs(reply, reply.tools.get(name, {}), found, tags)
    reply.end(complete)
    return complete


def _pairs(
    reply: ReplyBuilder, schema: Mapping[str, object], found: tuple[str, str] | None, tags: ArgumentTags
) -> Reading[bool]:
    cursor, opening = reply.cursor, "{"
    while found:
        key, word = found
        reply.argue(f"{opening}{json.dumps(key, ensure_ascii=False)}: ")
        types, text = _types(schema, key), False
        if word and tags.words:
            types, text = _ANY, word == tags.words.get("string", word)
        elif word in (types or JSON_TYPES):
            types = frozenset((word,))
        text = text or types == {"string"}
        if not (yield from _parameter(reply, types, tags, text)):
            return False
        yield from cursor.space()
        if not (yield from cursor.sees(tags.key)):
            break
        found, opening = (yield from _key(cursor, tags)), ", "
    complete = found is not None and (yield from cursor.sees(tags.stop))
    reply.argue("}" if complete else "")
    return complete


def _key(cursor: TextCursor, tags: ArgumentTags) -> Reading[tuple[str, str] | None]:
    """An argument's name and its word, with all that comes before its value; None if they do not come."""
    yield from cursor.skip(tags.key)
    pattern = _QUOTED_KEY if tags.named.startswith('"') else _KEY
    name, word = (yield from cursor.word(pattern)).strip(SPACE), ""
    if tags.words and (yield from cursor.skip(tags.named)):
        word = yield from cursor.word(_WORD)
    elif not tags.words and not (yield from cursor.skip(tags.named)):
        return None
    elif tags.value and not tags.words:
        yield from cursor.space()
    if tags.kind[0] and (yield from cursor.skip(tags.kind[0])):
        word = (yield from cursor.word(_KEY)).partition("[")[0].strip(SPACE).lower()
        if not (yield from cursor.skip(tags.kind[1])):
            return None
        yield from cursor.space()
    return (name, word) if name and (yield from cursor.skip(tags.value)) else None


def _parameter(reply: ReplyBuilder, types: frozenset[str], tags: ArgumentTags, text: bool) -> Reading[bool]:
    """One value up to its closing tag. Text goes on as it comes; anything else when it is whole."""
    if not text:
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


def _raw(cursor: TextCursor, sink: Sink, tags: ArgumentTags) -> Reading[bool]:
    """Text up to its closing tag. False: the text ended first."""
    ends = (f"\n{tags.end}", tags.end) if tags.pads else (tags.end,)
    if tags.pads:
        yield from cursor.skip("\n")
    while char := (yield from cursor.peek()):
        for closing in ends if char in "\n<" else ():
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
    pieces: list[str] = []
    if bare and read_whole(bare, lambda cursor: json_value(cursor, pieces.append)):
        return "".join(pieces)  # line ends in its texts are escapes there
    pieces.clear()
    as_python = read_whole(bare + " ", lambda cursor: _python(cursor, pieces.append))
    return "".join(pieces) if as_python else json.dumps(text, ensure_ascii=False)


def _python(cursor: TextCursor, sink: Sink) -> Reading[bool]:
    return (yield from python_value(cursor, sink)) and (yield from cursor.skip(" "))


def _types(schema: Mapping[str, object], key: str) -> frozenset[str]:
    """The JSON types that a tool's schema allows for one parameter; empty if it does not say."""
    properties = schema.get("properties")
    stated = properties.get(key) if isinstance(properties, Mapping) else None
    return frozenset().union(*map(kinds, alternatives(stated, schema)))


def _make_quoted_tags(prefix: str, tag: str = "parameter") -> ArgumentTags:
    """`<prefixtag name="key">value</prefixtag>`."""
    return ArgumentTags(f'<{prefix}{tag} name="', '"', ">", f"</{prefix}{tag}>")


def _invokes(prefix: str, begin: str, end: str, tags: ArgumentTags | None = None) -> TaggedCalls:
    """`<prefixinvoke name="f">` with quoted parameters, in `begin` and `end`."""
    made = tags or _make_quoted_tags(prefix)
    return TaggedCalls(begin, f'<{prefix}invoke name="', '">', made, f"</{prefix}invoke>", end)


def _make_keyed_tags(prefix: str = "", suffix: str = "") -> ArgumentTags:
    """`<arg_key>key</arg_key><arg_value>value</arg_value>`, with something around the words."""
    key, value = f"{prefix}arg_key{suffix}>", f"{prefix}arg_value{suffix}>"
    return ArgumentTags(f"<{key}", f"</{key}", f"<{value}", f"</{value}")


def _hunyuan(suffix: str) -> TaggedCalls:
    begin, call = f"tool_calls{suffix}>", f"tool_call{suffix}>"
    tags = _make_keyed_tags(suffix=suffix)
    return TaggedCalls(f"<{begin}", f"<{call}", f"<tool_sep{suffix}>", tags, f"</{call}", f"</{begin}")


DSML_WORD, GCML_WORD = "｜DSML｜", "｜GCML｜"  # the bars are full width


def _make_markup(word: str, begin: str) -> TaggedCalls:
    """Tags with `word` in them (DeepSeek-V3.2, GigaChat 3.5); each parameter says if it is a text."""
    tags = ArgumentTags(
        f'<{word}parameter name="',
        '" string="',
        '">',
        f"</{word}parameter>",
        words={kind: str(kind == "string").lower() for kind in JSON_TYPES},
    )
    return _invokes(word, f"<{word}{begin}>", f"</{word}{begin}>", tags)


DSML_V32, DSML = (_make_markup(DSML_WORD, begin) for begin in ("function_calls", "tool_calls"))
GCML = _make_markup(GCML_WORD, "tool_calls")
DSML_APART = f"{DSML_WORD} "
DSML_V41 = _make_markup(DSML_APART, "calls")
MINIMAX = _invokes("", "<minimax:tool_call>", "</minimax:tool_call>")
STEP3 = TaggedCalls(
    "<｜tool_calls_begin｜>",
    '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="',
    '">',
    _make_quoted_tags("steptml:"),
    "</steptml:invoke><｜tool_call_end｜>",
    "<｜tool_calls_end｜>",
)
SEED = TaggedCalls(
    "<seed:tool_call>",
    "<function=",
    ">",
    ArgumentTags("<parameter=", ">", "", "</parameter>"),
    "</function>",
    "</seed:tool_call>",
)
KIMI_K3 = TaggedCalls(
    "<|open|>tools<|sep|>",
    '<|open|>call tool="',
    f'" index="{NUMBER}"<|sep|>',
    ArgumentTags(
        '<|open|>argument key="',
        '" type="',
        '"<|sep|>',
        "<|close|>argument<|sep|>",
        words={kind: "number" if kind == "integer" else kind for kind in JSON_TYPES},
        stop="<|close|>",
    ),
    "<|close|>call<|sep|>",
    "<|close|>tools<|sep|>",
)
SOLAR2 = TaggedCalls(
    "",
    "<|tool_call:start|>",
    "\n",
    ArgumentTags(
        "<|tool_arg:start|>", "", "<|tool_arg:value|>", "<|tool_arg:end|>", stop="<|tool_call:end|>"
    ),
    "<|tool_call:end|>",
)
LONGCAT = TaggedCalls("", "<longcat_tool_call>", "", _make_keyed_tags("longcat_"), "</longcat_tool_call>")
IQUEST = TaggedCalls("", "<iquest_tool_call>", "", GLM_TAGS, "</iquest_tool_call>")
IFM = TaggedCalls(
    "<ifm|tool_calls>",
    "<ifm|tool_call>",
    "",
    replace(_make_keyed_tags("ifm|"), kind=("<ifm|arg_type>", "</ifm|arg_type>")),
    "</ifm|tool_call>",
    "</ifm|tool_calls>",
)
MINICPM5 = TaggedCalls("", '<function name="', '">', _make_quoted_tags("", "param"), "</function>")
TAGGED: Mapping[str, TaggedCalls] = {
    "minimax_m2": MINIMAX,
    "seed_oss": SEED,
    "step3": STEP3,
    "hy3_open": _hunyuan(":opensource"),
    "hy3": _hunyuan(""),
    "solar_open2": SOLAR2,
    "longcat_tags": LONGCAT,
    "iquest": IQUEST,
    "ifm": IFM,
    "minicpm5": MINICPM5,
    "atem": _invokes("atem:", "<atem:function_calls>", "</atem:function_calls>"),
    "invoke": _invokes("", "<function_calls>", "</function_calls>"),
}
"""Formats of which the tags say all. Hunyuan 3 has a suffix on every tag as it was published."""
