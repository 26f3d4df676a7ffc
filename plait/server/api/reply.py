"""The base of every generated reply: deltas in, the Structs of an API out, whole or as events.

Every API that answers a chat reads the same typed deltas; `ChoiceCourse` follows one choice through them.
"""

from __future__ import annotations

import asyncio
import contextvars
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from msgspec import Struct

from plait.fair_queue import capture_call
from plait.request import FinishReason, Request, RequestTrace
from plait.server.api.schema import ChatRequest, Sampling, StreamOptions
from plait.server.api.token_scores import ChosenToken, Count, list_chosen_tokens, name_by_id
from plait.server.gateway.request_context import RequestContext
from plait.server.http.errors import Problem
from plait.server.http.transfer import EVENTS, new_id
from plait.text.output import Arguments, CallEnd, CallStart, Content, Reasoning

if TYPE_CHECKING:
    from plait.frontend.deltas import Delta, TextLogprob


T = TypeVar("T")
WARNING_HEADER = "x-plait-warning"
MS = 1000.0


class CompletionTokensDetails(msgspec.Struct, kw_only=True, frozen=True):
    """`reasoning_tokens`: how many of the generated tokens were thinking."""

    reasoning_tokens: Count


class PromptTokensDetails(msgspec.Struct, kw_only=True, frozen=True):
    """`cached_tokens`: how many of the prompt's tokens were in the prefix cache."""

    cached_tokens: Count


class Usage(msgspec.Struct, kw_only=True, frozen=True):
    """Numbers of tokens. Each prompt counts once, every generated choice counts."""

    prompt_tokens: Count
    completion_tokens: Count
    total_tokens: Count
    completion_tokens_details: CompletionTokensDetails
    prompt_tokens_details: PromptTokensDetails


class PromptUsage(msgspec.Struct, kw_only=True, frozen=True):
    """Numbers of tokens where nothing is generated."""

    prompt_tokens: Count
    total_tokens: Count


class Timings(msgspec.Struct, kw_only=True, frozen=True):
    """llama.cpp's, with `timings_per_token`: `cache_n` tokens of the prompt were in the prefix cache."""

    cache_n: Count
    prompt_n: Count
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: Count
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float


class PromptProgress(msgspec.Struct, kw_only=True, frozen=True):
    """llama.cpp's, with `return_progress`: `processed` of `total` tokens are done, `cache` of them cached."""

    total: Count
    cache: Count
    processed: Count
    time_ms: Count


class TokenCount:
    """Tokens and times of one reply, as its deltas arrive.

    Each prompt counts once; every generated choice counts, returned or not. Cached are the tokens that the
    first choice found: those after it find what the first one computed.
    """

    def __init__(self, requests: Sequence[Request]) -> None:
        self._num_prompt = [len(request.prompt_token_ids) for request in requests]
        self._num_tokens: dict[tuple[int, int], int] = {}
        self._num_reasoning: dict[tuple[int, int], int] = {}
        self._num_cached: dict[int, int] = {}
        self._began_s = self._last_s = time.monotonic()
        self._first_s: float | None = None

    def add(self, i: int, delta: Delta) -> None:
        """Count this delta of request `i`; to be called as it arrives."""
        self._last_s, choice = time.monotonic(), (i, delta.index)
        if delta.prompt_progress is not None:
            self._began_s = self._last_s - delta.prompt_progress[1]
        if self._first_s is None and delta.num_tokens:
            self._first_s = self._last_s
        self._num_tokens[choice] = delta.num_tokens
        self._num_reasoning[choice] = delta.num_reasoning_tokens
        if delta.index == 0 and delta.num_cached_tokens >= self._num_cached.get(i, 0):
            self._num_cached[i] = delta.num_cached_tokens

    @property
    def num_cached(self) -> int:
        return sum(self._num_cached.values())

    def usage(self) -> Usage:
        prompt, completion = sum(self._num_prompt), sum(self._num_tokens.values())
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=prompt + completion,
            completion_tokens_details=CompletionTokensDetails(
                reasoning_tokens=sum(self._num_reasoning.values())
            ),
            prompt_tokens_details=PromptTokensDetails(cached_tokens=self.num_cached),
        )

    def prompt_usage(self) -> PromptUsage:
        """Usage as OpenAI counts it where nothing is generated."""
        return PromptUsage(prompt_tokens=sum(self._num_prompt), total_tokens=sum(self._num_prompt))

    def progress(self, i: int, delta: Delta) -> PromptProgress:
        """How far request `i` is with its prompt, by a delta that says so."""
        processed, seconds = delta.prompt_progress or (0, 0.0)
        cache, total = delta.num_cached_tokens, self._num_prompt[i]
        return PromptProgress(total=total, cache=cache, processed=processed, time_ms=round(seconds * MS))

    def timings(self) -> Timings:
        """Timings so far, by when tokens arrived here: waiting counts as reading the prompt."""
        first = self._last_s if self._first_s is None else self._first_s
        return self._timings(first - self._began_s, self._last_s - first)

    def engine_timings(self, traces: Iterable[RequestTrace | None]) -> Timings:
        """Timings of the whole reply, by the engine's clock. `traces`: of its choices, None where missing."""
        begun = [t for t in traces if t and t.first_scheduled_s is not None and t.first_token_s is not None]
        began = min((t.first_scheduled_s or 0.0 for t in begun), default=self._began_s)
        first = min((t.first_token_s or 0.0 for t in begun), default=self._first_s or self._last_s)
        last = max((t.finish_s for t in begun), default=self._last_s)
        return self._timings(first - began, last - first)

    def _timings(self, prompt_s: float, predicted_s: float) -> Timings:
        return Timings(
            cache_n=self.num_cached,
            **_rates("prompt", sum(self._num_prompt) - self.num_cached, prompt_s),
            **_rates("predicted", sum(self._num_tokens.values()), predicted_s),
        )


