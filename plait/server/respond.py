"""From a reply's plan to its response: generations, one or several, whole or as events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from concurrent.futures import Executor
from typing import TYPE_CHECKING

import msgspec
from starlette.responses import Response
from starlette.types import Receive

from plait.request import RequestTrace
from plait.server.api.reply import WARNING_HEADER, ApiReply, run_plan
from plait.server.gateway.request_context import Generation, RequestContext
from plait.server.http.errors import Problem, json_response
from plait.server.http.transfer import EventStream, until_disconnect
from plait.server.responses.reply import ResponsesReply

if TYPE_CHECKING:
    from plait.server.stored.state import StoredState


async def respond(
    receive: Receive,
    context: RequestContext,
    plan: Callable[[], ApiReply],
    threads: Executor | None = None,
    interval: int = 1,
    state: StoredState | None = None,
) -> Response:
    """Answer with the reply that `plan` makes. It tokenizes, so one of `threads` calls it. `interval`: tokens
    that a stream emits together. `state`: of background replies. Raises Cancelled if the client leaves."""
    return await until_disconnect(receive, _respond(context, plan, threads, interval, state))


async def _respond(
    context: RequestContext,
    plan: Callable[[], ApiReply],
    threads: Executor | None,
    interval: int,
    state: StoredState | None,
) -> Response:
    reply = await run_plan(plan, threads)
    if isinstance(reply, ResponsesReply) and reply.in_background and state is not None:
        return await state.background.start(context, reply)
    traces: list[RequestTrace | None] = []
    if reply.stream:
        rounds = ReplyRounds(context, reply, threads, interval)
        await rounds.start()

        def report_failure(found: Problem) -> Iterable[msgspec.Struct]:
            context.exchange.reason = found.reason  # the log's status is that of the headers, 200
            return reply.fail(found)

        return EventStream(rounds.events(), rounds.close, report_failure, form=reply.form)
    if reply.has_rounds:
        await _run_rounds(ReplyRounds(context, reply, threads, None))
    else:
        traces = await _generate(context, reply)
    body = await reply.keep(await asyncio.to_thread(reply.whole, traces))
    return json_response(body, headers={WARNING_HEADER: reply.warning} if reply.warning else {})


async def _generate(context: RequestContext, reply: ApiReply) -> list[RequestTrace | None]:
    """Add all deltas of a reply's requests to it, `at_once` requests at a time."""
    traces: list[RequestTrace | None] = []
    num_open = context.front.max_open
    size = max(min(reply.at_once, num_open // 2), 1) if reply.at_once else num_open
    for first in range(0, len(reply.requests), size):
        requests = reply.requests[first : first + size]
        # Later requests of a list wait for the queue, so that the results of the first are not lost.
        with reply.in_words():
            generation = await Generation.start(context, requests, None, waits=bool(first))
        try:
            async for i, delta in generation:
                reply.count.add(first + i, delta)
                reply.add(first + i, delta)
        finally:
            await generation.close()
        traces += generation.traces()
    return traces


async def _run_rounds(rounds: ReplyRounds) -> None:
    """Run all rounds of a reply that is not streamed; what its events say is in the whole reply, too."""
    try:
        await rounds.start()
        async for _ in rounds.run():
            pass
    finally:
        await rounds.close()


class ReplyRounds:
    """A reply as it comes: its generations, and what is done between them. `interval` as of a Generation."""

    def __init__(
        self, context: RequestContext, reply: ApiReply, threads: Executor | None, interval: int | None
    ) -> None:
        self._context, self._reply, self._threads, self._interval = context, reply, threads, interval
        self._generation: Generation | None = None

    async def start(self) -> None:
        """Submit the first requests, if there are any yet. Raises what the engine refuses them with."""
        if self._reply.requests:
            generation = await self._submit(waits=False)
            try:
                await generation.peek()
            except BaseException:
                await generation.close()
                raise

    async def events(self) -> AsyncIterator[msgspec.Struct]:
        """All events of the reply, which is stored before the last ones."""
        async for event in self.run():
            yield event
        await self._reply.keep_streamed()
        for event in self._reply.end():
            yield event

    async def run(self) -> AsyncIterator[msgspec.Struct]:
        """The events of all rounds, once `start` was awaited."""
        reply, generation = self._reply, self._generation
        for event in reply.begin():
            yield event
        while True:
            if generation is not None:
                async for i, delta in generation:
                    reply.count.add(i, delta)
                    for event in reply.events(i, delta):
                        yield event
            between = reply.advance(self._context, self._threads)
            if between is None:
                return
            async for event in between:
                yield event
            generation = await self._submit(waits=True) if reply.requests else None

    async def _submit(self, *, waits: bool) -> Generation:
        with self._reply.in_words():
            found = await Generation.start(self._context, self._reply.requests, self._interval, waits=waits)
        self._generation = found
        return found

    async def close(self) -> None:
        """End what still runs."""
        if self._generation is not None:
            await self._generation.close()
        self._reply.close()
