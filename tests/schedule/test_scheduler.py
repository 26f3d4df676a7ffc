from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from plait.errors import CapacityError, EngineError, QueueFull
from plait.memory import BlockGroup
from plait.request import SamplingParams, TokenLogprobs
from plait.schedule.allocation import Allocation
from plait.schedule.costs import SchedulerLimits, StepCosts
from plait.schedule.plan import CopyBlock, CopySlot, Drop, Load, Sampled, Save, StepPlan
from plait.schedule.pools import CacheOptions
from plait.schedule.scheduler import Scheduler
from plait.schedule.sequence import Phase, TokenSequence
from plait.schedule.turns import Update

FULL = BlockGroup("full", None, ("a",))
WINDOW = BlockGroup("window:6", 6, ("b",))
TOKEN = Sampled((7,))


def scheduler(
    *,
    blocks: int = 100,
    groups: tuple[BlockGroup, ...] = (FULL,),
    slots: bool = False,
    cache: CacheOptions | None = None,
    costs: StepCosts | None = None,
    clock: Callable[[], float] = lambda: 0.0,
    **limits: Any,
) -> Scheduler:
    options = dict(max_num_seqs=4, max_num_batched_tokens=16, max_waiting=8, max_model_len=64)
    rules = SchedulerLimits(**(options | limits))
    memory = Allocation(
        groups,
        [blocks] * len(groups),
        4,
        num_slots=2 * rules.max_num_seqs + 1 if slots else 0,
        max_step_len=rules.max_num_batched_tokens,
        trims=rules.causal,
        cache=cache,
    )
    return Scheduler(rules, memory, costs=costs, clock=clock)


def sequence(seq_id: int, prompt: int | list[int], max_tokens: int = 4, **options: Any) -> TokenSequence:
    tokens = [100 * seq_id + i for i in range(prompt)] if isinstance(prompt, int) else prompt
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, **options.pop("params", {}))
    stops = options.pop("stops", frozenset())
    return TokenSequence(
        seq_id, f"r{seq_id}", 0, list(tokens), params, stops, max_len=len(tokens) + max_tokens, **options
    )


def planned(s: Scheduler) -> StepPlan:
    plan = s.plan()
    assert plan is not None
    s.check()
    return plan


def run(s: Scheduler, plan: StepPlan, token: int = 7) -> list[Update]:
    updates = s.commit(plan, [Sampled((token,))] * sum(c.num_logits > 0 for c in plan.chunks))
    s.check()
    return updates


def shape(plan: StepPlan) -> list[tuple[int, int, int]]:
    return [(c.seq_id, c.start, c.end) for c in plan.chunks]


def test_nothing_to_do_is_no_plan() -> None:
    assert scheduler().plan() is None


def test_prompt_longer_than_the_budget_is_cut_into_chunks_and_only_the_last_has_logits() -> None:
    s = scheduler()
    s.add(sequence(1, 40))
    seen = []
    for _ in range(3):
        plan = planned(s)
        seen += [(c.start, c.end, c.num_logits) for c in plan.chunks]
        updates = run(s, plan)
    assert seen == [(0, 16, 0), (16, 32, 0), (32, 40, 1)]
    assert [u.event.token_ids for u in updates] == [(7,)]
    assert shape(planned(s)) == [(1, 40, 41)]


def test_decodes_come_first_and_never_wait_for_a_prompt() -> None:
    s = scheduler()
    s.add(sequence(1, 40))
    run(s, planned(s))
    s.add(sequence(2, 3))
    run(s, planned(s))
    run(s, planned(s))  # 1 has 8 tokens left, 2 is admitted next to it
    assert shape(planned(s)) == [(1, 40, 41), (2, 3, 4)]


def test_late_decode_comes_before_an_earlier_prompt_in_the_plan() -> None:
    s = scheduler(max_num_batched_tokens=8)
    s.add(sequence(1, 4, max_tokens=30))
    run(s, planned(s))
    s.add(sequence(2, 30))
    s.add(sequence(3, 2))
    plan = planned(s)
    assert shape(plan) == [(1, 4, 5), (2, 0, 7)]
    run(s, plan)
    assert shape(planned(s)) == [(1, 5, 6), (2, 7, 14)]


