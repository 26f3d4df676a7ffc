"""Bound the reads and join the writes of a connection within one turn of the event loop.

An answer's head, its body and its end are written one after the other. Each would be a system call and a
packet of its own. Nothing is kept longer than the turn.
"""

from __future__ import annotations

import asyncio
from typing import Any

READ_BYTES = 32 * 1024  # parsed in one turn: a hundred thousand tiny chunks would delay all connections
LINGER_S = 2.0  # for a client to send the rest of what it had begun before its connection ends
MOST_BYTES = 16 * 1024  # what a turn may gather before it is handed on: buffers and their limits are below


class Reads(asyncio.BufferedProtocol):
    """A protocol that is given at most READ_BYTES at a time, by any loop and through TLS.

    `room`: a buffer of so many bytes, which all connections of a loop share: each read is parsed at once.
    """

    def __init__(self, inner: asyncio.Protocol, room: memoryview) -> None:
        self._inner, self._room = inner, room

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._inner.connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._inner.connection_lost(exc)

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._room

    def buffer_updated(self, nbytes: int) -> None:
        self._inner.data_received(bytes(self._room[:nbytes]))

    def eof_received(self) -> bool | None:
        return self._inner.eof_received()


class TurnTransport:
    """Wraps a connection's transport; everything but writing is that one's own. On the loop's thread."""

    def __init__(self, inner: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._inner, self._loop = inner, loop
        self._pieces: list[bytes] = []
        self._size = 0
        self._end: asyncio.TimerHandle | None = None  # of a connection that is closing

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def write(self, piece: bytes) -> None:
        """Send it at the end of this turn at the latest."""
        if not piece or self.is_closing():
            return
        self._pieces.append(piece)
        self._size += len(piece)
        if self._size >= MOST_BYTES:
            self._flush()
        elif len(self._pieces) == 1:
            self._loop.call_soon(self._flush)

    def is_closing(self) -> bool:
        """Whether nothing is written any more; input is to be ignored."""
        return self._end is not None or self._inner.is_closing()

    def close(self) -> None:
        """Close when everything has been sent, and the client has closed or had `LINGER_S` seconds to.

        A socket that is closed over unread bytes resets the connection, and the client may lose the answer.
        """
        if self.is_closing():
            return
        self._flush()
        if not self._inner.can_write_eof():  # TLS says itself that it ends
            self._inner.close()
            return
        self._end = self._loop.call_later(LINGER_S, self._inner.close)
        try:
            self._inner.write_eof()
            self._inner.resume_reading()
        except OSError:  # the client has gone
            self._inner.close()

    def abort(self) -> None:
        """Close now; what has not been sent is lost."""
        self._pieces, self._size = [], 0
        self._inner.abort()

    def closed(self) -> None:
        """The connection has ended."""
        if self._end is not None:
            self._end.cancel()

    def _flush(self) -> None:
        if self._pieces:
            pieces, self._pieces, self._size = self._pieces, [], 0
            if not self._inner.is_closing():  # the client may have gone in this very turn
                self._inner.write(b"".join(pieces))
