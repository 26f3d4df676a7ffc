"""One connection between a gateway and a replica: the handshake, and frames in both directions.

`ClusterConnection` is an `asyncio.Protocol`, with a subclass for each side. A wrong proof ends it before
anything is decoded. Too much that waits to be sent ends it, too: the other side has stopped reading.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, TypeVar

from plait.cluster.wire import (
    NONCE_NBYTES,
    PREFACE,
    PROOF_NBYTES,
    FrameReader,
    FrameWriter,
    MessageDecoder,
    SessionKeys,
    ToGateway,
    ToReplica,
    draw_nonce,
    encode_message,
    is_proof,
)
from plait.worker.protocol import BadFrame, WireMessage

HANDSHAKE_S = 5.0
MAX_UNSENT_NBYTES = 64 << 20  # an end that reads nothing while so much waits has gone, or is stopped
M = TypeVar("M")


class ClusterConnection(asyncio.Protocol, Generic[M]):
    """One end. `on_open`: both ends have proved the token; `on_end`: it is over, with the reason.

    All methods and callbacks are of the event loop's thread.
    """

    decoder: MessageDecoder[M]
    greeting_nbytes: int  # of the other end, until frames begin

    def __init__(
        self,
        token: bytes,
        on_open: Callable[[], None],
        on_message: Callable[[M], None],
        on_end: Callable[[str], None],
    ) -> None:
        self._token, self._on_open, self._on_message, self._on_end = token, on_open, on_message, on_end
        self._nonce, self._transport = draw_nonce(), _no_transport()
        self._greeting = bytearray()
        self._keys: SessionKeys | None = None
        self._reader: FrameReader | None = None
        self._writer: FrameWriter | None = None
        self._patience: asyncio.TimerHandle | None = None
        self._why = "the other end closed it"
        self._is_over = False

    @property
    def is_open(self) -> bool:
        """Whether frames can be sent."""
        return self._writer is not None and not self._transport.is_closing()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as for TCP
        self._transport = transport
        if self._is_over:
            transport.abort()
            return
        self._transport.set_write_buffer_limits(MAX_UNSENT_NBYTES)
        loop = asyncio.get_running_loop()
        self._patience = loop.call_later(HANDSHAKE_S, self.end, f"no handshake within {HANDSHAKE_S:g} s")
        self.begin()

    def data_received(self, data: bytes) -> None:
        try:
            if self._reader is None:
                data = self._greet(data)
            if self._reader is not None:
                for body in self._reader.feed(data):
                    self._on_message(self.decoder.decode(body))
        except BadFrame as error:
            self.end(str(error))

    def connection_lost(self, exc: Exception | None) -> None:
        if self._patience is not None:
            self._patience.cancel()
        self._writer = None
        self._on_end(self._why if exc is None else f"{type(exc).__name__}: {exc}")

    def send(self, message: WireMessage) -> None:
        """Send a message, or drop it if the connection has ended. Raises what `encode_message` raises."""
        if self._writer is None or self._transport.is_closing():
            return
        frame = encode_message(message)
        if self._transport.get_write_buffer_size() > MAX_UNSENT_NBYTES:  # before this one, however long it is
            self.end(f"{MAX_UNSENT_NBYTES} bytes wait to be sent, and the other end reads nothing")
            return
        self._transport.write(self._writer.seal(frame))

    def end(self, why: str) -> None:
        """Close it at once; `on_end` follows."""
        self._why, self._is_over = why, True
        with suppress(NotImplementedError):  # no connection yet
            self._transport.abort()

    def begin(self) -> None:
        """Send what this end says first."""
        raise NotImplementedError

    def greet(self, greeting: bytes) -> bool:
        """Answer the other end's greeting. Returns whether its proof was right."""
        raise NotImplementedError

    def _greet(self, data: bytes) -> bytes:
        """Take in the greeting; returns what follows it. Raises BadFrame for one that is wrong."""
        self._greeting += data
        if len(self._greeting) < self.greeting_nbytes:
            return b""
        greeting, rest = (
            bytes(self._greeting[: self.greeting_nbytes]),
            bytes(self._greeting[self.greeting_nbytes :]),
        )
        self._greeting.clear()
        if not self.greet(greeting):
            raise BadFrame("a greeting without the right proof: another cluster, or an intruder")
        return rest

    def _open(self, incoming: bytes, outgoing: bytes) -> None:
        self._reader, self._writer = FrameReader(incoming), FrameWriter(outgoing)
        if self._patience is not None:
            self._patience.cancel()
        self._on_open()


class ReplicaEnd(ClusterConnection[ToReplica]):
    """The replica's end: it shows a nonce, and answers a proof with its own."""

    decoder = MessageDecoder[ToReplica](ToReplica)
    greeting_nbytes = NONCE_NBYTES + PROOF_NBYTES

    def begin(self) -> None:
        self._transport.write(PREFACE + self._nonce)

    def greet(self, greeting: bytes) -> bool:
        keys = SessionKeys.derive(self._token, self._nonce, greeting[:NONCE_NBYTES])
        if not is_proof(greeting[NONCE_NBYTES:], keys.gateway_proof):
            return False
        self._transport.write(keys.replica_proof)
        self._open(keys.to_replica, keys.to_gateway)
        return True


class GatewayEnd(ClusterConnection[ToGateway]):
    """The gateway's end. It proves itself first, so a stranger gets no proof out of a replica."""

    decoder = MessageDecoder[ToGateway](ToGateway)
    greeting_nbytes = len(PREFACE) + NONCE_NBYTES

    def begin(self) -> None:
        """The replica speaks first."""

    def greet(self, greeting: bytes) -> bool:
        if self._keys is not None:
            if not is_proof(greeting, self._keys.replica_proof):
                return False
            self._open(self._keys.to_gateway, self._keys.to_replica)
            return True
        if not greeting.startswith(PREFACE):
            return False
        keys = self._keys = SessionKeys.derive(self._token, greeting[len(PREFACE) :], self._nonce)
        self.greeting_nbytes = PROOF_NBYTES
        self._transport.write(self._nonce + keys.gateway_proof)
        return True


def _no_transport() -> asyncio.Transport:
    """Before there is a connection: nothing can be written."""
    return asyncio.Transport()
