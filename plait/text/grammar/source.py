"""Converts a grammar to the form that llguidance compiles, or reports why it cannot be honoured.

Runs in the trial process: what follows is pure Python over a stranger's text, some of it quadratic.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping

from llguidance import regex_to_lark

from plait.request import JsonStyle
from plait.text.grammar.closed_objects import with_closed_objects
from plait.text.grammar.gbnf import lark_from_gbnf

# Between two tokens of JSON. Small models get lost in white space, and each token of it costs a step.
_SPACE: dict[str, dict[str, object]] = {
    "line": {"whitespace_pattern": r"\x20|\x0A(\x20{0,8}|\x09{0,4})"},
    "any": {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,32}"},
    "none": {"whitespace_flexible": False},
}
# The outer grammar is ours, so that no inner one can switch forcing on. With forcing, a mask would depend on
# how a text is cut into tokens, and the library would call Python back from threads of its own.
_OUTER = '%llguidance {"no_forcing": true}\nstart: @reply'
_LARK_NOISE = re.compile(r'"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])+/|//[^\n]*|#[^\n]*')
_LARK_REFUSED = re.compile(r"\b(temperature|stop|max_tokens)\s*=")
_UNHEEDED = {
    "nullable": 'write "type": [..., "null"]',
    "dependencies": "leave it out",
    "$dynamicRef": "use $ref",
    "$recursiveRef": "use $ref",
    "x-guidance": "leave it out",
}
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("anyOf", "allOf", "oneOf", "prefixItems")
_ONES = ("items", "additionalProperties", "additionalItems")


def library_form(kind: str, source: str, style: JsonStyle, max_bytes: int) -> str:
    """llguidance's serialized grammar. `style`: of a schema. Raises ValueError with the reason.

    `max_bytes`: of a source. The form, of which an engine and caches hold many, may have four times as much.
    """
    match kind:
        case "json_schema":
            inner: dict[str, object] = {"json_schema": _schema(source, style)}
        case "regex":
            inner = {"lark_grammar": f"start: {_regex(source)}"}
        case "choice":
            options = " | ".join(_literal(option) for option in json.loads(source))
            inner = {"lark_grammar": f"start: CHOICE\nCHOICE: {options}"}
        case "gbnf":
            inner = {"lark_grammar": lark_from_gbnf(source)}
        case "lark":
            inner = {"lark_grammar": _lark(source)}
        case _:
            raise ValueError(f"{kind!r} is not a kind of grammar")
    grammars = [{"lark_grammar": _OUTER}, {"name": "reply", **inner}]
    form = json.dumps({"grammars": grammars}, ensure_ascii=False)
    if any("\ud800" <= c <= "\udfff" for c in form):
        raise ValueError("it holds half of a surrogate pair, which is not a character")
    if len(form.encode()) > 4 * max_bytes:
        is_schema = kind == "json_schema"
        what = "schema is too large with its references followed" if is_schema else "grammar is too large"
        raise ValueError(f"the {what}; make it simpler")
    return form


def _literal(text: str) -> str:
    """As Lark writes it: like JSON, but for the one control character that JSON does not escape."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _regex(source: str) -> str:
    if not source:
        raise ValueError("the regular expression is empty, and so would be every reply")
    return f"/{regex_to_lark(source, '')}/"


def _lark(source: str) -> str:
    refused = _LARK_REFUSED.search(_LARK_NOISE.sub("", source))
    if refused:
        raise ValueError(f"the rule option {refused.group(1)!r} cannot be honoured; leave it out")
    return source


def _schema(source: str, style: JsonStyle) -> dict[str, object]:
    try:
        schema = json.loads(source)
    except RecursionError as error:
        raise ValueError("the schema is nested too deeply") from error
    except ValueError as error:
        raise ValueError(f"the schema is not JSON: {error}") from error
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise ValueError("the schema is not an object; one that allows something is needed")
    for part in _subschemas(schema):
        _check(part)
    return in_style(schema, style)


def in_style(schema: Mapping[str, object], style: JsonStyle) -> dict[str, object]:
    """A schema with its texts written in that style. Raises ValueError if it is nested too deeply."""
    found = schema if style.open_objects else with_closed_objects(schema)
    return {**found, "x-guidance": _SPACE[style.space]}


def _subschemas(schema: Mapping[str, object]) -> Iterator[Mapping[str, object]]:
    """The schema and every schema in it; what is in `enum`, `const` or an unknown keyword is not one."""
    waiting: list[object] = [schema]
    while waiting:
        part = waiting.pop()
        if not isinstance(part, dict):
            continue
        yield part
        for name, value in part.items():
            if name in _MAPS and isinstance(value, dict):
                waiting += value.values()
            elif name in _LISTS + _ONES:
                waiting += value if isinstance(value, list) else [value]


def _check(part: Mapping[str, object]) -> None:
    """Refuses what the library would pass over in silence; the rest it refuses by itself."""
    for name, instead in _UNHEEDED.items():
        if part.get(name) not in (None, False):
            raise ValueError(f"the schema keyword {name!r} is not supported; {instead}")
    least, required = part.get("minProperties", 0), part.get("required", [])
    enough = len(required) if isinstance(required, list) else 0
    if isinstance(least, int) and least > max(1, enough):
        raise ValueError(
            "the schema keyword 'minProperties' is not supported above the number of required properties: "
            "a key that stands twice would count as two; name the keys in 'required'"
        )