def test_a_slot_is_zeroed_for_its_new_owner_and_only_then() -> None:
    s = scheduler(max_num_seqs=1, slots=True)
    s.add(sequence(1, 2, max_tokens=2))
    s.add(sequence(2, 2, max_tokens=1))
    fresh = []
    while s.has_work:
        plan = planned(s)
        fresh.append((plan.chunks[0].seq_id, plan.fresh))
        run(s, plan)
    assert fresh == [(1, (1,)), (1, ()), (2, (1,))]


def test_a_model_without_slots_has_slot_zero_and_nothing_fresh() -> None:
    s = scheduler()
    s.add(sequence(1, 3))
    plan = planned(s)
    assert (plan.fresh, plan.chunks[0].slot) == ((), 0)


def test_when_blocks_run_out_the_latest_arrival_is_computed_again_from_scratch() -> None:
    s = scheduler(blocks=5)  # 4 blocks of 4 tokens
    s.add(sequence(1, 7, max_tokens=8))
    s.add(sequence(2, 7, max_tokens=8))
    first = planned(s)
    assert shape(first) == [(1, 0, 7), (2, 0, 7)]
    run(s, first)
    run(s, planned(s))
    plan = planned(s)  # both want a third block, and there is none
    assert shape(plan) == [(1, 8, 9)]
    assert [(q.id, q.phase, q.num_computed_tokens, q.num_tokens) for q in s.waiting] == [
        (2, Phase.WAITING, 0, 9)
    ]
    order = []
    run(s, plan)
    while s.has_work:
        plan = planned(s)
        order += shape(plan)
        run(s, plan)
    assert (2, 0, 9) in order  # prompt and output so far, in one prefill
    assert s.num_preemptions == 1


def test_the_whole_prompt_must_fit_before_a_sequence_starts() -> None:
    s = scheduler(blocks=6, max_num_batched_tokens=4)
    s.add(sequence(1, 12, max_tokens=2), sequence(2, 12, max_tokens=2))
    for _ in range(3):
        plan = planned(s)
        assert [c.seq_id for c in plan.chunks] == [1]
        run(s, plan)


def test_first_come_first_served_even_if_a_later_one_would_fit() -> None:
    s = scheduler(blocks=6, max_num_batched_tokens=32)
    s.add(sequence(1, 12, max_tokens=3))
    run(s, planned(s))
    s.add(sequence(2, 16))
    s.add(sequence(3, 1))
    assert shape(planned(s)) == [(1, 12, 13)]


