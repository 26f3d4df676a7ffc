"""Steps that do more than one token for each sequence: sequences are swapped, draft tokens are checked."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from plait.engine.metric_registry import make_registry
from plait.schedule.costs import StepCosts
from plait.schedule.drafts.governor import DraftGovernor
from plait.schedule.drafts.turns import DraftRequest
from plait.schedule.speculate import Speculation
from tests.engine.hash_model import HOST, VOCAB, Reader, engine, finish, oracle, prompts, request


class Costs(StepCosts):
    """Records what is reported to it."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[int] = []
        self.moved: list[int] = []

    def observe(self, num_tokens: int, seconds: float) -> None:
        self.steps.append(num_tokens)
        super().observe(num_tokens, seconds)

    def observe_moved(self, nbytes: int, seconds: float) -> None:
        self.moved.append(nbytes)
        super().observe_moved(nbytes, seconds)


def test_texts_are_the_same_when_sequences_are_swapped_out_and_in_and_costs_are_learned() -> None:
    costs = Costs()
    costs.move_s = lambda nbytes: 0.0  # type: ignore[method-assign]
    e, reader = engine(blocks=26, length=70, cache=HOST, costs=costs), Reader()
    given = prompts(20)
    for i, prompt in enumerate(given):
        e.submit(request(f"r{i}", prompt, max_tokens=20), reader)
    finish(e)
    for i, prompt in enumerate(given):
        assert reader.tokens(f"r{i}") == oracle(prompt, 20)
    assert e.stats()["num_swaps"] > 0
    plans = e.runner.plans  # type: ignore[attr-defined]
    saves = [any(type(move).__name__ in {"Save", "Load"} for move in plan.moves) for plan in plans]
    assert len(costs.moved) == sum(saves) > 0
    assert all(nbytes > 0 for nbytes in costs.moved)
    assert costs.steps == [plan.num_tokens for plan, moves in zip(plans, saves, strict=True) if not moves]
    assert e.metrics.num_steps == len(plans)
    assert sum(trace.num_preemptions for trace in reader.traces) == e.stats()["num_preemptions"]


class Teacher:
    """Drafts from the oracle's text; every so many tokens it is wrong. `forgotten`: ids that ended."""

    def __init__(self, prompts: Mapping[int, Sequence[int]], wrong_every: int) -> None:
        self.texts = {seq_id: [*p, *oracle(p, 40)] for seq_id, p in prompts.items()}
        self.wrong_every, self.forgotten = wrong_every, list[int]()

    def propose(self, wanted: Sequence[DraftRequest]) -> Mapping[int, tuple[int, ...]]:
        found = {}
        for one in wanted:
            start = len(one.token_ids)
            text = self.texts[one.seq_id][start : start + one.limit]
            found[one.seq_id] = tuple(
                (t + 1) % VOCAB if (start + i) % self.wrong_every == 0 else t for i, t in enumerate(text)
            )
        return found

    def forget(self, seq_id: int) -> None:
        self.forgotten.append(seq_id)


def speculating(given: Sequence[Sequence[int]], wrong_every: int, **limits: Any) -> tuple[Any, Teacher]:
    costs = StepCosts()
    teacher = Teacher(dict(enumerate(given, 1)), wrong_every)
    speculation = Speculation(teacher, costs, 4, replays=True)
    e = engine(costs=costs, options={"speculation": speculation}, slots=10, **limits)
    e.scheduler.costs = costs
    costs.observe = lambda num_tokens, seconds: None  # type: ignore[method-assign]  # costs stay unknown
    return e, teacher


