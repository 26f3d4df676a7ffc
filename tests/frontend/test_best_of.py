"""best_of: the highest log-probability per token wins, and nothing odd wins by accident."""

from __future__ import annotations

import math

import pytest

from plait.frontend.deltas import ChoiceScore, TextLogprob, best_of


def score(*values: float) -> ChoiceScore:
    found = ChoiceScore()
    for value in values:  # as a stream brings them, piece by piece
        found.add([TextLogprob("x", 1, b"x", value)])
        found.add(None)
    return found


def test_it_is_the_mean_that_counts_not_the_sum() -> None:
    scores = [score(-3.0), score(-1.0, -1.0, -1.0, -1.0), score(-2.0, -0.5)]
    assert best_of(scores, 1) == [1]
    assert best_of(scores, 3) == [1, 2, 0]


def test_equals_keep_their_order() -> None:
    assert best_of([score(-1.0), score(-1.0, -1.0), score(-0.5), score(-1.0)], 4) == [2, 0, 1, 3]


@pytest.mark.parametrize("odd", [(), (math.nan,), (-0.1, -math.inf), (-math.inf,)])
def test_what_has_no_mean_comes_last(odd: tuple[float, ...]) -> None:
    assert best_of([score(*odd), score(-90.0)], 2) == [1, 0]
