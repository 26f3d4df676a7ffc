"""Parameters that are written as bare text between tags: the tags, and what a tool's schema says of one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct, field

_MOST_STEPS = 256  # of a schema that refers to itself
_MOST_CHARS = 1_000_000  # more than any reply has
_KINDS: Mapping[type, str] = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array"}
JSON_TYPES = ("array", "boolean", "integer", "null", "number", "object", "string")
_FORMATS = {
    "date": r"[0-9]{4}-[0-9]{2}-[0-9]{2}",
    "time": r"[0-9]{2}:[0-9]{2}:[0-9]{2}(\.[0-9]+)?([zZ]|[+-][0-9]{2}:[0-9]{2})",
    "duration": r"P[0-9YMWDTHS.]+",
    "email": r"[^ @\t\r\n<>]+@[^ @\t\r\n<>]+",
    "hostname": r"[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?",
    "ipv4": r"[0-9]{1,3}(\.[0-9]{1,3}){3}",
    "ipv6": r"[0-9A-Fa-f:.]{2,45}",
    "uuid": r"[0-9A-Fa-f]{8}(-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}",
    "uri": r"[A-Za-z][A-Za-z0-9+.-]*:[^ \t\r\n<>]*",
}
_FORMATS["date-time"] = f"{_FORMATS['date']}[tT]{_FORMATS['time']}"


class ArgumentTags(Struct, frozen=True):
    """How an argument is written as text: `key`, its name, `named`, `value`, the value, and `end`.

    `pads`: a line end on either side of the value is not its own. `words`: JSON type → the word between
    `named` and `value` that says whether the value is text or JSON; a call may leave it out with `named`.
    `stop`: what comes behind the last argument begins with this. `kind`: around the word of a type, which a
    call may write before a value. It counts where a schema allows several types, that one included, or says
    nothing of the argument.
    """

    key: str
    named: str
    value: str
    end: str
    pads: bool = False
    words: Mapping[str, str] = field(default_factory=dict)
    stop: str = "</"
    kind: tuple[str, str] = ("", "")

    @property
    def markers(self) -> tuple[str, ...]:
        """Every text of the tags that may hold a control token of a vocabulary."""
        tags = (self.key, self.named, *self.kind, self.value, self.end)
        return tuple(dict.fromkeys(text for text in tags if text))


def alternatives(schema: object, root: Mapping[str, object]) -> list[Mapping[str, object]]:
    """The schemas of which one must hold. What is no schema, or refers too far, becomes `{}`: any value.

    `anyOf` and `oneOf` are taken apart, the parts of `allOf` are joined, references are followed.
    """
    found: list[Mapping[str, object]] = []
    waiting = [schema]
    for _ in range(_MOST_STEPS):
        if not waiting:
            return found
        one = _merge_schema(waiting.pop(), root)
        options = one.get("anyOf", one.get("oneOf"))
        if "$ref" in one or "allOf" in one:
            waiting.append(one)
        elif isinstance(options, Sequence) and not isinstance(options, str):
            rest = {name: value for name, value in one.items() if name not in ("anyOf", "oneOf")}
            waiting += [{**rest, **option} for option in reversed(options) if isinstance(option, Mapping)]
        else:
            found.append(one)
    return [*found, {}]


def kinds(schema: Mapping[str, object]) -> frozenset[str]:
    """The JSON types that one of `alternatives` allows; empty if it does not say."""
    stated = schema.get("type")
    named = frozenset(kind for kind in (stated if isinstance(stated, list | tuple) else [stated]) if kind)
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if named or not isinstance(values, list):
        return frozenset(kind for kind in named if isinstance(kind, str))
    return frozenset("null" if v is None else _KINDS.get(type(v), "object") for v in values)


def values(schema: Mapping[str, object]) -> list[str] | None:
    """The strings that one of `alternatives` allows, where it lists them."""
    listed = [schema["const"]] if "const" in schema else schema.get("enum")
    return [value for value in listed if isinstance(value, str)] if isinstance(listed, list) else None


def lengths(schema: Mapping[str, object]) -> tuple[int, int | None]:
    """How many characters a string must and may have under one of `alternatives`."""
    return _count(schema.get("minLength")) or 0, _count(schema.get("maxLength"))


def patterns(schema: Mapping[str, object]) -> tuple[str, ...]:
    """Regular expressions, each of which a string must match as a whole under one of `alternatives`."""
    found = []
    if isinstance(pattern := schema.get("pattern"), str):
        found.append(_anchor_pattern(pattern))
    if form := _FORMATS.get(str(schema.get("format"))):
        found.append(form)
    return tuple(found)


def _count(value: object) -> int | None:
    """What is no number is refused elsewhere, with the whole schema."""
    return int(min(max(value, 0), _MOST_CHARS)) if isinstance(value, int | float) else None


def _anchor_pattern(pattern: str) -> str:
    """A pattern may match anywhere in a string, unless it says otherwise."""
    begins, ends = pattern.startswith("^"), pattern.endswith("$") and not pattern.endswith("\\$")
    inner = pattern[begins : len(pattern) - ends]
    return f"{'' if begins else '(?s:.*)'}({inner}){'' if ends else '(?s:.*)'}"


def _merge_schema(schema: object, root: Mapping[str, object]) -> dict[str, object]:
    """A schema with its reference, and the parts that must hold together, taken in: one step of each."""
    if not isinstance(schema, Mapping):
        return {}
    rest = {name: value for name, value in schema.items() if name not in ("$ref", "allOf")}
    parts = schema.get("allOf")
    found: dict[str, object] = {}
    for part in (
        _follow_reference(schema.get("$ref"), root),
        *(parts if isinstance(parts, Sequence) else ()),
    ):
        found |= part if isinstance(part, Mapping) else {}
    return {**found, **rest}


def _follow_reference(reference: object, root: object) -> object:
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return None
    for name in reference[2:].split("/"):
        name = name.replace("~1", "/").replace("~0", "~")
        root = root.get(name) if isinstance(root, Mapping) else None
    return root
