"""Server-sent events: `data: …` and an empty line for each chunk, `[DONE]` at the end, exactly once."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from plait.server.http.errors import Problem, problem
from plait.server.http.tasks import cancel_tasks, wait_disconnect

logger = logging.getLogger("plait.server")
PING_S = 15.0  # silence after which a comment is sent, so that proxies keep the connection open
SEND_TIMEOUT_S = 60.0  # a client that reads nothing for so long is disconnected
_ENCODE = msgspec.json.Encoder().encode
DONE = b"data: [DONE]\n\n"


def frame(body: Any) -> bytes:
    """One event. JSON holds no raw line break, so it is one line."""
    return b"data: " + _ENCODE(body) + b"\n\n"


def event_frame(body: Any) -> bytes:
    """One event under its own name, which is its `type`."""
    return b"event: " + str(body.type).encode() + b"\n" + frame(body)


class EventStream(Response):
    """A streamed response of events. `close` is awaited at its end: done, failed or disconnected.

    `failed`: the events that report a failure, if they are not OpenAI's error object. `named`: events have
    their own names, and no `[DONE]` at the end.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        bodies: AsyncIterator[msgspec.Struct],
        close: Callable[[], Awaitable[None]],
        failed: Callable[[Problem], Iterable[msgspec.Struct]] = lambda found: (found.body(),),
        *,
        named: bool = False,
    ) -> None:
        self.status_code, self.body, self.background = 200, b"", None
        self._bodies, self._close, self._failed, self._last_sent = bodies, close, failed, 0.0
        self._frame, self._done = (event_frame, b"") if named else (frame, DONE)
        self._sending_since: float | None = None
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        self._last_sent = time.monotonic()
        pump = asyncio.ensure_future(self._pump(send))
        others = asyncio.ensure_future(wait_disconnect(receive)), asyncio.ensure_future(self._watch(send))
        try:
            await asyncio.wait({pump, *others}, return_when=asyncio.FIRST_COMPLETED)
            if pump.done():
                pump.result()
        finally:
            await cancel_tasks(pump, *others)
            await self._close()

    async def _pump(self, send: Send) -> None:
        try:
            async for body in self._bodies:
                await self._send(send, self._frame(body))
        except Exception as error:
            for body in self._failed(problem(error)):
                await self._send(send, self._frame(body))
        if self._done:
            await self._send(send, self._done)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, send: Send, data: bytes) -> None:
        self._sending_since = time.monotonic()
        await send({"type": "http.response.body", "body": data, "more_body": True})
        self._last_sent, self._sending_since = time.monotonic(), None

    async def _watch(self, send: Send) -> None:
        """Break long silences; returns when the client reads nothing. A timer for each event costs more."""
        while True:
            since, silence = self._sending_since, time.monotonic() - self._last_sent
            if since is not None:
                if time.monotonic() - since >= SEND_TIMEOUT_S:
                    break
                await asyncio.sleep(SEND_TIMEOUT_S / 4)
            elif silence >= PING_S:
                try:
                    async with asyncio.timeout(SEND_TIMEOUT_S):  # no other timer limits this send
                        await self._send(send, b": ping\n\n")
                except TimeoutError:
                    break
            else:
                await asyncio.sleep(min(PING_S - silence, SEND_TIMEOUT_S / 4))
        logger.warning("a client read nothing for %g s; its stream was ended", SEND_TIMEOUT_S)
