"""Replies to read in tests: cut in every way, put together again, checked for order on the way."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from plait.text.output import (
    FORMATS,
    Arguments,
    CallEnd,
    CallStart,
    Content,
    OutputDelta,
    OutputParser,
    Reasoning,
    tool_schemas,
)

DS = {
    "begin": "<｜tool▁calls▁begin｜>",
    "call": "<｜tool▁call▁begin｜>",
    "sep": "<｜tool▁sep｜>",
    "end": "<｜tool▁call▁end｜>",
    "close": "<｜tool▁calls▁end｜>",
}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "tags": {"type": "array"}},
}
NAMES = ["get_weather", "search", "f"]
TOOLS = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in NAMES]


@dataclass
class Read:
    """A reply, put together again."""

    content: str = ""
    reasoning: str = ""
    names: list[str] = field(default_factory=list)
    arguments: list[str] = field(default_factory=list)
    complete: list[bool] = field(default_factory=list)

    @property
    def calls(self) -> list[tuple[str, Any]]:
        return [(name, json.loads(text)) for name, text in zip(self.names, self.arguments, strict=True)]


def gathered(deltas: Sequence[OutputDelta]) -> Read:
    """Checks the order of deltas on the way: start, pieces, end, one call after the other."""
    read = Read()
    for delta in deltas:
        match delta:
            case Content(text):
                assert text
                read.content += text
            case Reasoning(text):
                assert text
                read.reasoning += text
            case CallStart(index, call_id, name):
                assert index == len(read.names) == len(read.complete)
                assert call_id == f"call_{index}"
                read.names.append(name)
                read.arguments.append("")
            case Arguments(index, text):
                assert text
                assert index == len(read.names) - 1 == len(read.complete)
                read.arguments[index] += text
            case CallEnd(index, complete):
                assert index == len(read.names) - 1 == len(read.complete)
                read.complete.append(complete)
    return read


def parser(name: str, **options: Any) -> OutputParser:
    count = itertools.count()
    return OutputParser(
        calls=FORMATS[name].syntax,
        tools=tool_schemas(options.pop("tools", TOOLS)),
        make_id=lambda: f"call_{next(count)}",
        most_calls=None if options.pop("parallel", True) else 1,
        **options,
    )


def pieces(text: str, cuts: Sequence[int]) -> list[str]:
    at = [0, *sorted({cut % (len(text) + 1) for cut in cuts}), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(at)]


def read(name: str, parts: Sequence[str], **options: Any) -> Read:
    reader = parser(name, **options)
    deltas = [delta for part in parts for delta in reader.push(part)]
    return gathered([*deltas, *reader.finish()])


def read_every_way(name: str, text: str, cuts: Sequence[int] = (), **options: Any) -> Read:
    """The whole text at once, and the same by characters and by the given cuts."""
    whole = read(name, [text], **options)
    assert read(name, list(text), **options) == whole
    assert read(name, pieces(text, cuts), **options) == whole
    return whole


def parses(text: str) -> bool:
    """Whether it is JSON, which has no NaN and no Infinity."""
    try:
        json.loads(text, parse_constant=refuse)
    except ValueError:
        return False
    return True


def refuse(constant: str) -> None:
    raise ValueError(constant)


def is_beginning_of_json(text: str) -> bool:
    """Whether more text can make it valid, tried out with `json`."""
    closers, inside, escaped = "", False, False
    for char in text:
        if inside:
            inside, escaped = escaped or char != '"', char == "\\" and not escaped
        elif char == '"':
            inside = True
        elif char in "{[":
            closers = ("}" if char == "{" else "]") + closers
        elif char in "}]":
            closers = closers[1:]
    words = [word[n:] for word in ("true", "false", "null") for n in range(1, len(word))]
    return any(parses(text + more + closers) for more in ["", '"', '":0', ":0", "0", '"":0', *words])
