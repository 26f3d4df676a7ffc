"""Lark source, in llguidance's notation, for the structure of a demanded call."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping

from plait.text.output.call_grammar import (
    FormatMarker,
    FreeUntil,
    FreeWithout,
    Json,
    OneOf,
    Part,
    RegexPiece,
    Repeated,
    Structure,
    Text,
    Unlike,
    Value,
)

Rules = dict[str, str]
"""What each rule says, and its name: parts that are alike share one."""
_REGEX_MARKS = re.compile(r"[\\^$.|?*+()\[\]{}/]")


def as_lark(structure: Structure, special_ids: Mapping[str, int]) -> str:
    """Lark source with the structure as its `start`.

    `special_ids`: text → id of the vocabulary's control tokens; all else in a marker is text.
    """
    rules: Rules = {}
    start = _sequence(structure, special_ids, rules)
    return "\n".join([f"start: {start}", *(name + body for body, name in rules.items())]) + "\n"


def _sequence(structure: Structure, special_ids: Mapping[str, int], rules: Rules) -> str:
    return " ".join(_write_part(part, special_ids, rules) for part in structure) or '""'


def _write_part(part: Part, special_ids: Mapping[str, int], rules: Rules) -> str:
    match part:
        case FormatMarker(text):
            return _marker(text, special_ids)
        case Text(text):
            return _literal(text)
        case Json(schema):
            return _rule(rules, f": %json {json.dumps(schema, ensure_ascii=False)}")
        case FreeUntil() | Value():
            return _until(part, special_ids, rules)
        case FreeWithout(markers):
            free = _without(markers, special_ids)
            return _rule(rules, ": " + (f"{free} & " if free else "") + "/(?s:.*)/", "TEXT")
        case Unlike() | RegexPiece():
            return _expression(part, rules)
        case Repeated(parts):
            return f"{_rule(rules, ': ' + _sequence(parts, special_ids, rules))}*"
        case OneOf(options):
            return _rule(rules, ": " + " | ".join(_sequence(o, special_ids, rules) for o in options))


def _until(part: FreeUntil | Value, special_ids: Mapping[str, int], rules: Rules) -> str:
    """Text with what ends it: in one piece where that is text, so that the first that comes ends it."""
    patterns, kept = ["(?s:.*)"], ""
    if isinstance(part, Value):
        from llguidance import regex_to_lark  # a library that most requests need not load

        patterns = [f"({regex_to_lark(pattern, '')})" for pattern in part.patterns]
        kept = f"~/(?s:.*){quote_regex(part.closing)}(?s:.+)/" if part.closing else ""
    else:
        kept = _without(part.without, special_ids)
    lead, *rest = _cut_marker(part.end.text, special_ids) if isinstance(part.end, FormatMarker) else [""]
    if rest:  # a control token ends the text, behind what the marker has before it
        texts = [f"/{pattern}{quote_regex(lead)}/" for pattern in patterns]
        texts += [kept] if kept and isinstance(part, FreeUntil) else []
        return f"{_rule(rules, ': ' + ' & '.join(texts))} {_write_pieces(rest, special_ids)}"
    texts = [f"/{pattern}{quote_regex(part.end.text)}/" for pattern in patterns]
    return _rule(rules, "[lazy]: " + " & ".join([*texts, kept] if kept else texts))


def _without(markers: Iterable[str], special_ids: Mapping[str, int]) -> str:
    """Anything without these: no text matches a control token, so that only markers that are text count.

    What is no UTF-8 matches no expression, and so every complement of one. So the caller adds one that it
    must match as well. Otherwise a lexer would go on behind a marker, waiting for bytes that are no text.
    """
    texts = "|".join(quote_regex(text) for text in markers if text not in special_ids)
    return f"~/(?s:.*)({texts})(?s:.*)/" if texts else ""


def _expression(part: Unlike | RegexPiece, rules: Rules) -> str:
    if isinstance(part, Unlike):
        # What is no UTF-8 matches no expression, and so every complement of one: it must match one as well.
        return _rule(rules, f": ~/({'|'.join(part.patterns)})/ & /(?s:.*)/", "TEXT")
    lead = ""
    if part.markers:
        free = "/(?s:.*)/" if part.text is None else _expression(part.text, rules)
        lead = f"({free} ({' | '.join(map(_literal, part.markers))})){'?' * part.bare} "
    return _rule(rules, f": {lead}/{part.pattern}/", "HEAD")


def _marker(text: str, special_ids: Mapping[str, int]) -> str:
    """A marker may be one control token, hold some, or be ordinary text."""
    return _write_pieces(_cut_marker(text, special_ids), special_ids)


def _cut_marker(text: str, special_ids: Mapping[str, int]) -> list[str]:
    """Text and control tokens in turn, text first; it may be empty."""
    inside = sorted((token for token in special_ids if token and token in text), key=len, reverse=True)
    return re.split(f"({'|'.join(map(re.escape, inside))})", text) if inside else [text]


def _write_pieces(pieces: Iterable[str], special_ids: Mapping[str, int]) -> str:
    return " ".join(f"<[{special_ids[t]}]>" if t in special_ids else _literal(t) for t in pieces if t)


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def quote_regex(text: str) -> str:
    """A regular expression of exactly this text, for llguidance."""
    return _REGEX_MARKS.sub(r"\\\g<0>", text).replace("\n", "\\n")


def _rule(rules: Rules, body: str, kind: str = "part") -> str:
    """The name of a rule; one that regular expressions alone make up has one in capitals."""
    return rules.setdefault(body, f"{kind}{len(rules)}")
