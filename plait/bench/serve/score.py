"""What many outcomes amount to: percentiles, throughput, goodput, errors, named as in `vllm bench serve`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from plait.bench.model.measure import round_number
from plait.bench.serve.client import RequestOutcome
from plait.errors import ConfigError

PERCENTILES = (50, 90, 95, 99)
LIMITS = ("ttft", "tpot", "e2el")  # what --goodput may name; all in milliseconds
REFUSALS = (429, 503)
Facts = dict[str, Any]


def parse_goodput(given: Sequence[str]) -> dict[str, float]:
    """('ttft:500', 'tpot:50 e2el:9000') -> limits in milliseconds. Raises ConfigError."""
    limits = {}
    for word in " ".join(given).split():
        name, _, number = word.partition(":")
        try:
            limit = float(number)
        except ValueError:
            limit = math.nan
        if name not in LIMITS or not limit > 0:
            raise ConfigError(
                f"--goodput {word!r}: write NAME:MILLISECONDS of {', '.join(LIMITS)}, like ttft:500"
            )
        limits[name] = limit
    return limits


def score(
    outcomes: Sequence[RequestOutcome], duration_s: float, limits: Mapping[str, float] | None = None
) -> Facts:
    """The numbers of one run of `duration_s` seconds. Latencies are of whole replies only, in milliseconds.

    Tokens of cancelled and failed replies count in none of them. Without `limits` there is no goodput.
    """
    whole = [one for one in outcomes if one.is_ok]
    failed = [one for one in outcomes if one.error]
    given, written = sum(one.input_len for one in whole), sum(one.output_len for one in whole)
    facts: Facts = {
        "duration": round_number(duration_s),
        "completed": len(whole),
        "failed": len(failed),
        "cancelled": sum(one.is_cancelled for one in outcomes),
        "total_input_tokens": given,
        "total_output_tokens": written,
        "total_cached_tokens": (cached := sum(one.cached_len for one in whole)),
        "cached_token_rate": round_number(cached / given) if given else None,
        "request_throughput": round_number(len(whole) / duration_s),
        "request_goodput": None,
        "input_throughput": round_number(given / duration_s),
        "output_throughput": round_number(written / duration_s),
        "total_token_throughput": round_number((given + written) / duration_s),
        "max_output_tokens_per_s": most_per_second(whole),
        "max_concurrent_requests": most_at_once(outcomes),
    }
    if limits:
        facts["request_goodput"] = round_number(sum(is_good(one, limits) for one in whole) / duration_s)
        facts["goodput_limits_ms"] = dict(limits)
    for name, values in latencies(whole).items():
        facts |= spread(name, values)
    return facts | failures(outcomes)


def latencies(outcomes: Sequence[RequestOutcome]) -> dict[str, list[float]]:
    """Seconds, by vLLM's names: first token, mean gap of each reply, single gaps, whole replies."""
    return {
        "ttft": [one.ttft_s for one in outcomes if one.ttft_s is not None],
        "tpot": [one.tpot_s for one in outcomes if one.tpot_s is not None],
        "itl": [gap for one in outcomes for gap in one.gaps_s],
        "e2el": [one.e2e_s for one in outcomes],
    }


def spread(name: str, seconds: Sequence[float]) -> Facts:
    """Mean, median, deviation and percentiles of `seconds`, in milliseconds; None of nothing."""
    names = [f"{kind}_{name}_ms" for kind in ("mean", "median", "std", *(f"p{p}" for p in PERCENTILES))]
    if not seconds:
        return dict.fromkeys(names)
    ms = 1000 * np.asarray(seconds)
    values = [ms.mean(), np.median(ms), ms.std(), *np.percentile(ms, PERCENTILES)]
    return {key: round_number(float(value)) for key, value in zip(names, values, strict=True)}


def is_good(one: RequestOutcome, limits: Mapping[str, float]) -> bool:
    """Whether a whole reply kept every limit; one of a single token keeps any limit on those after it."""
    found = {"ttft": one.ttft_s, "tpot": one.tpot_s, "e2el": one.e2e_s}
    return all((found[name] or 0.0) * 1000 <= limit for name, limit in limits.items())


def failures(outcomes: Sequence[RequestOutcome]) -> Facts:
    """Errors by kind, the first message of each, and how long refusals (429 and 503) took."""
    failed = [one for one in outcomes if one.error]
    examples = {one.error: one.message for one in reversed(failed)}
    refused = [one.e2e_s for one in failed if one.status in REFUSALS]
    return {
        "errors": dict(Counter(one.error for one in failed).most_common()),
        "error_examples": examples,
        "refused": len(refused),
        **spread("refusal", refused),
    }


def most_per_second(outcomes: Sequence[RequestOutcome]) -> int:
    """The most events with text (a token each, mostly) that came within one of the run's seconds."""
    seconds: Counter[int] = Counter()
    for one in outcomes:
        if one.ttft_s is not None:
            at = one.started + one.ttft_s
            seconds[int(at)] += 1
            for gap in one.gaps_s:
                at += gap
                seconds[int(at)] += 1
    return max(seconds.values(), default=0)


def most_at_once(outcomes: Sequence[RequestOutcome]) -> int:
    """The most requests that were open at the same time."""
    ends = [(one.started + one.e2e_s, -1) for one in outcomes]
    open_now = most = 0
    for _, step in sorted([*((one.started, 1) for one in outcomes), *ends]):
        open_now += step
        most = max(most, open_now)
    return most


def details(outcomes: Sequence[RequestOutcome]) -> Facts:
    """One value for each request, by vLLM's names, and its text."""
    return {
        "input_lens": [one.input_len for one in outcomes],
        "output_lens": [one.output_len for one in outcomes],
        "cached_lens": [one.cached_len for one in outcomes],
        "start_times": [one.started for one in outcomes],
        "ttfts": [one.ttft_s for one in outcomes],
        "itls": [one.gaps_s for one in outcomes],
        "e2els": [one.e2e_s for one in outcomes],
        "cancels": [one.is_cancelled for one in outcomes],
        "error_kinds": [one.error for one in outcomes],
        "generated_texts": [one.text for one in outcomes],
    }
