"""One client's connection: what it may take in number, time and buffers is bounded, and errors are ours."""

from __future__ import annotations

import asyncio
import logging
import sys
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from plait.server.generation import new_id
from plait.server.problems import http_problem

logger = logging.getLogger("plait.server")
HEAD_TIMEOUT_S = 20.0  # from the connection, or from the last response, to the end of a request's headers
READ_TIMEOUT_S = 60.0  # for a client to read enough that more can be sent: 48 KiB
FLUSH_S = 10.0  # for a client to read the last of an answer before its connection is cut
WRITE_BUFFER_BYTES = 64 * 1024  # what is kept for a client that reads slowly; its stream waits then


class Connection(H11Protocol):
    """uvicorn's connection, closed when a client takes its time to say what it wants or to read."""

    _deadline: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None

    def __init__(self, *given: Any, max_connections: int, **more: Any) -> None:
        super().__init__(*given, **more)
        self._max_connections = max_connections

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
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

    def send_400_response(self, msg: str) -> None:
        """The answer to what is not HTTP, and to headers that are too large."""
        # uvicorn calls this while it handles h11's exception, which knows the status.
        status = getattr(sys.exception(), "error_status_hint", 400)
        if status == 431:
            msg = f"the request's headers take more than {self.config.h11_max_incomplete_event_size} bytes"
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
