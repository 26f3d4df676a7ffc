"""One client's connection: its requests, time and buffers are bounded, and errors have our shape."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import sys
from collections import deque
from collections.abc import Callable
from typing import Any

from httptools import HttpParserError, HttpRequestParser
from starlette.responses import Response
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from plait.server.http.errors import HeadTooLarge, NotReady, Problem, problem
from plait.server.http.transfer import REQUEST_ID, new_id

READ_BYTES = 32 * 1024  # parsed in one turn: a hundred thousand tiny chunks would delay all connections
LINGER_S = 2.0  # for a client to send the rest of what it had begun before its connection ends
MOST_BYTES = 16 * 1024  # what a turn may gather before it is handed on: buffers and their limits are below


class Reads(asyncio.BufferedProtocol):
    """A protocol that is given at most READ_BYTES at a time, by any loop and through TLS.

    `buffer`: a buffer of so many bytes, which all connections of a loop share: each read is parsed at once.
    """

    def __init__(self, inner: asyncio.Protocol, buffer: memoryview) -> None:
        self._inner, self._buffer = inner, buffer

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._inner.connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._inner.connection_lost(exc)

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        self._inner.data_received(bytes(self._buffer[:nbytes]))

    def eof_received(self) -> bool | None:
        return self._inner.eof_received()


class TurnTransport:
    """Wraps a connection's transport; everything but writing is that one's own. On the loop's thread."""

    def __init__(self, inner: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._inner, self._loop = inner, loop
        self._pieces: list[bytes] = []
        self._size = 0
        self._end: asyncio.TimerHandle | None = None  # of a connection that is closing

    def __getattr__(self, name: str) -> object:
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
        if not self._inner.can_write_eof():  # TLS says itself that it ends, and waits for the client's answer
            self._inner.close()
            self._end = self._loop.call_later(LINGER_S, self._end_reading)
            return
        self._end = self._loop.call_later(LINGER_S, self._inner.close)
        try:
            self._inner.write_eof()
            self._inner.resume_reading()
        except OSError:  # the client has gone
            self._inner.close()

    def _end_reading(self) -> None:
        """Have TLS end as if the client had closed: one that keeps a connection for later does not answer."""
        end = self._inner.get_extra_info("socket")
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(end.fileno())) as same:
            same.shutdown(socket.SHUT_RD)

    def abort(self) -> None:
        """Close now; what has not been sent is lost."""
        self._pieces, self._size = [], 0
        self._inner.abort()

    def end(self) -> None:
        """The connection has ended."""
        if self._end is not None:
            self._end.cancel()

    def _flush(self) -> None:
        if self._pieces:
            pieces, self._pieces, self._size = self._pieces, [], 0
            if not self._inner.is_closing():  # the client may have gone in this very turn
                self._inner.write(b"".join(pieces))


logger = logging.getLogger("plait.server")
HEAD_TIMEOUT_S = 20.0  # from the connection, or from the last response, to the end of a request's headers
READ_TIMEOUT_S = 60.0  # for a client to read enough that more can be sent: 48 KiB
FLUSH_S = 10.0  # for a client to read the last of an answer before its connection is cut
WRITE_BUFFER_BYTES = 64 * 1024  # what is kept for a client that reads slowly; its stream waits then
LAST_S = 0.5  # for a client that has connected to send its request, when the server stops
MAX_PIPELINED = 16  # requests sent ahead of the answer to the first


