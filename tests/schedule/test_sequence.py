"""Sequences with requested hidden states: what chunks must give, cached or not, cut and preempted."""

from __future__ import annotations

import pytest

from plait.errors import EngineError
from plait.schedule.attached import PooledHidden
from plait.schedule.plan import Chunk, Sampled, StepPlan
from plait.schedule.scheduler import Scheduler
from plait.schedule.turns import Update
from tests.schedule.test_scheduler import planned, scheduler, sequence, shape


def hidden(plan: StepPlan, chunk: Chunk) -> Sampled:
    """The state of a token is (its id, 1)."""
    tokens = chunk.token_ids[len(chunk.token_ids) - chunk.num_pooled :]
    return Sampled(pooled=(float(sum(tokens)), float(len(tokens))) if tokens else ())


def run(s: Scheduler, plan: StepPlan) -> list[Update]:
    assert all(row.num_samples == 0 for row in s.sampling(plan).rows)
    updates = s.commit(plan, [hidden(plan, chunk) for chunk in plan.chunks if chunk.has_answer])
    s.check()
    return updates


def test_state_of_the_last_token_is_requested_once() -> None:
    s = scheduler()
    s.add(sequence(1, 20, 0, pooled=PooledHidden("last")))
    first = planned(s)
    assert (shape(first), first.chunks[0].num_pooled, first.chunks[0].num_logits) == ([(1, 0, 16)], 0, 0)
    assert not first.chunks[0].has_answer
    assert run(s, first) == []
    last = planned(s)
    assert (last.chunks[0].num_pooled, last.chunks[0].num_logits) == (1, 0)
    (update,) = run(s, last)
    assert (update.event.embedding, update.event.finish_reason, update.event.token_ids) == (
        (119.0, 1.0),
        "length",
        (),
    )
    assert not s.has_work


def test_the_mean_is_that_of_all_tokens_however_the_prompt_was_cut() -> None:
    s = scheduler(max_num_batched_tokens=6)
    s.add(sequence(1, 20, 0, pooled=PooledHidden("mean")))
    while not (updates := run(s, planned(s))):
        pass
    assert updates[0].event.embedding == (sum(range(100, 120)) / 20, 1.0)


def test_a_mean_computes_what_is_cached_and_the_last_state_does_not() -> None:
    s, tokens = scheduler(), list(range(500, 512))
    s.add(sequence(1, tokens, 0, pooled=PooledHidden("last")))
    run(s, planned(s))
    s.add(sequence(2, tokens, 0, pooled=PooledHidden("mean")))
    plan = planned(s)
    assert shape(plan) == [(2, 0, 12)]
    assert run(s, plan)[0].event.embedding == (sum(tokens) / 12, 1.0)
    s.add(sequence(3, tokens, 0, pooled=PooledHidden("last")))
    plan = planned(s)
    assert plan.chunks[0].start > 0
    assert run(s, plan)[0].event.embedding == (511.0, 1.0)


def test_a_failed_step_counts_no_token_twice() -> None:
    s = scheduler(max_num_batched_tokens=8)
    s.add(sequence(1, 20, 0, pooled=PooledHidden("mean")))
    run(s, planned(s))
    planned(s)
    s.isolate()
    updates: list[Update] = []
    while not updates:
        updates = run(s, planned(s))
    assert updates[0].event.embedding == (sum(range(100, 120)) / 20, 1.0)


def test_an_answer_without_a_state_is_an_error() -> None:
    pool = PooledHidden("mean")
    with pytest.raises(EngineError, match="hidden state"):
        pool.add((), 4)
    pool.add((1.0, 2.0), 4)
    with pytest.raises(EngineError, match="after 2"):
        pool.add((1.0,), 8)


def test_tokens_that_the_host_must_choose_are_neither_followed_nor_decoded_in_bulk() -> None:
    plain = sequence(1, 20, 4, is_watched=False)
    chained = sequence(2, 20, 4, is_watched=False, params={"xtc_probability": 0.5})
    assert (plain.is_unobserved, plain.can_follow) == (True, True)
    assert (chained.is_unobserved, chained.can_follow, chained.is_penalized) == (False, False, False)
    repeated = sequence(3, 20, 4, params={"dry_multiplier": 1.0})
    assert repeated.is_penalized
