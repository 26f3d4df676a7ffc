"""Slots around a draft: the state behind the last right token becomes the sequence's own."""

from __future__ import annotations

import pytest

from plait.memory import BlockGroup
from plait.request import SamplingParams
from plait.schedule.allocation import Allocation
from plait.schedule.branching import branch
from plait.schedule.plan import CopySlot
from plait.schedule.sequence import TokenSequence
from plait.state.blocks import Hit


def opened(num_slots: int) -> tuple[Allocation, TokenSequence]:
    memory = Allocation([BlockGroup("all", None, ("a",))], [9], 4, num_slots=num_slots, max_step_len=16)
    seq = TokenSequence(1, "one", 0, [5] * 6, SamplingParams(), frozenset(), 30, prompt_len=5)
    memory.open(seq, Hit())
    seq.num_computed_tokens = 5
    assert memory.reserve(seq, 9)
    return memory, seq


@pytest.mark.parametrize("right", [0, 1, 2, 3])
def test_sequence_goes_on_with_the_state_behind_its_last_right_draft_token(right: int) -> None:
    memory, seq = opened(14)
    own = seq.slot
    assert branch(memory.pools, seq, 3, keeps_rows=True)
    assert seq.draft_slots is not None
    rows = seq.draft_slots.rows
    assert len({own, *rows}) == 4
    assert not memory.pools.moves
    memory.check([seq], [])
    seq.token_ids += [7] * (right + 1)
    memory.settle(seq, 6 + right, accepted=right == 3)
    assert seq.slot == (*rows, own)[right]
    assert seq.num_computed_tokens == 6 + right
    assert seq.draft_slots is None
    memory.check([seq], [])


@pytest.mark.parametrize(("num_slots", "keeps_rows"), [(9, True), (14, False)])
def test_state_before_the_step_is_copied_where_rows_cannot_be_kept(num_slots: int, keeps_rows: bool) -> None:
    memory, seq = opened(num_slots)
    own = seq.slot
    assert branch(memory.pools, seq, 3, keeps_rows=keeps_rows)
    (move,) = memory.pools.moves
    assert isinstance(move, CopySlot)
    assert move.source == own
    assert seq.draft_slots is not None
    assert seq.draft_slots.rows == ()
    seq.token_ids += [7]
    memory.settle(seq, 6, accepted=False)
    assert seq.slot == move.target
    assert seq.num_computed_tokens == 5, "its tokens are computed again"
    memory.check([seq], [])


def test_without_a_free_slot_there_is_no_draft() -> None:
    memory, seq = opened(2)
    assert not branch(memory.pools, seq, 1, keeps_rows=True)
    assert seq.draft_slots is None


def test_draft_that_is_never_checked_gives_its_slots_back() -> None:
    memory, seq = opened(14)
    branch(memory.pools, seq, 3, keeps_rows=True)
    seq.in_step = 1
    memory.release(seq)
    memory.check([], [])
    assert memory.stats()["num_free_slots"] == 13
