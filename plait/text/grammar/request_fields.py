"""From the fields of a request, in any of the spellings that clients use, to a grammar."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from plait.errors import BadGrammar, InvalidField
from plait.request import Grammar

_ANY_OBJECT = {"type": "object"}
_FORMATS = "'text', 'json_object' or 'json_schema'"
_LARK = "%llguidance"


def grammar_from(body: Mapping[str, object]) -> Grammar | None:
    """The grammar that a request asks for; None for free text.

    vLLM's `disable_additional_properties` (false: objects of a schema are open) and `disable_any_whitespace`
    (true: none) in `structured_outputs` say how a schema's JSON is written, whatever field brings it.

    Read are OpenAI's `response_format`, vLLM's `structured_outputs` and `guided_json`, `guided_regex`,
    `guided_choice`, `guided_grammar`, llama.cpp's `grammar` and `json_schema`, and Ollama's `format`. Raises
    InvalidField, naming the field, for a field of the wrong shape and for two that both constrain the reply,
    BadGrammar for a schema that cannot be written as JSON.
    """
    found = list(_read_grammars(body))
    if len(found) > 1:
        first, second = found[0].param, found[1].param
        raise InvalidField(f"{second}: {first} says already what the reply must be; send one of them", second)
    return replace(found[0], **_style(body.get("structured_outputs"))) if found else None


def _style(asked: object) -> dict[str, Any]:
    """What a request says of how JSON is written, as fields of a Grammar."""
    given = asked if isinstance(asked, Mapping) else {}
    for name in _STYLE:
        if not isinstance(given.get(name), bool | None):
            at = f"structured_outputs.{name}"
            raise InvalidField(f"{at}: {_short(given[name])} is not true or false", at)
    is_open, is_compact = given.get(_STYLE[0]), given.get(_STYLE[1])
    return {"open_objects": None if is_open is None else not is_open, "space": "none" if is_compact else None}


def _read_grammars(body: Mapping[str, object]) -> Iterator[Grammar]:
    for name, read in _FIELDS.items():
        value = body.get(name)
        if value is not None and not (value == "" and name in _EMPTY_IS_ABSENT):
            grammar = read(value, name)
            if grammar is not None:
                yield grammar


def _response_format(value: Any, at: str) -> Grammar | None:
    kind = _mapping(value, at).get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        schema = value.get("schema")  # llama.cpp's place for a schema
        return _schema(_ANY_OBJECT if schema is None else schema, at if schema is None else f"{at}.schema")
    if kind != "json_schema":
        raise InvalidField(f"{at}.type: {_short(kind)} is not {_FORMATS}", f"{at}.type")
    inside = f"{at}.json_schema"
    described = _mapping(value.get("json_schema"), inside)
    if described.get("schema") is None:
        raise InvalidField(f"{inside}.schema: it is required", f"{inside}.schema")
    return _schema(described["schema"], f"{inside}.schema")


def _read_structured_outputs(value: object, at: str) -> Grammar | None:
    sent = _mapping(value, at).items()
    wanted = {name: v for name, v in sent if v is not None and v is not False and name not in _STYLE}
    for name in wanted:
        if name not in _STRUCTURED:
            known = ", ".join((*_STRUCTURED, *_STYLE))
            raise InvalidField(f"{at}.{name}: it cannot be honoured; known are {known}", f"{at}.{name}")
    if len(wanted) > 1:
        raise InvalidField(f"{at}: {' and '.join(sorted(wanted))} are both set; send one of them", at)
    return next((_STRUCTURED[name](v, f"{at}.{name}") for name, v in wanted.items()), None)


def _ollama(value: object, at: str) -> Grammar:
    if isinstance(value, str) and value != "json":
        raise InvalidField(f"{at}: {_short(value)} is neither 'json' nor a JSON schema", at)
    return _schema(_ANY_OBJECT if value == "json" else value, at)


def _json_object(value: object, at: str) -> Grammar:
    if value is not True:
        raise InvalidField(f"{at}: {_short(value)} is not true or false", at)
    return _schema(_ANY_OBJECT, at)


def _schema(value: object, at: str) -> Grammar:
    """From a schema, or from its JSON text."""
    if isinstance(value, str):
        return Grammar("json_schema", value, at)
    if not isinstance(value, Mapping | bool):
        raise InvalidField(f"{at}: {_short(value)} is not a JSON schema", at)
    try:
        return Grammar("json_schema", json.dumps(value, ensure_ascii=False, allow_nan=False), at)
    except RecursionError as error:
        raise BadGrammar(f"{at}: the schema is nested too deeply; make it flatter", at) from error
    except (TypeError, ValueError) as error:
        raise BadGrammar(f"{at}: the schema cannot be written as JSON: {error}", at) from error


def _regex(value: object, at: str) -> Grammar:
    return Grammar("regex", _text(value, at, "a regular expression"), at)


def _choice(value: object, at: str) -> Grammar:
    if not isinstance(value, list | tuple) or not value:
        raise InvalidField(f"{at}: {_short(value)} is not a list of strings, with at least one", at)
    for i, choice in enumerate(value):
        if not isinstance(choice, str) or not choice:
            raise InvalidField(f"{at}[{i}]: {_short(choice)} is not a string with text in it", f"{at}[{i}]")
    return Grammar("choice", json.dumps(list(value), ensure_ascii=False), at)


def _grammar(value: object, at: str) -> Grammar:
    """llama.cpp's notation writes `root ::= …`, Lark's `start: …`; `%llguidance` at the head means Lark."""
    text = _text(value, at, "a grammar")
    is_gbnf = "::=" in text and not text.lstrip().startswith(_LARK)
    return Grammar("gbnf" if is_gbnf else "lark", text, at)


def _text(value: object, at: str, what: str) -> str:
    if not isinstance(value, str) or not value:
        raise InvalidField(f"{at}: {_short(value)} is not the text of {what}", at)
    return value


def _mapping(value: object, at: str) -> Mapping[str, object]:
    if not isinstance(value, Mapping):
        what = "it is required" if value is None else f"{_short(value)} is not an object"
        raise InvalidField(f"{at}: {what}", at)
    return value


def _short(value: object) -> str:
    shown = repr(value) if not isinstance(value, list | tuple | Mapping) or len(value) < 8 else "this value"
    return shown if len(shown) <= 80 else shown[:79] + "…"


_Read = Callable[[object, str], Grammar | None]
_STRUCTURED: Mapping[str, Callable[[object, str], Grammar]] = {
    "json": _schema,
    "json_object": _json_object,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
}
_STYLE = ("disable_additional_properties", "disable_any_whitespace")
_FIELDS: Mapping[str, _Read] = {
    "response_format": _response_format,
    "structured_outputs": _read_structured_outputs,
    "guided_json": _schema,
    "guided_regex": _regex,
    "guided_choice": _choice,
    "guided_grammar": _grammar,
    "grammar": _grammar,
    "json_schema": _schema,
    "format": _ollama,
}
_EMPTY_IS_ABSENT = frozenset({"grammar", "format"})
