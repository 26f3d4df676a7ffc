"""Percentiles, throughput, goodput and the most at once, against what they mean."""

from __future__ import annotations

import math
from statistics import median

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.bench.serve.client import RequestOutcome
from plait.bench.serve.score import is_good, most_at_once, most_per_second, parse_goodput, score, spread
from plait.errors import ConfigError


def reply(started: float, ttft_s: float, gaps_s: list[float], **more: object) -> RequestOutcome:
    whole = ttft_s + sum(gaps_s)
    return RequestOutcome(
        0,
        0,
        started,
        10,
        1 + len(gaps_s),
        4,
        200,
        ttft_s,
        gaps_s,
        whole,
        **more,  # type: ignore[arg-type]
    )


@given(st.lists(st.floats(1e-4, 100), min_size=1, max_size=60))
def test_percentiles_are_numpys_and_lie_between_neighbours(seconds: list[float]) -> None:
    found = spread("x", seconds)
    assert found["median_x_ms"] == found["p50_x_ms"] == pytest.approx(1000 * median(seconds), rel=1e-3)
    assert found["mean_x_ms"] == pytest.approx(1000 * math.fsum(seconds) / len(seconds), rel=1e-3)
    ordered = sorted(seconds)
    for p in (50, 90, 95, 99):
        assert found[f"p{p}_x_ms"] == pytest.approx(1000 * np.percentile(seconds, p), rel=1e-3)
        at = p / 100 * (len(ordered) - 1)  # by hand: between the two neighbours, in proportion
        low, high = ordered[math.floor(at)], ordered[math.ceil(at)]
        assert found[f"p{p}_x_ms"] == pytest.approx(1000 * (low + (high - low) * (at % 1)), rel=1e-3)


def test_of_nothing_there_is_no_latency() -> None:
    assert set(spread("x", []).values()) == {None}
    facts = score([], 1.0)
    assert facts["completed"] == facts["max_concurrent_requests"] == facts["request_throughput"] == 0
    assert facts["cached_token_rate"] is None


def test_only_whole_replies_count() -> None:
    whole = [reply(0.0, 0.5, [0.1, 0.3]), reply(1.0, 0.1, [0.2])]
    left = reply(0.0, 9.0, [9.0] * 5, is_cancelled=True)
    failed = reply(0.0, 7.0, [7.0], error="timeout", message="late")
    facts = score([*whole, left, failed], 4.0)
    assert (facts["completed"], facts["cancelled"], facts["failed"]) == (2, 1, 1)
    assert (facts["total_input_tokens"], facts["total_output_tokens"]) == (20, 5)
    assert facts["cached_token_rate"] == 0.4
    assert facts["output_throughput"] == 1.25
    assert facts["total_token_throughput"] == 6.25
    assert facts["request_throughput"] == 0.5
    assert facts["mean_ttft_ms"] == 300.0
    assert facts["mean_itl_ms"] == 200.0
    assert facts["mean_tpot_ms"] == 200.0  # (0.9 - 0.5) / 2 and 0.2 / 1
    assert facts["mean_e2el_ms"] == 600.0
    assert facts["errors"] == {"timeout": 1}
    assert facts["error_examples"] == {"timeout": "late"}


def test_goodput_counts_what_kept_every_limit() -> None:
    fast, slow = reply(0.0, 0.1, [0.01] * 4), reply(0.0, 0.1, [0.2] * 4)
    assert is_good(fast, {"ttft": 150, "tpot": 50, "e2el": 200})
    assert not is_good(slow, {"ttft": 150, "tpot": 50})
    assert is_good(slow, {"ttft": 150})
    assert is_good(reply(0.0, 0.1, []), {"tpot": 1})
    facts = score([fast, slow, fast], 2.0, {"tpot": 50})
    assert (facts["request_goodput"], facts["request_throughput"]) == (1.0, 1.5)
    assert score([fast], 2.0)["request_goodput"] is None


def test_limits_are_read_one_by_one_or_together() -> None:
    assert parse_goodput(["ttft:500 tpot:50", "e2el:9e3"]) == {"ttft": 500.0, "tpot": 50.0, "e2el": 9000.0}
    assert parse_goodput([]) == {}


@pytest.mark.parametrize("text", ["ttft", "ttft:", "ttft:x", "ttft:0", "ttft:nan", "speed:5"])
def test_what_is_no_limit_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--goodput"):
        parse_goodput([text])


def test_the_most_at_once_and_in_a_second() -> None:
    outcomes = [reply(0.0, 0.5, [0.2, 0.5]), reply(0.4, 0.4, []), reply(1.3, 0.1, [])]
    assert most_at_once(outcomes) == 2
    assert most_at_once(outcomes[:1] * 5) == 5
    assert most_per_second(outcomes) == 3  # at 0.5, 0.7, 0.8; the others at 1.2 and 1.4