def test_blocks_behind_the_window_are_given_back_and_point_to_garbage() -> None:
    s = scheduler(groups=(FULL, WINDOW))
    seq = sequence(1, 20, max_tokens=30)
    s.add(seq)
    run(s, planned(s))
    assert [b == 0 for b in seq.tables[1]] == [True, True, False, False]  # 16 computed: the next sees 11..16
    for _ in range(10):
        plan = planned(s)
        full, windowed = plan.chunks[0].blocks
        assert all(full)
        assert len(full) == len(windowed) == -(-plan.chunks[0].end // 4)
        first_seen = max(plan.chunks[0].start - 5, 0)
        assert all(windowed[first_seen // 4 :])
        assert not any(windowed[: first_seen // 4])
        run(s, plan)
    s.cancel(1)
    stats = s.stats()
    assert stats["num_free_blocks"] + stats["num_cached_blocks"] == stats["num_blocks"] == 198


def test_a_model_that_is_not_causal_computes_the_whole_sequence_at_every_step() -> None:
    s = scheduler(causal=False, groups=(FULL, WINDOW), slots=True)
    s.add(sequence(1, 5, max_tokens=3))
    s.add(sequence(2, 9, max_tokens=2))
    seen = []
    while s.has_work:
        plan = planned(s)
        seen.append(shape(plan))
        assert len(plan.fresh) == len(plan.chunks)
        assert all(all(table) for c in plan.chunks for table in c.blocks)
        run(s, plan)
    assert seen == [[(1, 0, 5), (2, 0, 9)], [(1, 0, 6), (2, 0, 10)], [(1, 0, 7)]]


def test_a_sequence_that_is_not_causal_waits_until_the_budget_holds_it_whole() -> None:
    s = scheduler(causal=False)
    s.add(sequence(1, 10, max_tokens=2))
    s.add(sequence(2, 10, max_tokens=2))
    assert shape(planned(s)) == [(1, 0, 10)]


def test_add_refuses_a_sequence_that_memory_never_holds_with_both_numbers() -> None:
    s = scheduler(blocks=5)
    assert s.longest == 16
    with pytest.raises(CapacityError, match=r"17 tokens needs 5 blocks and there are 4"):
        s.add(sequence(2, 14))
    assert not s.has_work


def test_one_request_too_many_is_refused_and_choices_count_as_one() -> None:
    s = scheduler(max_waiting=1, max_num_seqs=1)
    s.add(*(sequence(i, 2) for i in (1, 2, 3)))  # three requests in one call: two may wait, one place is free
    with pytest.raises(QueueFull, match=r"max_waiting is 1"):
        s.add(sequence(4, 2))
    run(s, planned(s))
    assert s.num_waiting_requests == 2
    s.cancel(3)
    s.cancel(2)
    s.add(sequence(5, 2))


def test_no_waiting_allowed_still_lets_an_idle_engine_start() -> None:
    s = scheduler(max_waiting=0, max_num_seqs=2)
    s.add(sequence(1, 2))
    s.add(sequence(2, 2))
    with pytest.raises(QueueFull):
        s.add(sequence(3, 2))


def test_the_end_of_generation_token_ends_and_is_not_output() -> None:
    s = scheduler()
    s.add(sequence(1, 2, stops=frozenset({9})))
    run(s, planned(s))
    (update,) = run(s, planned(s), token=9)
    assert (update.event.token_ids, update.event.finish_reason, update.event.stop_token_id) == ((), "stop", 9)
    assert not s.has_work


def test_min_tokens_forbids_the_end_until_then() -> None:
    s = scheduler()
    s.add(sequence(1, 2, params={"min_tokens": 1}, stops=frozenset({9})))
    plan = planned(s)
    assert s.sampling(plan).rows[0].stop_token_ids == {9}
    run(s, plan)
    plan = planned(s)
    assert s.sampling(plan).rows[0].stop_token_ids == frozenset()
    assert run(s, plan, token=9)[0].event.finish_reason == "stop"


def test_the_last_token_is_reported_with_its_reason() -> None:
    s = scheduler()
    s.add(sequence(1, 3, max_tokens=2))
    assert run(s, planned(s))[0].event.finish_reason is None
    (update,) = run(s, planned(s))
    assert (update.event.token_ids, update.event.finish_reason) == ((7,), "length")


def logprob(token_id: int) -> TokenLogprobs:
    return TokenLogprobs(token_id, -float(token_id))


def score(s: Scheduler) -> list[Update]:
    """Run to the end with prompt log-probabilities that say which token they are for."""
    updates = []
    while s.has_work:
        plan = planned(s)
        rows = s.sampling(plan).rows
        assert [r.num_logits for r in rows] == [c.num_logits for c in plan.chunks if c.num_logits]
        updates += s.commit(
            plan,
            [Sampled((7,) * r.num_samples, None, tuple(map(logprob, r.prompt_targets))) for r in rows],
        )
    return updates


@pytest.mark.parametrize("prompt", [1, 2, 15, 16, 17, 40])
@pytest.mark.parametrize("max_tokens", [0, 2])
def test_a_scored_prompt_has_every_token_after_the_first_once(prompt: int, max_tokens: int) -> None:
    s = scheduler()
    seq = sequence(0, prompt, max_tokens, params={"prompt_logprobs": 0}, wants_prompt_logprobs=True)
    s.add(seq)
    updates = score(s)
    assert updates[0].event.prompt_logprobs == tuple(map(logprob, range(1, prompt)))
    assert all(u.event.prompt_logprobs is None for u in updates[1:])
    assert [t for u in updates for t in u.event.token_ids] == [7] * max_tokens
    assert updates[-1].event.finish_reason == "length"


def test_a_preempted_scoring_goes_on_where_it_was() -> None:
    s = scheduler()
    seq = sequence(0, 40, 2, params={"prompt_logprobs": 0}, wants_prompt_logprobs=True)
    s.add(seq)
    for _ in range(2):
        plan = planned(s)
        rows = s.sampling(plan).rows
        s.commit(plan, [Sampled((), None, tuple(map(logprob, r.prompt_targets))) for r in rows])
    assert len(seq.scored) == 32
    s.isolate()
    plan = planned(s)
    assert (plan.chunks[0].start, plan.chunks[0].num_logits) == (0, 0)  # these were scored before
    s.commit(plan, [])
    assert score(s)[0].event.prompt_logprobs == tuple(map(logprob, range(1, 40)))


def test_after_a_failed_step_sequences_run_alone_until_each_has_given_a_token() -> None:
    s = scheduler()
    for i in (1, 2, 3):
        s.add(sequence(i, 3))
    run(s, planned(s))
    planned(s)
    s.isolate()
    s.check()
    s.add(sequence(4, 3))
    alone = []
    for _ in range(3):
        plan = planned(s)
        alone.append(shape(plan))
        run(s, plan)
    assert alone == [[(1, 0, 4)], [(2, 0, 4)], [(3, 0, 4)]]
    assert shape(planned(s)) == [(1, 4, 5), (2, 4, 5), (3, 4, 5), (4, 0, 3)]


def test_suspects_that_do_not_fit_with_the_cleared_wait_for_them() -> None:
    s = scheduler(blocks=5)
    for i in (1, 2):
        s.add(sequence(i, 7, max_tokens=8))
    run(s, planned(s))
    run(s, planned(s))
    s.isolate()
    finished = []
    while s.has_work:
        plan = planned(s)
        finished += [u.seq_id for u in run(s, plan) if u.event.finish_reason]
    assert finished == [1, 2]


def test_a_suspect_behind_a_preempted_sequence_still_runs_alone() -> None:
    s = scheduler(blocks=7)
    for i, prompt in ((1, 7), (2, 7), (3, 3)):
        s.add(sequence(i, prompt, max_tokens=8))
    run(s, planned(s))
    s.isolate()
    seen = []
    while s.has_work:
        plan = planned(s)
        seen.append(shape(plan))
        run(s, plan)
    assert seen[:3] == [[(1, 0, 8)], [(2, 0, 8)], [(1, 8, 9), (2, 8, 9)]]
    # 2 was preempted by 1 and is before the suspect in line, which runs alone all the same.
    alone, again = seen.index([(3, 0, 3)]), seen.index([(3, 4, 5), (2, 4, 13)])
    assert alone < again


def test_a_sequence_cancelled_while_its_step_runs_is_left_out() -> None:
    s = scheduler()
    s.add(sequence(1, 3))
    s.add(sequence(2, 3))
    plan = planned(s)
    s.cancel(1)
    assert [u.seq_id for u in run(s, plan)] == [2]
    s.cancel(1)
    s.cancel(99)


@pytest.mark.parametrize("answers", [[], [TOKEN, TOKEN, TOKEN], [TOKEN, Sampled(())]])
def test_answers_that_do_not_match_the_plan_change_nothing(answers: list[Sampled]) -> None:
    s = scheduler()
    s.add(sequence(1, 3))
    s.add(sequence(2, 3))
    plan = planned(s)
    with pytest.raises(EngineError, match=r"step 1"):
        s.commit(plan, answers)
    assert [q.num_tokens for q in s.running] == [3, 3]
    assert [q.num_computed_tokens for q in s.running] == [0, 0]


def test_history_is_given_to_the_sampler_only_for_penalties() -> None:
    s = scheduler()
    s.add(sequence(1, [5, 6]))
    s.add(sequence(2, [5, 6], params={"frequency_penalty": 0.5}))
    run(s, planned(s))
    first, second = s.sampling(planned(s)).rows
    assert (first.history, second.history, second.prompt_len, second.position) == ((), (5, 6, 7), 2, 3)


def test_prompts_of_a_model_with_slots_are_cut_where_a_snapshot_is_needed() -> None:
    s = scheduler(slots=True, max_num_batched_tokens=32)
    s.add(sequence(1, 20, boundaries=(7, 19, 40)))
    seen = []
    for _ in range(4):
        plan = planned(s)
        seen.append((shape(plan)[0][1:], plan.moves))
        run(s, plan)
    assert [cut for cut, _ in seen] == [(0, 7), (7, 19), (19, 20), (20, 21)]
    assert seen[1][1] == (CopyBlock(0, 2, 3), CopySlot(1, 2))  # 7 is inside a block
    assert seen[2][1] == (CopyBlock(0, 6, 7), CopySlot(1, 3))


def test_the_same_prompt_again_computes_its_last_token_only() -> None:
    for slots in (True, False):
        s = scheduler(slots=slots, max_num_batched_tokens=64)
        s.add(sequence(1, 21))
        while s.has_work:
            run(s, planned(s))
        s.add(sequence(2, [100 + i for i in range(21)]))
        assert shape(planned(s)) == [(2, 20, 21)]
        assert (s.running[0].num_cached_tokens, s.cache_counts["hit_tokens"]) == (20, 20)


def test_the_next_turn_of_a_chat_computes_what_is_new_and_nothing_else() -> None:
    s = scheduler(slots=True, max_num_batched_tokens=64)
    first = sequence(1, 18, max_tokens=5)
    s.add(first)
    while s.has_work:
        run(s, planned(s))
    s.add(sequence(2, [*first.token_ids, 9, 9, 9]))
    assert shape(planned(s)) == [(2, 22, 25)]  # the last token of the reply was never computed


def test_two_equal_prompts_at_the_same_time_are_computed_once() -> None:
    s = scheduler(slots=True, max_num_batched_tokens=64)
    s.add(sequence(1, 20))
    s.add(sequence(2, [100 + i for i in range(20)]))
    seen = []
    for _ in range(3):
        plan = planned(s)
        seen.append(shape(plan))
        run(s, plan)
    assert seen == [[(1, 0, 19)], [(1, 19, 20), (2, 19, 20)], [(1, 20, 21), (2, 20, 21)]]


def test_choices_share_the_prompt_and_copy_the_block_they_write() -> None:
    s = scheduler(max_num_batched_tokens=64)
    tokens = list(range(22))
    choices = [sequence(i, tokens) for i in (1, 2, 3)]
    for choice in choices:
        choice.request_id = "r"
    s.add(*choices)
    run(s, planned(s))
    plan = planned(s)
    assert shape(plan) == [(1, 22, 23), (2, 21, 22), (3, 21, 22)]
    tables = [chunk.blocks[0] for chunk in plan.chunks]
    assert tables[0][:5] == tables[1][:5] == tables[2][:5]
    assert len({table[5] for table in tables}) == 3
    assert sum(isinstance(move, CopyBlock) for move in plan.moves) == 3  # one to keep, one for each


def test_different_salts_share_nothing() -> None:
    s = scheduler(slots=True, max_num_batched_tokens=64)
    for i, salt in enumerate(("a", "b", "a")):
        s.add(sequence(i, list(range(20)), cache_salt=salt))
        while s.has_work:
            run(s, planned(s))
    assert s.cache_counts == {"new": 2, "hit": 1, "asked_tokens": 60, "hit_tokens": 19}


def test_without_a_prefix_cache_only_choices_of_a_request_share() -> None:
    s = scheduler(slots=True, max_num_batched_tokens=64, cache=CacheOptions(shares=False))
    tokens = list(range(20))
    s.add(sequence(1, tokens))
    while s.has_work:
        run(s, planned(s))
    again = [sequence(2, tokens), sequence(3, tokens)]
    again[1].request_id = "r2"
    s.add(*again)
    assert shape(planned(s)) == [(2, 0, 19)]


def test_a_lower_priority_number_runs_first_and_waiting_makes_up_for_it() -> None:
    now = 0.0
    s = scheduler(max_num_seqs=1, clock=lambda: now)
    s.add(sequence(1, 3, priority=1))
    s.add(sequence(2, 3, priority=0))
    s.add(sequence(3, 3, priority=-1))
    now = 31.0
    s.add(sequence(4, 3, priority=0))  # one level is worth half a minute
    order = []
    while s.has_work:
        order += [u.seq_id for u in run(s, planned(s)) if u.event.finish_reason]
    assert order == [3, 2, 1, 4]


def test_prompts_are_cut_so_that_running_replies_do_not_wait_too_long() -> None:
    costs = StepCosts()
    for tokens in (1, 64, 128) * 9:
        costs.observe(tokens, 0.001 * tokens)
    limits = dict(max_num_batched_tokens=128, max_model_len=500, max_step_s=0.05)
    s = scheduler(blocks=1000, costs=costs, **limits)
    s.add(sequence(1, 128, max_tokens=50))
    plan = planned(s)
    assert shape(plan) == [(1, 0, 128)]  # no client waits for this one
    run(s, plan)
    s.add(sequence(2, 200))
    plan = planned(s)
    assert 45 <= plan.num_tokens <= 50


def test_reply_that_is_not_streamed_cuts_no_prompt() -> None:
    costs = StepCosts()
    for tokens in (1, 64, 128) * 9:
        costs.observe(tokens, 0.001 * tokens)
    s = scheduler(blocks=1000, costs=costs, max_num_batched_tokens=128, max_model_len=500, max_step_s=0.05)
    s.add(sequence(1, 8, max_tokens=50, is_watched=False))
    run(s, planned(s))
    s.add(sequence(2, 200))
    plan = planned(s)
    assert shape(plan) == [(1, 8, 9), (2, 0, 127)]
    run(s, plan)
    s.add(sequence(3, 8, max_tokens=50))
    run(s, planned(s))
    s.add(sequence(4, 200))
    assert 45 <= planned(s).num_tokens <= 50  # the third is streamed


def test_preempted_sequence_is_saved_or_computed_again_whichever_is_faster() -> None:
    for byte_s, swaps in ((1e-9, 1), (1.0, 0)):
        costs = StepCosts()
        costs.observe(8, 0.01)
        costs.observe_moved(1, byte_s)
        cache = CacheOptions(block_nbytes=(64,), host_nbytes=10_000)
        s = scheduler(blocks=5, costs=costs, cache=cache)
        s.add(sequence(1, 7, max_tokens=8))
        s.add(sequence(2, 7, max_tokens=8))
        finished, moves = [], []
        while s.has_work:
            plan = planned(s)
            moves += [type(move) for move in plan.moves]
            finished += [u.seq_id for u in run(s, plan) if u.event.finish_reason]
        assert finished == [1, 2]
        assert (s.num_preemptions, s.num_swaps) == (1, swaps)
        assert moves == [Save, Load, Drop] * swaps
        assert s.stats()["host_nbytes"] == 0


def test_right_draft_tokens_count_and_wrong_ones_are_computed_again() -> None:
    for slots in (True, False):
        s = scheduler(slots=slots)
        s.add(sequence(1, 5, max_tokens=12))
        while s.running == [] or s.running[0].num_tokens == 5:
            run(s, planned(s))
        plan = s.plan({1: (7, 7, 8)})
        assert plan is not None
        assert (shape(plan), plan.chunks[0].num_logits) == ([(1, 5, 9)], 4)
        (row,) = s.sampling(plan).rows
        assert (row.num_samples, row.position, row.draft) == (4, 6, (7, 7, 8))
        (update,) = s.commit(plan, [Sampled((7, 7, 7, 9))])
        s.check()
        assert (update.event.token_ids, update.num_drafted, update.num_accepted) == ((7, 7, 7), 3, 2)
        # Recurrent state cannot be cut: the tokens that were right are computed again.
        assert shape(planned(s)) == [(1, 5, 9) if slots else (1, 8, 9)]


def test_an_end_inside_of_a_draft_cuts_the_rest() -> None:
    s = scheduler(slots=True)
    s.add(sequence(1, 5, max_tokens=12, stops=frozenset({9})))
    while s.running == [] or s.running[0].is_prefilling:
        run(s, planned(s))
    plan = s.plan({1: (7, 9, 7)})
    assert plan is not None
    (update,) = s.commit(plan, [Sampled((7, 9, 7, 7))])
    assert (update.event.token_ids, update.event.finish_reason, update.event.stop_token_id) == (
        (7,),
        "stop",
        9,
    )
    s.check()
    assert not s.running


def test_memory_that_was_lost_is_found_by_a_repair() -> None:
    s = scheduler(slots=True)
    s.add(sequence(1, 10))
    run(s, planned(s))
    s.memory.pools.blocks[0].take(2)  # a fault of ours
    with pytest.raises(AssertionError):
        s.check()
    assert "references" in s.repair()
    s.check()
    assert s.repair() == ""
    while s.has_work:
        run(s, planned(s))


def test_sequences_past_their_deadline_are_named() -> None:
    s = scheduler()
    s.add(sequence(1, 3, deadline=5.0), sequence(2, 3), sequence(3, 3, deadline=9.0))
    assert (s.expire(4.9), s.expire(5.0), s.expire(100.0)) == ([], [1], [1, 3])
