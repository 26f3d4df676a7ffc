"""A model's spec as plain values, and back: for other processes, and for files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from importlib import import_module

# Where specs are, the common ones first. The others are imported once a model has one: making their classes
# would take a tenth of a run of one token.
_MODULES = tuple(
    f"plait.spec.{name}"
    for name in ("model", "positions", "recurrent", "attention", "branches", "sparse", "moe", "canvas")
)


def encode_spec_value(value: object) -> object:
    """A spec as plain values: a dataclass becomes a dict of its fields, with its class under "".

    A mixer's spec that a plug-in defines is given as the class of Plait from which it is derived,
    because not every process loads plug-ins.
    """
    if is_dataclass(value) and not isinstance(value, type):
        cls = next(c for c in type(value).__mro__ if c.__module__ in _MODULES)
        return {"": cls.__name__, **{f.name: encode_spec_value(getattr(value, f.name)) for f in fields(cls)}}
    if isinstance(value, list | tuple):
        return [encode_spec_value(item) for item in value]
    if isinstance(value, Mapping):
        return {key: encode_spec_value(item) for key, item in value.items()}
    return value


def decode_spec_value(value: object) -> object:
    """What `encode_spec_value` encoded, of Plait's classes. Raises TypeError."""
    if isinstance(value, list | tuple):
        return tuple(decode_spec_value(item) for item in value)
    if not isinstance(value, dict):
        return value
    items = {key: decode_spec_value(item) for key, item in value.items() if key}
    if "" not in value:
        return items
    return _find_class(str(value[""]))(**items)


def _find_class(name: str) -> type:
    for module in _MODULES:
        found = vars(import_module(module)).get(name)
        if isinstance(found, type) and is_dataclass(found):
            return found
    raise TypeError(f"{name!r} is no part of a spec")
