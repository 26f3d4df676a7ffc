"""JSON schemas whose objects have no other properties than they name.

JSON Schema lets any property stand in an object that does not say `additionalProperties: false`. Who writes
`properties` does not mean that, and a small model that may go on writing keys does. So objects with
`properties` are closed where the key is absent. Schemas that are combined (`allOf`, `$ref` with more beside
it) describe one object together: that is closed once, for the names of all, and its parts stay open.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_COMBINED = ("allOf", "anyOf", "oneOf")
_NESTED = ("items", "prefixItems", "additionalItems", "additionalProperties")
_SAYS = ("additionalProperties", "unevaluatedProperties")
_MOST_STEPS = 20_000  # schemas that are looked at: references could make it a square of the text


def with_closed_objects(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The same schema with closed objects. Raises ValueError if it is nested or combined too deeply."""
    try:
        return _Closing(schema).whole()
    except RecursionError as error:
        raise ValueError("the schema is nested too deeply") from error


@dataclass(slots=True)
class _Names:
    """What schemas say of an object's properties. `is_said`: whether others may be there."""

    names: dict[str, None] = field(default_factory=dict)  # in their order
    patterns: dict[str, None] = field(default_factory=dict)
    is_said: bool = False


class _Closing:
    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root, self._steps = root, 0
        self._copies: dict[str, Any] = {}  # open ones, by their names under $defs
        self._names_of_copies: dict[str, str] = {}  # by the reference

    def whole(self) -> dict[str, Any]:
        found: dict[str, Any] = self._part(self._root)
        if self._copies:
            found["$defs"] = {**_mapping(found.get("$defs")), **self._copies}
        return found

    def _part(self, part: Any, *, stays_open: bool = False) -> Any:
        """A schema, its objects closed. `stays_open`: its own, which others close."""
        if not isinstance(part, dict):
            return part
        self._step()
        parts = [*_parts(part)]
        is_said = any(key in part for key in _SAYS)
        together = self._together(part) if len(parts) > 1 and not is_said and not stays_open else None
        inner_open = stays_open or (bool(parts) and is_said) or together is not None
        found = {key: self._value(key, value, inner_open) for key, value in part.items()}
        if together is not None and not together.is_said:
            for key, names in (("properties", together.names), ("patternProperties", together.patterns)):
                if names:
                    found[key] = {**dict.fromkeys(names, True), **_mapping(found.get(key))}
            found["additionalProperties"] = False
        elif isinstance(part.get("properties"), dict) and not (is_said or inner_open):
            found["additionalProperties"] = False
        return found

    def _value(self, key: str, value: Any, inner_open: bool) -> Any:
        if key in _MAPS and isinstance(value, dict):
            return {name: self._part(one) for name, one in value.items()}
        if key in _COMBINED and isinstance(value, list):
            return [self._part(one, stays_open=inner_open) for one in value]
        if key in _NESTED:
            return [self._part(one) for one in value] if isinstance(value, list) else self._part(value)
        if key == "$ref" and inner_open and isinstance(value, str):
            return self._open_copy(value)
        return value

    def _together(self, part: Mapping[str, Any]) -> _Names | None:
        """What the parts of a combined schema say of one object; None: fewer than two of them speak of it."""
        found, speaking = _Names(), 0
        for one in _parts(part):
            mine = _Names()
            for schema in one:
                self._collect(schema, mine, set())
            speaking += bool(mine.names or mine.patterns or mine.is_said)
            found.names |= mine.names
            found.patterns |= mine.patterns
            found.is_said |= mine.is_said
        return found if speaking > 1 else None

    def _collect(self, part: Any, found: _Names, seen: set[str]) -> None:
        if not isinstance(part, dict):
            return
        self._step()
        for key, kept in (("properties", found.names), ("patternProperties", found.patterns)):
            named = part.get(key)
            if isinstance(named, dict):
                kept |= dict.fromkeys(named)
                self._step(len(named))
        found.is_said |= any(key in part for key in _SAYS)
        for key in _COMBINED:
            for one in part[key] if isinstance(part.get(key), list) else ():
                self._collect(one, found, seen)
        ref = part.get("$ref")
        if isinstance(ref, str) and ref not in seen:
            seen.add(ref)
            target = self._target(ref)
            found.is_said |= target is None  # of what is not found here nothing is known
            self._collect(target, found, seen)

    def _open_copy(self, ref: str) -> str:
        """A reference to the same schema, with an object that stays open."""
        target = self._target(ref)
        if not isinstance(target, dict):
            return ref
        if ref not in self._names_of_copies:
            taken = _mapping(self._root.get("$defs"))
            name = f"open_{len(self._names_of_copies)}"
            while name in taken:
                name += "_"
            self._names_of_copies[ref] = name
            self._copies[name] = self._part(target, stays_open=True)
        return f"#/$defs/{self._names_of_copies[ref]}"

    def _target(self, ref: str) -> Any:
        """What a reference within the schema points to; None: nothing here."""
        if ref == "#":
            return self._root
        at: Any = self._root
        for step in ref[2:].split("/") if ref.startswith("#/") else (None,):
            if step is None or not isinstance(at, dict):
                return None
            at = at.get(step.replace("~1", "/").replace("~0", "~"))
        return at

    def _step(self, count: int = 1) -> None:
        self._steps += count
        if self._steps > _MOST_STEPS:
            raise ValueError(f"the schema has more than {_MOST_STEPS} parts, its references followed")


def _parts(part: Mapping[str, Any]) -> Iterator[list[Any]]:
    """The schemas that must all hold: each a list of alternatives."""
    own = {key: part[key] for key in _MAPS[:2] if isinstance(part.get(key), dict)}
    if own:
        yield [own]
    if "$ref" in part:
        yield [{"$ref": part["$ref"]}]
    for one in part["allOf"] if isinstance(part.get("allOf"), list) else ():
        yield [one]
    for key in ("anyOf", "oneOf"):
        if isinstance(part.get(key), list):
            yield part[key]


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}
