"""One client's connection: its number and the time for a request's head are bounded, and errors are ours."""

from __future__ import annotations

import asyncio
import logging

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from plait.server.problems import http_problem

logger = logging.getLogger("plait.server")
MAX_CONNECTIONS = 4096
HEAD_TIMEOUT_S = 20.0  # from the connection, or from the last response, to the end of a request's headers


class Connection(H11Protocol):
    """uvicorn's connection, closed when a client takes its time to say what it wants."""

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > MAX_CONNECTIONS:
            logger.warning("more than %d connections are open; one was closed", MAX_CONNECTIONS)
            transport.close()
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        self._expect_head()
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        """The answer to what is not HTTP; also called for headers that are too large."""
        found = http_problem(400, f"{msg} (headers may take {self.h11_max_incomplete_event_size} bytes)")
        response = found.response()
        headers = [*response.raw_headers, (b"connection", b"close")]
        for event in (
            h11.Response(status_code=found.status, headers=headers),
            h11.Data(data=bytes(response.body)),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    @property
    def h11_max_incomplete_event_size(self) -> int | None:
        return self.config.h11_max_incomplete_event_size

    def _expect_head(self) -> None:
        self._forget()
        self._deadline = self.loop.call_later(HEAD_TIMEOUT_S, self._give_up)

    def _give_up(self) -> None:
        if not self.cycle or self.cycle.response_complete:
            self.transport.close()

    def _forget(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
