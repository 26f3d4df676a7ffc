"""`best_of`: which of the generated choices are returned."""

from __future__ import annotations

import math
from collections.abc import Sequence

from plait.frontend.delta import TextLogprob


class ChoiceScore:
    """The log-probability per token of one choice, as it grows."""

    def __init__(self) -> None:
        self.total, self.count = 0.0, 0

    def add(self, logprobs: Sequence[TextLogprob] | None) -> None:
        for lp in logprobs or ():
            self.total += lp.logprob
            self.count += 1

    @property
    def mean(self) -> float:
        """The sum over the number of tokens; -inf for a choice without any, which says nothing."""
        mean = self.total / self.count if self.count else -math.inf
        return -math.inf if math.isnan(mean) else mean


def best(scores: Sequence[ChoiceScore], n: int) -> list[int]:
    """The indices of the `n` choices with the highest mean, best first; of equal ones the earlier one."""
    return sorted(range(len(scores)), key=lambda i: -scores[i].mean)[:n]
