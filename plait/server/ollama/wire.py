"""What the endpoints of Ollama's API share: bodies, errors, clocks, and `keep_alive`."""

from __future__ import annotations

import math
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
_PART_OF_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ns|us|µs|ms|s|m|h)")
_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
MAX_DURATION_CHARS = 64
_LONGEST_KEEP_S = 100 * 365 * 86_400  # longer is for ever: /api/ps has no date behind the year 9999


class OllamaError(msgspec.Struct, frozen=True):
    """The body of every refusal under /api."""

    error: str


class OllamaStatus(msgspec.Struct, frozen=True):
    """A step of a request that changes models; "success" is the last."""

    status: str


class Durations(msgspec.Struct, kw_only=True, frozen=True):
    """Times in nanoseconds, and tokens. `load_duration`: until the model was loaded; 0 if it was."""

    total_duration: Count
    load_duration: Count
    prompt_eval_count: Count
    prompt_eval_duration: Count | UnsetType = UNSET
    eval_count: Count | UnsetType = UNSET
    eval_duration: Count | UnsetType = UNSET


class ReplyClock:
    """The time since a request was read. `load_s`: how long it had waited for its model by then."""

    def __init__(self, load_s: float) -> None:
        self._load_ns = round(load_s * NS)
        self._began_ns = time.monotonic_ns() - self._load_ns

    def durations(self, num_prompt: int, timings: Timings | None = None) -> dict[str, int]:
        """The fields of `Durations`; without `timings` those of a reply that generates nothing."""
        found = {
            "total_duration": time.monotonic_ns() - self._began_ns,
            "load_duration": self._load_ns,
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
    """Whether it requests what holds anyway: that the only model stays. Raises InvalidField.

    It stays as long as the server runs, so any other time changes nothing, and is reported.
    """
    return value is None or read_keep_alive(value) == math.inf


def read_keep_alive(value: object) -> float:
    """How long a model is to stay after a request, in seconds; below zero, or a century, means: for ever.

    Raises InvalidField for what is no time.
    """
    text = value.strip() if isinstance(value, str) else ""
    is_text = len(text) <= MAX_DURATION_CHARS and _DURATION.fullmatch(text)
    if is_text:
        parts = _PART_OF_DURATION.findall(text)
        seconds = sum(float(number) * _SECONDS[unit] for number, unit in parts) if parts else float(text)
    elif isinstance(value, int | float) and not isinstance(value, bool) and -math.inf < value < math.inf:
        seconds = float(min(max(value, -1), _LONGEST_KEEP_S))
    else:
        wanted = 'send seconds, or a duration such as "5m"; -1: for ever'
        raise InvalidField(f"keep_alive: {shorten(value)} is no time; {wanted}", "keep_alive")
    is_endless = text.startswith("-") or not 0 <= seconds < _LONGEST_KEEP_S
    return math.inf if is_endless else seconds
