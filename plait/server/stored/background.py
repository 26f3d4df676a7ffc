"""Responses with `background: true`: they go on when their client has left, as tasks of the server.

The row of a response says `queued`, then `in_progress`, then how it ended. Its events are in memory while it
runs, and in the store after that, so a stream can be read again from any number. A response that was in work
when the server ended says `failed`, with the cause, when the next one starts.
"""

from __future__ import annotations

import asyncio
import logging
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct, field
from starlette.responses import Response

from plait.errors import CapacityError, EngineError, QueueFull
from plait.server.gateway.exchange import Exchange
from plait.server.gateway.request_context import Generation, RequestContext
from plait.server.http.errors import NotReady, Problem, TooManyRequests, json_response, problem
from plait.server.http.transfer import EventStream, StreamForm, event_frame
from plait.server.responses import items
from plait.server.responses.reply import ResponsesReply
from plait.server.store.errors import NotStored
from plait.typed_values import decode_json

if TYPE_CHECKING:
    from plait.server.gateway.middleware import Traffic
    from plait.server.store.rows import Rows, StoredRow
    from plait.server.store.store import Store

logger = logging.getLogger("plait.server")
MAX_PER_KEY = 32  # responses of one key in work; each may have a place in the engine's queue
QUEUE_S, RETRY_S = 3600.0, 1.0  # how long a full queue is tried again, and how often
PAUSES_S = (1.0, 5.0, 15.0, 60.0)  # between attempts to store how a response ended
EVENTS_PART = "events"
RESTARTED = "the server ended before this response was whole; send the request again"
STOPPED = "the server is stopping and has ended this response; send the request again"


class EventFrame(msgspec.Struct, frozen=True):
    """One event as it is sent."""

    data: bytes


FRAMES = StreamForm("text/event-stream", lambda found: found.data)


