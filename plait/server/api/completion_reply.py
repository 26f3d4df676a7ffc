"""What both kinds of generation answer with: the head of every body, usage, and the way there."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from starlette.responses import Response
from starlette.types import Receive

from plait.request import Request
from plait.server.api.generation import Generation, planned
from plait.server.api.reply_extras import Extras
from plait.server.api.schema import StreamOptions
from plait.server.http.errors import json_response
from plait.server.http.sse import EventStream
from plait.server.http.tasks import until_disconnect

if TYPE_CHECKING:
    from plait.frontend.delta import Delta, TextLogprob
    from plait.frontend.frontend import Front

WARNING_HEADER = "x-plait-warning"
LOGPROB_FLOOR = -9999.0  # JSON has no -inf


@dataclass(frozen=True, slots=True)
class Head:
    """What every body of one response shares. `kind`: 'chat.completion' or 'text_completion'."""

    id: str
    kind: str
    model: str
    fingerprint: str
    created: int = field(default_factory=lambda: int(time.time()))

    def body(self, kind: str, choices: Sequence[Any], **more: Any) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint or None,
            "choices": choices,
            **more,
        }


class Reply(Protocol):
    """The shape of one response as deltas arrive, whole or in chunks."""

    @property
    def head(self) -> Head: ...
    @property
    def chunk_kind(self) -> str: ...
    @property
    def requests(self) -> Sequence[Request]: ...
    @property
    def stream(self) -> bool: ...
    @property
    def told(self) -> StreamOptions: ...
    @property
    def extras(self) -> Extras: ...
    @property
    def warning(self) -> str:
        """What went wrong although the request was answered; ""."""
        ...

    def chunks(self, i: int, delta: Delta) -> list[dict[str, Any]]:
        """The choices of chunks that this delta of request `i` completes, one chunk each."""
        ...

    def add(self, i: int, delta: Delta) -> None:
        """Keep this delta for `choices`."""
        ...

    def choices(self) -> list[dict[str, Any]]:
        """Every choice, complete."""
        ...


class Usage:
    """Tokens of one response: each prompt counts once, every generated choice counts, returned or not.

    Cached are the tokens that the first choice found: those after it find what the first one computed.
    """

    def __init__(self, requests: Sequence[Request]) -> None:
        self._prompt = sum(len(r.prompt_token_ids) for r in requests)
        self._completion: dict[tuple[int, int], int] = {}
        self._reasoning: dict[tuple[int, int], int] = {}
        self._cached: dict[int, int] = {}

    def add(self, i: int, delta: Delta) -> None:
        self._completion[i, delta.index] = delta.num_tokens
        self._reasoning[i, delta.index] = delta.num_reasoning_tokens
        if delta.index == 0:
            self._cached[i] = max(self._cached.get(i, 0), delta.num_cached_tokens)

    def body(self) -> dict[str, Any]:
        completion = sum(self._completion.values())
        return {
            "prompt_tokens": self._prompt,
            "completion_tokens": completion,
            "total_tokens": self._prompt + completion,
            "completion_tokens_details": {"reasoning_tokens": sum(self._reasoning.values())},
            "prompt_tokens_details": {"cached_tokens": sum(self._cached.values())},
        }


async def respond(
    receive: Receive,
    front: Front,
    plan: Callable[[], Reply],
    threads: Executor | None = None,
    interval: int = 1,
) -> Response:
    """Run what `plan` (called in one of `threads`: it tokenizes) asks for.

    `interval`: tokens that a stream tells together. Raises Cancelled if the client leaves.
    """
    return await until_disconnect(receive, _respond(front, plan, threads, interval))


async def _respond(
    front: Front, plan: Callable[[], Reply], threads: Executor | None, interval: int
) -> Response:
    reply = await planned(plan, threads)
    generation = await Generation.start(front, reply.requests, interval if reply.stream else None)
    usage = Usage(reply.requests)
    try:
        if reply.stream:
            await generation.peek()
            return EventStream(_bodies(reply, generation, usage), generation.close)
        async for i, delta in generation:
            usage.add(i, delta)
            reply.extras.add(i, delta)
            reply.add(i, delta)
    except BaseException:
        await generation.close()
        raise
    await generation.close()
    more = reply.extras.of_whole(generation.traces())
    body = reply.head.body(reply.head.kind, reply.choices(), usage=usage.body(), **more)
    return json_response(body, headers={WARNING_HEADER: reply.warning} if reply.warning else {})


async def _bodies(reply: Reply, generation: Generation, usage: Usage) -> AsyncIterator[Mapping[str, Any]]:
    told = reply.told
    more: dict[str, Any] = {"usage": None} if told.include_usage else {}
    async for i, delta in generation:
        usage.add(i, delta)
        reply.extras.add(i, delta)
        if told.continuous_usage_stats:
            more = {"usage": usage.body()}
        for choice in reply.chunks(i, delta):
            extra = reply.extras.of_chunk(i, delta)
            if choice["finish_reason"] is not None and reply.warning:
                extra["warning"] = reply.warning
            yield reply.head.body(reply.chunk_kind, [choice], **more, **extra)
    if told.include_usage:
        yield reply.head.body(reply.chunk_kind, [], usage=usage.body())


def finite(logprob: float) -> float:
    """A log-probability that JSON can carry. NaN and -inf become the floor."""
    return min(logprob, 0.0) if logprob > LOGPROB_FLOOR else LOGPROB_FLOOR


def best(lp: TextLogprob) -> list[TextLogprob]:
    """The alternatives of a token, most likely first."""
    return sorted(lp.top, key=lambda one: -finite(one.logprob))
