"""What a gateway and a replica exchange: authenticated frames of msgpack messages over one TCP connection.

Both ends prove that they know the replica's token, which only its own cluster can read, and neither sends it:

    replica   PREFACE, nonce                      32 bytes
    gateway   nonce, proof of both nonces         32 + 32 bytes
    replica   proof of both nonces                32 bytes
    both      frames: length (4 bytes), keyed hash of number and body (16 bytes), body

The hash has the frame's number and the direction in it, so a frame that is changed, lost, repeated or sent
back ends the connection. Frames are not encrypted: the network is private, or encrypted below this.
"""

from __future__ import annotations

import hmac
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from typing import Generic, TypeVar

import msgspec

from plait.cluster.resume_points import ReplicaReport
from plait.engine.metrics import Family
from plait.errors import EngineError, PlaitError
from plait.request import Request
from plait.typed_values import msgpack_decoder
from plait.worker.protocol import (
    MAX_FRAME_NBYTES,
    BadFrame,
    EventMessage,
    WireMessage,
    read_error,
    write_error,
)

PREFACE = b"plait-cluster 1\n"
NONCE_NBYTES = PROOF_NBYTES = 32
MAC_NBYTES = 16
HEAD = struct.Struct(">I16s")
M = TypeVar("M")


class OpenLease(WireMessage, frozen=True, tag=1):
    """Compute a request, or what is missing of it. `key`: of this lease alone; its events carry it.

    `missing`: tokens of its prompt that the gateway expects the replica to compute; None: all of them.
    """

    key: int
    request: Request
    missing: int | None = None


class CancelLease(WireMessage, frozen=True, tag=2):
    """End a lease, or one of its choices."""

    key: int
    index: int | None


class Greeting(WireMessage, frozen=True, tag=4):
    """The first message of a gateway: its name. An older connection of the same gateway ends."""

    gateway: str


class ReportAnew(WireMessage, frozen=True, tag=3):
    """Reports were lost: report every resume point again."""


class AskMetrics(WireMessage, frozen=True, tag=5):
    """A gateway is scraped: report the engine's metrics, with this number."""

    number: int


class ReplicaCard(WireMessage, frozen=True, tag=1):
    """The first message of a replica: what it serves. A gateway needs no weights to know it.

    `source`: the JSON of its `TextSource`; `spec`: msgpack of `encode_spec_value`. `model`: a hash of what a
    gateway must have in common with it; `arithmetic`: of all that decides the numbers of a reply. `is_paged`:
    every block of a prompt can be resumed. `max_open`: requests that it takes at a time. `adapters`: a hash
    of each one's numbers, by name; it is in the names of the blocks that the adapter computes. `digest`: of a
    reply that it generated at startup, see `reply_digest`: machines of one fingerprint may differ in it.
    """

    name: str
    source: bytes
    spec: bytes
    model: str
    arithmetic: str
    max_model_len: int
    longest: int | None
    block_size: int
    is_paged: bool
    max_open: int
    adapters: dict[str, str] = msgspec.field(default_factory=dict)
    answers_metrics: bool = False  # an older replica ends the connection instead
    digest: str = ""

    @property
    def equality(self) -> str:
        """The same for replicas that continue each other's replies with the same tokens."""
        return f"{self.arithmetic} {self.digest}"


class LeaseEvent(WireMessage, frozen=True, gc=False):
    """An event of a lease. `start`: tokens of this choice that were reported before, in any lease."""

    start: int
    event: EventMessage


class LeaseEvents(WireMessage, frozen=True, tag=2):
    """Events of all leases of a step, in order."""

    events: tuple[LeaseEvent, ...]


class Beat(WireMessage, frozen=True, tag=3):
    """A sign of life, each second. `is_ready`: the engine takes requests. `stats`: see `Loop.stats`."""

    is_ready: bool
    is_lost: bool
    waiting_tokens: int
    open_replies: int
    stats: dict[str, int]


class PointsReport(WireMessage, frozen=True, tag=4):
    """Changes of what the replica can resume, and its load.

    `newest`: the last lease of this gateway that is a part of that load; None: an older replica, all of them.
    """

    report: ReplicaReport
    newest: int | None = None


class EngineEnded(WireMessage, frozen=True, tag=5):
    """The engine's process has ended, or shows no sign of life. The replica will replace it, or it wakes.

    `charged`: leases in its last step; `is_foreign`: they are not to blame.
    """

    charged: tuple[int, ...]
    is_foreign: bool


