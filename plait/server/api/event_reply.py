"""A response of any shape: what endpoints beside OpenAI's completions make of the same generation."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

from starlette.responses import Response
from starlette.types import Receive

from plait.request import Request
from plait.server.api.completion_reply import WARNING_HEADER, Usage
from plait.server.api.generation import Generation, planned
from plait.server.http.errors import Problem, json_response
from plait.server.http.sse import EventStream, Framing, named_frame
from plait.server.http.tasks import until_disconnect

if TYPE_CHECKING:
    from plait.frontend.delta import Delta
    from plait.frontend.frontend import Front

AT_ONCE = 64  # requests of one call that the engine has at a time: a list of inputs must not fill its queue
Event = Mapping[str, Any]  # `type` is its name


class Outcome(Protocol):
    """One response as deltas arrive. `stream`: as named events; there is one request then."""

    @property
    def requests(self) -> Sequence[Request]: ...
    @property
    def stream(self) -> bool: ...
    @property
    def warning(self) -> str:
        """What went wrong although the request was answered; "". Known with the body."""
        ...

    def words(self) -> AbstractContextManager[None]:
        """In which refusals name the fields that the client sent."""
        ...

    def add(self, i: int, delta: Delta) -> None:
        """Keep this delta of request `i` for `body`."""
        ...

    def body(self, usage: Usage) -> dict[str, Any]:
        """The whole response."""
        ...

    def begin(self) -> Iterable[Event]:
        """The events before the first delta."""
        ...

    def events(self, delta: Delta) -> Iterable[Event]:
        """The events that this delta brings."""
        ...

    def end(self, usage: Usage) -> Iterable[Event]:
        """The events after the last delta."""
        ...

    def failed(self, problem: Problem) -> Iterable[Event]:
        """The last events of a stream that fails."""
        ...


class Whole:
    """The half of `Outcome` that a response without a stream needs not think about."""

    stream, warning = False, ""

    def words(self) -> AbstractContextManager[None]:
        return nullcontext()

    def begin(self) -> Iterable[Event]:
        return ()

    def events(self, delta: Delta) -> Iterable[Event]:
        return ()

    def end(self, usage: Usage) -> Iterable[Event]:
        return ()

    def failed(self, problem: Problem) -> Iterable[Event]:
        return ()


async def respond(
    receive: Receive,
    front: Front,
    plan: Callable[[], Outcome],
    threads: Executor | None = None,
    interval: int = 1,
) -> Response:
    """Run what `plan` (called in one of `threads`: it tokenizes) asks for.

    `interval`: tokens that a stream tells together. Raises Cancelled if the client leaves.
    """
    return await until_disconnect(receive, _respond(front, plan, threads, interval))


async def _respond(
    front: Front, plan: Callable[[], Outcome], threads: Executor | None, interval: int
) -> Response:
    outcome = await planned(plan, threads)
    usage = Usage(outcome.requests)
    if outcome.stream:
        return await _streamed(front, outcome, usage, interval)
    size = max(min(AT_ONCE, front.max_open // 2), 1)
    for first in range(0, len(outcome.requests), size):
        requests = outcome.requests[first : first + size]
        # What was computed for the first of a list is not thrown away because others came meanwhile.
        with outcome.words():
            generation = await Generation.start(front, requests, None, waits=bool(first))
        try:
            async for i, delta in generation:
                usage.add(first + i, delta)
                outcome.add(first + i, delta)
        finally:
            await generation.close()
    body = await asyncio.to_thread(outcome.body, usage)
    return json_response(body, headers={WARNING_HEADER: outcome.warning} if outcome.warning else {})


async def _streamed(front: Front, outcome: Outcome, usage: Usage, interval: int) -> Response:
    with outcome.words():
        generation = await Generation.start(front, outcome.requests, interval)
    try:
        await generation.peek()
    except BaseException:
        await generation.close()
        raise
    framing = Framing(named_frame, outcome.failed, b"")
    return EventStream(_events(outcome, generation, usage), generation.close, framing=framing)


async def _events(outcome: Outcome, generation: Generation, usage: Usage) -> AsyncIterator[Event]:
    for event in outcome.begin():
        yield event
    async for i, delta in generation:
        usage.add(i, delta)
        for event in outcome.events(delta):
            yield event
    for event in outcome.end(usage):
        yield event
