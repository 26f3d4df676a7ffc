"""When several decode steps become one plan, and when they do not."""

from __future__ import annotations

from typing import Any

import pytest

from plait.errors import EngineError
from plait.schedule.costs import StepCosts
from plait.schedule.drafts.turns import MOST_STOPS
from plait.schedule.plan import CopySlot, Sampled, StepPlan
from plait.schedule.pools import CacheOptions
from plait.schedule.scheduler import Scheduler
from plait.schedule.sequence import TokenSequence
from plait.schedule.turns import Update
from tests.schedule.test_scheduler import FULL, WINDOW, planned, run, scheduler, sequence


def quick(seconds: float = 0.001) -> StepCosts:
    costs = StepCosts()
    for tokens in (1, 2, 4, 8, 16):
        costs.observe(tokens, seconds)
    return costs


def world(seconds: float = 0.001, **options: Any) -> Scheduler:
    sizes = {"num_steps": 8, "num_streamed_steps": 8, "max_model_len": 200}
    return scheduler(costs=quick(seconds), **{**sizes, **options})


def unseen(seq_id: int, prompt: int | list[int] = 6, max_tokens: int = 20, **options: Any) -> TokenSequence:
    return sequence(seq_id, prompt, max_tokens, **{"is_watched": False, **options})


def decoding(s: Scheduler, *sequences: TokenSequence) -> StepPlan:
    """The first plan behind the prompts."""
    s.add(*sequences)
    run(s, planned(s))
    return planned(s)


def commit(s: Scheduler, plan: StepPlan, *tokens: tuple[int, ...]) -> list[Update]:
    updates = s.commit(plan, list(map(Sampled, tokens)))
    s.check()
    return updates


def test_sequences_that_are_not_streamed_decode_several_steps_at_once() -> None:
    s = world()
    plan = decoding(s, unseen(1), unseen(2))
    assert (plan.num_steps, plan.num_tokens) == (8, 2)
    assert all(len(chunk.blocks[0]) == 4 for chunk in plan.chunks), "blocks of 4 for 14 tokens"
    first, second = commit(s, plan, tuple(range(20, 28)), tuple(range(30, 38)))
    assert (first.event.token_ids, second.event.token_ids) == (tuple(range(20, 28)), tuple(range(30, 38)))
    assert (first.num_drafted, first.num_accepted) == (0, 0)
    assert [c.start for c in planned(s).chunks] == [14, 14]


def test_last_steps_are_as_many_as_the_missing_tokens() -> None:
    s = world()
    plan = decoding(s, unseen(1, max_tokens=4), unseen(2))
    assert plan.num_steps == 3
    first, _ = commit(s, plan, (1, 2, 3), (1, 2, 3))
    assert (first.event.token_ids, first.event.finish_reason) == ((1, 2, 3), "length")


def test_what_follows_a_stop_token_is_dropped_and_its_memory_is_given_back() -> None:
    s = world(cache=None)
    plan = decoding(s, unseen(1, stops=frozenset({9})))
    (update,) = commit(s, plan, (5, 9, 6, 7, 8, 5, 5, 5))
    assert (update.event.token_ids, update.event.finish_reason, update.event.stop_token_id) == (
        (5,),
        "stop",
        9,
    )
    stats = s.stats()
    assert stats["num_free_blocks"] + stats["num_cached_blocks"] == stats["num_blocks"]


@pytest.mark.parametrize(
    "options",
    [
        {"params": {"logprobs": 0}},
        {"params": {"presence_penalty": 0.5}},
        {"params": {"repetition_penalty": 1.1}},
    ],
)
def test_one_that_is_looked_at_between_two_steps_has_one_after_the_other(options: dict[str, Any]) -> None:
    assert decoding(world(), unseen(1, **options), unseen(2)).num_steps == 1


def test_one_step_at_a_time_while_a_request_waits_or_a_prompt_is_computed() -> None:
    s = world(max_num_seqs=1)
    assert decoding(s, unseen(1), unseen(2)).num_steps == 1
    s = world()
    plan = decoding(s, unseen(1, 6), unseen(2, 30))
    assert [len(c.token_ids) for c in plan.chunks] == [1, 15]
    assert plan.num_steps == 1


