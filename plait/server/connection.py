"""One client's connection: what it may take in number, time and buffers is bounded, and errors are ours."""

from __future__ import annotations

import asyncio
import logging
import re
import socket
import sys
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from plait.server.generation import new_id
from plait.server.problems import http_problem
from plait.server.transport import TurnTransport

logger = logging.getLogger("plait.server")
HEAD_TIMEOUT_S = 20.0  # from the connection, or from the last response, to the end of a request's headers
READ_TIMEOUT_S = 60.0  # for a client to read enough that more can be sent: 48 KiB
FLUSH_S = 10.0  # for a client to read the last of an answer before its connection is cut
READ_BYTES = (
    32 * 1024
)  # parsed in one turn of the loop: a hundred thousand tiny pieces would hold up everybody
WRITE_BUFFER_BYTES = 64 * 1024  # what is kept for a client that reads slowly; its stream waits then


_HEAD_END = re.compile(rb"\n\r?\n")


class Connection(H11Protocol):
    """uvicorn's connection, closed when a client takes its time to say what it wants or to read."""

    _deadline: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None

    def __init__(self, *given: Any, max_connections: int, **more: Any) -> None:
        super().__init__(*given, **more)
        self._max_connections = max_connections

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        turns: Any = TurnTransport(transport, self.loop)
        super().connection_made(turns)
        # asyncio does this only for sockets that name their protocol, which accepted ones may not; without it
        # a token waits until the client has acknowledged the one before, 40 ms where it takes its time.
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        if hasattr(transport, "max_size"):  # asyncio's own; uvloop has a bound of its own
            transport.max_size = READ_BYTES
        if len(self.connections) > self._max_connections:
            logger.warning("more than %d connections are open; one was closed", self._max_connections)
            transport.close()
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        _stop(self._deadline)
        _stop(self._unread)
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        self._expect_head()
        super().on_response_complete()

    def pause_writing(self) -> None:
        """The client reads more slowly than is written."""
        super().pause_writing()
        self._unread = self.loop.call_later(READ_TIMEOUT_S, self._give_up_reader)

    def resume_writing(self) -> None:
        _stop(self._unread)
        super().resume_writing()

    def handle_events(self) -> None:
        """uvicorn's, but a head that is too long is refused before it is parsed."""
        if self.conn.their_state is h11.IDLE:
            waiting, _ = self.conn.trailing_data
            limit = self._max_head_bytes
            if len(waiting) > limit and not _HEAD_END.search(waiting, 0, limit):
                self._refuse(431, "")
                return
        super().handle_events()

    def send_400_response(self, msg: str) -> None:
        """The answer to what is not HTTP, and to headers that are too large."""
        # uvicorn calls this while it handles h11's exception, which knows the status.
        self._refuse(getattr(sys.exception(), "error_status_hint", 400), msg)

    @property
    def _max_head_bytes(self) -> int:
        return self.config.h11_max_incomplete_event_size or 0

    def _refuse(self, status: int, msg: str) -> None:
        if status == 431:
            msg = f"the request's headers take more than {self._max_head_bytes} bytes"
        found = http_problem(status, msg)
        response = found.response()
        more = [(b"connection", b"close"), (b"x-request-id", new_id("req").encode())]
        for event in (
            h11.Response(status_code=found.status, headers=[*response.raw_headers, *more]),
            h11.Data(data=bytes(response.body)),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _expect_head(self) -> None:
        _stop(self._deadline)
        self._deadline = self.loop.call_later(HEAD_TIMEOUT_S, self._give_up)

    def _give_up(self) -> None:
        if self.cycle and not self.cycle.response_complete:
            return
        self.transport.close()
        # Closing waits until what is written has been read, which may be never.
        self._deadline = self.loop.call_later(FLUSH_S, self.transport.abort)

    def _give_up_reader(self) -> None:
        logger.warning("a client read nothing for %g s; its connection was cut", READ_TIMEOUT_S)
        self.transport.abort()


def _stop(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