class ResponseJob(Struct):
    """One response in work. `frames`: its events, each as it is sent; the number of one is its place.

    `is_storing`: how it ended is being stored, which nothing interrupts.
    """

    reply: ResponsesReply
    row: StoredRow
    frames: list[bytes] = field(default_factory=list)
    is_done: bool = False
    is_cancelled: bool = False  # by its client
    is_storing: bool = False
    task: asyncio.Task[None] | None = None
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def is_streamed(self) -> bool:
        return self.reply.stream

    def push(self, event: msgspec.Struct) -> None:
        """Add an event, if the response has any."""
        if self.is_streamed:
            self.frames.append(event_frame(event))
            self.wake()

    def wake(self) -> None:
        """Have readers look again."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait(self) -> None:
        """Wait for another event, or for the end."""
        await self._changed.wait()

    def interrupt(self) -> None:
        """Have its task end soon: what it has generated so far is stored."""
        if self.task is not None and not self.is_storing:
            self.task.cancel()


async def follow(job: ResponseJob, first: int) -> AsyncIterator[msgspec.Struct]:
    """The events of a job from the number `first` on, as they come, until its end."""
    number = first
    while True:
        while number < len(job.frames):
            yield EventFrame(job.frames[number])
            number += 1
        if job.is_done:
            return
        await job.wait()


class BackgroundRunner:
    """Runs responses as tasks. Only for the event loop's thread."""

    def __init__(self, store: Store, traffic: Traffic) -> None:
        self._store, self._traffic = store, traffic
        self._jobs: dict[tuple[str, str], ResponseJob] = {}
        self._beginning = Counter[str]()  # by key: responses of which the rows come first
        self._stops = False

    def find(self, tenant: str, response_id: str) -> ResponseJob | None:
        """The job of a response that is in work."""
        return self._jobs.get((tenant, response_id))

    async def start(self, context: RequestContext, reply: ResponsesReply) -> Response:
        """Begin a response, and answer with it as it is: queued, or the stream of its events.

        Raises TooManyRequests and CapacityErrors.
        """
        keeper = reply.keeper
        assert keeper is not None
        num_open = sum(tenant == keeper.tenant for tenant, _ in self._jobs) + self._beginning[keeper.tenant]
        if num_open >= MAX_PER_KEY:
            text = f"background: {num_open} responses of this key are in work already"
            raise TooManyRequests(f"{text}, and {MAX_PER_KEY} may be; wait until one is done")
        if self._stops:
            raise NotReady("the server is stopping and takes no more requests")
        self._beginning[keeper.tenant] += 1
        # A client that leaves now must not leave a row behind that no task works on.
        work = self._begin(replace(context, exchange=take_over(context.exchange)), reply)
        job = await asyncio.shield(work)
        if reply.stream:
            return EventStream(follow(job, 0), _leave, form=FRAMES)
        return json_response(reply.head)

    async def _begin(self, context: RequestContext, reply: ResponsesReply) -> ResponseJob:
        keeper, head = reply.keeper, reply.head
        assert keeper is not None
        try:
            row = await self._store.run(lambda rows: keeper.add(rows, head))
        except BaseException:
            if context.exchange.release is not None:
                context.exchange.release()
            raise
        finally:
            self._beginning -= Counter([keeper.tenant])
        job = self._jobs[keeper.tenant, head.id] = ResponseJob(reply, row)
        job.task = asyncio.get_running_loop().create_task(self._run(job, context))
        await asyncio.sleep(0)  # a task that is cancelled before it began would never end its job
        return job

    async def cancel(self, tenant: str, response_id: str) -> None:
        """Cancel a response and wait until that is stored. One that has ended stays as it is."""
        job = self.find(tenant, response_id)
        if job is not None and job.task is not None:
            job.is_cancelled = True
            job.interrupt()
            await asyncio.wait({job.task})

    async def close(self) -> None:
        """End every job; its response says that the server stopped."""
        self._stops = True
        tasks = [job.task for job in self._jobs.values() if job.task is not None]
        for job in self._jobs.values():
            job.interrupt()
        if tasks:
            await asyncio.wait(tasks)

    async def _run(self, job: ResponseJob, context: RequestContext) -> None:
        """Run a job to its end, whatever that is. Its requests, tokens and log are those of its key."""
        exchange = context.exchange
        self._traffic.begin_inner(exchange)
        try:
            ending = await self._generate(job, context)
            exchange.status = 200
        except asyncio.CancelledError:
            found = problem(NotReady(STOPPED))
            ending = Ending(job.reply.end_early("cancelled")) if job.is_cancelled else _fail(job, found)
            exchange.status = 499
        except Exception as error:
            found = problem(error)
            exchange.status, exchange.reason = found.status, found.reason
            ending = _fail(job, found)
        finally:
            self._traffic.end(exchange)
        await self._finish(job, ending)

    async def _generate(self, job: ResponseJob, context: RequestContext) -> Ending:
        reply = job.reply
        events = reply.begin()
        for event in (next(events), next(events)):  # created and queued
            job.push(event)
        generation = await self._submit(context, reply) if reply.requests else None
        try:
            await self._change(job, msgspec.structs.replace(reply.head, status="in_progress"))
            for event in events:
                job.push(event)
            while True:
                if generation is not None:
                    await _push_deltas(job, generation)
                between = reply.advance(context, None)
                if between is None:
                    return _end_with(reply.end())
                async for done in between:
                    job.push(done)
                generation = await self._submit(context, reply) if reply.requests else None
        finally:
            if generation is not None:
                await generation.close()
            reply.close()

    async def _submit(self, context: RequestContext, reply: ResponsesReply) -> Generation:
        """Submit the request, and wait while the engine's queue is full. Raises CapacityErrors."""
        deadline = asyncio.get_running_loop().time() + QUEUE_S
        while True:
            try:
                with reply.in_words():
                    return await Generation.start(context, reply.requests, 1 if reply.stream else None)
            except QueueFull:
                if asyncio.get_running_loop().time() > deadline:
                    raise
            await asyncio.sleep(RETRY_S)

    async def _change(self, job: ResponseJob, response: items.Response) -> None:
        body = msgspec.json.encode(response)
        job.row = await self._store.run(lambda rows: rows.change(job.row, body, response.status))

    async def _finish(self, job: ResponseJob, ending: Ending) -> None:
        """Store how the job ended, with its events, before readers see it. A failure is a line of the log."""
        response, last = ending.response, b"".join(event_frame(event) for event in ending.events)
        body, packed = msgspec.json.encode(response), b""
        job.is_storing = True
        try:
            if job.is_streamed:
                packed = await asyncio.to_thread(zlib.compress, b"".join(job.frames) + last)

            def write(rows: Rows) -> None:
                row = rows.change(job.row, body, response.status)
                rows.add_items(row, (item.id for item in response.output))
                if job.reply.keeper is not None:
                    job.reply.keeper.append(rows, response)
                if packed:
                    rows.add_part(row, EVENTS_PART, 0, packed)

            for pause_s in PAUSES_S:
                job.is_storing = True
                if await self._try_to_store(write) or job.is_cancelled or self._stops:
                    break
                job.is_storing = False
                await asyncio.sleep(pause_s)
        finally:
            for event in ending.events:
                job.push(event)
            job.is_done = True
            self._jobs.pop((job.row.tenant, job.row.id), None)
            job.wake()

    async def _try_to_store(self, write: Callable[[Rows], None]) -> bool:
        """Store how a job ended. False: the store refuses it now, which the log says."""
        try:
            await self._store.run(write)
        except NotStored:  # it was deleted meanwhile
            pass
        except CapacityError as error:
            logger.error("a response in the background was not stored: %s", error)
            return False
        return True


async def _push_deltas(job: ResponseJob, generation: Generation) -> None:
    async for i, delta in generation:
        job.reply.count.add(i, delta)
        for event in job.reply.events(i, delta):
            job.push(event)


class Ending(Struct, frozen=True):
    """How a response ended, and its last events."""

    response: items.Response
    events: Sequence[items.ResponseEvent] = ()


def _end_with(events: Iterable[items.ResponseEvent]) -> Ending:
    found = [*events]
    last = found[-1]
    assert isinstance(last, items.StateEvent)
    return Ending(last.response, found)


def _fail(job: ResponseJob, found: Problem) -> Ending:
    return _end_with(job.reply.fail(found))


def take_over(old: Exchange) -> Exchange:
    """The exchange of a job, which outlives the request that began it.

    It holds the model in that request's place: no model is unloaded under a response in work.
    """
    release, old.release = old.release, None
    return Exchange(
        old.id,
        old.method,
        old.path,
        old.traceparent,
        old.key,
        old.account,
        old.route,
        model=old.model,
        release=release,
    )


async def _leave() -> None:
    """A reader that leaves changes nothing."""


def fail_unfinished(rows: Rows, ids: Collection[str]) -> None:
    """Have those of these responses say `failed` that are in work."""
    found = problem(EngineError(RESTARTED))
    for row in rows.list_working("response"):
        if row.id not in ids:
            continue
        body = decode_json(row.body, dict[str, object])
        body |= {"status": "failed", "error": {"code": "server_error", "message": found.message}}
        rows.change(row, msgspec.json.encode(body), "failed")
