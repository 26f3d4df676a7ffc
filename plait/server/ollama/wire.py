"""What the endpoints of Ollama's API share: bodies, errors, clocks, and `keep_alive`."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from datetime import UTC, datetime

import msgspec
from msgspec import UNSET, UnsetType

from plait.errors import InvalidField
from plait.sampling_fields import shorten
from plait.server.api.reply import Timings
from plait.server.api.token_scores import Count
from plait.server.http.errors import Problem

NS = 1_000_000_000
_NS_OF_MS = 1_000_000
# Go's notation, which Ollama's clients send: "5m", "1h30m", "-1"; a bare number is seconds.
_DURATION = re.compile(r"-?(?:\d+(?:\.\d+)?|(?:\d+(?:\.\d+)?(?:ns|us|µs|ms|s|m|h)){1,6})")
MAX_DURATION_CHARS = 64


class OllamaError(msgspec.Struct, frozen=True):
    """The body of every refusal under /api."""

    error: str


class OllamaStatus(msgspec.Struct, frozen=True):
    """A step of a request that changes models; "success" is the last."""

    status: str


class Durations(msgspec.Struct, kw_only=True, frozen=True):
    """Times in nanoseconds, and tokens. The model is loaded already, so `load_duration` is 0."""

    total_duration: Count
    load_duration: Count
    prompt_eval_count: Count
    prompt_eval_duration: Count | UnsetType = UNSET
    eval_count: Count | UnsetType = UNSET
    eval_duration: Count | UnsetType = UNSET


class ReplyClock:
    """The time since a request was read."""

    def __init__(self) -> None:
        self._began_ns = time.monotonic_ns()

    def durations(self, num_prompt: int, timings: Timings | None = None) -> dict[str, int]:
        """The fields of `Durations`; without `timings` those of a reply that generates nothing."""
        found = {
            "total_duration": time.monotonic_ns() - self._began_ns,
            "load_duration": 0,
            "prompt_eval_count": num_prompt,
        }
        if timings is not None:
            found |= {
                "prompt_eval_duration": round(timings.prompt_ms * _NS_OF_MS),
                "eval_count": timings.predicted_n,
                "eval_duration": round(timings.predicted_ms * _NS_OF_MS),
            }
        return found


def refusal(found: Problem) -> OllamaError:
    """An error as Ollama's clients read it."""
    return OllamaError(found.message)


def now() -> str:
    """The time in Ollama's notation."""
    return as_time(time.time())


def as_time(seconds: float) -> str:
    """Seconds since 1970 in Ollama's notation."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def read_body(body: Mapping[str, object]) -> dict[str, object]:
    """The fields that are not null, with the old name of `model`."""
    found = {name: value for name, value in body.items() if value is not None}
    if "name" in found and "model" not in found:
        found["model"] = found.pop("name")
    return found


def check_keep_alive(value: object) -> bool:
    """Whether it requests what holds anyway: that the model stays. Raises InvalidField.

    The model stays as long as the server runs, so any other time changes nothing, and is reported.
    """
    if value is None:
        return True
    text = value.strip() if isinstance(value, str) else str(value)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    is_text = isinstance(value, str) and len(value) <= MAX_DURATION_CHARS and _DURATION.fullmatch(text)
    if not (is_number or is_text):
        wanted = 'send seconds, or a duration such as "5m"; -1: for ever'
        raise InvalidField(f"keep_alive: {shorten(value)} is no time; {wanted}", "keep_alive")
    return text.startswith("-")
