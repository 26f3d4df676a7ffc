"""The messages between the front process and the engine process: msgpack in frames with a length.

Nothing that arrives is code. A frame is four bytes of length, big-endian, and one message. A frame that is
longer than `MAX_FRAME_NBYTES`, or holds no message of the other side, is a `BadFrame` and ends the sender.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, Generic, TypeVar, cast

import msgspec

from plait import errors, spec
from plait.config import MIB, EngineConfig
from plait.errors import BadFile, EngineError, OutOfMemory, PlaitError, RequestError, clip_text
from plait.process_memory import is_memory_error, out_of_memory_text
from plait.request import Event, Request
from plait.spec import ModelSpec

MAX_FRAME_NBYTES = 256 * MIB  # log-probabilities of a long prompt, with alternatives, are tens of megabytes
LENGTH = struct.Struct(">I")
LOAD_ENGINE = "plait.worker.child:load_engine"  # the builder of every real model
M = TypeVar("M")


class BadFrame(EngineError):
    """What arrived is too long, or not one of the other side's messages."""


class WireMessage(msgspec.Struct, array_like=True, frozen=True):
    """A message is an array: its tag, then its fields."""


class Hello(WireMessage, frozen=True, tag=1):
    """The first message to a child: what to load, with which function, and how much to log."""

    builder: str
    model: str
    config: EngineConfig
    log_levels: dict[str, int]


class Submit(WireMessage, frozen=True, tag=2):
    """Start a request, or go on with it; its events carry `key`. `arrival_s` is on the common clock."""

    key: int
    request: Request
    arrival_s: float


class Cancel(WireMessage, frozen=True, tag=3):
    """End a request, or one of its choices."""

    key: int
    index: int | None


class Count(WireMessage, frozen=True, tag=4):
    """Requests the engine's metrics: `MetricsReport` with the same number answers."""

    number: int


class Close(WireMessage, frozen=True, tag=5):
    """End the open requests, report that, and exit."""


class LogLevels(WireMessage, frozen=True, tag=6):
    """Which records are worth a line of the log from now on: levels by logger."""

    levels: dict[str, int]


class ProgressReport(WireMessage, frozen=True, tag=1):
    """How far loading is: `done` of `total` of what `text` names."""

    text: str
    done: int
    total: int


class Headers(WireMessage, frozen=True, tag=2):
    """A model's headers are read: the JSON of its `TextSource`."""

    source: bytes


class Ready(WireMessage, frozen=True, tag=3):
    """Requests are accepted. `spec`: see `encode_spec_value`; `longest`: tokens of the longest that fits."""

    spec: Any
    max_model_len: int
    longest: int
    stat_names: tuple[str, ...]
    fingerprint: str = ""


class Spoken(WireMessage, frozen=True, gc=False):
    """An `Event` of the request `key`; `more` is all of it, if it has more than the fields before."""

    key: int
    index: int
    token_ids: tuple[int, ...]
    num_cached_tokens: int
    more: Event | None


class Events(WireMessage, frozen=True, tag=4):
    """All events of one step."""

    spoken: tuple[Spoken, ...]


class MetricsReport(WireMessage, frozen=True, tag=5):
    """The engine's metrics: families as (name, help, type, samples), a sample as (name, labels, value)."""

    number: int
    families: tuple[tuple[str, str, str, tuple[tuple[str, dict[str, str], float], ...]], ...]


class Logged(WireMessage, frozen=True, tag=6):
    """A record of the child's log."""

    name: str
    level: int
    text: str


class Fault(WireMessage, frozen=True, tag=7):
    """The child ends, for this reason."""

    error: Exception


FromFront = Hello | Submit | Cancel | Count | Close | LogLevels
FromChild = ProgressReport | Headers | Ready | Events | MetricsReport | Logged | Fault


def frame(message: WireMessage) -> bytes:
    """A message as it is sent. Raises EngineError if it cannot be written, or is too long for a frame."""
    try:
        body = msgspec.msgpack.encode(message, enc_hook=_write_error)
    except (UnicodeEncodeError, OverflowError, TypeError, NotImplementedError) as error:
        raise EngineError(f"a {type(message).__name__} cannot be sent: {error}") from error
    if len(body) > MAX_FRAME_NBYTES:
        raise EngineError(
            f"a {type(message).__name__} of {len(body)} bytes is more than the engine's process takes "
            f"({MAX_FRAME_NBYTES})"
        )
    return LENGTH.pack(len(body)) + body


class Frames(Generic[M]):
    """Bytes as they arrive, cut into the messages of one side."""

    def __init__(self, kinds: Any) -> None:
        self._decoder = msgspec.msgpack.Decoder(kinds, dec_hook=_read_error)
        self._rest = bytearray()

    def feed(self, piece: bytes) -> Iterator[M]:
        """The messages that are complete with this piece. Raises BadFrame."""
        rest = self._rest
        rest += piece
        start = 0
        while len(rest) - start >= LENGTH.size:
            (length,) = LENGTH.unpack_from(rest, start)
            if length > MAX_FRAME_NBYTES:
                raise BadFrame(f"a frame of {length} bytes; the limit is {MAX_FRAME_NBYTES}")
            end = start + LENGTH.size + length
            if len(rest) < end:
                break
            body, start = bytes(memoryview(rest)[start + LENGTH.size : end]), end
            try:
                message = self._decoder.decode(body)
            except (msgspec.MsgspecError, PlaitError, TypeError) as error:
                raise BadFrame(f"a frame that is no message: {error}") from error
            yield cast("M", message)
        del rest[:start]


