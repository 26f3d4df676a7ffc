from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.schedule.costs import StepCosts


def line(tokens: float) -> float:
    return 0.008 + 0.001 * tokens


def measured(steps: int = 200, seed: int = 0) -> StepCosts:
    """Decodes of one to four sequences, now and then a chunk of a prompt; 10 % of noise."""
    rng, costs = random.Random(seed), StepCosts()
    for n in range(steps):
        tokens = rng.randint(1, 4) if n % 10 else rng.randint(100, 900)
        costs.observe(tokens, line(tokens) * rng.uniform(0.95, 1.05))
    return costs


def test_nothing_measured_is_nothing_known() -> None:
    costs = StepCosts()
    assert (costs.step_s(1), costs.tokens_within(1.0), costs.move_s(1)) == (None, None, None)


def test_between_two_sizes_lies_a_straight_line() -> None:
    costs = StepCosts()
    costs.observe(1, 0.01)
    costs.observe(101, 0.11)
    assert costs.step_s(51) == pytest.approx(0.06)
    assert costs.tokens_within(0.06001) == 51


@pytest.mark.parametrize("tokens", [1, 2, 9, 60, 500, 1500])
def test_a_linear_cost_is_found_again(tokens: int) -> None:
    assert measured().step_s(tokens) == pytest.approx(line(tokens), rel=0.12)


def test_a_step_that_fits_into_a_time_is_the_largest_that_does() -> None:
    costs = measured()
    for seconds in (0.02, 0.2, 0.7, 3.0):
        tokens = costs.tokens_within(seconds)
        assert tokens is not None
        below, above = costs.step_s(tokens), costs.step_s(tokens + 1)
        assert below is not None
        assert above is not None
        assert below <= seconds * (1 + 1e-9) < above * (1 + 1e-9)


def test_in_no_time_fits_nothing() -> None:
    assert measured().tokens_within(0.0) == measured().tokens_within(1e-9) == 0


@pytest.mark.parametrize("first", [1, 4, 512])
def test_a_first_slow_step_is_forgotten_at_the_second(first: int) -> None:
    costs = StepCosts()
    costs.observe(first, 40.0)
    for tokens in (1, 2, 4, 512):
        costs.observe(tokens, line(tokens))
    assert costs.step_s(1) == pytest.approx(line(1))
    assert costs.step_s(512) == pytest.approx(line(512))


def test_hiccups_do_not_count() -> None:
    rng, costs = random.Random(1), StepCosts()
    for n in range(300):
        tokens = rng.choice((1, 2, 256))
        costs.observe(tokens, line(tokens) * (50 if n % 7 == 0 else 1))
    for tokens in (1, 2, 256):
        assert costs.step_s(tokens) == pytest.approx(line(tokens), rel=0.01)


def test_a_hiccup_of_a_small_step_cannot_make_a_larger_one_dear() -> None:
    costs = StepCosts()
    costs.observe(1, 5.0)
    costs.observe(8, 0.02)
    assert costs.step_s(8) == costs.step_s(1) == pytest.approx(0.02)


def test_a_machine_that_changed_is_believed_soon() -> None:
    costs = measured()
    for _ in range(5):
        costs.observe(1, 3 * line(1))
        costs.observe(300, 3 * line(300))
    assert costs.step_s(1) == pytest.approx(3 * line(1), rel=0.05)
    assert costs.step_s(300) == pytest.approx(3 * line(300), rel=0.2)


def test_what_no_clock_can_have_seen_is_left_out() -> None:
    costs = StepCosts()
    for tokens, seconds in ((0, 1.0), (3, 0.0), (3, -1.0), (3, float("inf")), (3, float("nan"))):
        costs.observe(tokens, seconds)
    costs.observe_moved(0, 1.0)
    costs.observe_moved(5, float("nan"))
    assert (costs.step_s(1), costs.move_s(1)) == (None, None)


def test_moved_bytes_are_measured_apart_from_tokens() -> None:
    costs = StepCosts()
    for seconds in (9.0, 0.1, 0.11, 0.1, -0.001):
        costs.observe_moved(1_000_000, seconds)
    assert costs.move_s(2_000_000) == pytest.approx(0.2)
    assert costs.step_s(1) is None


@given(
    st.lists(st.tuples(st.integers(1, 4096), st.floats(1e-6, 100)), min_size=1, max_size=60),
    st.lists(st.integers(0, 5000), min_size=2, max_size=20),
)
def test_costs_are_positive_and_never_fall(steps: list[tuple[int, float]], asked: list[int]) -> None:
    costs = StepCosts()
    for tokens, seconds in steps:
        costs.observe(tokens, seconds)
    found = [costs.step_s(tokens) for tokens in sorted(asked)]
    known = [seconds for seconds in found if seconds is not None]
    assert len(known) == len(found)
    assert min(known) > 0
    assert all(b >= a * (1 - 1e-9) for a, b in pairwise(known))
    for tokens, seconds in zip(sorted(asked), known, strict=True):
        within = costs.tokens_within(seconds * (1 + 1e-9))
        assert within is not None
        assert within >= tokens - 1
