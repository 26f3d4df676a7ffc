"""The head's drafter: which hidden states it keeps, and what it gives the head to compute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from plait.memory import BlockGroup
from plait.request import SamplingParams
from plait.runner.host.draft_memory import DraftMemory
from plait.runner.host.mtp import MOST_KEPT, HiddenOnHost, MtpDrafter
from plait.schedule.drafts.turns import DraftRequest
from plait.schedule.plan import Chunk, SamplingRow, StepPlan

GREEDY = SamplingParams(temperature=0.0)
LENGTH = 2000


@dataclass
class RecordingPasses:
    """A head that says which hidden states and tokens it was given; a hidden state is its position."""

    seen: list[tuple[Chunk, list[float]]] = field(default_factory=list)
    error: Exception | None = None
    most = 8
    ahead, at_once = 0, False

    def run(
        self, plan: StepPlan, rows: Sequence[Tensor], sampling: Sequence[SamplingRow], length: int
    ) -> list[tuple[int, ...]]:
        if self.error:
            raise self.error
        for chunk, row in zip(plan.chunks, rows, strict=True):
            assert len(row) == len(chunk.token_ids)
            self.seen.append((chunk, row[:, 0].tolist()))
        return [tuple(range(row.position, row.position + length)) for row in sampling]


@dataclass
class RecordingKeeper(RecordingPasses):
    """A head that keeps hidden states as they come."""

    kept: list[tuple[Chunk, list[float]]] = field(default_factory=list)

    def keep(self, plan: StepPlan, rows: Sequence[Tensor]) -> None:
        for chunk, row in zip(plan.chunks, rows, strict=True):
            assert len(row) == len(chunk.token_ids) <= MOST_KEPT
            assert chunk.num_logits == 0
            self.kept.append((chunk, row[:, 0].tolist()))


class Bench:
    """A drafter with a model of which hidden states are positions."""

    def __init__(self, places: int = 2, max_len: int = LENGTH, passes: RecordingPasses | None = None) -> None:
        group = BlockGroup("full", None, ("mtp.layers.0.attn",))
        memory = DraftMemory(
            groups=(group,),
            has_slots=False,
            block_size=16,
            num_places=places,
            max_len=max_len,
            max_step_len=512,
        )
        self.passes = passes or RecordingPasses()
        self.drafter = MtpDrafter(self.passes, memory, HiddenOnHost(places, 1))
        self._step = 0

    def step(self, *chunks: tuple[int, int, int]) -> None:
        """The model computes (sequence, start, end)."""
        self._step += 1
        made = [Chunk(s, start, tuple(range(start, end)), (), 0, 0) for s, start, end in chunks]
        hidden = [torch.arange(start, end).float() for _, start, end in chunks]
        self.drafter.observe(StepPlan(self._step, tuple(made)), torch.cat(hidden)[:, None])

    def ask(self, count: int, seq_id: int = 1, limit: int = 3) -> tuple[int, ...]:
        """A draft for a sequence of `count` tokens, of which token i is i."""
        one = DraftRequest(seq_id, list(range(count)), limit, GREEDY, 0)
        return self.drafter.propose([one]).get(seq_id, ())

    def computed(self) -> list[tuple[int, tuple[int, ...], list[float]]]:
        """(start, tokens, hidden states) of every chunk since the last call."""
        found = [(chunk.start, chunk.token_ids, rows) for chunk, rows in self.passes.seen]
        self.passes.seen.clear()
        return found


def test_head_computes_every_position_with_the_token_behind_it() -> None:
    bench = Bench()
    bench.step((1, 0, 4))
    assert bench.ask(5) == (5, 6, 7)
    assert bench.computed() == [(0, (1, 2, 3, 4), [0, 1, 2, 3])]
    bench.step((1, 4, 8))  # the draft, of which one token was right
    assert bench.ask(7) == (7, 8, 9)
    assert bench.computed() == [(4, (5, 6), [4, 5])]


def test_positions_that_the_model_replays_are_not_computed_again() -> None:
    """After a wrong draft a hybrid computes what was right again, with the next token."""
    bench = Bench()
    bench.step((1, 0, 4))
    bench.ask(5)
    bench.step((1, 4, 8))
    bench.ask(6)
    bench.computed()
    bench.step((1, 4, 6))
    bench.ask(7)
    assert bench.computed() == [(5, (6,), [5])]


def test_head_begins_behind_a_cached_prefix() -> None:
    bench = Bench()
    bench.step((1, 32, 40))
    assert bench.ask(41)
    assert bench.computed() == [(0, tuple(range(33, 41)), [float(i) for i in range(32, 40)])]


def test_head_begins_anew_behind_what_was_not_kept() -> None:
    bench = Bench()
    bench.step((1, 0, 3))
    bench.ask(4)
    bench.computed()
    for at in range(3, 600):  # decodes without a draft
        bench.step((1, at, at + 1))
    assert bench.ask(601)
    ((start, tokens, rows),) = bench.computed()
    assert start == 0
    assert MOST_KEPT // 2 <= len(rows) <= MOST_KEPT
    assert rows == [float(i) for i in range(600 - len(rows), 600)]
    assert tokens == tuple(range(601 - len(rows), 601))


def test_of_a_long_prompt_the_end_is_kept() -> None:
    bench = Bench()
    bench.step((1, 0, 700))
    assert bench.ask(701)
    ((start, tokens, rows),) = bench.computed()
    assert (start, len(rows), rows[-1], tokens[-1]) == (0, MOST_KEPT, 699, 700)


@pytest.mark.parametrize("sizes", [(700,), (100, 200, 400), (256, 1, 443), (699, 1)])
def test_a_head_that_keeps_states_as_they_come_misses_none(sizes: tuple[int, ...]) -> None:
    passes = RecordingKeeper()
    bench, end = Bench(passes=passes), 0
    for size in sizes:
        bench.step((1, end, end + size))
        end += size
    assert bench.ask(701)
    ((start, tokens, rows),) = bench.computed()
    known = [state for _, states in passes.kept for state in states]
    assert [*known, *rows] == [float(i) for i in range(700)]
    assert [chunk.start for chunk, _ in passes.kept] == [int(states[0]) for _, states in passes.kept]
    assert (start, tokens) == (int(rows[0]), tuple(range(start + 1, 701)))


def test_states_that_came_are_kept_once_when_a_prompt_is_computed_again() -> None:
    passes = RecordingKeeper()
    bench = Bench(passes=passes)
    bench.step((1, 32, 500))  # behind a cached prefix
    assert [chunk.start for chunk, _ in passes.kept] == [0, 256]
    for start in (0, 250):  # preempted
        bench.step((1, start, start + 250))
    bench.step((1, 500, 501))
    assert len(passes.kept) == 2
    assert bench.ask(502)
    assert bench.computed() == [(467, (500, 501), [499.0, 500.0])]


def test_prompt_in_chunks_is_kept_whole() -> None:
    bench = Bench()
    for start in range(0, 200, 50):
        bench.step((1, start, start + 50))
    bench.ask(201)
    ((start, _, rows),) = bench.computed()
    assert (start, rows) == (0, [float(i) for i in range(200)])


def test_sequence_that_outgrows_its_place_begins_anew() -> None:
    bench = Bench(max_len=40)
    bench.step((1, 0, 30))
    assert bench.ask(31)
    bench.computed()
    bench.step((1, 30, 40))
    assert bench.ask(41)
    assert bench.computed() == [(0, tuple(range(31, 41)), [float(i) for i in range(30, 40)])]


def test_no_draft_writes_behind_a_place() -> None:
    """All sequences take part in passes as long as the longest draft, also one that is about to end."""
    bench = Bench(max_len=48)
    bench.step((1, 0, 46), (2, 0, 8))
    both = [DraftRequest(s, list(range(n)), limit, GREEDY, 0) for s, n, limit in ((1, 47, 1), (2, 9, 8))]
    assert set(bench.drafter.propose(both)) == {2}
    assert bench.drafter.propose(both[:1]) == {1: (47,)}
    for chunk, _ in bench.passes.seen:
        first = 16 * chunk.blocks[0][0]
        assert all(first <= 16 * block < first + 48 for block in chunk.blocks[0])


def test_repeated_request_computes_nothing() -> None:
    bench = Bench()
    bench.step((1, 0, 4))
    draft = bench.ask(5)
    bench.computed()
    assert bench.ask(5, limit=2) == draft[:2]
    assert bench.computed() == []


def test_preempted_sequence_that_is_computed_again_keeps_its_entries() -> None:
    bench = Bench()
    bench.step((1, 0, 20))
    bench.ask(21)
    bench.computed()
    for start in range(0, 20, 5):
        bench.step((1, start, start + 5))
    bench.step((1, 20, 21))
    bench.ask(22)
    assert bench.computed() == [(20, (21,), [20])]


def test_place_of_the_sequence_without_drafts_for_longest_is_given_away() -> None:
    bench = Bench(places=1)
    bench.step((1, 0, 4))
    assert bench.ask(5)
    bench.step((2, 0, 4))
    assert bench.ask(5, seq_id=2)
    bench.step((1, 4, 5))
    assert bench.ask(6)
    assert bench.computed()[-1] == (0, (5,), [4])


def test_ended_sequence_frees_its_place() -> None:
    bench = Bench(places=1)
    bench.step((1, 0, 4))
    bench.drafter.forget(1)
    assert bench.ask(5) == ()
    bench.step((2, 0, 4))
    assert bench.ask(5, seq_id=2)


def test_failed_pass_is_raised_and_nothing_of_its_state_is_trusted() -> None:
    bench = Bench()
    bench.step((1, 0, 4))
    bench.passes.error = RuntimeError("the head")
    with pytest.raises(RuntimeError, match="the head"):
        bench.ask(5)
    bench.passes.error = None
    assert bench.ask(5) == ()
    bench.step((1, 4, 5))
    assert bench.ask(6)
    assert bench.computed() == [(0, (5,), [4])]


def test_failure_to_keep_hidden_states_fails_no_step() -> None:
    bench = Bench()
    chunk = Chunk(1, 0, (1, 2), (), 0, 1)
    bench.drafter.observe(StepPlan(1, (chunk,)), torch.zeros(2, 3))  # of another width
    with pytest.raises((RuntimeError, ValueError), match=r"shape|size|expand"):
        bench.ask(3)


def test_other_tokens_under_the_same_id_are_not_drafted_for() -> None:
    bench = Bench()
    bench.step((1, 0, 4))
    bench.ask(5)
    one = DraftRequest(1, [9, 9, 9, 9, 9, 9], 3, GREEDY, 0)
    assert bench.drafter.propose([one]) == {}
