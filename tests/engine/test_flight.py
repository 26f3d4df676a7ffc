"""What a step that has landed counts for: tokens of decodes alone, and turns that a runner took by itself."""

from __future__ import annotations

from dataclasses import replace

import pytest

from plait.engine.flight import count_decoded, count_steps
from plait.request import Event
from plait.schedule.drafts.turns import TurnsEnd
from plait.schedule.plan import Chunk, Sampled, StepPlan
from plait.schedule.sequence import MOST_REPLAYED
from plait.schedule.turns import Update


def _chunk(start: int, count: int, num_logits: int) -> Chunk:
    return Chunk(1, start, tuple(range(count)), (), 0, num_logits)


@pytest.mark.parametrize(
    ("chunk", "count"),
    [
        (_chunk(40, 1, 1), 2),
        (_chunk(40, 4, 4), 2),  # a decode with drafts
        (_chunk(40, 4 + MOST_REPLAYED - 1, 4), 2),  # behind tokens that are computed again
        (_chunk(0, 5, 1), 0),  # a whole prompt
        (_chunk(64, 37, 1), 0),  # a prompt behind a cached beginning
    ],
)
def test_tokens_count_only_where_no_prompt_was_computed(chunk: Chunk, count: int) -> None:
    update = Update(1, Event(7, 0, token_ids=(3, 4)))
    assert count_decoded(StepPlan(1, (chunk,)), [update]) == count
    assert count_decoded(StepPlan(1, (chunk, _chunk(16, 16, 0))), [update]) == 0  # in the middle of a prompt


def test_turns_of_a_runner_and_steps_up_to_a_stop_token_are_counted() -> None:
    one = StepPlan(1, (_chunk(40, 1, 1),))
    assert count_steps(one, [Sampled((1,))]) == 1
    assert count_steps(one, [Sampled((1, 2, 3), turns=TurnsEnd(3, 2, (4,), 0, ()))]) == 3
    several = replace(one, num_steps=8, stops=(3,))
    assert count_steps(several, [Sampled((5, 6, 7)), Sampled((1, 2, 3))]) == 3
    assert count_steps(several, []) == 8
