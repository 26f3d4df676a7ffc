"""The number of replicas follows the seconds of work that wait: up at once, down slowly and one by one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.cluster.scaling import ReplicaLoad, ScalingLimits, ScalingPolicy
from plait.errors import ConfigError

LIMITS = ScalingLimits(least=1, most=8, max_queue_s=2.0, down_after_s=300.0)
IDLE = ReplicaLoad(waiting_tokens=0, places=16, tokens_per_s=1000.0)


def waiting(seconds: float, **more: int) -> ReplicaLoad:
    return ReplicaLoad(waiting_tokens=round(seconds * 1000), places=16, tokens_per_s=1000.0, **more)


def test_waiting_seconds_are_prompts_and_places() -> None:
    assert waiting(3.0).waiting_s == 3.0
    assert ReplicaLoad(waiting_tokens=1000).waiting_s == 2.0  # nothing is measured yet
    full = ReplicaLoad(waiting_tokens=0, waiting_replies=8, running_replies=4, places=4, reply_s=10.0)
    assert full.waiting_s == 20.0  # a place is free every 2.5 s
    free = ReplicaLoad(waiting_tokens=0, waiting_replies=3, running_replies=1, places=4, reply_s=10.0)
    assert free.waiting_s == 0.0


def test_load_is_read_from_an_engines_numbers() -> None:
    stats = {"num_waiting_tokens": 900, "num_waiting": 2, "num_running": 3, "prompt_tokens_per_s": 300}
    load = ReplicaLoad.from_stats({**stats, "num_places": 16, "reply_ms": 1500})
    assert (load.waiting_s, load.running_replies, load.waiting_replies, load.places) == (3.0, 3, 2, 16)
    assert load.reply_s == 1.5
    assert ReplicaLoad.from_numbers({name: float(n) for name, n in load.to_numbers().items()}) == load


def test_up_at_once_by_as_many_as_the_work_needs() -> None:
    policy = ScalingPolicy(LIMITS)
    assert policy.decide([waiting(3.0), waiting(3.0)], 2, 0.0) == 3
    assert policy.decide([waiting(60.0)], 1, 1.0) == 2  # at most twice as many at a time
    assert policy.decide([waiting(60.0), IDLE], 5, 1.0) == 5  # those that start are counted
    assert policy.decide([waiting(60.0)] * 8, 8, 2.0) == 8


def test_down_after_minutes_and_one_by_one() -> None:
    policy, replicas = ScalingPolicy(LIMITS), 3
    found = []
    for now in range(0, 1000, 100):
        replicas = policy.decide([IDLE] * replicas, replicas, float(now))
        found.append(replicas)
    assert found == [3, 3, 3, 2, 2, 2, 1, 1, 1, 1]


def test_work_in_between_begins_the_minutes_anew() -> None:
    policy = ScalingPolicy(LIMITS)
    assert policy.decide([IDLE] * 2, 2, 0.0) == 2
    assert policy.decide([waiting(1.0)] * 2, 2, 299.0) == 2  # more than a third of what may wait
    assert policy.decide([IDLE] * 2, 2, 400.0) == 2
    assert policy.decide([IDLE] * 2, 2, 699.0) == 2
    assert policy.decide([IDLE] * 2, 2, 700.0) == 1


def test_replicas_with_running_replies_stay() -> None:
    policy = ScalingPolicy(LIMITS)
    busy = [waiting(0.0, running_replies=14)] * 2
    assert [policy.decide(busy, 2, now) for now in (0.0, 1000.0)] == [2, 2]
    to_zero = ScalingPolicy(ScalingLimits(least=0, most=2))
    one = [waiting(0.0, running_replies=1)]
    assert [to_zero.decide(one, 1, now) for now in (0.0, 1000.0)] == [1, 1]


def test_to_zero_and_back_for_a_request_that_waits() -> None:
    policy = ScalingPolicy(ScalingLimits(least=0, most=4))
    assert [policy.decide([IDLE], 1, now) for now in (0.0, 300.0)] == [1, 0]
    assert policy.decide([], 0, 301.0) == 0
    assert policy.decide([], 0, 302.0, pending=3) == 1


@given(
    st.lists(st.floats(0, 100), max_size=8),
    st.integers(0, 8),
    st.floats(0, 1e6),
    st.integers(0, 3),
    st.integers(0, 5),
)
def test_the_number_is_always_within_its_limits(
    seconds: list[float], current: int, now: float, least: int, pending: int
) -> None:
    policy = ScalingPolicy(ScalingLimits(least=least, most=4))
    for at in (now, now + 1000):
        assert least <= policy.decide([waiting(s) for s in seconds], current, at, pending) <= 4


@pytest.mark.parametrize("wrong", [{"least": 3, "most": 2}, {"most": 0, "least": 0}, {"max_queue_s": 0.0}])
def test_wrong_limits_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        ScalingLimits(**wrong)  # type: ignore[arg-type]
