"""One HTTP call's requests while the engine works on them: merged, streamed, and cancelled as one."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from plait.errors import DeadlineExceeded, EngineError, QueueFull
from plait.fair_queue import capture_call
from plait.request import Request, RequestTrace
from plait.server.http.bodies import cancel_tasks
from plait.server.http.errors import NotReady
from plait.text.grammar.trial_pool import apply_verdict, too_late

if TYPE_CHECKING:
    from plait.frontend.deltas import Delta
    from plait.frontend.output_stream import OutputStream
    from plait.server.gateway.request_context import RequestContext

FIRST_WAIT_S = 0.05  # a refusal that only the engine can decide comes within this, and is an HTTP error then
RETRY_S = 0.05  # between attempts to submit to a full queue
PATIENCE_S = 60.0  # in a full queue: then the client gets an error, and may retry
T = TypeVar("T")


class Generation:
    """Requests that were submitted together. Iterate it once: (place of the request, Delta).

    The failure of one is the failure of all; leaving early cancels all.
    """

    def __init__(self, requests: Sequence[Request], streams: Sequence[OutputStream]) -> None:
        self.requests, self._streams = requests, streams
        self._first: asyncio.Task[tuple[int, Delta]] | None = None
        self._deltas = _merge_streams(streams)
        self._finished = False

    @classmethod
    async def start(
        cls,
        context: RequestContext,
        requests: Sequence[Request],
        interval: int | None,
        *,
        waits: bool = False,
    ) -> Generation:
        """Submit every request or none. Raises BadGrammar, QueueFull and other CapacityErrors.

        `interval`: tokens that a delta has, None where only the end matters, see `Front.submit`. `waits`:
        wait while the queue is full, `PATIENCE_S` at most for each request.
        """
        streams: list[OutputStream] = []
        requests = [*requests]
        try:
            for i, request in enumerate(requests):
                request = requests[i] = await _try_grammars(context, request)
                submit = partial(context.submit, request, interval)
                streams.append(await _submit(submit, request) if waits else submit())
        except BaseException:
            for stream in streams:
                stream.cancel()
            raise
        return cls(requests, streams)

    async def peek(self) -> None:
        """Wait a moment for the first delta. Raises what the engine refused the request with."""
        self._first = asyncio.ensure_future(anext(self._deltas))
        await asyncio.wait({self._first}, timeout=FIRST_WAIT_S)
        if self._first.done():
            self._first.result()

    async def __aiter__(self) -> AsyncIterator[tuple[int, Delta]]:
        if self._first is not None:
            yield await self._first
        async for item in self._deltas:
            yield item
        self._finished = True

    def traces(self) -> Iterator[RequestTrace | None]:
        """The traces of the choices that have ended, as far as the engine has reported them."""
        for stream in self._streams:
            yield from stream.traces.values()

    async def close(self) -> None:
        """Cancel what still runs. May be called at any time, and twice."""
        if not self._finished:
            for stream in self._streams:
                stream.cancel()
        self._finished = True
        if self._first is not None and not self._first.done():
            self._first.cancel()
            await asyncio.gather(self._first, return_exceptions=True)
        await self._deltas.aclose()


async def _try_grammars(context: RequestContext, request: Request) -> Request:
    """The same request, its grammars tried out; other requests have their turn meanwhile.

    Raises BadGrammar, DeadlineExceeded for a request past its timeout, and CapacityError.
    """
    front = context.front
    for grammar in front.untried(request):
        assert front.grammars is not None
        began, left = time.monotonic(), request.timeout_s or front.grammars.limits.wait_s
        try:
            async with asyncio.timeout(left):
                found = await asyncio.wrap_future(front.grammars.submit(grammar, context.tenant))
        except TimeoutError as error:
            if request.timeout_s is None:
                raise too_late(left) from error
            raise DeadlineExceeded("timeout_s: it was over before the request's grammar was tried") from error
        request = replace(request, grammar=apply_verdict(grammar, found))
        if request.timeout_s is not None:
            request = replace(request, timeout_s=max(left - (time.monotonic() - began), 0.001))
    return request


async def _submit(submit: Callable[[], OutputStream], request: Request) -> OutputStream:
    until = time.monotonic() + min(PATIENCE_S, request.timeout_s or PATIENCE_S)
    while time.monotonic() < until:
        with contextlib.suppress(QueueFull):
            return submit()
        await asyncio.sleep(RETRY_S)
    return submit()


async def run_plan(plan: Callable[[], T], threads: Executor | None) -> T:
    """What `plan` returns or raises, called in one of `threads`; None: in any of those all requests share."""
    call = partial(contextvars.copy_context().run, plan)
    return await asyncio.get_running_loop().run_in_executor(threads, capture_call, call)


async def _merge_streams(streams: Sequence[OutputStream]) -> AsyncGenerator[tuple[int, Delta], None]:
    if len(streams) == 1:
        async for delta in streams[0]:
            yield 0, _check_delta(delta)
        return
    arrived: asyncio.Queue[tuple[int, Delta | Exception | None]] = asyncio.Queue()

    async def read(i: int, stream: OutputStream) -> None:
        last: Exception | None = None
        try:
            async for delta in stream:
                arrived.put_nowait((i, delta))
        except Exception as error:
            last = error
        arrived.put_nowait((i, last))

    readers = [asyncio.ensure_future(read(i, stream)) for i, stream in enumerate(streams)]
    try:
        open_streams = len(streams)
        while open_streams:
            i, item = await arrived.get()
            if item is None:
                open_streams -= 1
            elif isinstance(item, Exception):
                raise item
            else:
                yield i, _check_delta(item)
    finally:
        await cancel_tasks(*readers)


def _check_delta(delta: Delta) -> Delta:
    """Raises what a failed or cancelled choice ended with."""
    if delta.finish_reason == "error":
        raise delta.error or EngineError("the engine failed at this request and gave no reason")
    if delta.finish_reason == "cancelled":
        raise NotReady("the server is stopping and has ended this request")
    return delta
