"""Holds calls to their tools' schemas in a reply that may call and need not (`tool_choice` auto).

Where a marker of its own begins each call, text is free up to the marker. Where none does (JSON, Python
lists), a reply is read as a call because of how it begins and which tool it names. Text may not do both.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Literal

from plait.text.grammar.call_lark import quote_regex
from plait.text.output.call_grammar import (
    FormatMarker,
    Frame,
    FreeUntil,
    FreeWithout,
    OneOf,
    RegexPiece,
    Repeated,
    Structure,
    Style,
    Text,
    Unlike,
    write_arguments,
)
from plait.text.output.json_calls import CallSyntax
from plait.text.output.reasoning import ReasoningFormat

_ANY = "(?s:.*)"
_SPACE, _SOME = r"[ \t\r\n]*", r"[ \t\r\n]{0,9}"
_MOST_AFTER_TEXT = 16  # tools: each is searched at every character of a text; a lexer's steps are bounded
_LINE_END = rf"[ \t]*\r?\n{_SPACE}"
_NAMED_BY = "(name|tool|tool_name|function)"
_JSON = (
    r'\{{{s}("type"{s}:{s}"function"{s},{s})?"(tool_)?name"{s}:{s}"{name}"{t},{t}'
    r'"(arguments|parameters)"{t}:{t}'
)


def hold_calls(
    calls: Structure,
    starts: Sequence[str],
    special: Collection[str],
    reasoning: ReasoningFormat | None = None,
    asides: Iterable[tuple[str, str]] = (),
) -> Structure | None:
    """Text, and then perhaps `calls`, which begin with one of the markers `starts`: to write it is to call.

    `special`: the vocabulary's control tokens. No thinking begins within text: a call in it would be a
    thought. None where calls begin with no marker of their own, or where the first control token of it may
    begin something else, of `asides`.
    """
    marker = next((m for m in starts if _rest(calls, m) is not None), None)
    if marker is None or marker.isalnum():
        return None
    inside = [token for token in special if token and token in marker]
    if any(token in opening for token in inside for opening, _ in asides):
        return None
    rest = _rest(calls, marker) or ()
    others = tuple(other for other in starts if other != marker)
    thoughts = tuple(pair.opening for pair in reasoning.pairs) if reasoning else ()
    lead: Structure = (FreeUntil(FormatMarker(marker), thoughts),)
    if marker in special:
        lead = (FreeWithout((*others, *thoughts)), FormatMarker(marker))
    return (OneOf(((FreeWithout((*starts, *thoughts)),), (*lead, *rest))),)


def hold_in_turns(calls: Structure, asides: Iterable[tuple[str, str]], between: str, final: str) -> Structure:
    """Blocks of `asides` (opening, closing) with `between` after each, then `final` and text, or `calls`.

    For replies of which control tokens begin every part, text as well.
    """
    turns = tuple(
        (FormatMarker(opening), FreeUntil(FormatMarker(closing)), FormatMarker(between))
        for opening, closing in asides
    )
    return (Repeated((OneOf(turns),)), OneOf(((FormatMarker(final), FreeWithout(())), calls)))


def hold_in_wrapper(calls: Structure, starts: Iterable[str], final: str, end: str) -> Structure:
    """Text in which no call starts, with or without `final` before it and `end` behind it, or `calls`."""
    text: Structure = (
        OneOf(((FormatMarker(final),), ())),
        FreeWithout((*starts, end)),
        OneOf(((FormatMarker(end),), ())),
    )
    return (OneOf((text, calls)),)


def hold_by_name(
    syntax: CallSyntax,
    frame: Frame,
    schemas: Mapping[str, Mapping[str, object]],
    special: Collection[str],
    reasoning: ReasoningFormat | None = None,
    *,
    parallel: bool = True,
) -> Structure:
    """Text, or calls of these tools, for a syntax in which calls may begin without a marker of their own.

    A marker that is a word (`functools`) begins a call with the bracket behind it, whatever tool it names.
    Of many tools, none can be called behind text and a marker that is text itself, only at the beginning.
    """
    plain = tuple(marker for marker in syntax.opens if marker not in special)
    free = Unlike(tuple(_calls_as_text(syntax, frame, plain, schemas, reasoning)))
    few = not syntax.bare or len(schemas) <= _MOST_AFTER_TEXT
    behind = plain if few else ()
    special_opens = tuple(marker for marker in syntax.opens if marker in special)
    closing = OneOf((*((Text(f"{n}{c}"),) for c in syntax.closes for n in ("\n", "")), ()))
    options: list[Structure] = [(free,)]
    for style, shape in _shapes(syntax, frame):
        rest = (*_further(style, shape, schemas, parallel), closing)
        in_text = _calls(style, _open_pattern(shape), schemas, behind, free, bare=bool(syntax.bare))
        options.append((in_text, *rest))
        marked = _calls(style, _open_pattern(shape), schemas)
        options += [(free, FormatMarker(marker), marked, *rest) for marker in special_opens]
    return (OneOf(tuple(options)),)


Shape = Literal["one", "list"]


def _shapes(syntax: CallSyntax, frame: Frame) -> tuple[tuple[Style, Shape], ...]:
    """How calls are written: also as JSON by models that were taught Python."""
    if frame.style == "line":
        return (("line", "one"),)
    if frame.style == "python":
        return (("python", "list"), ("json", "list"))
    return (("json", "one"), ("json", "list")) if syntax.bare else (("json", "list"),)


def _open_pattern(shape: Shape) -> str:
    return rf"{_SPACE}\[{_SPACE}" if shape == "list" else _SPACE


def _calls(
    style: Style,
    before: str,
    schemas: Mapping[str, Mapping[str, object]],
    markers: tuple[str, ...] = (),
    free: Unlike | None = None,
    *,
    bare: bool = True,
) -> OneOf:
    """A call of one of the tools, begun in any of the spellings that models have for it."""
    ends: dict[Style, Structure] = {"python": (Text(")"),), "json": (RegexPiece(rf"{_SOME}\}}"),)}
    end = ends.get(style, ())
    return OneOf(
        tuple(
            (
                RegexPiece(_head(style, name, before), markers, free, bare),
                *write_arguments(Frame("", style=style), schema),
                *end,
            )
            for name, schema in schemas.items()
        )
    )


def _head(style: Style, name: str, before: str) -> str:
    """The beginning of a call up to its arguments."""
    if style == "python":
        return rf"{before}{quote_regex(name)}\("
    if style == "line":
        return rf"{before}{quote_regex(name)}{_LINE_END}"
    return before + _JSON.format(s=_SPACE, t=_SOME, name=quote_regex(name))


def _further(
    style: Style, shape: Shape, schemas: Mapping[str, Mapping[str, object]], parallel: bool
) -> Structure:
    """What follows the first call."""
    before = _SOME + ("," if shape == "list" else "[,;]?") + _SOME
    more: Structure = (Repeated((_calls(style, before, schemas),)),) if parallel else ()
    return (*more, RegexPiece(rf"{_SOME}\]")) if shape == "list" else more


def _calls_as_text(
    syntax: CallSyntax,
    frame: Frame,
    plain: Sequence[str],
    schemas: Mapping[str, object],
    reasoning: ReasoningFormat | None,
) -> Iterable[str]:
    """Regular expressions of the texts that would be read as calls, or as thinking with a call after it."""
    wrappers = "|".join(quote_regex(text) for text in (reasoning.wrappers if reasoning else ()) if text)
    start = rf"([ \t\r\n]|{wrappers})*" if wrappers else _SPACE
    markers = "|".join(quote_regex(marker) for marker in plain)
    behind = f"{_ANY}({markers}){_SPACE}"
    if frame.style == "line":
        yield rf"{start}({'|'.join(map(quote_regex, schemas))}){_LINE_END}\{{{_ANY}"
    elif not syntax.bare:  # every name is taken for a tool's
        yield rf"{behind}(\[{_SPACE})?\{{{_ANY}"
    else:
        yield from _bare_calls(syntax.bare, start, behind if plain else "", schemas)
    for pair in reasoning.pairs if reasoning else ():
        yield f"{_ANY}{quote_regex(pair.opening)}{_ANY}"


def _bare_calls(bare: str, start: str, behind: str, names: Collection[str]) -> Iterable[str]:
    """Texts that name a tool where it is called: at the `start`, or `behind` a marker ("": there is none)."""
    objects = [start] * ("{" in bare) + [rf"{start}\[{_SPACE}"] * ("[" in bare)
    lists = [start] * ("[" in bare)
    if behind:
        objects.append(rf"{behind}(\[{_SPACE})?")
        lists.append(behind)
    spelled, quoted = "|".join(map(_spell_in_json, names)), "|".join(map(quote_regex, names))
    yield rf'({"|".join(objects)})\{{{_ANY}"{_NAMED_BY}"{_SPACE}:{_SPACE}"({spelled})"{_ANY}'
    if lists:
        yield rf"({'|'.join(lists)})\[{_SPACE}({quoted})\({_ANY}"


def _spell_in_json(text: str) -> str:
    """The text as it may appear in a JSON string: a character or its escape."""
    return "".join(
        f"({quote_regex(char)}|\\\\u{_hex(ord(char))})" if ord(char) < 0x10000 else quote_regex(char)
        for char in text
    )


def _hex(code: int) -> str:
    return "".join(d if d.isdigit() else f"[{d}{d.upper()}]" for d in f"{code:04x}")


def _rest(structure: Structure, marker: str) -> Structure | None:
    """What follows the marker at the beginning; None: it does not begin with it."""
    match structure[:1]:
        case (FormatMarker(text),) if text == marker:
            return structure[1:]
        case (OneOf(options),) if options:
            found = [_rest(option, marker) for option in options]
            rests = tuple(rest for rest in found if rest is not None)
            return (OneOf(rests), *structure[1:]) if len(rests) == len(found) else None
    return None
