from __future__ import annotations

import math

import pytest
import torch

from plait.errors import EngineError
from plait.runner.pooling import add_pooled
from plait.schedule.plan import Chunk, Sampled, StepPlan


def chunk(num_tokens: int, num_pooled: int) -> Chunk:
    fields = dict(seq_id=1, start=0, token_ids=(0,) * num_tokens, blocks=(), slot=0, num_logits=0)
    return Chunk(**fields, num_pooled=num_pooled)  # type: ignore[arg-type]


def test_the_last_rows_of_a_chunk_are_added_up() -> None:
    hidden = torch.arange(10.0).view(5, 2)
    found = add_pooled(StepPlan(1, (chunk(2, 1), chunk(3, 2))), hidden, [Sampled(), Sampled()])
    assert [answer.pooled for answer in found] == [(2.0, 3.0), (6.0 + 8.0, 7.0 + 9.0)]


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_a_sum_that_is_no_number_is_never_told(broken: float) -> None:
    hidden = torch.full((2, 4), broken)
    with pytest.raises(EngineError, match="hidden states that are no numbers"):
        add_pooled(StepPlan(1, (chunk(2, 2),)), hidden, [Sampled()])