class Refused(WireMessage, frozen=True, tag=6):
    """A lease was not taken, for this reason. Nothing of it was computed."""

    key: int
    error: PlaitError


class ReplicaLeaves(WireMessage, frozen=True, tag=7):
    """The replica will stop: it takes no new lease, and what is open should move when it ends."""


class EngineMetrics(WireMessage, frozen=True, tag=8):
    """The metrics of the engine, for `AskMetrics` of that number."""

    number: int
    families: tuple[Family, ...]


ToReplica = OpenLease | CancelLease | ReportAnew | Greeting | AskMetrics
ToGateway = (
    ReplicaCard | LeaseEvents | Beat | PointsReport | EngineEnded | Refused | ReplicaLeaves | EngineMetrics
)


def encode_message(message: WireMessage) -> bytes:
    """The body of a frame. Raises EngineError for what cannot be written, or is too long."""
    try:
        body = msgspec.msgpack.encode(message, enc_hook=write_error)
    except (UnicodeEncodeError, OverflowError, TypeError, NotImplementedError) as error:
        raise EngineError(f"a {type(message).__name__} cannot be sent: {error}") from error
    if len(body) > MAX_FRAME_NBYTES:
        raise EngineError(f"a {type(message).__name__} of {len(body)} bytes; {MAX_FRAME_NBYTES} are allowed")
    return body


class MessageDecoder(Generic[M]):
    """Bodies to messages of one side."""

    def __init__(self, kinds: object) -> None:
        self._decoder: msgspec.msgpack.Decoder[M] = msgpack_decoder(kinds, dec_hook=read_error)

    def decode(self, body: bytes) -> M:
        """Raises BadFrame for what is none of them."""
        try:
            return self._decoder.decode(body)
        except (msgspec.MsgspecError, PlaitError, TypeError, ValueError, NotImplementedError) as error:
            raise BadFrame(f"a frame that is no message: {error}") from error


@dataclass(frozen=True, slots=True)
class SessionKeys:
    """The keys of one connection, and the proofs that both ends know the token."""

    gateway_proof: bytes
    replica_proof: bytes
    to_replica: bytes
    to_gateway: bytes

    @classmethod
    def derive(cls, token: bytes, replica_nonce: bytes, gateway_nonce: bytes) -> SessionKeys:
        """From the token and what both ends drew for this connection."""
        words = (b"gateway proof", b"replica proof", b"to replica", b"to gateway")
        drawn = PREFACE + replica_nonce + gateway_nonce
        return cls(*(blake2b(word + drawn, key=token, digest_size=32).digest() for word in words))


def draw_nonce() -> bytes:
    return os.urandom(NONCE_NBYTES)


def is_proof(sent: bytes, expected: bytes) -> bool:
    """Whether a proof is right, in a time that does not depend on where it differs."""
    return hmac.compare_digest(sent, expected)


class FrameWriter:
    """Bodies to frames, in order, with one key."""

    def __init__(self, key: bytes) -> None:
        self._key, self._number = key, 0

    def seal(self, body: bytes) -> bytes:
        """The frame, to be sent before the next one is made."""
        mac = _mac(self._key, self._number, body)
        self._number += 1
        return HEAD.pack(len(body), mac) + body


class FrameReader:
    """Bytes as they arrive, cut into the bodies that the other end sealed."""

    def __init__(self, key: bytes) -> None:
        self._key, self._number, self._rest = key, 0, bytearray()

    def feed(self, piece: bytes) -> Iterator[bytes]:
        """The bodies that are complete with this piece. Raises BadFrame for one that was not sealed so."""
        rest = self._rest
        rest += piece
        start = 0
        try:
            while len(rest) - start >= HEAD.size:
                length, mac = HEAD.unpack_from(rest, start)
                if length > MAX_FRAME_NBYTES:
                    raise BadFrame(f"a frame of {length} bytes; the limit is {MAX_FRAME_NBYTES}")
                end = start + HEAD.size + length
                if len(rest) < end:
                    break
                body, start = bytes(memoryview(rest)[start + HEAD.size : end]), end
                if not hmac.compare_digest(mac, _mac(self._key, self._number, body)):
                    raise BadFrame("a frame that was changed, lost or repeated on its way")
                self._number += 1
                yield body
        finally:
            del rest[:start]


def _mac(key: bytes, number: int, body: bytes) -> bytes:
    return blake2b(body, key=key, digest_size=MAC_NBYTES, salt=number.to_bytes(8, "big")).digest()
