"""JSON, msgpack and plain values as values of a declared type: the one way to msgspec's typed decoding.

msgspec describes a type when it first decodes it, and caches the description before it is complete. A second
thread with the same type reads null pointers then: SIGSEGV (msgspec 0.22.0), when a server's first requests
came together. So types are described here under a lock. `tests/test_typed_values.py` keeps others to this.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import msgspec

V = TypeVar("V")
_describing, _described = threading.Lock(), set[object]()  # kinds that are complete, with all types inside


def _describe(kind: object) -> None:
    if kind not in _described:
        with _describing:
            msgspec.json.Decoder(kind)
            _described.add(kind)


def convert_to(value: object, kind: type[V]) -> V:
    """A plain value as `kind`. Raises msgspec.ValidationError."""
    _describe(kind)
    return msgspec.convert(value, kind)


def decode_json(raw: bytes | str, kind: type[V]) -> V:
    """JSON as `kind`. Raises msgspec.DecodeError, of which msgspec.ValidationError is one."""
    _describe(kind)
    return msgspec.json.decode(raw, type=kind)


def decode_msgpack(raw: bytes, kind: type[V]) -> V:
    """msgpack as `kind`. Raises msgspec.DecodeError, of which msgspec.ValidationError is one."""
    _describe(kind)
    return msgspec.msgpack.decode(raw, type=kind)


def msgpack_decoder(
    kind: object, dec_hook: Callable[[type, object], object] | None = None
) -> msgspec.msgpack.Decoder[V]:
    """A decoder of msgpack, which threads may share. `kind`: a type, or a union of types."""
    with _describing:
        return msgspec.msgpack.Decoder(kind, dec_hook=dec_hook)
