"""What the front process and the engine process exchange: messages, and the shared status block.

Nothing that arrives is code. A frame is four bytes of length, big-endian, and one msgpack message. One that
is longer than `MAX_FRAME_NBYTES`, or holds no message of the other side, is a `BadFrame` and ends the sender.
"""

from __future__ import annotations

import logging
import mmap
import os
import struct
import time
from array import array
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any, Generic, TypeVar

import msgspec

from plait import errors
from plait.config import MIB, EngineConfig
from plait.engine.fingerprint import NO_FINGERPRINT, Fingerprint
from plait.engine.metrics import Family
from plait.errors import BadFile, EngineError, OutOfMemory, PlaitError, RequestError, clip_text
from plait.request import Event, Request
from plait.resource_limits import is_memory_error, out_of_memory_text
from plait.spec.model import ModelSpec
from plait.spec.values import decode_spec_value
from plait.state.prefix_tree import PrefixChanges
from plait.typed_values import msgpack_decoder
from plait.worker.start_process import NUM_STATS, PLANNED

MAX_FRAME_NBYTES = 256 * MIB  # log-probabilities of a long prompt, with alternatives, are tens of megabytes
LENGTH = struct.Struct(">I")
LOAD_ENGINE = "plait.worker.child:load_engine"  # the builder of every real model
ALIVE, BUSY, ARRIVING, NUM_PLANNED, NUM_SEEN = range(5)
STATS = PLANNED - NUM_STATS
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


class ChangeAdapter(WireMessage, frozen=True, tag=7):
    """Load an adapter, or unload it (path None): `AdapterChanged` with the same number answers.

    number 0: make it what it was in the engine before; nothing answers.
    """

    number: int
    name: str
    path: str | None


class FollowPrefixes(WireMessage, frozen=True, tag=8):
    """Report what can be resumed from now on, all of it first: `PrefixReport`s follow."""


class ProgressReport(WireMessage, frozen=True, tag=1):
    """How far loading is: `done` of `total` of what `text` names."""

    text: str
    done: int
    total: int


class Headers(WireMessage, frozen=True, tag=2):
    """A model's headers are read: the JSON of its `TextSource`."""

    source: bytes


class Ready(WireMessage, frozen=True, tag=3):
    """Requests are accepted. `spec`: see `encode_spec_value`; `longest`: tokens of the longest that fits.

    `adapters`: a hash of each one's numbers, by name, as they are now; `device_nbytes`: memory of its
    GPU that it has; 0: the model is on a CPU.
    """

    spec: Any
    max_model_len: int
    longest: int
    stat_names: tuple[str, ...]
    fingerprint: Fingerprint = NO_FINGERPRINT
    adapters: dict[str, str] = msgspec.field(default_factory=dict)
    device_nbytes: int = 0


class EventMessage(WireMessage, frozen=True, gc=False):
    """An `Event` of the request `key`; `more` is all of it, if it has more than the fields before."""

    key: int
    index: int
    token_ids: tuple[int, ...]
    num_cached_tokens: int
    more: Event | None


class Events(WireMessage, frozen=True, tag=4):
    """All events of one step."""

    events: tuple[EventMessage, ...]


class MetricsReport(WireMessage, frozen=True, tag=5):
    """The engine's metrics: families as (name, help, type, samples), a sample as (name, labels, value)."""

    number: int
    families: tuple[Family, ...]


class Logged(WireMessage, frozen=True, tag=6):
    """A record of the child's log."""

    name: str
    level: int
    text: str
    trace: str  # of the exception that was logged, or ""

    def log(self) -> None:
        """Log it in this process."""
        if (logger := logging.getLogger(self.name)).isEnabledFor(self.level):
            record = logger.makeRecord(self.name, self.level, "", 0, self.text, (), None)
            record.exc_text = self.trace
            logger.handle(record)


class Fault(WireMessage, frozen=True, tag=7):
    """The child ends, for this reason."""

    error: PlaitError


class AdapterChanged(WireMessage, frozen=True, tag=8):
    """The answer to `ChangeAdapter`. error: why it was not done."""

    number: int
    error: PlaitError | None


class PrefixReport(WireMessage, frozen=True, tag=9):
    """What has changed in the prefix cache since the last report."""

    changes: PrefixChanges


FromFront = Hello | Submit | Cancel | Count | Close | LogLevels | ChangeAdapter | FollowPrefixes
FromChild = (
    ProgressReport | Headers | Ready | Events | MetricsReport | Logged | Fault | AdapterChanged | PrefixReport
)


def frame(message: WireMessage) -> bytes:
    """A message as it is sent. Raises EngineError if it cannot be written, or is too long for a frame."""
    try:
        body = msgspec.msgpack.encode(message, enc_hook=write_error)
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

    def __init__(self, kinds: object) -> None:
        self._decoder: msgspec.msgpack.Decoder[M] = msgpack_decoder(kinds, dec_hook=read_error)
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
            yield message
        del rest[:start]