@pytest.mark.parametrize(("seconds", "steps"), [(0.001, 8), (0.009, 3), (0.02, 2), (0.021, 1)])
def test_streamed_tokens_are_twenty_milliseconds_late_at_most(seconds: float, steps: int) -> None:
    full = {"max_num_seqs": 2}
    assert decoding(world(seconds, **full), unseen(1, is_watched=True), unseen(2)).num_steps == steps
    limits = {"num_streamed_steps": 1, **full}
    assert decoding(world(seconds, **limits), unseen(1, is_watched=True), unseen(2)).num_steps == 1


def test_a_burst_of_streamed_requests_finds_no_long_plan_in_its_way() -> None:
    s = world(0.01, max_num_seqs=3)
    plan = decoding(s, unseen(1, is_watched=True))
    for _ in range(2):  # the tokens of the first 30 ms
        assert plan.num_steps == 1
        commit(s, plan, (7,))
        plan = planned(s)
    assert plan.num_steps == 3
    commit(s, plan, (7, 7, 7))
    plan = decoding(s, unseen(2, is_watched=True))
    assert plan.num_steps == 1
    run(s, plan)
    s.add(unseen(3, is_watched=True))
    run(s, planned(s))
    assert planned(s).num_steps == 3, "no other request could start"


def test_bursts_of_requests_that_are_not_streamed_do_not_change_plans() -> None:
    assert decoding(world(0.01, max_num_seqs=3), unseen(1)).num_steps == 5


def test_recurrent_state_is_copied_before_several_steps_and_comes_back_behind_a_stop() -> None:
    s = world(slots=True)
    first = decoding(s, unseen(1, 6, stops=frozenset({9})), unseen(2, 6))
    run(s, first)  # a prompt's last token is a step of its own, because a snapshot is taken before it
    first = planned(s)
    assert first.num_steps == 8
    copies = [move for move in first.moves if isinstance(move, CopySlot)]
    assert {c.source for c in copies} >= {chunk.slot for chunk in first.chunks}
    (copy,) = (c.target for c in copies if c.source == first.chunks[0].slot)
    stopped, _ = commit(s, first, (5, 9, 6, 7, 8, 5, 5, 5), tuple(range(30, 38)))
    assert (stopped.event.token_ids, stopped.event.finish_reason) == ((5,), "stop")
    plan = planned(s)
    (going,) = plan.chunks
    assert (going.start, going.slot) == (14, first.chunks[1].slot)
    commit(s, plan, tuple(range(plan.num_steps)))
    # Another sequence starts where the plan did: from the copy, not from what ran on behind the stop.
    s.add(unseen(3, [*range(100, 106), 77, 78, 79]))
    plan = planned(s)
    assert [(c.start, c.token_ids) for c in plan.chunks if c.seq_id == 3] == [(6, (77, 78))]
    assert copy in [move.source for move in plan.moves if isinstance(move, CopySlot)]


def test_recurrent_state_is_not_copied_where_steps_end_behind_a_stop() -> None:
    s = world(slots=True, cache=CacheOptions(slot_nbytes=1 << 30))
    s.memory.ends_steps = True
    one = unseen(1, 6, stops=frozenset({9}))
    run(s, decoding(s, one, unseen(2, 6, stops=frozenset({8}))))
    plan = planned(s)
    assert (plan.num_steps, sorted(plan.stops)) == (8, [8, 9])
    assert not [move for move in plan.moves if isinstance(move, CopySlot)]
    before = one.num_tokens
    stopped, going = commit(s, plan, (5, 9), (30, 31))
    assert (stopped.event.token_ids, stopped.event.finish_reason) == ((5,), "stop")
    assert (going.event.token_ids, going.event.finish_reason) == ((30, 31), None)
    after = planned(s)
    assert [(c.start, c.slot) for c in after.chunks] == [(plan.chunks[1].start + 2, plan.chunks[1].slot)]
    commit(s, after, tuple(range(after.num_steps)))
    # The slot of the one that ended has the state behind all of its tokens: another sequence starts there.
    assert one.num_tokens == before + 1
    s.add(unseen(3, [*one.token_ids, 77, 78]))
    after = planned(s)
    assert [(c.start, c.token_ids) for c in after.chunks if c.seq_id == 3] == [(one.num_tokens, (77,))]
    assert plan.chunks[0].slot in [move.source for move in after.moves if isinstance(move, CopySlot)]