def _rates(name: str, count: int, seconds: float) -> dict[str, Any]:
    ms = max(seconds, 0.0) * MS
    return {
        f"{name}_n": count,
        f"{name}_ms": round(ms, 3),
        f"{name}_per_token_ms": round(ms / count, 3) if count else 0.0,
        f"{name}_per_second": round(count * MS / ms, 3) if ms else 0.0,
    }


class ApiReply(ABC):
    """One reply of an API, built from the deltas of its requests: whole, or with `stream` as events.

    `count`: its tokens and times so far. `form`: how its events are written. `at_once`: requests that the
    engine has of it at a time; None: all. `in_background`: it goes on when its client has left.
    `is_kept`: `keep` stores it. `has_rounds`: `advance` may ask for another generation.
    """

    form = EVENTS
    at_once: int | None = None
    in_background = is_kept = has_rounds = False

    def __init__(self, requests: Sequence[Request], *, stream: bool = False) -> None:
        self.requests, self.stream, self.count = requests, stream, TokenCount(requests)

    @property
    def warning(self) -> str:
        """What went wrong although the request was answered; "" if nothing. Known when the reply is whole."""
        return ""

    def in_words(self) -> AbstractContextManager[None]:
        """A context in which errors name the fields that the client sent."""
        return nullcontext()

    @abstractmethod
    def add(self, i: int, delta: Delta) -> None:
        """Keep this delta of request `i` for `whole`."""

    @abstractmethod
    def whole(self, traces: Iterable[RequestTrace | None]) -> msgspec.Struct:
        """The whole reply. `traces`: of its choices, None where the engine has not reported yet."""

    async def keep(self, whole: msgspec.Struct) -> msgspec.Struct:
        """Store the whole reply, if it was to be stored. Returns it as it is now. Raises CapacityErrors."""
        return whole

    async def keep_streamed(self) -> None:
        """Store a reply that was streamed, before its `end`. Raises CapacityErrors."""
        if self.is_kept:
            await self.keep(self.whole(()))

    def begin(self) -> Iterable[msgspec.Struct]:
        """The events before the first delta."""
        return ()

    def advance(
        self, context: RequestContext, threads: Executor | None
    ) -> AsyncIterator[msgspec.Struct] | None:
        """What is done between two generations, as its events; None: the reply is whole.

        Afterwards `requests` are those of the next generation. Called first if there are none at the start.
        """
        return None

    def close(self) -> None:
        """Let go of requests, and of what `advance` uses. May be called at any time, and twice."""
        self.requests = ()

    def events(self, i: int, delta: Delta) -> Iterable[msgspec.Struct]:
        """The events that this delta of request `i` brings."""
        return ()

    def end(self) -> Iterable[msgspec.Struct]:
        """The events after the last delta."""
        return ()

    def fail(self, problem: Problem) -> Iterable[msgspec.Struct]:
        """The last events of a stream that fails."""
        return (problem.body(),)


