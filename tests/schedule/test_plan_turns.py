"""Which plans have several speculative turns, and what they leave in a sequence and its memory."""

from __future__ import annotations

from typing import Any

import pytest

from plait.schedule.costs import StepCosts
from plait.schedule.drafts.turns import FEW_TURNS, TurnsEnd
from plait.schedule.plan import Sampled, StepPlan
from plait.schedule.scheduler import Scheduler
from plait.schedule.sequence import TokenSequence
from tests.schedule.test_multi_step import quick
from tests.schedule.test_scheduler import planned, run, scheduler, sequence

DRAFT = (50, 51)


def world(costs: StepCosts | None = None, **options: Any) -> Scheduler:
    limits = {"num_steps": 8, "num_streamed_steps": 8, "num_turns": 8, "max_model_len": 200}
    s = scheduler(costs=costs or quick(), **{**limits, "max_num_seqs": 12, **options})
    s.memory.keeps_rows = True
    return s


def drafting(s: Scheduler, seq: TokenSequence, draft: tuple[int, ...] = DRAFT) -> StepPlan:
    """The plan with a draft behind the first token."""
    s.add(seq)
    while seq.num_output_tokens == 0:
        run(s, planned(s))
    plan = s.plan({seq.id: draft})
    assert plan is not None
    return plan


def end(plan: StepPlan, earlier: tuple[int, ...], last: tuple[int, ...], num_turns: int) -> list[Sampled]:
    """What a runner answers that chose the second row's state in the turn before the last."""
    (chunk,) = plan.chunks
    slots = (chunk.slot, *chunk.row_slots)
    if slots[-1]:
        slots = (slots[1], slots[0], *slots[2:])
    ended = TurnsEnd(num_turns, len(earlier), (60, 61), slots[0], slots[1:])
    return [Sampled((*earlier, *last), turns=ended)]


@pytest.mark.parametrize("slots", [False, True])
def test_turns_bring_all_tokens_before_the_last_draft_and_its_right_ones(slots: bool) -> None:
    s, seq = world(slots=slots), sequence(1, 6, 60)
    plan = drafting(s, seq)
    known, start = seq.num_tokens, seq.num_computed_tokens
    assert plan.turns is not None
    assert plan.turns.most > 2
    assert len(plan.chunks[0].blocks[0]) * 4 >= start + plan.turns.num_rows
    answers = end(plan, (50, 7, 50, 51, 8), (60, 9, 9), 3)  # 2, 3 tokens, and the last turn: one is right
    (update,) = s.commit(plan, answers)
    s.check()
    assert update.event.token_ids == (50, 7, 50, 51, 8, 60, 9)
    assert (update.num_drafted, update.num_accepted) == (6, 1 + 2 + 1)
    assert (seq.num_tokens, seq.num_computed_tokens) == (known + 7, known + 6)
    assert seq.draft == ()
    if slots:  # the state behind the first right draft token
        assert seq.slot == answers[0].turns.row_slots[1]  # type: ignore[union-attr]


@pytest.mark.parametrize("slots", [False, True])
def test_end_in_the_last_turn_leaves_memory_whole(slots: bool) -> None:
    s, seq = world(slots=slots), sequence(1, 6, 60, stops=frozenset({99}))
    plan = drafting(s, seq)
    assert plan.turns is not None
    assert plan.turns.stops == (99,)
    (update,) = s.commit(plan, end(plan, (50, 51, 8), (60, 99, 3), 2))
    s.check()
    assert (update.event.token_ids, update.event.finish_reason) == ((50, 51, 8, 60), "stop")
    assert update.event.stop_token_id == 99
    assert not s.has_work or s.plan() is not None


def test_first_turn_alone_is_settled_as_a_step_with_a_draft() -> None:
    s, seq = world(slots=True), sequence(1, 6, 60)
    plan = drafting(s, seq)
    (update,) = s.commit(plan, [Sampled((50, 7, 8))])
    s.check()
    assert update.event.token_ids == (50, 7)


def test_turns_are_no_more_than_the_sequence_can_take() -> None:
    for missing in range(3, 30):
        s, seq = world(), sequence(1, 6, missing)
        plan = drafting(s, seq)
        left = missing - 1  # the first token came with the prompt
        if plan.turns is None:  # the second turn has no space for its rows
            assert left < 4
            continue
        assert plan.turns.num_rows == min(left, 8 * 3)
        assert 2 <= plan.turns.most <= plan.turns.num_rows - 2
        assert len(plan.chunks[0].blocks[0]) * 4 >= seq.num_computed_tokens + plan.turns.num_rows


def test_few_turns_while_their_cost_is_compared() -> None:
    s, seq = world(num_turns=32), sequence(1, 6, 100)
    s.add(seq)
    while seq.num_output_tokens == 0:
        run(s, planned(s))
    plan = s.plan({seq.id: DRAFT}, is_compared=True)
    assert plan is not None
    assert plan.turns is not None
    assert plan.turns.most == FEW_TURNS
    free = drafting(world(num_turns=32), sequence(1, 6, 150))
    assert free.turns is not None
    assert free.turns.most > FEW_TURNS


@pytest.mark.parametrize(
    "options",
    [{"params": p} for p in ({"logprobs": 0}, {"presence_penalty": 0.5}, {"logit_bias": {4: 1.0}})],
)
def test_sequence_that_is_looked_at_has_one_turn(options: dict[str, Any]) -> None:
    assert drafting(world(), sequence(1, 6, 60, **options)).turns is None


def test_one_turn_where_time_memory_or_others_do_not_allow_more() -> None:
    assert drafting(world(quick(0.02)), sequence(1, 6, 60)).turns is None
    assert drafting(world(StepCosts()), sequence(1, 6, 60)).turns is None
    assert drafting(world(num_turns=1), sequence(1, 6, 60)).turns is None
    s = world()
    s.add(sequence(2, 6, 60))
    assert drafting(s, sequence(1, 6, 60)).turns is None
    s = world(slots=True)
    s.memory.keeps_rows = False  # one state, copied before the step
    assert drafting(s, sequence(1, 6, 60)).turns is None
