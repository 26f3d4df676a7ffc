"""An engine that launches a step before it has read the last one's tokens gives the same replies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from msgspec import structs

from plait.engine.core import Engine
from plait.errors import EngineError
from plait.schedule.drafts.ngram import NgramProposer
from plait.schedule.plan import FOLLOW, Chunk, Sampled, SamplingBatch, StepPlan, Ticket
from plait.schedule.speculate import Speculation
from tests.engine.hash_model import HOST, HashModel, Reader, engine, finish, oracle, prompts, request


@dataclass
class Late:
    """A ticket of a step that has run, of which the host learns later, even that it failed."""

    answers: list[Sampled]
    error: Exception | None
    on_wait: Callable[[], None]
    can_be_followed: bool = True

    def wait(self) -> list[Sampled]:
        self.on_wait()
        if self.error is not None:
            raise self.error
        return self.answers


class AheadModel(HashModel):
    """A device with a queue: it keeps what it sampled last for each sequence.

    `most`: the most steps that were launched and not waited for. `at_launch`: faults show at once.
    """

    def __init__(self, *args: Any, at_launch: bool = False) -> None:
        super().__init__(*args)
        self.last: dict[int, int] = {}
        self.num_open = self.most = self.num_followed = 0
        self.at_launch = at_launch

    def launch(self, plan: StepPlan, sampling: SamplingBatch) -> Ticket:
        self.num_open += 1
        self.most = max(self.most, self.num_open)
        self.num_followed += sum(c.token_ids == (FOLLOW,) for c in plan.chunks)
        chunks = tuple(
            structs.replace(c, token_ids=(self.last[c.seq_id],)) if c.token_ids == (FOLLOW,) else c
            for c in plan.chunks
        )
        seen, answers, error = StepPlan(plan.step, chunks, plan.moves, plan.fresh), [], None
        try:
            answers = super().launch(seen, sampling).wait()
        except Exception as fault:
            error = fault
            if self.at_launch:
                self.num_open -= 1
                raise
        answering = [c.seq_id for c in plan.chunks if c.has_answer]
        self.last |= {i: a.token_ids[-1] for i, a in zip(answering, answers, strict=False) if a.token_ids}
        return Late(answers, error, self._landed)

    def _landed(self) -> None:
        self.num_open -= 1


def served(e: Engine, given: Sequence[Sequence[int]], max_tokens: int = 15, **options: Any) -> Reader:
    reader = Reader()
    for i, prompt in enumerate(given):
        e.submit(request(f"r{i}", prompt, max_tokens=max_tokens, **options), reader)
    finish(e)
    return reader


@pytest.mark.parametrize("options", [{}, {"blocks": 26, "length": 70, "cache": HOST}, {"max_num_seqs": 2}])
def test_replies_are_the_same_when_steps_are_launched_ahead(options: dict[str, Any]) -> None:
    model, given = AheadModel(), prompts(12)
    reader = served(engine(model, **options), given, 20)
    assert model.most == 2
    assert model.num_followed > 50
    for i, prompt in enumerate(given):
        assert reader.tokens(f"r{i}") == oracle(prompt, 20)
        assert reader.ends(f"r{i}") == ["length"]


def test_a_stop_token_ends_a_reply_though_the_next_step_runs() -> None:
    model, given = AheadModel(), prompts(6)
    e, reader = engine(model), Reader()
    for i, prompt in enumerate(given):
        e.submit(request(f"r{i}", prompt, frozenset({oracle(prompt, 12)[7]}), max_tokens=12), reader)
    finish(e)
    for i, prompt in enumerate(given):
        text = oracle(prompt, 12)
        assert reader.tokens(f"r{i}") == text[: text.index(text[7])]
        assert reader.ends(f"r{i}") == ["stop"]


@pytest.mark.parametrize("at_launch", [False, True])
def test_only_the_sequence_at_fault_fails_when_a_step_ahead_is_dropped(at_launch: bool) -> None:
    given = [[1, 2, 3], [4, 5], [6, 7, 8, 9]]
    bad = oracle(given[1], 6)

    def breaks(chunk: Chunk) -> bool:
        return chunk.seq_id == 2 and chunk.end > len(given[1]) + 3

    model = AheadModel(breaks, at_launch=at_launch)
    e = engine(model)
    reader = served(e, given)
    assert reader.ends("r1") == ["error"]
    assert reader.tokens("r1") == bad[:4]
    for i in (0, 2):
        assert reader.tokens(f"r{i}") == oracle(given[i], 15)
    assert e.metrics.num_failed_steps > 1
    assert model.most >= 2


def test_a_sequence_is_not_blamed_for_a_step_that_it_shared_with_one_that_has_ended() -> None:
    failing = []
    model = AheadModel(lambda chunk: bool(failing) and failing.pop())
    e, reader = engine(model), Reader()
    for name, prompt in (("a", [1, 2, 3]), ("b", [4, 5])):
        e.submit(request(name, prompt, max_tokens=15), reader)
    for _ in range(4):
        e.step()
    failing.append(True)
    e.step()  # both are in the step that is launched now, and fails when it is read
    e.cancel("b")
    finish(e)
    assert e.metrics.num_failed_steps == 1
    assert reader.ends("a") == ["length"]
    assert reader.tokens("a") == oracle([1, 2, 3], 15)


def test_a_fault_of_no_sequence_costs_nothing() -> None:
    faults = iter([False] * 30 + [True] + [False] * 50 + [True] + [False] * 10_000)
    given = prompts(6)
    e = engine(AheadModel(lambda chunk: next(faults)))
    reader = served(e, given)
    assert e.metrics.num_failed_steps == 2
    for i, prompt in enumerate(given):
        assert reader.tokens(f"r{i}") == oracle(prompt, 15)


def test_a_reply_that_is_cancelled_while_its_next_step_runs_leaves_nothing() -> None:
    model = AheadModel()
    e, reader = engine(model), Reader()
    e.submit(request("a", [1, 2], max_tokens=20), reader)
    e.submit(request("b", [3], max_tokens=20), reader)
    for _ in range(4):
        e.step()
    assert model.num_open == 1
    e.cancel("a")
    assert e.has_work
    finish(e)
    assert reader.ends("a") == ["cancelled"]
    assert reader.tokens("a") == oracle([1, 2], 20)[: len(reader.tokens("a"))]
    assert reader.tokens("b") == oracle([3], 20)
    assert model.num_open == 0


def test_the_last_request_that_is_cancelled_leaves_a_step_to_wait_for() -> None:
    model = AheadModel()
    e, reader = engine(model), Reader()
    e.submit(request("a", [1, 2], max_tokens=20), reader)
    e.step()
    e.cancel("a")
    assert not e.open_requests
    assert e.has_work
    finish(e)
    assert model.num_open == 0


def test_requests_in_flight_are_those_of_both_steps() -> None:
    """The supervisor blames them if the process dies."""
    model = AheadModel()
    e, reader = engine(model), Reader()
    seen: list[list[str]] = []
    launch = model.launch

    def watched(plan: StepPlan, sampling: SamplingBatch) -> Ticket:
        seen.append(e.requests_in(plan))
        return launch(plan, sampling)

    model.launch = watched  # type: ignore[method-assign]
    e.submit(request("a", [1, 2], max_tokens=1), reader)
    e.submit(request("b", [3], max_tokens=3), reader)
    finish(e)
    assert seen[:2] == [["a", "b"], ["a", "b"]], "a is in the step that runs, though not in the next"


def test_nothing_is_launched_ahead_with_drafts() -> None:
    model, given = AheadModel(), prompts(3)
    e = engine(model, slots=10)
    e.speculation = Speculation(NgramProposer(), e.scheduler.costs, 3, replays=True)
    reader = served(e, given)
    assert model.most == 1
    for i, prompt in enumerate(given):
        assert reader.tokens(f"r{i}") == oracle(prompt, 15)


def test_a_device_that_answers_too_little_is_a_fault_of_that_step() -> None:
    class Silent(AheadModel):
        def launch(self, plan: StepPlan, sampling: SamplingBatch) -> Ticket:
            ticket = super().launch(plan, sampling)
            assert isinstance(ticket, Late)
            ticket.answers = ticket.answers[:-1]
            return ticket

    reader = served(engine(Silent()), [[1]])
    assert isinstance(reader.last("r0").error, EngineError)
    assert "0 answers for 1 chunks" in str(reader.last("r0").error)
