"""How many threads steps get, by what they take. Every clock here is made up."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from plait.kernels.cpu.runtime.thread_count import ThreadTuner, levels

Cost = Callable[[int], tuple[float, float]]  # threads -> (seconds of a step, seconds of it in long waits)


def quiet(threads: int) -> tuple[float, float]:
    return 0.001 + 0.004 / threads, 0.0


def busy(threads: int) -> tuple[float, float]:
    """With a busy process on each core: one thread is half as fast, several wait for lost cores each step."""
    return (0.010, 0.0) if threads == 1 else (0.030, 0.020)


class Engine:
    """Steps one after the other, on a clock that they move on."""

    def __init__(self, threads: int = 2, patience: float = 0.5) -> None:
        self.pace, self.now, self.counts = ThreadTuner(threads, patience), 100.0, list[int]()

    def run(self, cost: Cost, seconds: float, kind: int = 1, work: int = 1) -> dict[int, float]:
        """Seconds spent on each number of threads."""
        spent: dict[int, float] = {}
        until = self.now + seconds
        while self.now < until:
            threads = self.pace.begin(kind, work, self.now)
            took, waited = cost(threads)
            self.now += took
            self.counts.append(threads)
            spent[threads] = spent.get(threads, 0.0) + took
            self.pace.observe(kind, work, took, waited, self.now)
        return spent


def test_all_threads_first_and_one_last_are_tried() -> None:
    assert [levels(n) for n in (1, 2, 4, 16)] == [[1], [2, 1], [4, 3, 2, 1], [16, 15, 12, 8, 4, 1]]


def test_a_quiet_machine_always_gets_all_threads() -> None:
    engine = Engine()
    assert set(engine.run(quiet, 60.0)) == {2}
    alone = Engine(threads=1)
    assert set(alone.run(busy, 5.0)) == {1}


def test_late_steps_get_fewer_threads_and_trials_of_more_cost_little() -> None:
    engine = Engine()
    engine.run(busy, 1.0)
    spent = engine.run(busy, 60.0)
    assert spent[1] > 0.9 * 60
    served = len(engine.counts)
    assert served > 0.9 * 61 / 0.010, "nine tenths of what one thread alone would have done"


def test_threads_come_back_soon_after_the_neighbours_have_gone() -> None:
    engine = Engine()
    engine.run(busy, 60.0)
    engine.run(quiet, ThreadTuner.MOST_S + 0.5)
    assert set(engine.run(quiet, 10.0)) == {2}


def test_waits_with_another_cause_keep_all_threads() -> None:
    """Fewer threads are slower there, so the trials of them stay rare."""
    engine = Engine()
    spent = engine.run(lambda n: (0.005, 0.003) if n == 2 else (0.008, 0.0), 30.0)
    assert spent[1] < 0.03 * 30


def test_a_wait_now_and_then_starts_no_trial() -> None:
    engine, steps = Engine(), [0]

    def cost(threads: int) -> tuple[float, float]:
        steps[0] += 1
        return (0.013, 0.010) if steps[0] % 50 == 0 else (0.003, 0.0)

    assert set(engine.run(cost, 30.0)) == {2}


def test_a_step_that_lost_patience_is_late_whatever_its_waits_were() -> None:
    engine = Engine(patience=0.004)
    spent = engine.run(lambda n: (0.040, 0.005) if n == 2 else (0.010, 0.0), 20.0)
    assert spent[1] > 0.9 * 20


def test_a_step_waits_for_as_long_as_it_would_take_longer_alone() -> None:
    """Nothing is known of the first step, and what was played alone says nothing of all threads."""
    pace = ThreadTuner(4, 0.008)
    assert (pace.begin(1, 1, 1.0), pace.patience) == (4, 0.008)
    pace.observe(1, 1, 0.050, 0.009, 1.5)
    pace.begin(1, 1, 1.5)
    assert pace.patience == 0.008
    pace.observe(1, 1, 0.022, 0.002, 1.6)
    pace.begin(1, 2, 1.6)
    assert pace.patience == pytest.approx(3 * 2 * 0.020)
    pace.begin(2, 1, 1.7)
    assert pace.patience == 0.008


def test_as_many_threads_as_are_fastest_are_found_among_many() -> None:
    """One core of eight is taken: seven threads never wait, eight always do."""
    engine = Engine(threads=8)
    cost: Cost = lambda n: (0.016, 0.009) if n == 8 else (0.056 / n, 0.0)  # noqa: E731
    engine.run(cost, 2.0)
    assert engine.run(cost, 30.0)[7] > 0.9 * 30
    engine.run(busy, 10.0)
    assert engine.run(busy, 30.0)[1] > 0.85 * 30


def test_only_steps_of_one_kind_are_compared() -> None:
    """A prompt costs more than a decode; that one ran on fewer threads is no reason against these."""
    engine = Engine()
    engine.run(busy, 5.0)
    for _ in range(2000):
        engine.run(lambda n: (0.200, 0.100) if n == 2 else (0.100, 0.0), 0.1, kind=9)
        engine.run(busy, 0.05)
    assert engine.counts[-2000:].count(1) > 1900


def test_long_steps_are_compared_by_their_work() -> None:
    engine = Engine()
    for work in (512, 300, 400, 511) * 20:
        engine.run(lambda n, w=work: (0.0006 * w, 0.0003 * w) if n == 2 else (0.0004 * w, 0.0), 0.1, 10, work)
    assert engine.counts[-40:].count(1) > 35


def test_after_a_long_pause_the_next_step_has_all_threads_and_a_short_one_forgets_nothing() -> None:
    engine = Engine()
    engine.run(busy, 20.0)
    while engine.pace.threads == 2:
        engine.run(busy, 0.01)
    assert engine.pace.begin(1, 1, engine.now + 1.0) == 1
    assert engine.pace.begin(1, 1, engine.now + ThreadTuner.FORGET_S + 1.0) == 2


def test_single_prompts_now_and_then_get_all_threads_back() -> None:
    engine = Engine()
    engine.run(busy, 5.0, 10, 600)
    for _ in range(3):
        engine.run(quiet, 0.001, 10, 600)
        engine.now += 5.0
    engine.run(quiet, 0.2, 10, 600)
    assert engine.pace.threads == 2


def test_a_trial_that_meets_only_steps_of_another_kind_ends() -> None:
    engine = Engine()
    engine.run(busy, 5.0)
    while engine.pace.threads == 1:
        engine.run(busy, 0.01)
    engine.run(busy, 0.5, kind=7)
    assert engine.pace.threads == 1


def test_runs_that_begin_with_another_kind_are_judged_all_the_same() -> None:
    """A prompt, then some tokens, then a pause: the prompt alone says nothing of the tokens."""
    engine, spent = Engine(), dict.fromkeys((1, 2), 0.0)
    for _ in range(30):
        engine.run(lambda n: (0.200, 0.150) if n == 2 else (0.100, 0.0), 0.1, kind=6)
        for threads, seconds in engine.run(busy, 0.4).items():
            spent[threads] += seconds
        engine.now += 3.0
    assert spent[1] > 2 * spent[2]
