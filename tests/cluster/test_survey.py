from __future__ import annotations

import random
from collections.abc import Sequence

from plait.cluster.ray_serve.survey import Row, ask_gateways


class Gateways:
    """Answers come from any of them, as a router chooses."""

    def __init__(self, number: int) -> None:
        self.rows: list[Row] = [{"name": f"g{i}", "open": i} for i in range(number)]
        self.rng, self.num_calls = random.Random(1), 0

    def ask(self, count: int) -> Sequence[Row]:
        self.num_calls += count
        return [self.rng.choice(self.rows) for _ in range(count)]


def test_every_gateway_is_found_once_and_in_order() -> None:
    for number in (1, 2, 9):
        gateways = Gateways(number)
        assert ask_gateways(gateways.ask, number, 5.0) == gateways.rows
        assert gateways.num_calls < 20 * number


def test_one_that_does_not_answer_is_left_out_in_time() -> None:
    gateways = Gateways(2)
    assert ask_gateways(gateways.ask, 3, 0.01) == gateways.rows