async def run_plan(plan: Callable[[], T], threads: Executor | None) -> T:
    """What `plan` returns or raises, called in one of `threads`; None: in any of those all requests share."""
    call = partial(contextvars.copy_context().run, plan)
    return await asyncio.get_running_loop().run_in_executor(threads, capture_call, call)


def head(context: RequestContext, prefix: str, kind: str) -> dict[str, object]:
    """The first fields of every body of one reply of chat or completions. `kind`: its `object`."""
    return {
        "id": new_id(prefix),
        "object": kind,
        "created": int(time.time()),
        "model": context.model,
        "system_fingerprint": context.front.fingerprint.arithmetic or None,
    }


class ChoicesReply(ApiReply):
    """What chat and completions share: choices under one head, with usage and llama.cpp's numbers.

    `chunk`: the Struct of an event.
    """

    def __init__(
        self,
        head: Mapping[str, Any],
        asked: Sampling,
        requests: Sequence[Request],
        chunk: type[msgspec.Struct],
    ) -> None:
        super().__init__(requests, stream=asked.stream)
        self.head, self._chunk = head, chunk
        self._stream_options, self._has_timings = (
            asked.stream_options or StreamOptions(),
            asked.timings_per_token,
        )

    def end(self) -> Iterator[msgspec.Struct]:
        if self._stream_options.include_usage:
            yield self._chunk(**self.head, choices=[], usage=self.count.usage())

    def fields_of_chunk(self, i: int, delta: Delta) -> dict[str, Any]:
        """The fields of every chunk of this delta, without its choice."""
        found: dict[str, object] = {}
        if self._stream_options.include_usage:
            found["usage"] = self.count.usage() if self._stream_options.continuous_usage_stats else None
        if delta.prompt_progress is not None:
            found["prompt_progress"] = self.count.progress(i, delta)
        elif self._has_timings:
            found["timings"] = self.count.timings()
        return found

    def fields_of_whole(self, traces: Iterable[RequestTrace | None]) -> dict[str, Any]:
        """The fields of the whole reply, without its choices."""
        timings = {"timings": self.count.engine_timings(traces)} if self._has_timings else {}
        return {**self.head, "usage": self.count.usage(), **timings}


NO_FORM = (
    "max_tokens ended the reply before what it must be had begun: thinking counts against max_tokens; send a "
    "larger one, or bound thinking by thinking_token_budget"
)
Part = Content | Reasoning | CallStart | Arguments | CallEnd


class ChatPlan(Struct, frozen=True):
    """A chat that may go to the engine. `with_ids`: its reply shows token ids."""

    asked: ChatRequest
    request: Request
    with_ids: bool

    def logprobs(self, delta: Delta) -> list[ChosenToken] | None:
        """What the reply shows of a delta's log-probabilities; None: they were not requested."""
        if not self.asked.logprobs:
            return None
        scores: Sequence[TextLogprob] = delta.logprobs or ()
        if self.asked.return_tokens_as_token_ids:
            scores = name_by_id(scores, keeps_bytes=True)
        return list_chosen_tokens(scores, self.asked.top_logprobs or 0)


def parts_of(delta: Delta) -> Sequence[Part]:
    """Content, thinking and calls in their order."""
    return delta.parts or ((Content(delta.text),) if delta.text else ())


def is_hidden(delta: Delta) -> bool:
    """Whether its tokens are thinking, which are not shown where thinking is not."""
    return any(isinstance(part, Reasoning) for part in delta.parts)


class ChoiceCourse:
    """Progress of one choice. `says_something`: more than thinking; `num_calls`: those that ended whole."""

    def __init__(self, chat: ChatPlan) -> None:
        grammar = chat.request.grammar
        # A grammar of "tools" only says how calls are written, if there are any.
        self._is_demanded = grammar is not None and grammar.param != "tools"
        self.has_begun = self.has_thought = self.says_something = False
        self.num_calls = 0
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None

    @property
    def warning(self) -> str:
        """What is wrong with a choice that has ended; "" if nothing is."""
        is_cut = self.finish_reason == "length" and self.has_thought and not self.says_something
        return NO_FORM if is_cut and self._is_demanded else ""

    def note(self, delta: Delta) -> None:
        """Update the progress by this delta of the choice."""
        self.has_begun = True
        for part in parts_of(delta):
            match part:
                case Content(text):
                    self.says_something = self.says_something or bool(text.strip())
                case Reasoning():
                    self.has_thought = True
                case CallStart():
                    self.says_something = True
                case CallEnd(_, complete):
                    self.num_calls += complete
        self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason
