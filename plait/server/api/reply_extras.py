"""Top-level fields of a reply that OpenAI's has not: llama.cpp's timings and progress, vLLM's prompt ids."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from plait.request import Request, RequestTrace
from plait.server.api.schema import Sampling

if TYPE_CHECKING:
    from plait.frontend.delta import Delta

MS = 1000.0
Count = Annotated[int, msgspec.Meta(ge=0)]


class Timings(msgspec.Struct, kw_only=True, frozen=True):
    """llama.cpp's, with `timings_per_token`: `cache_n` tokens of the prompt were found computed already."""

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
    """llama.cpp's, with `return_progress`: `processed` of `total` tokens are done, `cache` of them were."""

    total: Count
    cache: Count
    processed: Count
    time_ms: Count


class Extras:
    """Of one response. `once`: fields of the whole reply, or of the first chunk of its stream.

    In a stream times are taken when tokens arrive here, and waiting counts as reading the prompt; of a whole
    reply they are the engine's own.
    """

    def __init__(
        self, asked: Sampling, requests: Sequence[Request], once: Mapping[str, Any] | None = None
    ) -> None:
        self._has_timings, self._once = asked.timings_per_token, dict(once or {})
        self._num_prompt = [len(request.prompt_token_ids) for request in requests]
        self._num_tokens: dict[tuple[int, int], int] = {}
        self._num_cached: dict[int, int] = {}
        self._began_s = self._last_s = time.monotonic()
        self._first_s: float | None = None

    def add(self, i: int, delta: Delta) -> None:
        """Count this delta of request `i`; to be called as it arrives."""
        self._last_s = time.monotonic()
        if delta.prompt_progress is not None:
            self._began_s = self._last_s - delta.prompt_progress[1]
        if delta.num_tokens and self._first_s is None:
            self._first_s = self._last_s
        self._num_tokens[i, delta.index] = delta.num_tokens
        if delta.index == 0:
            self._num_cached[i] = max(self._num_cached.get(i, 0), delta.num_cached_tokens)

    def of_chunk(self, i: int, delta: Delta) -> dict[str, Any]:
        """The fields of the next chunk, which this delta of request `i` brought."""
        found, self._once = self._once, {}
        if delta.prompt_progress is not None:
            num_done, seconds = delta.prompt_progress
            found["prompt_progress"] = {
                "total": self._num_prompt[i],
                "cache": delta.num_cached_tokens,
                "processed": num_done,
                "time_ms": round(seconds * MS),
            }
        elif self._has_timings:
            first = self._last_s if self._first_s is None else self._first_s
            found["timings"] = self._timings(first - self._began_s, self._last_s - first)
        return found

    def of_whole(self, traces: Iterable[RequestTrace | None]) -> dict[str, Any]:
        """The fields of the whole reply. `traces`: of all of its choices, None where there is none yet."""
        if not self._has_timings:
            return self._once
        begun = [t for t in traces if t and t.first_scheduled_s is not None and t.first_token_s is not None]
        began = min((t.first_scheduled_s or 0.0 for t in begun), default=self._began_s)
        first = min((t.first_token_s or 0.0 for t in begun), default=self._first_s or self._last_s)
        last = max((t.finish_s for t in begun), default=self._last_s)
        return {**self._once, "timings": self._timings(first - began, last - first)}

    def _timings(self, prompt_s: float, predicted_s: float) -> dict[str, Any]:
        num_cached = sum(self._num_cached.values())
        return {
            "cache_n": num_cached,
            **_pace("prompt", sum(self._num_prompt) - num_cached, prompt_s),
            **_pace("predicted", sum(self._num_tokens.values()), predicted_s),
        }


def _pace(name: str, count: int, seconds: float) -> dict[str, Any]:
    ms = max(seconds, 0.0) * MS
    return {
        f"{name}_n": count,
        f"{name}_ms": round(ms, 3),
        f"{name}_per_token_ms": round(ms / count, 3) if count else 0.0,
        f"{name}_per_second": round(count * MS / ms, 3) if ms else 0.0,
    }
