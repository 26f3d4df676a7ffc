"""Which draft lengths are chosen under simulated costs: what pays is found, what does not costs little."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import pytest

from plait.schedule.drafts.governor import DraftGovernor

LENGTHS = (1, 2, 3, 4, 6, 8)


@dataclass
class Machine:
    """Sequences that decode together. `plain_s`: of a token without drafts, eight of them in a plan.

    `rate`: how much faster a token of each draft length is. `noise`: by what factor a plan may be slower.
    """

    rates: Mapping[int, float]
    noise: float = 0.0
    num_sequences: int = 1
    plain_s: float = 0.0002
    load: Callable[[float], float] = lambda progress: 1.0
    governor: DraftGovernor = field(default_factory=lambda: DraftGovernor(LENGTHS))
    num_measured: int = 0
    dice: random.Random = field(default_factory=lambda: random.Random(7))

    def run(self, tokens: int) -> tuple[float, dict[int, int]]:
        """(how much slower than without drafts, tokens by length), for so many tokens of each sequence."""
        spent, best, by_length, done = 0.0, 0.0, dict.fromkeys((0, *LENGTHS), 0), 0
        while done < tokens:
            length = self.governor.choose(self.num_sequences)
            count = self.dice.randint(1, length + 1) if length else 8
            plain = self.plain_s * self.num_sequences * count * self.load(done)
            seconds = plain / (self.rates[length] if length else 1.0)
            seconds *= 1 + self.noise * self.dice.random() ** 3
            is_measured = self.governor.is_measuring(self.num_sequences)
            self.num_measured += is_measured
            self.governor.charge(
                self.num_sequences, count * self.num_sequences, seconds if is_measured else None
            )
            spent, best, done = spent + seconds, best + plain * (1 + self.noise / 4), done + count
            by_length[length] += count
        return spent / best, by_length


def rates(peak: int, best: float, fall: float = 0.12) -> dict[int, float]:
    return {n: best - fall * abs(LENGTHS.index(n) - LENGTHS.index(peak)) for n in LENGTHS}


@pytest.mark.parametrize("noise", [0.0, 0.5])
@pytest.mark.parametrize("rate", [0.4, 0.63, 0.86, 0.95])
def test_drafts_that_do_not_pay_cost_two_percent_at_most(rate: float, noise: float) -> None:
    machine = Machine(rates(1, rate), noise)
    machine.run(2_000)
    slower, by_length = machine.run(20_000)
    assert slower < 1.02
    assert by_length[0] > 0.95 * sum(by_length.values())


def test_first_reply_is_hardly_slower() -> None:
    assert Machine(rates(1, 0.63)).run(2_000)[0] < 1.03


@pytest.mark.parametrize("peak", LENGTHS)
def test_length_that_pays_most_is_found(peak: int) -> None:
    machine = Machine(rates(peak, 1.9), noise=0.1)
    machine.run(2_000)
    slower, by_length = machine.run(10_000)
    assert slower < 1 / 1.75
    assert by_length[peak] > 0.7 * sum(by_length.values())


def test_drafts_come_back_when_they_pay_and_go_when_they_do_not() -> None:
    machine = Machine(rates(2, 0.7))
    machine.run(4_000)
    machine.rates = rates(2, 1.6)
    machine.run(16_000)
    assert machine.run(4_000)[1][0] < 1_000
    machine.rates = rates(2, 0.7)
    machine.run(20_000)
    assert machine.run(4_000)[1][0] > 3_800


def test_load_that_comes_and_goes_changes_nothing() -> None:
    """Everything becomes three times as slow for a while, in both states."""
    for rate in (0.8, 1.4):
        machine = Machine(rates(1, rate), load=lambda done: 3.0 if done // 900 % 2 else 1.0)
        machine.run(3_000)
        _, by_length = machine.run(30_000)
        assert (by_length[0] > 0.8 * sum(by_length.values())) == (rate < 1), by_length


def test_each_number_of_sequences_has_its_own_choice() -> None:
    governor = DraftGovernor((1, 2))
    one = Machine(rates(1, 1.5), governor=governor)
    many = Machine(rates(1, 0.7), num_sequences=16, governor=governor)
    for _ in range(3):
        one.run(1_000)
        many.run(1_000)
    assert governor.choose(1) > 0
    assert governor.choose(16) == governor.choose(20) == 0


def test_hardly_anything_is_measured_while_there_are_no_drafts() -> None:
    machine = Machine(rates(1, 0.7))
    machine.run(4_000)
    machine.num_measured = 0
    machine.run(8_000)
    assert 0 < machine.num_measured < 8_000 / 8 / 10


def test_costs_of_nothing_and_of_no_time_are_ignored() -> None:
    governor = DraftGovernor((2,))
    for _ in range(1_000):
        governor.charge(1, 0, 1.0)
        governor.charge(1, 8, 0.0)
        governor.charge(1, 8, float("inf"))
    assert governor.choose(1) == 2
