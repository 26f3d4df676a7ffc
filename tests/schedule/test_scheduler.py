from __future__ import annotations

from typing import Any

import pytest

from plait.errors import CapacityError, ContextTooLong, EngineError, QueueFull
from plait.memory import BlockGroup
from plait.request import SamplingParams, TokenLogprobs
from plait.schedule.allocation import Allocation
from plait.schedule.plan import Plan, Sampled
from plait.schedule.scheduler import Limits, Scheduler
from plait.schedule.sequence import Phase, Sequence, Update

FULL = BlockGroup("full", None, ("a",))
WINDOW = BlockGroup("window:6", 6, ("b",))
TOKEN = Sampled((7,))


def scheduler(
    *, blocks: int = 100, groups: tuple[BlockGroup, ...] = (FULL,), slots: bool = True, **limits: Any
) -> Scheduler:
    options = dict(max_num_seqs=4, max_num_batched_tokens=16, max_waiting=8, max_model_len=64)
    rules = Limits(**(options | limits))
    memory = Allocation(
        groups,
        [blocks] * len(groups),
        4,
        num_slots=rules.max_num_seqs + 1 if slots else 0,
        max_step_len=rules.max_num_batched_tokens,
        trims=rules.causal,
    )
    return Scheduler(rules, memory)


def sequence(seq_id: int, prompt: int | list[int], max_tokens: int = 4, **options: Any) -> Sequence:
    tokens = [100 * seq_id + i for i in range(prompt)] if isinstance(prompt, int) else prompt
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, **options.pop("params", {}))
    stops = options.pop("stops", frozenset())
    return Sequence(
        seq_id, f"r{seq_id}", 0, list(tokens), params, stops, max_len=len(tokens) + max_tokens, **options
    )


def planned(s: Scheduler) -> Plan:
    plan = s.plan()
    assert plan is not None
    s.check()
    return plan


def run(s: Scheduler, plan: Plan, token: int = 7) -> list[Update]:
    updates = s.commit(plan, [Sampled((token,))] * sum(c.num_logits > 0 for c in plan.chunks))
    s.check()
    return updates


def shape(plan: Plan) -> list[tuple[int, int, int]]:
    return [(c.seq_id, c.start, c.end) for c in plan.chunks]


def test_nothing_to_do_is_no_plan() -> None:
    assert scheduler().plan() is None


def test_a_prompt_longer_than_the_budget_is_computed_in_pieces_and_only_the_last_has_logits() -> None:
    s = scheduler()
    s.add(sequence(1, 40))
    seen = []
    for _ in range(3):
        plan = planned(s)
        seen += [(c.start, c.end, c.num_logits) for c in plan.chunks]
        updates = run(s, plan)
    assert seen == [(0, 16, 0), (16, 32, 0), (32, 40, 1)]
    assert [u.token_ids for u in updates] == [(7,)]
    assert shape(planned(s)) == [(1, 40, 41)]


def test_decodes_come_first_and_never_wait_for_a_prompt() -> None:
    s = scheduler()
    s.add(sequence(1, 40))
    run(s, planned(s))
    s.add(sequence(2, 3))
    run(s, planned(s))
    run(s, planned(s))  # 1 has 8 tokens left, 2 is admitted beside it
    assert shape(planned(s)) == [(1, 40, 41), (2, 3, 4)]


def test_a_late_decode_stands_before_an_earlier_prompt_in_the_plan() -> None:
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
    s = scheduler(max_num_seqs=1)
    s.add(sequence(1, 2, max_tokens=2))
    s.add(sequence(2, 2, max_tokens=1))
    fresh = []
    while s.has_work:
        plan = planned(s)
        fresh.append((plan.chunks[0].seq_id, plan.fresh))
        run(s, plan)
    assert fresh == [(1, (1,)), (1, ()), (2, (1,))]


def test_a_model_without_slots_has_slot_zero_and_nothing_fresh() -> None:
    s = scheduler(slots=False)
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
    assert s.stats()["num_free_blocks"] == s.stats()["num_blocks"] == 198


def test_a_model_that_is_not_causal_computes_the_whole_sequence_at_every_step() -> None:
    s = scheduler(causal=False, groups=(FULL, WINDOW))
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


def test_a_prompt_that_can_never_fit_is_refused_with_both_numbers() -> None:
    s = scheduler(blocks=5)
    with pytest.raises(ContextTooLong, match=r"65 tokens and the longest sequence is 64"):
        s.add(sequence(1, 65, max_tokens=0))
    with pytest.raises(CapacityError, match=r"17 tokens needs 5 blocks and there are 4"):
        s.add(sequence(2, 14))
    with pytest.raises(ContextTooLong, match=r"17 tokens and the longest sequence is 16 .*one piece"):
        scheduler(causal=False).add(sequence(3, 17, max_tokens=1))
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
    assert (update.token_ids, update.finish_reason, update.stop_token_id) == ((), "stop", 9)
    assert not s.has_work


def test_min_tokens_forbids_the_end_until_then() -> None:
    s = scheduler()
    s.add(sequence(1, 2, params={"min_tokens": 1}, stops=frozenset({9})))
    plan = planned(s)
    assert s.sampling(plan).rows[0].stop_token_ids == {9}
    run(s, plan)
    plan = planned(s)
    assert s.sampling(plan).rows[0].stop_token_ids == frozenset()
    assert run(s, plan, token=9)[0].finish_reason == "stop"


def test_the_last_token_is_reported_with_its_reason() -> None:
    s = scheduler()
    s.add(sequence(1, 3, max_tokens=2))
    assert run(s, planned(s))[0].finish_reason is None
    (update,) = run(s, planned(s))
    assert (update.token_ids, update.finish_reason) == ((7,), "length")


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
    assert updates[0].prompt_logprobs == tuple(map(logprob, range(1, prompt)))
    assert all(u.prompt_logprobs is None for u in updates[1:])
    assert [t for u in updates for t in u.token_ids] == [7] * max_tokens
    assert updates[-1].finish_reason == "length"


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
    assert score(s)[0].prompt_logprobs == tuple(map(logprob, range(1, 40)))


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


def test_suspects_that_do_not_fit_beside_the_cleared_wait_for_them() -> None:
    s = scheduler(blocks=5)
    for i in (1, 2):
        s.add(sequence(i, 7, max_tokens=8))
    run(s, planned(s))
    run(s, planned(s))
    s.isolate()
    finished = []
    while s.has_work:
        plan = planned(s)
        finished += [u.seq_id for u in run(s, plan) if u.finish_reason]
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
    again = seen.index([(2, 0, 13)])  # preempted by 1, and now before the suspect, without it
    assert seen[again + 1] == [(3, 0, 3)]


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