class SharedStatus:
    """What an engine process is doing, in shared memory: it outlives any way to die, and is free to write.

    One thread of the child writes it (a second one the signs of life), and the front reads it at any time.
    Every value is eight bytes, stored at once. Times are on the clock of all processes (`time.monotonic`).
    `alive_s`: when a thread of the child last ran, 0 before it has begun. `busy_since_s`: since when the
    engine's thread is at its present round; 0: it waits for work. `arriving`: the key of the request that the
    engine is taking. `planned`: keys of the requests in the last step that began. `num_seen`: requests that
    were sent to the engine, of which its numbers (`stats`) know.
    """

    def __init__(self, fd: int, max_planned: int) -> None:
        """Over a file from `new_status`, which is closed."""
        self._max_planned = max_planned
        self._memory = mmap.mmap(fd, 8 * (PLANNED + max_planned))
        os.close(fd)
        self._times = memoryview(self._memory).cast("d")
        self._numbers = memoryview(self._memory).cast("q")

    @property
    def alive_s(self) -> float:
        return self._times[ALIVE]

    def beat(self) -> None:
        """Show that the process runs."""
        self._times[ALIVE] = time.monotonic()

    @property
    def busy_since_s(self) -> float:
        return self._times[BUSY]

    def begin(self) -> None:
        """A round begins: there is work."""
        self._times[BUSY] = time.monotonic()

    def rest(self) -> None:
        """There is no work."""
        self._times[BUSY] = 0.0

    @property
    def arriving(self) -> int:
        return self._numbers[ARRIVING]

    @arriving.setter
    def arriving(self, key: int) -> None:
        self._numbers[ARRIVING] = key

    @property
    def planned(self) -> tuple[int, ...]:
        count = min(max(self._numbers[NUM_PLANNED], 0), self._max_planned)
        return tuple(self._numbers[PLANNED : PLANNED + count])

    @planned.setter
    def planned(self, keys: Collection[int]) -> None:
        # No request is blamed because of a list that is half written.
        self._numbers[NUM_PLANNED] = 0
        self._numbers[PLANNED : PLANNED + len(keys)] = memoryview(array("q", keys))
        self._numbers[NUM_PLANNED] = len(keys)

    @property
    def num_seen(self) -> int:
        return self._numbers[NUM_SEEN]

    def stats(self, count: int) -> tuple[int, ...]:
        """The first `count` numbers of those `put_stats` wrote."""
        return tuple(self._numbers[STATS : STATS + count])

    def put_stats(self, values: Sequence[int], num_seen: int) -> None:
        """At most `NUM_STATS` numbers, in an order that both sides know, and how many requests they know."""
        for i, value in enumerate(values):
            self._numbers[STATS + i] = value
        self._numbers[NUM_SEEN] = num_seen

    def close(self) -> None:
        """Release the memory. May be called twice."""
        self._times.release()
        self._numbers.release()
        self._memory.close()


def keep_on_gpu(hello: Hello, ready: Ready) -> Hello:
    """What the next engine gets: one that was on a GPU is followed by none on a CPU, if that is lost."""
    if not ready.device_nbytes or hello.config.device != "auto":
        return hello
    return msgspec.structs.replace(hello, config=replace(hello.config, device="cuda"))


def encode_event(key: int, event: Event) -> EventMessage:
    """An event as it is sent: most are a token and nothing more."""
    rare = (event.finish_reason, event.logprobs, event.prompt_logprobs, event.prompt_progress)
    is_more = any(value is not None for value in (*rare, event.mirostat_mu))
    more = event if is_more else None  # a stop token, an error, a trace, an embedding come with the end
    return EventMessage(key, event.index, event.token_ids, event.num_cached_tokens, more)


def decode_event(request_id: str, message: EventMessage) -> Event:
    """The event that `message` stands for."""
    if message.more is not None:
        return message.more
    return Event(request_id, message.index, message.token_ids, num_cached_tokens=message.num_cached_tokens)


def encode_error(error: BaseException) -> tuple[str, str, str | None]:
    """(class, message, param) of an exception; one that is not Plait's is reported as one that is."""
    text = " ".join(str(error).split())
    match error:
        case PlaitError():
            param = error.param if isinstance(error, RequestError) else None
            public = (c for c in type(error).__mro__ if getattr(errors, c.__name__, None) is c)
            return next(public).__name__, str(error), param  # the nearest class that both sides know
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


def write_error(value: object) -> tuple[str, str, str | None]:
    """An exception for msgspec's encoder (`enc_hook`)."""
    if isinstance(value, BaseException):
        return encode_error(value)
    # What msgspec's hooks raise for a type that they do not know; `frame` makes an EngineError of it.
    raise NotImplementedError(f"a {type(value).__name__} is not sent between processes")


def read_error(kind: type, value: Any) -> PlaitError:
    """What `write_error` wrote, for msgspec's decoder (`dec_hook`)."""
    if issubclass(kind, BaseException):
        return decode_error(*value)
    raise NotImplementedError(f"a {kind.__name__} is not sent between processes")


def decode_spec(value: object) -> ModelSpec:
    """A whole model. Raises BadFrame if it is none."""
    try:
        found = decode_spec_value(value)
    except TypeError as error:
        raise BadFrame(f"a spec that cannot be read: {error}") from error
    if not isinstance(found, ModelSpec):
        raise BadFrame(f"a spec was expected, not {found!r:.100}")
    return found
