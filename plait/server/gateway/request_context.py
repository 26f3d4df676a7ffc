"""The way to the engine: the loading state of its model, the context of an HTTP request, and its generation.

HTTP answers from the first moment, and reports how far loading is.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType

from plait.errors import DeadlineExceeded, EngineError, InvalidField, QueueFull
from plait.fair_queue import current_client
from plait.request import Request, RequestTrace, SamplingParams
from plait.server.gateway.exchange import Exchange
from plait.server.http.errors import NotReady
from plait.server.http.transfer import cancel_tasks
from plait.server.mcp.allowed import McpServers
from plait.text.grammar.trial_pool import apply_verdict, too_late

if TYPE_CHECKING:
    from plait.frontend.deltas import Delta
    from plait.frontend.frontend import Front
    from plait.frontend.output_stream import OutputStream
    from plait.server.store.store import Store

FIRST_WAIT_S = 0.05  # a refusal that only the engine can decide comes within this, and is an HTTP error then
RETRY_S = 0.05  # between attempts to submit to a full queue
PATIENCE_S = 60.0  # in a full queue: then the client gets an error, and may retry
NO_MCP = McpServers()
TOTALS = frozenset(
    {"num_steps", "num_prompt_tokens", "num_output_tokens", "num_preemptions", "num_swaps", "num_restarts"}
)


class LoadingProgress(Struct, frozen=True):
    """How far loading is: `done` of `total` steps of what `text` names."""

    text: str = "starting"
    done: int = 0
    total: int = 0


class ModelHealth(msgspec.Struct, kw_only=True, frozen=True):
    """How one of several models is; `engine` and `totals` as of `Health`. `error`: why it failed."""

    status: Literal["ok", "loading", "unhealthy", "unloaded", "failed"]
    progress: LoadingProgress | UnsetType = UNSET
    error: str | UnsetType = UNSET
    engine: dict[str, int] | UnsetType = UNSET
    totals: dict[str, int] | UnsetType = UNSET


class Health(msgspec.Struct, kw_only=True, frozen=True):
    """The body of /health. `engine`: current values; `totals`: counters; `progress`: while it loads.

    `models`: of a server of several, each by its name.
    """

    status: Literal["ok", "loading", "unhealthy", "stopping"]
    progress: LoadingProgress | UnsetType = UNSET
    engine: dict[str, int] | UnsetType = UNSET
    totals: dict[str, int] | UnsetType = UNSET
    models: dict[str, ModelHealth] | UnsetType = UNSET


class Readiness(msgspec.Struct, frozen=True):
    """The body of /ready and /live: whether new requests are accepted, or why not."""

    status: str


class LoadingState:
    """Holds the Front once it is there. Written by the loading thread, read by the event loop.

    `timeout_s`: loading without progress for so long counts as stuck.
    """

    def __init__(self, front: Front | None = None, timeout_s: float = math.inf) -> None:
        self.front, self.progress, self.stopping = front, LoadingProgress(), False
        self._timeout_s, self._got_on_s = timeout_s, time.monotonic()
        self._lock = threading.Lock()

    def report(self, text: str, done: int, total: int) -> None:
        """Report how far loading is; from any thread. Raises NotReady when the server stops, to cancel it."""
        if self.stopping:
            raise NotReady("the server is stopping, and the model is loaded no further")
        progress = LoadingProgress(text, done, total)
        if progress != self.progress:
            self.progress, self._got_on_s = progress, time.monotonic()

    def arrive(self, front: Front) -> bool:
        """Hand the loaded model over. False: the server is stopping already, so the caller closes it.

        What the first one finds here stays: no collection looks at it again. That would take a fifth of a
        second, in which no stream gets a token.
        """
        if not gc.get_freeze_count():
            gc.freeze()
        with self._lock:
            if not self.stopping:
                self.front = front
            return not self.stopping

    def stop(self) -> None:
        """Accept no new requests from now on; running ones go on."""
        with self._lock:
            self.stopping = True

    def ready(self) -> Front:
        """The model. Raises NotReady while it loads and when the server stops."""
        if self.stopping:
            raise NotReady("the server is stopping and takes no more requests")
        if self.front is None:
            raise NotReady(f"the model is loading ({self.progress.text}); try again soon")
        return self.front

    def check_capacity(self) -> None:
        """Raises QueueFull or EngineError if any request that came now would be refused."""
        if self.front is not None and not self.stopping:
            self.front.check_capacity()

    def readiness(self) -> tuple[int, str]:
        """The HTTP status of /ready and why: 200 if a request that came now would be taken."""
        if self.stopping:
            return 503, "stopping"
        if self.front is None:
            return 503, "loading"
        if self.front.healthy:
            return 200, "ready"
        return 503, "unhealthy" if self.front.loading is None else "loading"

    def liveness(self) -> tuple[int, str]:
        """The HTTP status of /live and why: 503 if only restarting the server could help."""
        if self.stopping:
            return 200, "stopping"
        if self.front is None:
            hangs = time.monotonic() - self._got_on_s > self._timeout_s
            return (503, "hangs") if hangs else (200, "loading")
        if self.front.healthy:
            return 200, "up"
        if not self.front.live:
            return 503, "lost"
        return 200, "stalled" if self.front.loading is None else "restarting"

    def health(self) -> tuple[int, Health]:
        """The HTTP status of /health and its body: `engine` is as it is now, `totals` only grow."""
        if self.stopping:
            return 503, Health(status="stopping")
        if self.front is None:
            return 503, Health(status="loading", progress=self.progress)
        stats = self.front.stats()
        now = {name: value for name, value in stats.items() if name not in TOTALS}
        totals = {name: value for name, value in stats.items() if name in TOTALS}
        healthy, again = self.front.healthy, self.front.loading
        if not healthy and again is not None:
            return 503, Health(status="loading", progress=LoadingProgress(*again), engine=now, totals=totals)
        return 200 if healthy else 503, Health(
            status="ok" if healthy else "unhealthy", engine=now, totals=totals
        )


# Of all choices of all prompts of one HTTP request: a list of a thousand prompts is one, too.
MAX_OUTPUT_TOKENS = 1 << 22


@dataclass(frozen=True, slots=True)
class RequestContext:
    """One request on its way to the engine: the model, its name in the reply, and the client.

    It separates the cached prompts of keys, counts and bounds. Safe from any thread, like the Front. `store`:
    what clients have stored; None: the server stores nothing. `adapter`: the name of the one that the request
    chose; "": none. `mcp`: the servers of which tools may be called.
    """

    front: Front
    model: str
    exchange: Exchange
    store: Store | None = None
    adapter: str = ""
    mcp: McpServers = NO_MCP

    @property
    def tenant(self) -> str:
        """The unit of fair sharing: the API key's name, else the client's address."""
        return self.exchange.key.name or current_client.get()

    def prepare(self, prompt: str | Sequence[int], params: SamplingParams, **more: Any) -> Request:
        """As Front's. Raises InvalidField, too, if the whole HTTP request asks for too many tokens."""
        return self._count(self.front.prepare(prompt, params, **more))

    def prepare_chat(self, messages: Sequence[Mapping[str, Any]], *given: Any, **options: Any) -> Request:
        """As Front's, and bounded like `prepare`."""
        return self._count(self.front.prepare_chat(messages, *given, **options))

    def submit(self, request: Request, interval: int | None = 1) -> OutputStream:
        """As Front's, under the key's own salt. The key pays for the prompt."""
        exchange = self.exchange
        if exchange.key.name:
            # No name holds a slash, so no salt that is sent makes one key's prompts another's.
            request = replace(request, cache_salt=f"{exchange.key.name}/{request.cache_salt}")
        request = replace(request, tenant=self.tenant, adapter=self.adapter)
        stream = self.front.submit(request, interval)
        exchange.streams.append(stream)
        if exchange.account is not None:
            exchange.account.pay(len(request.prompt_token_ids))
        return stream

    def report_unread(self, names: Iterable[str], words: Mapping[str, str]) -> None:
        """Name hints that change nothing in the reply's header. `words`: what a chat's fields are called."""
        self.exchange.unread += (words.get(name, name) for name in names)

    def _count(self, request: Request) -> Request:
        asked = self.exchange.num_asked_tokens + request.params.n * (request.params.max_tokens or 0)
        self.exchange.num_asked_tokens = asked
        if asked > MAX_OUTPUT_TOKENS:
            raise InvalidField(
                f"max_tokens: times n choices of each prompt it makes {asked} tokens, more than "
                f"{MAX_OUTPUT_TOKENS} in one request; send max_tokens, a smaller n, or fewer prompts",
                "max_tokens",
            )
        return request


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
    for grammar in front.list_untried(request):
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
