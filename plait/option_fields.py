"""How an option is declared: a field of a dataclass with a default, a help text, and bounds of its values."""

from __future__ import annotations

from dataclasses import field, fields
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from plait.errors import ConfigError, check_unicode

_TYPES: dict[type, dict[str, tuple[Any, bool]]] = {}  # by class: to read them takes a millisecond


def option(default: Any, text: str, *also: str, least: int | None = None, needs: str = "") -> Any:
    """A field with a default and a help text. `also`: more names of its flag; `least`: the lowest number;
    `needs`: another field, without which this one would have no effect."""
    return field(default=default, metadata={"help": text, "also": also, "least": least, "needs": needs})


def option_types(cls: type) -> dict[str, tuple[Any, bool]]:
    """Of each field its type, and whether it may also be None: `int | None` is (int, True)."""
    if cls not in _TYPES:
        found: dict[str, tuple[Any, bool]] = {}
        for name, hint in get_type_hints(cls).items():
            parts = [part for part in get_args(hint) if part is not NoneType]
            optional = get_origin(hint) in (Union, UnionType)
            found[name] = (parts[0] if optional else hint, optional)
        _TYPES[cls] = found  # complete: another thread may read it at once
    return _TYPES[cls]


def check_fields(config: Any) -> None:
    """Make lists tuples. Raises ConfigError for a word that is not of its type, a number too low, and an
    option without the one that it needs."""
    for each in fields(config):
        name, value = each.name, getattr(config, each.name)
        kind, may_be_none = option_types(type(config))[name]
        least, needs = each.metadata["least"], each.metadata["needs"]
        check_unicode(name, value)
        if needs and value != each.default and not getattr(config, needs):
            raise ConfigError(f"{name}: it needs {needs}, to which it applies; give both, or none of them")
        if get_origin(kind) is tuple:
            object.__setattr__(config, name, (value,) if isinstance(value, str) else tuple(value))
        elif value is None and may_be_none:
            continue
        elif get_origin(kind) is Literal and value not in get_args(kind):
            raise ConfigError(f"{name}: {value!r} is not one of {', '.join(get_args(kind))}")
        elif least is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise ConfigError(f"{name}: {value!r} is not a whole number")
        elif least is not None and value < least:
            raise ConfigError(f"{name}: {value} is less than {least}")
