"""The form of a reply in which a call is demanded (`tool_choice`), as plain data.

A structure is a tuple of parts, one after the other. It does not define how it is enforced; `call_lark`
writes it for llguidance.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

from msgspec import Struct

from plait.errors import InvalidField
from plait.text.output.parameters import ArgumentTags, alternatives, kinds, lengths, patterns, values
from plait.text.output.reasoning import ReasoningFormat

_MOST_COUNTED = 1000  # characters of a text that must also be free of something
MOST_NESTED, MOST_ITEMS = 6, 32  # levels of objects, and counted items, in the style "quoted"
MOST_THOUGHTS = 4  # blocks of thinking before what is demanded


class Text(Struct, frozen=True):
    """Exactly this text."""

    text: str


class FormatMarker(Struct, frozen=True):
    """A marker of the format: what in it is a control token of the vocabulary must be that token."""

    text: str


class Json(Struct, frozen=True):
    """A JSON text that this schema allows."""

    schema: Mapping[str, object]


class FreeUntil(Struct, frozen=True):
    """Any text up to and with the first occurrence of `end`, which may be a marker.

    None of `without` may come before `end`.
    """

    end: FormatMarker | Text
    without: tuple[str, ...] = ()


class Value(Struct, frozen=True):
    """Text that each of `patterns` matches in whole, up to and with the first `end`.

    `closing`: what must not come before that, if a pattern may pass over an `end` that comes too early.
    """

    end: FormatMarker | Text
    patterns: tuple[str, ...]
    closing: str = ""


class FreeWithout(Struct, frozen=True):
    """Any text in which none of these markers occurs."""

    markers: tuple[str, ...]


class Unlike(Struct, frozen=True):
    """Any text that none of these regular expressions matches from its beginning to its end."""

    patterns: tuple[str, ...]


class RegexPiece(Struct, frozen=True):
    """What a regular expression matches, taken as one piece: `Unlike` that gives way to it does so within it.

    It may come after `text` and one of `markers`; with `bare` or no markers it may come alone.
    """

    pattern: str
    markers: tuple[str, ...] = ()
    text: Unlike | None = None
    bare: bool = True


class OneOf(Struct, frozen=True):
    """One of several structures; an empty one makes it optional."""

    options: tuple[Structure, ...]


class Repeated(Struct, frozen=True):
    """This structure any number of times, or not at all."""

    parts: Structure


Part = Text | FormatMarker | Json | FreeUntil | Value | FreeWithout | Unlike | RegexPiece | OneOf | Repeated
Structure = tuple[Part, ...]


Style = Literal["json", "line", "python", "tags", "quoted"]
NUMBER, NAME, ARGUMENTS, LINE, CALL_ID = "\0", "\1", "\2", "\3", "\4"  # in the texts of a `Frame`
_BREAK = OneOf(((Text("\n"),), ()))
_PLACES: Mapping[str, Part] = {
    NUMBER: RegexPiece("[0-9]{1,3}"),
    LINE: _BREAK,
    CALL_ID: RegexPiece("[A-Za-z0-9]{9}"),
}


class Frame(Struct, frozen=True):
    """How a format writes calls: `opening`, then calls with `separator` between them, then `closing`.

    `call`: a text with `NAME`, `ARGUMENTS` (written as `style`) and perhaps `NUMBER`, the call's number,
    `CALL_ID`, Mistral's nine letters and digits, and `LINE`, a line end that may be left out.
    `name_in_json`: the name is inside a JSON string. `tags`: of the style "tags"; `quote`: around texts in
    the style "quoted". `leads`: texts of which one may come first.
    """

    call: str
    opening: str = ""
    separator: str = ""
    closing: str = ""
    style: Style = "json"
    name_in_json: bool = False
    tags: ArgumentTags | None = None
    quote: str = ""
    leads: tuple[str, ...] = ()


def json_frame(
    opening: str = "",
    closing: str = "",
    separator: str = ", ",
    *,
    name: str = "name",
    key: str = "arguments",
    around: tuple[str, str] = ("", ""),
) -> Frame:
    """Calls as JSON objects, the texts of `around` before and behind each. `name`, `key`: their keys."""
    call = f'{around[0]}{{"{name}": "{NAME}", "{key}": {ARGUMENTS}}}{around[1]}'
    return Frame(call, opening, separator, closing, name_in_json=True)


def required_tools(schemas: Mapping[str, Mapping[str, Any]], choice: Any) -> tuple[str, ...]:
    """The tools of which one must be called under OpenAI's `tool_choice`; none where none must be.

    Raises InvalidField (`tool_choice`) for a choice that is not known, and for a function that is not there.
    """
    if choice is None or choice in ("auto", "none"):
        return ()
    if choice == "required":
        if not schemas:
            raise InvalidField("tool_choice: 'required', but there are no tools; send some", "tool_choice")
        return tuple(schemas)
    function = choice.get("function") if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or choice.get("type", "function") != "function":
        raise InvalidField(
            "tool_choice: it is not 'none', 'auto', 'required' or "
            '{"type": "function", "function": {"name": …}}',
            "tool_choice",
        )
    if name not in schemas:
        known = ", ".join(schemas) or "none"
        raise InvalidField(f"tool_choice: there is no tool {name!r}; the tools are: {known}", "tool_choice")
    return (name,)


def frame_call(
    frame: Frame, markers: Iterable[str], schemas: Mapping[str, Mapping[str, object]], parallel: bool
) -> Structure:
    """A call of one of these tools; `parallel`: further ones may follow."""
    cut = [re.escape(marker) for marker in (*sorted(markers, key=len, reverse=True), *_PLACES)]

    def parts(text: str) -> Structure:
        pieces = enumerate(re.split(f"({'|'.join(cut)})", text))
        return tuple(_PLACES.get(p) or (FormatMarker(p) if n % 2 else Text(p)) for n, p in pieces if p)

    before, after = frame.call.split(NAME)
    between, after = after.split(ARGUMENTS)
    calls = tuple(
        (
            *parts(before),
            Text(json.dumps(name, ensure_ascii=False)[1:-1] if frame.name_in_json else name),
            *parts(between),
            *write_arguments(frame, schema),
            *parts(after),
        )
        for name, schema in schemas.items()
    )
    call = OneOf(calls)
    more: Structure = (Repeated((*parts(frame.separator), call)),) if parallel else ()
    lead: Structure = (OneOf((*map(parts, frame.leads), ())),) if frame.leads else ()
    return (*lead, *parts(frame.opening), call, *more, *parts(frame.closing))


def begin_thinking(reasoning: ReasoningFormat | None, starts_open: bool, *, again: bool = True) -> Structure:
    """Thinking that may come before what is demanded, opened by the prompt or not.

    `again`: in several blocks; not in any number, or a reply could think for ever. What would end thinking
    without its closing marker must not be in it: what is demanded comes behind that marker.
    """
    if reasoning is None:
        return ()
    between = OneOf(tuple((FormatMarker(text),) if text else () for text in reasoning.between))
    first, closings = reasoning.pairs[0], [pair.closing for pair in reasoning.pairs]
    ends = tuple(
        (FreeUntil(FormatMarker(end), (*reasoning.until, *(c for c in closings if c != end))),)
        for end in closings
    )
    rest: Structure = (ends[0][0] if len(ends) == 1 else OneOf(ends), between)
    block: Structure = (
        FormatMarker(first.opening),
        FreeUntil(FormatMarker(first.closing), reasoning.until),
        between,
    )
    most = MOST_THOUGHTS if again else 1
    more: Structure = ()
    for _ in range(most - starts_open):
        more = (OneOf(((*block, *more), ())),)
    return (*rest, *more) if starts_open else more


def _properties(schema: Mapping[str, object]) -> tuple[list[tuple[str, Any]], list[tuple[str, Any]]]:
    """(required, optional) parameters with their schemas, in the order of the schema.

    A part's schema keeps the definitions of the whole, for its references.
    """
    properties = schema.get("properties")
    required = schema.get("required")
    names = set(required) if isinstance(required, Sequence) and not isinstance(required, str) else set()
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    found = [
        (name, {**one, **shared} if isinstance(one, Mapping) else one)
        for name, one in (properties.items() if isinstance(properties, Mapping) else ())
    ]
    return [p for p in found if p[0] in names], [p for p in found if p[0] not in names]


def _as_python(schema: Mapping[str, object]) -> Structure:
    """`a=1, b="x"`: required ones first, for the order of keywords is free and a comma needs a left side."""
    required, optional = _properties(schema)
    head: list[Part] = []
    for name, one in required:
        head += [*([Text(", ")] if head else []), Text(f"{name}="), Json(one)]
    tails = [OneOf(((Text(f", {name}="), Json(one)), ())) for name, one in optional]
    if required:
        return (*head, *tails)
    begins: list[Structure] = [
        (Text(f"{name}="), Json(one), *tails[n + 1 :]) for n, (name, one) in enumerate(optional)
    ]
    return (OneOf((*begins, ())),) if begins else ()


def _rows(schema: Mapping[str, object], row: Callable[[str, object], Structure]) -> Structure:
    required, optional = _properties(schema)
    rows: list[Part] = [part for name, one in required for part in row(name, one)]
    return (*rows, *(OneOf((row(name, one), ())) for name, one in optional))


def _write_tags(tags: ArgumentTags, name: str, schema: object) -> Structure:
    """One argument between tags: text where its schema allows one, else JSON."""
    head = (FormatMarker(tags.key), Text(name), FormatMarker(tags.named))
    if tags.words:
        return (*head, OneOf(tuple(_write_word(tags, schema))), _BREAK)
    lead: Structure = (_BREAK, FormatMarker(tags.value)) if tags.value else ()
    pad = "\n" if tags.pads else ""
    return (*head, *lead, *((Text(pad),) if pad else ()), *_bare(schema, FormatMarker(tags.end), pad), _BREAK)


def _write_word(tags: ArgumentTags, schema: object) -> Iterable[Structure]:
    """The word for each type that a value may have, and the values of that type."""
    for option in alternatives(schema, schema if isinstance(schema, Mapping) else {}):
        for kind in sorted(kinds(option) or tags.words):
            one, end = {**option, "type": kind}, FormatMarker(tags.end)
            value = _bare(one, end) if kind == "string" else (Json(one), end)
            yield (Text(tags.words.get(kind, tags.words["object"])), FormatMarker(tags.value), *value)


def _bare(schema: Any, closing: FormatMarker | Text, pad: str = "") -> Structure:
    """A value, `pad` and what closes it: JSON, or text where it may be a string, as it is read as one."""
    options = alternatives(schema, schema if isinstance(schema, Mapping) else {})
    texts = [option for option in options if "string" in kinds(option)]
    end = Text(pad + closing.text) if pad else closing
    if not texts:
        return (Json(schema), end)
    found: list[Structure] = []
    for option in texts:
        listed = values(option)
        found += [(_text(option, closing, pad),)] if listed is None else [(Text(v), end) for v in listed]
    if any("null" in kinds(option) for option in options):
        found.append((Text("null"), end))
    return found[0] if len(found) == 1 else (OneOf(tuple(dict.fromkeys(found))),)


def _text(schema: Mapping[str, object], closing: FormatMarker | Text, pad: str) -> Value:
    """A string and what closes it, in a form that is cheap to follow: long ones need not be counted twice.

    The first `closing` ends what is free to its end, and `pad` before it belongs to no value. A string with a
    set length or form could run over `closing`, so that must be kept out of it.
    """
    (least, most), forms = lengths(schema), patterns(schema)
    many = f"(?s:.{{0,{most}}})" if most is not None else "(?s:.*)"
    if not least and not forms:
        return Value(closing, (f"{many}{pad and f'{pad}?'}",))
    if not forms and most is not None and most > _MOST_COUNTED:
        first = f"[^<{pad}]{{{min(least, most)}}}(?s:.{{0,{max(most - least, 0)}}})"
        return Value(closing, (f"{first}{pad and f'{pad}?'}",))
    counted = (f"(?s:.{{{least},{'' if most is None else max(most, least)}}})",) if least or most else ()
    return Value(Text(pad + closing.text) if pad else closing, (*counted, *forms), closing.text)


def write_arguments(frame: Frame, schema: Mapping[str, object]) -> Structure:
    """The arguments of one call, in the style of a `Frame`."""
    match frame.style:
        case "json" | "line":
            return (Json(schema if schema.get("type") == "object" else {"type": "object", **schema}),)
        case "python":
            return _as_python(schema)
        case "tags":
            return _rows(schema, partial(_write_tags, frame.tags)) if frame.tags else ()
        case "quoted":
            return write_members(schema, frame.quote)


def write_members(schema: Mapping[str, object], quote: str, depth: int = 0) -> Structure:
    """`a:1,b:{c:<quote>x<quote>}`: the members of an object, required ones first.

    A part of what the schema allows: unknown keys are left out. Raises InvalidField for what is nested deeper
    than MOST_NESTED, as schemas that hold themselves are.
    """
    required, optional = _properties(schema)
    rows = [(Text(f"{name}:"), *_write_quoted(one, quote, depth)) for name, one in required]
    head = [part for n, row in enumerate(rows) for part in ((Text(","), *row) if n else row)]
    ways = [(Text(f"{name}:"), *_write_quoted(one, quote, depth)) for name, one in optional]
    tails = [OneOf(((Text(","), *row), ())) for row in ways]
    if required or not ways:
        return (*head, *tails)
    return (OneOf((*((*row, *tails[n + 1 :]) for n, row in enumerate(ways)), ())),)


def _write_quoted(schema: object, quote: str, depth: int) -> Structure:
    if depth > MOST_NESTED:
        raise InvalidField(
            f"tools: parameters nested deeper than {MOST_NESTED} levels cannot be demanded in this model's "
            "format; make them flatter, or send tool_choice 'auto'",
            "tools",
        )
    found: list[Structure] = []
    for option in alternatives(schema, schema if isinstance(schema, Mapping) else {}):
        for kind in sorted(kinds(option) or ("boolean", "null", "number", "string")):
            found.append(_write_kind({**option, "type": kind}, kind, quote, depth))
    return found[0] if len(found) == 1 else (OneOf(tuple(found)),)


def _write_kind(schema: Mapping[str, object], kind: str, quote: str, depth: int) -> Structure:
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    match kind:
        case "string":
            return (FormatMarker(quote), *_bare(schema, FormatMarker(quote)))
        case "object":
            return (Text("{"), *write_members(schema, quote, depth + 1), Text("}"))
        case "array":
            items = schema.get("items")
            one = {**items, **shared} if isinstance(items, Mapping) else {}
            return (Text("["), *_write_items(schema, _write_quoted(one, quote, depth + 1)), Text("]"))
        case _:
            return (Json(schema),)


def _write_items(schema: Mapping[str, object], item: Structure) -> Structure:
    """As many items as a list must have, and further ones up to what it may have."""
    least, most = (schema.get(name) for name in ("minItems", "maxItems"))
    low = min(least, MOST_ITEMS) if isinstance(least, int) and least > 0 else 0
    more: Structure = (Repeated((Text(","), *item)),)
    if isinstance(most, int) and most >= low:
        more = ()
        for _ in range(min(most, MOST_ITEMS) - max(low, 1)):
            more = (OneOf(((Text(","), *item, *more), ())),)
    rest = tuple(part for _ in range(low - 1) for part in (Text(","), *item))
    some = (*item, *rest, *more)
    return some if low else (OneOf((some, ())),) if most != 0 else ()