def test_fewer_tokens_than_steps_are_an_error_unless_a_stop_token_is_the_last() -> None:
    s = world(slots=True)
    s.memory.ends_steps = True
    run(s, decoding(s, unseen(1, 6, stops=frozenset({9})), unseen(2, 6)))
    plan = planned(s)
    for tokens in (((5, 4), (30, 31)), ((5, 9), (30,)), ((9, 4), (30, 31))):
        with pytest.raises(EngineError, match="tokens were sampled for"):
            s.commit(plan, list(map(Sampled, tokens)))
    commit(s, plan, (5, 9), (30, 31))


def test_recurrent_state_is_copied_where_stop_tokens_are_too_many() -> None:
    s = world(slots=True)
    s.memory.ends_steps = True
    run(s, decoding(s, unseen(1, 6, stops=frozenset(range(1000, 1001 + MOST_STOPS)))))
    plan = planned(s)
    assert (plan.num_steps, plan.stops) == (8, ())
    assert plan.chunks[0].slot in [move.source for move in plan.moves if isinstance(move, CopySlot)]


def test_a_plan_ends_where_a_snapshot_is_needed() -> None:
    s = world(slots=True, cache=CacheOptions(snapshot_interval=8))
    run(s, decoding(s, unseen(1, 5)))
    plan = planned(s)
    assert plan.chunks[0].start + plan.num_steps == 8


def test_one_step_at_a_time_where_copies_cost_more_and_for_suspects() -> None:
    assert decoding(world(slots=True, cache=CacheOptions(slot_nbytes=1 << 30)), unseen(1)).num_steps == 1
    s = world()
    decoding(s, unseen(1), unseen(2))
    s.isolate()
    while s.has_work:
        plan = planned(s)
        if len(plan.chunks) > 1:
            break
        assert plan.num_steps == 1
        run(s, plan)


@pytest.mark.parametrize(("seconds", "limit", "steps"), [(0.011, None, 4), (0.04, None, 1), (0.004, 0.01, 2)])
def test_who_comes_meanwhile_waits_for_fifty_milliseconds_at_most(
    seconds: float, limit: float | None, steps: int
) -> None:
    assert decoding(world(seconds, max_step_s=limit), unseen(1)).num_steps == steps


def test_nothing_is_known_about_costs_before_the_first_step() -> None:
    s = scheduler(num_steps=8)
    assert decoding(s, unseen(1)).num_steps == 1


@pytest.mark.parametrize("groups", [(FULL,), (FULL, WINDOW)])
def test_steps_ahead_are_for_all_sequences_or_for_none(groups: Any) -> None:
    """Three sequences of 3 blocks, one of 12 left for six more each, and a prompt of two blocks is cached."""
    s = world(blocks=13, groups=groups)
    s.add(sequence(9, 9, 1))
    run(s, planned(s))
    cached = s.stats()["num_cached_blocks"]
    assert cached
    plan = decoding(s, *(unseen(i, 3, 15) for i in (1, 2, 3)))
    while plan.num_steps > 1:
        commit(s, plan, *[(7,) * plan.num_steps] * 3)
        plan = planned(s)
    assert s.num_preemptions == 0
    tables = [len(table) for chunk in plan.chunks for table in chunk.blocks]
    assert all(n == -(-chunk.end // 4) for n, chunk in zip(tables, plan.chunks, strict=False)), tables


def test_first_token_is_emitted_at_once() -> None:
    """Its prompt was known but for the last token: what is left looks like a decode."""
    s = world()
    s.add(sequence(1, list(range(9)), 1))
    run(s, planned(s))
    s.add(unseen(2, list(range(9)), 20))
    plan = planned(s)
    assert [(len(c.token_ids), c.start) for c in plan.chunks] == [(1, 8)]
    assert plan.num_steps == 1
    run(s, plan)
    assert planned(s).num_steps == 8


@pytest.mark.parametrize("groups", [(FULL,), (FULL, WINDOW)])
def test_no_sequence_is_preempted_for_steps_ahead(groups: Any) -> None:
    """Two sequences of 7 tokens: 7 tokens more of each would be 8 blocks, and there are 6."""
    s = world(blocks=7, groups=groups)
    plan = decoding(s, unseen(1, 7, 8), unseen(2, 7, 8))
    assert (plan.num_steps, s.num_preemptions) == (1, 0)
    assert all(len(table) == 2 for chunk in plan.chunks for table in chunk.blocks), "nothing stays reserved"
