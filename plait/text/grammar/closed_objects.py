"""Closes the objects of JSON schemas: they get no other properties than they name.

JSON Schema allows any property in an object that does not set `additionalProperties: false`. The author of
`properties` does not mean that, and a small model that may go on writing keys does. So objects with
`properties` are closed where the key is absent; names that only `required` lists are allowed too. Schemas
that are combined (`allOf`, `$ref` with other keywords) describe one object together. That is closed once, for
the names of all, and its parts stay open. Where several of them describe the same property or the items of a
list, everything in there stays open, because each would forbid what another requires.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import unquote

_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_COMBINED = ("allOf", "anyOf", "oneOf")
_ITEMS = ("items", "prefixItems", "additionalItems")
_SAYS = ("additionalProperties", "unevaluatedProperties")
_OWN = (*_MAPS[:2], *_ITEMS, *_SAYS, "required")  # what a schema itself defines of an object or a list
_MOST_STEPS = 20_000  # schemas that are looked at: references could make it a square of the text
_MOST_ADDED = 1 << 20  # characters of copies and names: a reference's path may lead through all of the text


def with_closed_objects(schema: Mapping[str, object]) -> dict[str, object]:
    """The same schema with closed objects. Raises ValueError if it is nested or combined too deeply."""
    try:
        return _Closing(schema).whole()
    except RecursionError as error:
        raise ValueError("the schema is nested too deeply") from error


@dataclass(frozen=True, slots=True)
class _Mode:
    """What stays open in a schema: its own object, and all that the schemas of some properties describe."""

    is_open: bool = False
    shared: frozenset[str] = frozenset()  # these properties
    all_properties: bool = False
    items: bool = False

    def of_property(self, name: str) -> _Mode:
        return _OPEN if self.all_properties or name in self.shared else _CLOSED


_CLOSED, _OPEN = _Mode(), _Mode(True, all_properties=True, items=True)


@dataclass(slots=True)
class _Names:
    """What schemas define of an object's properties. `is_said`: whether others may be there."""

    names: dict[str, None] = field(default_factory=dict)  # in their order
    patterns: dict[str, None] = field(default_factory=dict)
    required: dict[str, None] = field(default_factory=dict)
    shared: set[str] = field(default_factory=set)  # names that more than one schema describes
    is_said: bool = False
    has_properties: bool = False
    # How many schemas that must hold together:
    speaking: int = 0  # define something of the object
    describing: int = 0  # describe its properties
    unlisted: int = 0  # of these: some by pattern, or all others
    lists: int = 0  # describe the items of a list

    def add(self, other: _Names) -> None:
        """Both hold."""
        self.shared |= self.names.keys() & other.names.keys()
        self._join(other)
        self.speaking += other.speaking
        self.describing += other.describing
        self.unlisted += other.unlisted
        self.lists += other.lists

    def add_choice(self, other: _Names) -> None:
        """One of them holds."""
        self._join(other)
        self.speaking = min(1, self.speaking + other.speaking)
        self.describing = max(self.describing, other.describing)
        self.unlisted = max(self.unlisted, other.unlisted)
        self.lists = max(self.lists, other.lists)

    def _join(self, other: _Names) -> None:
        self.names |= other.names
        self.patterns |= other.patterns
        self.required |= other.required
        self.shared |= other.shared
        self.is_said |= other.is_said
        self.has_properties |= other.has_properties

    def inner_mode(self, mode: _Mode, *, is_open: bool) -> _Mode:
        """That of the schemas that are combined within a schema of this mode."""
        every = mode.all_properties or (self.unlisted > 0 and self.describing > 1)
        return _Mode(is_open, mode.shared | self.shared, every, mode.items or self.lists > 1)