class Connection(HttpToolsProtocol):
    """uvicorn's connection, closed when a client takes too long to send a request or to read."""

    _deadline: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None

    def __init__(
        self,
        *given: Any,
        max_connections: int,
        max_head_bytes: int,
        reject_early: Callable[[object], Response | None] = lambda scope: None,
        **more: Any,
    ) -> None:
        """`reject_early`: the answer to a request, by its scope, that needs no task; None: it needs one."""
        super().__init__(*given, **more)
        self._reject_early = reject_early
        self._max_connections, self._max_head_bytes = max_connections, max_head_bytes
        self._unused, self._is_used = 0, False  # bytes that were read and are part of nothing yet
        self._in_head, self._is_refused, self._piece = False, False, b""
        self._asked: deque[RequestResponseCycle] = deque()  # in their order; `cycle` is the last of them

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        turns: Any = TurnTransport(transport, self.loop)
        self._turns: TurnTransport = turns
        super().connection_made(turns)
        # asyncio sets TCP_NODELAY only for sockets that name their protocol, and accepted ones may not.
        # Without it a token waits until the client has acknowledged the one before, which may take 40 ms.
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        if len(self.connections) > self._max_connections:
            logger.warning("more than %d connections are open; one was closed", self._max_connections)
            transport.close()
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        _stop(self._deadline)
        _stop(self._unread)
        self._turns.end()
        super().connection_lost(exc)
        if running := self._find_unanswered():  # uvicorn notifies the last of several, which only waits
            running.disconnected = True
            running.message_event.set()
        self._asked.clear()
        self.pipeline.clear()

    def on_response_complete(self) -> None:
        self._expect_head()
        super().on_response_complete()

    def shutdown(self) -> None:
        """The server stops: open requests are answered, and a client that has just connected may send one."""
        if self._find_unanswered():
            super().shutdown()
        else:
            _stop(self._deadline)
            self._deadline = self.loop.call_later(LAST_S, self._end_unasked)

    def pause_writing(self) -> None:
        """The client reads more slowly than is written."""
        super().pause_writing()
        self._unread = self.loop.call_later(READ_TIMEOUT_S, self._give_up_reader)

    def resume_writing(self) -> None:
        _stop(self._unread)
        super().resume_writing()

    def data_received(self, data: bytes) -> None:
        """uvicorn's, but what the parser keeps for itself (a head, a trailer) is bounded."""
        if self._is_refused or self.transport.is_closing():
            return
        self._is_used, self._piece = False, data
        super().data_received(data)
        self._unused = 0 if self._is_used else self._unused + len(data)
        if self._is_refused:
            return
        if self._unused > self._max_head_bytes:
            self._refuse(431 if self._in_head else 400, "what follows the body is too long")
        elif len(self.pipeline) > MAX_PIPELINED:
            self._refuse(400, f"more than {MAX_PIPELINED} requests were sent ahead of their answers")

    def on_message_begin(self) -> None:
        self._in_head = True
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # a trailer must not become a header of a request that has been looked at
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head, self._is_used = False, True
        if self.parser.should_upgrade():
            if self.parser.get_method() == b"CONNECT":
                raise ValueError("this is no proxy")  # the parser's caller answers 400
            return
        super().on_headers_complete()
        self._find_unanswered()  # forgets those that are answered
        self._asked.append(self.cycle)
        if self.pipeline:
            self._read_ahead()
        if self.scope["http_version"] == "1.0":
            self.cycle.send = Unframed(self.cycle).send  # type: ignore[method-assign]

    def on_body(self, body: bytes) -> None:
        self._is_used = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._is_used = True
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        """uvicorn's, but a rejected request is answered at once, and its body is skipped."""
        answer = None if self.flow.write_paused else self._reject_early(cycle.scope)
        if answer is None:
            super()._start_asgi_task(cycle, app)
            return
        headers = [*cycle.default_headers, *answer.raw_headers]
        if (b"connection", b"close") in headers:
            cycle.keep_alive = False
        elif not cycle.keep_alive:
            headers.append((b"connection", b"close"))
        lines = b"".join(name + b": " + value + b"\r\n" for name, value in headers)
        self.transport.write(STATUS_LINE[answer.status_code] + lines + b"\r\n" + bytes(answer.body))
        cycle.response_started = cycle.response_complete = True
        if not cycle.keep_alive:
            self.transport.close()
        cycle.on_response()

    def _unsupported_upgrade_warning(self) -> None:
        """Ignore an offer to upgrade to another protocol (RFC 9110, 7.8); Java's client always makes one.

        The parser takes what follows the head to be of that protocol: a new one reads the head without it.
        """
        if len(self.pipeline) > MAX_PIPELINED:
            return  # because `data_received` ends the connection
        offer = sys.exception()  # uvicorn calls this while it handles the parser's
        rest = self._piece[offer.args[0] :] if offer else b""
        old, self.parser = self.parser, HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's own
        line = b"%s %s HTTP/%s" % (old.get_method(), self.url, old.get_http_version().encode())
        headers = [b"%s: %s" % header for header in self.headers if header[0] != b"upgrade"]
        self._piece = b"\r\n".join([line, *headers, b"", rest])
        super().data_received(self._piece)

    def send_400_response(self, msg: str) -> None:
        """Answer input that is not HTTP."""
        error = sys.exception()  # uvicorn calls this while it handles the parser's
        cause = error.__context__ if error else None
        if isinstance(error, HttpParserError) and not isinstance(cause, Exception):
            msg = f"this is not HTTP/1.1: {error}"
        self._refuse(400, msg)

    def _refuse(self, status: int, msg: str) -> None:
        """Answer input that is no request, and end the connection.

        Where another answer has begun, there is no place for this one, so that answer is cut.
        """
        self._is_refused = True
        answering = self._find_unanswered()
        if answering and answering.response_started:
            self._end()
            return
        if status == 431:
            error = HeadTooLarge(f"the request's headers take more than {self._max_head_bytes} bytes")
            self._answer(problem(error))
        else:
            self._answer(Problem(status, msg, None, "invalid_http", {}))

    def _answer(self, found: Problem) -> None:
        """Answer input that reached no handler, and end the connection."""
        answer: Response = found.response()
        headers = [*answer.raw_headers, (b"connection", b"close"), (b"x-request-id", new_id("req").encode())]
        lines = b"".join(name + b": " + value + b"\r\n" for name, value in dict(headers).items())
        self.transport.write(STATUS_LINE[found.status] + lines + b"\r\n" + bytes(answer.body))
        self._end()

    def _read_ahead(self) -> None:
        """Go on reading behind requests that wait, because only a read shows that a client left."""
        waiting = sum(len(cycle.body) for cycle, _ in self.pipeline)
        if len(self.pipeline) < MAX_PIPELINED and waiting <= HIGH_WATER_LIMIT:
            self.flow.resume_reading()

    def _find_unanswered(self) -> RequestResponseCycle | None:
        """The request that is being answered, if one is."""
        while self._asked and self._asked[0].response_complete:
            self._asked.popleft()
        return self._asked[0] if self._asked else None

    def _expect_head(self) -> None:
        _stop(self._deadline)
        self._deadline = self.loop.call_later(HEAD_TIMEOUT_S, self._give_up)

    def _give_up(self) -> None:
        if self.cycle and not self.cycle.response_complete:
            return
        self._end()

    def _end_unasked(self) -> None:
        if self._in_head and not self._find_unanswered():
            self._is_refused = True
            self._answer(problem(NotReady("the server is stopping and takes no more requests")))
        else:
            self._give_up()

    def _end(self) -> None:
        """Close the connection when the client has read all that is written, or after `FLUSH_S` seconds."""
        self.transport.close()
        _stop(self._deadline)
        self._deadline = self.loop.call_later(FLUSH_S, self.transport.abort)

    def _give_up_reader(self) -> None:
        cycle = self._find_unanswered() or self.cycle  # what is not read may be the end of the last answer
        request_id = cycle.scope.get(REQUEST_ID, "") if cycle else ""
        text = "%s: the client read nothing for %g s; its connection was cut"
        logger.warning(text, request_id, READ_TIMEOUT_S)
        self.transport.abort()


class Unframed:
    """Answers HTTP/1.0, which has no chunks: what has no length ends with its connection (RFC 9112, 6.3)."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle, self._send, self._is_open = cycle, cycle.send, False

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self._is_open = all(name.lower() != b"content-length" for name, _ in message["headers"])
            if self._is_open:
                self._cycle.chunked_encoding = False
        elif self._is_open:
            self._cycle.expected_content_length = len(message.get("body", b""))
        await self._send(message)


def _stop(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