@pytest.mark.parametrize("wrong_every", [2, 3, 5, 1000])
def test_texts_are_the_same_with_draft_tokens(wrong_every: int) -> None:
    given = prompts(6)
    (e, teacher), reader = speculating(given, wrong_every), Reader()
    for i, prompt in enumerate(given):
        e.submit(request(f"r{i}", prompt, max_tokens=25), reader)
    finish(e)
    for i, prompt in enumerate(given):
        assert reader.tokens(f"r{i}") == oracle(prompt, 25)
        assert reader.ends(f"r{i}") == ["length"]
    assert sorted(teacher.forgotten) == [1, 2, 3, 4, 5, 6]
    metrics = e.metrics
    assert metrics.num_output_tokens == 25 * 6
    assert metrics.num_drafted_tokens == sum(trace.num_drafted_tokens for trace in reader.traces) > 0
    assert metrics.num_accepted_tokens == sum(trace.num_accepted_tokens for trace in reader.traces)
    assert metrics.num_accepted_tokens < metrics.num_drafted_tokens or wrong_every == 1000
    assert (
        make_registry(metrics.families).get_sample_value("plait_inter_token_latency_seconds_count") == 24 * 6
    )
    if wrong_every == 1000:
        assert metrics.num_accepted_tokens > 0
        assert max(len(event.token_ids) for event in reader.events["r0", 0]) > 1


@pytest.mark.parametrize("cut", range(6))
def test_end_inside_a_right_draft_cuts_the_rest(cut: int) -> None:
    prompt = [3, 1, 4]
    expected = oracle(prompt, 20)
    stop = expected[8 + cut]
    first = expected.index(stop)
    (e, _), reader = speculating([prompt], 1000), Reader()
    e.submit(request("r", prompt, frozenset({stop}), max_tokens=20), reader)
    finish(e)
    assert reader.tokens("r") == expected[:first]
    assert (reader.last("r").finish_reason, reader.last("r").stop_token_id) == ("stop", stop)
    assert reader.traces[-1].num_output_tokens == first


def test_prompt_in_the_same_plans_does_not_keep_the_drafts_of_one_reply_off() -> None:
    """Drafts do not pay for two sequences and pay for one, while the prompt of the second is computed."""

    class ForOne(DraftGovernor):
        def choose(self, num_sequences: int) -> int:
            return 4 if num_sequences == 1 else 0

        def is_measuring(self, num_sequences: int) -> bool:
            return False

    given = [[3, 1, 4], [1, 5, 9], [*range(1, 61)]]
    limits = {"max_num_batched_tokens": 40, "max_step_s": 0.010, "length": 120}
    (e, _), reader = speculating(given, 1000, **limits), Reader()
    for tokens in (1, 8, 16, 32):  # the whole prompt is more than a step may have
        StepCosts.observe(e.scheduler.costs, tokens, 0.009 + 0.0001 * tokens)
    e.speculation.governor = ForOne([4])
    e.submit(request("r0", given[0], max_tokens=40), reader)
    e.submit(request("r1", given[1], max_tokens=4), reader)
    while "r1" in e.open_requests:
        e.step()
    assert e.speculation.is_resting
    e.submit(request("r2", given[2], max_tokens=3), reader)
    before = len(e.runner.plans)
    finish(e)
    plans = [plan for plan in e.runner.plans[before:] if any(c.seq_id == 3 for c in plan.chunks)]
    lengths = [{c.seq_id: len(c.token_ids) for c in plan.chunks} for plan in plans]
    with_prompt = [found for found in lengths if found[3] > 4]
    assert len(with_prompt) > 1
    assert all(found[1] > 1 for found in with_prompt), with_prompt
    assert reader.tokens("r0") == oracle(given[0], 40)


def test_speculation_that_fails_is_switched_off_and_costs_no_reply(caplog: pytest.LogCaptureFixture) -> None:
    given = prompts(3)
    (e, teacher), reader = speculating(given, 1000), Reader()

    def broken(*_: object) -> None:
        raise RuntimeError("the draft model is gone")

    teacher.forget = broken  # type: ignore[method-assign,assignment]
    for i, prompt in enumerate(given):
        e.submit(request(f"r{i}", prompt, max_tokens=4 + i), reader)
    with caplog.at_level(logging.ERROR, "plait.engine"):
        finish(e)
    for i, prompt in enumerate(given):
        assert reader.tokens(f"r{i}") == oracle(prompt, 4 + i)
    assert e.speculation is None
    assert ["speculation failed" in r.getMessage() for r in caplog.records] == [True]