def encode_event(key: int, event: Event) -> Spoken:
    """An event as it is sent: most are a token and nothing more."""
    rare = (event.finish_reason, event.logprobs, event.prompt_logprobs, event.prompt_progress)
    is_more = any(value is not None for value in rare)
    more = event if is_more else None  # a stop token, an error, a trace, an embedding come with the end
    return Spoken(key, event.index, event.token_ids, event.num_cached_tokens, more)


def decode_event(request_id: str, said: Spoken) -> Event:
    """The event that `said` stands for."""
    if said.more is not None:
        return said.more
    return Event(request_id, said.index, said.token_ids, num_cached_tokens=said.num_cached_tokens)


def encode_error(error: BaseException) -> tuple[str, str, str | None]:
    """(class, message, param) of an exception; one that is not Plait's is reported as one that is."""
    text = " ".join(str(error).split())
    match error:
        case PlaitError():
            param = error.param if isinstance(error, RequestError) else None
            return _public(type(error)).__name__, str(error), param
        case _ if is_memory_error(error):
            return OutOfMemory.__name__, out_of_memory_text(error), None
        case OSError(filename=name) if name is not None:
            return BadFile.__name__, f"{name}: {error.strerror}", None
    if type(error).__name__ == "OutOfMemoryError" or "DefaultCPUAllocator" in text:
        hint = "choose a smaller --max-model-len or --max-num-seqs"
        return OutOfMemory.__name__, f"out of memory: {clip_text(text, 200)}; {hint}", None
    return EngineError.__name__, f"the engine stopped: {type(error).__name__}: {text}", None


def decode_error(kind: str, message: str, param: str | None) -> PlaitError:
    """The exception that `encode_error` encoded."""
    cls = getattr(errors, kind, None)
    if not (isinstance(cls, type) and issubclass(cls, PlaitError)):
        return EngineError(f"{kind}: {message}")
    return cls(message, param) if issubclass(cls, RequestError) else cls(message)


def _public(cls: type) -> type:
    """The nearest base class that both sides know, because `plait.errors` has it."""
    known: type = next(c for c in cls.__mro__ if getattr(errors, c.__name__, None) is c)
    return known


def _write_error(value: object) -> tuple[str, str, str | None]:
    if isinstance(value, BaseException):
        return encode_error(value)
    # What msgspec's hooks raise for a type that they do not know; `frame` makes an EngineError of it.
    raise NotImplementedError(f"a {type(value).__name__} is not sent between processes")


def _read_error(kind: type, value: Any) -> PlaitError:
    if issubclass(kind, BaseException):
        return decode_error(*value)
    raise NotImplementedError(f"a {kind.__name__} is not sent between processes")


def encode_spec_value(value: Any) -> Any:
    """A spec as plain values: a dataclass becomes a dict of its fields, with its class under "".

    A mixer's spec that a plug-in defines is sent as the class of `plait.spec` from which it is derived,
    because the front loads no plug-ins.
    """
    if is_dataclass(value) and not isinstance(value, type):
        cls = next(c for c in type(value).__mro__ if getattr(spec, c.__name__, None) is c)
        return {"": cls.__name__, **{f.name: encode_spec_value(getattr(value, f.name)) for f in fields(cls)}}
    if isinstance(value, list | tuple):
        return [encode_spec_value(item) for item in value]
    return (
        {key: encode_spec_value(item) for key, item in value.items()} if isinstance(value, Mapping) else value
    )


def decode_spec_value(value: Any) -> Any:
    """What `encode_spec_value` encoded, of the classes in `plait.spec`."""
    if isinstance(value, list | tuple):
        return tuple(decode_spec_value(item) for item in value)
    if not isinstance(value, dict):
        return value
    items = {key: decode_spec_value(item) for key, item in value.items() if key}
    if "" not in value:
        return items
    cls = getattr(spec, str(value[""]), None)
    if not (isinstance(cls, type) and is_dataclass(cls)):
        raise TypeError(f"{value['']!r} is no part of a spec")
    return cls(**items)


def decode_spec(value: Any) -> ModelSpec:
    """A whole model. Raises BadFrame if it is none."""
    try:
        found = decode_spec_value(value)
    except TypeError as error:
        raise BadFrame(f"a spec that cannot be read: {error}") from error
    if not isinstance(found, ModelSpec):
        raise BadFrame(f"a spec was expected, not {found!r:.100}")
    return found


def to_json(value: Any) -> bytes:
    """The JSON of a dataclass of plain values. Strings in files may not be Unicode; JSON can escape those."""
    return json.dumps({f.name: getattr(value, f.name) for f in fields(value)}, default=list).encode()
