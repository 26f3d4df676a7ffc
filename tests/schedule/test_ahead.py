"""Steps that are planned before the tokens of the step before are known: the same text, the same memory."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.schedule.plan import FOLLOW, CopySlot, Sampled, StepPlan
from plait.schedule.scheduler import Scheduler
from tests.schedule.ahead import AheadWorld, wander_ahead
from tests.schedule.test_scheduler import planned, scheduler, sequence
from tests.schedule.walk import SHAPES, Size


@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_sequences_get_the_same_tokens_when_steps_are_planned_ahead(shape: str, shares: bool) -> None:
    rng = random.Random(f"{shape} {shares}")
    size = Size(num_blocks=rng.randint(10, 16), num_seqs=3, budget=rng.randint(6, 20), shares=shares)
    world = AheadWorld(SHAPES[shape], size)
    wander_ahead(world, rng, 600, busy=0.3)
    world.settle()
    assert world.counts["finished"] > 20
    assert world.counts["failed"] > 0
    assert world.counts["followed"] > 100
    assert not shares or world.counts["hit tokens"] > 0


@pytest.mark.parametrize("shape", ["full", "full+window", "full+slots"])
def test_several_steps_of_a_plan_may_be_ahead_of_another(shape: str) -> None:
    rng = random.Random(shape)
    world = AheadWorld(SHAPES[shape], Size(num_blocks=16, num_steps=4))
    wander_ahead(world, rng, 1200, busy=0.06, faults=0.02)
    world.settle()
    assert world.counts["finished"] > 20
    assert world.counts["multi-steps"] > 10


@settings(max_examples=25, deadline=None)
@given(shape=st.sampled_from([*SHAPES]), seed=st.integers(0, 2**32), host=st.booleans())
def test_so_do_they_with_any_memory_and_faults(shape: str, seed: int, host: bool) -> None:
    rng = random.Random(seed)
    size = Size(
        num_blocks=rng.randint(8, 20),
        num_seqs=rng.randint(1, 4),
        budget=rng.randint(4, 24),
        num_spare_slots=rng.randint(0, 3),
        snapshot_interval=rng.choice([4, 8, 12]),
        host_nbytes=2000 if host else 0,
    )
    world = AheadWorld(SHAPES[shape], size)
    wander_ahead(world, rng, 80, busy=0.5, faults=0.03)
    world.settle()


def decoding(*sequences: Any, **options: Any) -> tuple[Scheduler, StepPlan]:
    """A scheduler with these sequences, and the plan of their prompts, which runs."""
    s = scheduler(**{"max_model_len": 200, **options})
    s.add(*sequences)
    return s, planned(s)


def test_a_decode_follows_the_token_that_is_being_sampled() -> None:
    s, first = decoding(sequence(1, 5, 10))
    second = s.plan_ahead(first)
    assert second is not None
    (chunk,) = second.chunks
    assert (chunk.start, chunk.token_ids, chunk.num_logits) == (5, (FOLLOW,), 1)
    assert [row.position for row in s.sampling(second).rows] == [6]
    (update,) = s.commit(first, [Sampled((7,))])
    s.check()
    assert update.event.token_ids == (7,)
    third = s.plan_ahead(second)
    assert third is not None
    assert [c.start for c in third.chunks] == [6]
    assert [u.event.token_ids for u in s.commit(second, [Sampled((8,))])] == [(8,)]
    assert s.running[0].token_ids[5:] == [7, 8]


def test_a_sequence_that_must_end_with_the_pending_token_is_not_computed_again() -> None:
    s, first = decoding(sequence(1, 5, 1), sequence(2, 5, 3))
    second = s.plan_ahead(first)
    assert second is not None
    assert [c.seq_id for c in second.chunks] == [2]
    ended, _ = s.commit(first, [Sampled((7,)), Sampled((7,))])
    assert ended.event.finish_reason == "length"


def test_what_is_computed_behind_an_end_is_dropped() -> None:
    s, first = decoding(sequence(1, 6, 10, stops=frozenset({9})))
    second = s.plan_ahead(first)
    assert second is not None
    (update,) = s.commit(first, [Sampled((9,))])
    assert (update.event.finish_reason, update.event.stop_token_id) == ("stop", 9)
    assert s.commit(second, [Sampled((3,))]) == []
    assert not s.has_work
    stats = s.stats()
    assert stats["num_free_blocks"] + stats["num_cached_blocks"] == stats["num_blocks"]


def test_a_slot_that_went_on_behind_the_end_is_no_snapshot_and_that_of_the_prompt_is() -> None:
    s, first = decoding(sequence(1, 9, 10, stops=frozenset({9})), slots=True)
    assert [len(c.token_ids) for c in first.chunks] == [8], "a chunk ends where a snapshot is needed"
    second = s.plan_ahead(first)
    assert second is not None
    (chunk,) = second.chunks
    copies = [move for move in second.moves if isinstance(move, CopySlot)]
    assert [move.source for move in copies] == [chunk.slot], "between the two steps"
    s.commit(first, [])
    third = s.plan_ahead(second)
    assert third is not None
    before = s.stats()["num_snapshots"]
    s.commit(second, [Sampled((9,))])
    s.commit(third, [Sampled((3,))])
    assert s.stats()["num_snapshots"] == before


@pytest.mark.parametrize(
    "options",
    [{"wants_prompt_logprobs": True}, {"guide": object()}, {"params": {"presence_penalty": 0.5}}],
)
def test_a_step_with_a_sequence_that_needs_the_host_is_not_followed(options: dict[str, Any]) -> None:
    s = scheduler()
    seq = sequence(1, 5, 10, **{k: v for k, v in options.items() if k != "guide"})
    s.add(seq, sequence(2, 5, 10))
    first = planned(s)
    if "guide" in options:
        seq.can_follow = False
    assert s.plan_ahead(first) is None
    assert [u.event.token_ids for u in s.commit(first, [Sampled((7,))] * 2)] == [(7,), (7,)]
    s.check()


def test_no_sequence_is_preempted_for_a_step_ahead() -> None:
    s, first = decoding(sequence(1, 8, 6), sequence(2, 8, 6), blocks=5)
    assert [len(c.token_ids) for c in first.chunks] == [8, 8]
    assert s.plan_ahead(first) is None
    s.commit(first, [Sampled((7,)), Sampled((7,))])
    s.check()
    assert s.num_preemptions == 0
    assert [c.seq_id for c in planned(s).chunks] == [1]
    assert s.num_preemptions == 1


def test_a_request_is_admitted_into_a_step_ahead() -> None:
    s, first = decoding(sequence(1, 5, 10))
    s.add(sequence(2, 7, 10))
    second = s.plan_ahead(first)
    assert second is not None
    assert [(c.seq_id, len(c.token_ids)) for c in second.chunks] == [(1, 1), (2, 7)]


def test_both_plans_are_void_after_a_fault() -> None:
    s, first = decoding(sequence(1, 5, 10), sequence(2, 5, 10))
    assert s.plan_ahead(first) is not None
    s.isolate()
    s.check()
    again = planned(s)
    assert [(c.seq_id, c.start, len(c.token_ids)) for c in again.chunks] == [(1, 0, 5)]
    assert s.plan_ahead(again) is None