class _Closing:
    def __init__(self, root: Mapping[str, object]) -> None:
        self._root, self._steps, self._added = root, 0, 0
        self._base = str(root.get("$id", "")).partition("#")[0]
        self._copies: dict[str, object] = {}  # open ones, by their names under $defs
        self._names_of_copies: dict[tuple[str, _Mode], str] = {}  # by the reference
        self._has_followed = self._is_lost = self._has_inner_base = False

    def whole(self) -> dict[str, object]:
        found: dict[str, object] = self._part(self._root, _CLOSED)
        # Of an unknown target nothing can be copied, so that none may be closed: it could be any of them.
        if self._is_lost or (self._has_followed and self._has_inner_base):
            return dict(self._root)
        if self._copies:
            found["$defs"] = {**_mapping(found.get("$defs")), **self._copies}
        return found

    def _part(self, part: object, mode: _Mode) -> Any:
        """A schema, its objects closed where they may be."""
        if not isinstance(part, dict):
            return part
        self._step()
        self._has_inner_base |= part is not self._root and isinstance(part.get("$id"), str)
        is_said = any(key in part for key in _SAYS)
        together, inner = None, replace(mode, is_open=mode.is_open or is_said)
        if not mode.is_open and _num_parts(part) > 1:
            said = _Names()
            self._collect(part, said, set())
            together = said if said.speaking > 1 and said.has_properties and not is_said else None
            inner = said.inner_mode(mode, is_open=is_said or together is not None)
        found = {key: self._value(key, value, inner) for key, value in part.items()}
        if together is not None and not together.is_said:
            self._add(sum(map(len, (*together.names, *together.required, *together.patterns))))
            _close(found, together)
        elif isinstance(part.get("properties"), dict) and not inner.is_open:
            _close(found, _Names(required=dict.fromkeys(_texts(part.get("required")))))
        return found

    def _value(self, key: str, value: object, mode: _Mode) -> object:
        if key == "properties" and isinstance(value, dict):
            return {name: self._part(one, mode.of_property(name)) for name, one in value.items()}
        if key in _COMBINED and isinstance(value, list):
            return [self._part(one, mode) for one in value]
        if key == "$ref" and mode != _CLOSED and isinstance(value, str):
            return self._open_copy(value, mode)
        is_open = mode.items if key in _ITEMS else mode.all_properties
        within = _OPEN if is_open and key not in _MAPS[2:] else _CLOSED
        if key in _MAPS and isinstance(value, dict):
            return {name: self._part(one, within) for name, one in value.items()}
        if key in _ITEMS or key == "additionalProperties":
            of_each = [self._part(one, within) for one in value] if isinstance(value, list) else None
            return self._part(value, within) if of_each is None else of_each
        return value

    def _collect(self, part: object, found: _Names, seen: set[str]) -> None:
        if not isinstance(part, dict):
            return
        self._collect_own(part, found)
        for one in part["allOf"] if isinstance(part.get("allOf"), list) else ():
            self._collect(one, found, seen)
        for key in ("anyOf", "oneOf"):
            choices = _Names()
            for one in part[key] if isinstance(part.get(key), list) else ():
                mine = _Names()
                self._step(len(seen))
                self._collect(one, mine, seen.copy())
                choices.add_choice(mine)
                self._step(len(mine.names) + len(mine.patterns) + len(mine.required))
            found.add(choices)
        ref = part.get("$ref")
        if isinstance(ref, str) and ref not in seen:
            seen.add(ref)
            self._collect(self._target(ref), found, seen)

    def _collect_own(self, part: Mapping[str, object], found: _Names) -> None:
        names, patterns = _mapping(part.get("properties")), _mapping(part.get("patternProperties"))
        required = _texts(part.get("required"))
        self._step(1 + len(names) + len(patterns) + len(required))
        is_said = any(key in part for key in _SAYS)
        has_properties = bool(patterns) or isinstance(part.get("properties"), dict)
        is_unlisted = bool(patterns) or isinstance(part.get("additionalProperties"), dict)
        own = _Names(dict.fromkeys(names), dict.fromkeys(patterns), dict.fromkeys(required))
        own.is_said, own.has_properties = is_said, has_properties
        own.speaking = has_properties or is_said or bool(required)
        own.describing, own.unlisted = bool(names) or is_unlisted, is_unlisted
        own.lists = any(key in part for key in _ITEMS)
        found.add(own)

    def _open_copy(self, ref: str, mode: _Mode) -> str:
        """A reference to the same schema, in which that stays open."""
        target = self._target(ref)
        if not isinstance(target, dict):
            return ref
        if (ref, mode) not in self._names_of_copies:
            taken = _mapping(self._root.get("$defs"))
            name = f"open_{len(self._names_of_copies)}"
            while name in taken:
                name += "_"
            self._names_of_copies[ref, mode] = name
            # References point into the original, so that its definitions are not needed twice.
            left = {"$defs", "definitions"} | ({"$id"} if target is self._root else set())
            kept = {key: value for key, value in target.items() if key not in left}
            self._add(len(json.dumps(kept, ensure_ascii=False)))
            self._copies[name] = self._part(kept, mode)
        return f"#/$defs/{self._names_of_copies[ref, mode]}"

    def _target(self, ref: str) -> object:
        """What a reference within the schema points to; None: it is unknown."""
        self._has_followed = True
        if self._base and (ref == self._base or ref.startswith(f"{self._base}#")):
            ref = f"#{ref[len(self._base) + 1 :]}"
        at = self._root if ref == "#" else _at_pointer(self._root, unquote(ref))
        self._is_lost |= at is None
        return at

    def _step(self, count: int = 1) -> None:
        self._steps += count
        if self._steps > _MOST_STEPS:
            raise ValueError(f"the schema has more than {_MOST_STEPS} parts, its references followed")

    def _add(self, size: int) -> None:
        self._added += size
        if self._added > _MOST_ADDED:
            raise ValueError("the schema is too large with its references followed; make it simpler")


def _close(schema: dict[str, object], said: _Names) -> None:
    """Allow the schema's own properties and those named, and no others; these are described elsewhere."""
    for key, names in (("properties", said.names | said.required), ("patternProperties", said.patterns)):
        if names:
            schema[key] = {**dict.fromkeys(names, True), **_mapping(schema.get(key))}
    schema["additionalProperties"] = False


def _at_pointer(root: object, pointer: str) -> object:
    """What a JSON pointer, after `#`, points to, or None."""
    if not pointer.startswith("#/"):
        return None
    at = root
    for step in pointer[2:].split("/"):
        if isinstance(at, list):
            is_index = step.isascii() and step.isdigit() and len(step) < 8
            at = at[int(step)] if is_index and int(step) < len(at) else None
        else:
            at = _mapping(at).get(step.replace("~1", "/").replace("~0", "~"))
    return at


def _num_parts(part: Mapping[str, object]) -> int:
    """How many schemas must all hold."""
    all_of = part.get("allOf")
    num = len(all_of) if isinstance(all_of, list) else 0
    num += any(key in part for key in _OWN)
    return num + sum(key in part for key in ("$ref", "anyOf", "oneOf"))


def _texts(values: object) -> list[str]:
    return [value for value in values if isinstance(value, str)] if isinstance(values, list) else []


def _mapping(value: object) -> Mapping[str, object]:
    return value if isinstance(value, dict) else {}
