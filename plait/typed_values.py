"""JSON, msgpack and plain values as values of a declared type: the one way to msgspec's typed decoding.

msgspec describes a type when it is first decoded, and caches the description before it is complete. A second
thread that decodes the same type at that moment reads null pointers, and the process ends with SIGSEGV
(msgspec 0.22.0). The first requests of a server did so when they came together. So a type is described here
under a lock, before a thread decodes it. `tests/test_typed_values.py` holds other modules to these functions.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

V = TypeVar("V")
DecHook = Callable[[type, Any], Any]

_describing = threading.Lock()
_described: set[object] = set()  # kinds with a complete description, as are all types inside of them


def describe(kind: object) -> None:
    """Have msgspec describe `kind` completely, unless it has. Raises TypeError for what cannot be decoded."""
    if kind not in _described:
        with _describing:
            msgspec.json.Decoder(kind)
            _described.add(kind)


def convert_to(value: object, kind: type[V]) -> V:
    """A plain value as `kind`. Raises msgspec.ValidationError."""
    describe(kind)
    return msgspec.convert(value, kind)


def decode_json(raw: bytes | bytearray | str, kind: type[V]) -> V:
    """JSON as `kind`. Raises msgspec.DecodeError, of which msgspec.ValidationError is one."""
    describe(kind)
    return msgspec.json.decode(raw, type=kind)


def decode_msgpack(raw: bytes, kind: type[V]) -> V:
    """msgpack as `kind`. Raises msgspec.DecodeError, of which msgspec.ValidationError is one."""
    describe(kind)
    return msgspec.msgpack.decode(raw, type=kind)


def json_decoder(kind: type[V]) -> msgspec.json.Decoder[V]:
    """A decoder of JSON, which threads may share."""
    with _describing:
        return msgspec.json.Decoder(kind)


def msgpack_decoder(kind: object, dec_hook: DecHook | None = None) -> msgspec.msgpack.Decoder[Any]:
    """A decoder of msgpack, which threads may share. `kind`: a type or a union of types."""
    with _describing:
        return msgspec.msgpack.Decoder(kind, dec_hook=dec_hook)
