"""The drafter over a model's memory: which rows and tables it keeps, and what it gives the head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from plait.request import SamplingParams
from plait.runner.host.assistant import MOST_SEEN, AssistantDrafter
from plait.runner.host.mtp import HiddenOnHost
from plait.schedule.drafts.turns import DraftRequest
from plait.schedule.plan import Chunk, SamplingRow, StepPlan

GREEDY = SamplingParams(temperature=0.0)


@dataclass
class RecordingPasses:
    """A head that says which rows and tables it was given; a hidden state is its position."""

    seen: list[tuple[Chunk, float]] = field(default_factory=list)
    error: Exception | None = None

    def run(
        self, plan: StepPlan, rows: Sequence[Tensor], sampling: Sequence[SamplingRow], length: int
    ) -> list[tuple[int, ...]]:
        if self.error:
            raise self.error
        for chunk, row in zip(plan.chunks, rows, strict=True):
            assert len(row) == len(chunk.token_ids) == 1
            self.seen.append((chunk, float(row[0, 0])))
        return [tuple(range(row.position, row.position + length)) for row in sampling]


class Bench:
    """A drafter with a model of which hidden states are positions. Token i of a text is i."""

    def __init__(self, places: int = 2) -> None:
        self.passes, self.store = RecordingPasses(), object()
        self.drafter = AssistantDrafter(places, self._make)
        self.drafter.begin(self.store)

    def _make(self, store: object) -> tuple[RecordingPasses, HiddenOnHost]:
        assert store is self.store
        return self.passes, HiddenOnHost(2, 1, MOST_SEEN)

    def step(self, *chunks: tuple[int, int, int], wrong: int = 0, logits: int = 1, pooled: int = 0) -> None:
        """The model computes (sequence, start, end), of which the last `wrong` tokens are none of the text.
        Tables are named by the sequence and the end."""
        made, hidden = [], []
        for s, start, end in chunks:
            ids = (*range(start, end - wrong), *[-1] * wrong)
            made.append(Chunk(s, start, ids, ((s, end),), 0, logits, pooled))
            hidden.append(torch.arange(start, end).float())
        self.drafter.observe(StepPlan(1, tuple(made)), torch.cat(hidden)[:, None])

    def ask(self, count: int, seq_id: int = 1, limit: int = 3) -> tuple[int, ...]:
        """A draft for a sequence of so many tokens."""
        one = DraftRequest(seq_id, list(range(count)), limit, GREEDY, 0)
        return self.drafter.propose([one]).get(seq_id, ())

    def computed(self) -> list[tuple[int, tuple[int, ...], tuple[object, ...], float]]:
        """(start, tokens, tables, hidden state) of every chunk since the last call."""
        found = [(chunk.start, chunk.token_ids, chunk.blocks, row) for chunk, row in self.passes.seen]
        self.passes.seen.clear()
        return found


def test_head_goes_on_from_the_state_before_the_last_token() -> None:
    """Its place is that of the token before, which is the last that the model has computed."""
    bench = Bench()
    bench.step((1, 0, 4))
    assert bench.ask(5) == (5, 6, 7)
    assert bench.computed() == [(3, (4,), ((1, 4),), 3.0)]


@pytest.mark.parametrize("right", [0, 1, 3])
def test_head_goes_on_behind_the_last_right_token_of_a_draft(right: int) -> None:
    bench = Bench()
    bench.step((1, 4, 8), wrong=3 - right)
    assert bench.ask(6 + right) == (6 + right, 7 + right, 8 + right)
    assert bench.computed() == [(4 + right, (5 + right,), ((1, 8),), 4.0 + right)]


def test_rows_of_a_long_chunk_are_its_last() -> None:
    bench = Bench()
    bench.step((2, 0, 5), (1, 0, 3 * MOST_SEEN))
    assert bench.ask(3 * MOST_SEEN + 1)
    assert bench.computed()[0][3] == 3 * MOST_SEEN - 1
    assert bench.ask(2 * MOST_SEEN) == ()


def test_no_draft_is_made_from_what_is_not_known() -> None:
    bench = Bench()
    assert bench.ask(5) == ()
    bench.step((1, 0, 4), logits=0)  # in the middle of a prompt
    bench.step((2, 0, 4), pooled=4)
    assert (bench.ask(5), bench.ask(5, seq_id=2)) == ((), ())
    bench.step((1, 4, 8))
    assert (bench.ask(5), bench.ask(10), bench.ask(9, limit=0)) == ((), (), ())
    bench.step((1, 4, 8), wrong=2)
    assert bench.ask(9) == ()  # the token before the last is another one


def test_sequences_without_history_come_last() -> None:
    bench = Bench()
    bench.step((1, 0, 1), (2, 0, 4))
    wanted = [DraftRequest(s, list(range(n)), 1 + s, GREEDY, 0) for s, n in ((1, 2), (2, 5))]
    assert bench.drafter.propose(wanted) == {1: (2, 3), 2: (5, 6, 7)}
    assert [start for start, *_ in bench.computed()] == [3, 0]


def test_place_of_the_sequence_without_drafts_for_longest_is_given_away() -> None:
    bench = Bench()
    bench.step((1, 0, 4), (2, 0, 4))
    bench.ask(5)
    bench.step((3, 0, 4))
    assert bench.ask(5)
    assert bench.ask(5, seq_id=3)
    assert bench.ask(5, seq_id=2) == ()
    bench.drafter.forget(1)
    bench.drafter.forget(1)
    bench.step((2, 0, 4))
    assert bench.ask(5, seq_id=2)
    assert bench.ask(5, seq_id=3)


def test_nothing_is_kept_while_it_rests() -> None:
    bench = Bench()
    bench.drafter.rest(True)
    bench.step((1, 0, 4))
    assert bench.ask(5) == ()
    bench.drafter.rest(False)
    bench.step((1, 4, 5))
    assert bench.ask(6)


def test_failures_come_with_the_next_draft_and_leave_the_step() -> None:
    bench = Bench()
    bench.drafter.observe(StepPlan(1, (Chunk(1, 0, (0, 1), (), 0, 1),)), torch.ones(2, 3))
    with pytest.raises(ValueError, match="broadcast"):
        bench.ask(3)
    other = Bench()
    other.step((1, 0, 4))
    other.passes.error = RuntimeError("no numbers")
    with pytest.raises(RuntimeError, match="no numbers"):
        other.ask(5)
