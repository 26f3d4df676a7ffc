from __future__ import annotations

import logging
import random
from dataclasses import replace
from itertools import count
from typing import Any

import pytest

from plait.engine.metric_registry import make_registry
from plait.errors import CapacityError, ContextTooLong, DeviceLost, EngineError, InvalidField, QueueFull
from plait.request import Event
from plait.schedule.plan import CopyBlock, CopySlot, Done, Load, SamplingBatch, Save, StepPlan, Ticket
from tests.engine.hash_model import (
    HOST,
    VOCAB,
    HashModel,
    Reader,
    engine,
    finish,
    oracle,
    prompts,
    request,
)


@pytest.mark.parametrize("budget", [4, 7, 16, 1000])
@pytest.mark.parametrize("seqs", [1, 2, 4])
def test_the_text_is_the_same_whatever_the_batch_and_the_chunks(seqs: int, budget: int) -> None:
    e, reader = engine(max_num_seqs=seqs, max_num_batched_tokens=budget), Reader()
    given = prompts(12)
    for i, prompt in enumerate(given):
        e.submit(request(f"r{i}", prompt, max_tokens=i), reader)
    finish(e)
    for i, prompt in enumerate(given):
        assert reader.tokens(f"r{i}") == oracle(prompt, i)
        assert reader.ends(f"r{i}") == ["length"]


def test_the_text_is_the_same_when_memory_is_short_and_sequences_are_computed_again() -> None:
    e, reader = engine(blocks=26, max_num_seqs=4, length=70), Reader()
    given = prompts(20)
    for i, prompt in enumerate(given):
        e.submit(request(f"r{i}", prompt, max_tokens=20), reader)
    finish(e)
    assert e.stats()["num_preemptions"] > 0
    for i, prompt in enumerate(given):
        assert reader.tokens(f"r{i}") == oracle(prompt, 20)


def test_a_model_that_is_not_causal_says_the_same() -> None:
    e, reader = engine(causal=False, max_num_batched_tokens=60, length=60), Reader()
    for i, prompt in enumerate(prompts(8)):
        e.submit(request(f"r{i}", prompt), reader)
    finish(e)
    for i, prompt in enumerate(prompts(8)):
        assert reader.tokens(f"r{i}") == oracle(prompt, 5)


@pytest.mark.parametrize("seed", range(5))
def test_random_cancels_free_all_and_disturb_no_request(seed: int) -> None:
    rng = random.Random(seed)
    e, reader, given = engine(blocks=40), Reader(), prompts(60, seed)
    todo, cancelled = list(enumerate(given)), set()
    while todo or e.has_work:
        if todo and rng.random() < 0.5:
            i, prompt = todo.pop()
            e.submit(request(f"r{i}", prompt, max_tokens=12, n=rng.choice([1, 1, 3])), reader)
        e.step()
        if e.open_requests and rng.random() < 0.15:
            name = rng.choice(e.open_requests)
            e.cancel(name)
            cancelled.add(name)
        e.scheduler.check()
    finish(e)
    assert len(cancelled) > 5
    for i, prompt in enumerate(given):
        tokens = reader.tokens(f"r{i}")
        assert tokens == oracle(prompt, 12)[: len(tokens)]
        if f"r{i}" not in cancelled:
            assert len(tokens) == 12


def test_engine_emits_prompt_progress_after_each_chunk_before_the_first_token() -> None:
    e, reader = engine(max_num_batched_tokens=16), Reader()
    e.submit(replace(request("r", range(40), n=2), shows_progress=True), reader)
    e.submit(request("silent", range(40)), reader)
    finish(e)
    events = reader.events["r", 0]
    shown = [event.prompt_progress for event in events if event.prompt_progress is not None]
    assert len(shown) >= 3
    assert [num_done for num_done, _ in shown] == sorted({num_done for num_done, _ in shown})
    assert shown[-1][0] == 40
    assert all(seconds >= 0 for _, seconds in shown)
    assert all(event.prompt_progress is None for event in events[len(shown) :])
    for key in (("r", 1), ("silent", 0)):
        assert all(event.prompt_progress is None for event in reader.events[key])


def test_choices_are_sequences_with_seeds_of_their_own() -> None:
    e, reader = engine(), Reader()
    e.submit(request("r", [1, 2, 3], n=3, seed=5), reader)
    finish(e)
    assert reader.tokens("r", 0) == oracle([1, 2, 3], 5, seed=5)
    assert len({tuple(reader.tokens("r", i)) for i in range(3)}) == 3
    assert reader.ends("r") == ["length"] * 3


def test_without_a_seed_every_request_has_another() -> None:
    e, reader = engine(), Reader()
    for i in range(8):
        e.submit(request(f"r{i}", [1, 2], seed=None), reader)
    finish(e)
    assert len({tuple(reader.tokens(f"r{i}")) for i in range(8)}) > 1


def test_a_choice_ended_by_its_reader_counts_as_stopped_and_the_others_go_on() -> None:
    e, reader = engine(), Reader()
    e.submit(request("r", [1, 2, 3], n=3), reader)
    e.step()
    e.cancel("r", 1)
    finish(e)
    assert [len(reader.tokens("r", i)) for i in range(3)] == [5, 1, 5]
    assert sorted(reader.ends("r")) == ["length", "length", "stop"]
    assert sorted(trace.finish_reason for trace in reader.traces) == ["length", "length", "stop"]


@pytest.mark.parametrize("steps", range(5))
def test_cancel_works_in_every_phase_and_says_so_once(steps: int) -> None:
    e, reader = engine(), Reader()
    e.submit(request("r", range(40)), reader)
    for _ in range(steps):
        e.step()
    e.cancel("r")
    e.cancel("r")
    e.cancel("unknown")
    assert reader.ends("r") == ["cancelled"]
    finish(e)


def test_reader_may_cancel_its_request_during_an_event() -> None:
    e, seen = engine(), []

    def on_event(event: Event) -> None:
        seen.append((event.index, event.finish_reason))
        e.cancel("r")

    e.submit(request("r", [1], n=2), on_event)
    finish(e)
    assert seen == [(0, None), (0, "cancelled"), (1, "cancelled")]


def test_broken_reader_ends_only_its_own_request(caplog: pytest.LogCaptureFixture) -> None:
    e, reader = engine(), Reader()

    def broken(event: Event) -> None:
        raise RuntimeError("the pipe is gone")

    e.submit(request("bad", [1], n=2), broken)
    e.submit(request("good", [2]), reader)
    finish(e)
    assert reader.tokens("good") == oracle([2], 5)
    (record,) = (r for r in caplog.records if r.exc_info)
    assert "the reader of bad failed" in record.getMessage()
    assert "the pipe is gone" in caplog.text


def test_generation_ends_at_the_context() -> None:
    e, reader = engine(length=10), Reader()
    e.submit(request("r", range(7), max_tokens=None), reader)
    e.submit(request("s", range(7), max_tokens=50), reader)
    finish(e)
    assert reader.tokens("r") == reader.tokens("s") == oracle(range(7), 3)
    assert reader.ends("r") == ["length"]


def test_stop_token_ends_the_reply_and_is_reported_apart() -> None:
    e, reader = engine(), Reader()
    expected = oracle([1, 2], 5)
    e.submit(request("r", [1, 2], frozenset({expected[2]})), reader)
    finish(e)
    last = reader.events["r", 0][-1]
    assert reader.tokens("r") == expected[:2]
    assert (last.finish_reason, last.stop_token_id, last.token_ids) == ("stop", expected[2], ())


def test_scoring_ends_after_the_prompt_without_a_token() -> None:
    e, reader = engine(), Reader()
    e.submit(request("r", range(40), max_tokens=0, prompt_logprobs=0), reader)
    e.submit(request("one", [3], max_tokens=0, prompt_logprobs=0), reader)
    e.submit(request("none", [3], max_tokens=0), reader)
    finish(e)
    (event,) = reader.events["r", 0]
    assert [lp.token_id for lp in event.prompt_logprobs or ()] == list(range(1, 40))
    assert (event.token_ids, event.finish_reason) == ((), "length")
    assert reader.events["one", 0][0].prompt_logprobs == ()
    assert reader.events["none", 0][0].prompt_logprobs is None


REFUSED = [
    (dict(prompt=[1, VOCAB]), InvalidField, r"token id 97 is not one of this model's 0\.\.96"),
    (dict(prompt=range(20)), ContextTooLong, r"length is 20 tokens\. However, you requested 21 tokens"),
]


@pytest.mark.parametrize(("options", "kind", "message"), REFUSED)
def test_what_cannot_be_honoured_is_refused(options: Any, kind: type[Exception], message: str) -> None:
    e, reader = engine(length=20), Reader()
    with pytest.raises(kind, match=message):
        e.submit(request("r", **options), reader)
    assert not reader.events
    finish(e)


def test_a_prompt_that_fills_the_context_can_be_scored() -> None:
    e, reader = engine(length=20), Reader()
    e.submit(request("r", range(20), max_tokens=0), reader)
    finish(e)
    assert reader.ends("r") == ["length"]


def test_a_request_that_is_refused_by_events_counts_as_an_error_for_each_choice() -> None:
    e, reader = engine(), Reader()
    e.refuse(request("r", [1], n=3), reader, CapacityError("not now"))
    found = make_registry(e.metrics.families).get_sample_value(
        "plait_requests_total", {"finish_reason": "error"}
    )
    assert reader.ends("r") == ["error"] * 3
    assert found == 3


def test_a_request_larger_than_the_memory_is_refused_at_once() -> None:
    e = engine(blocks=8)
    with pytest.raises(CapacityError, match=r"44 tokens needs 11 blocks and there are 7"):
        e.submit(request("r", range(40)), Reader())


def test_ids_in_use_are_refused_and_a_full_queue_says_so() -> None:
    e, reader = engine(max_waiting=0, max_num_seqs=1), Reader()
    e.submit(request("r", [1]), reader)
    with pytest.raises(InvalidField, match="in use"):
        e.submit(request("r", [1]), reader)
    with pytest.raises(QueueFull):
        e.submit(request("s", [1]), reader)
    finish(e)
    e.submit(request("r", [1]), reader)
    finish(e)


def test_a_sequence_that_breaks_the_step_fails_alone() -> None:
    poisoned = 66
    model = HashModel(lambda chunk: poisoned in chunk.token_ids)
    e, reader = engine(model), Reader()
    given = [[1, 2, 3], list(range(20)), [4, poisoned, 5], [7]]
    expected = [oracle(prompt, 5) for prompt in given]
    for i, prompt in enumerate(given):
        e.submit(request(f"r{i}", prompt), reader)
    finish(e)
    for i in (0, 1, 3):
        if poisoned not in expected[i]:
            assert reader.tokens(f"r{i}") == expected[i]
    (event,) = reader.events["r2", 0]
    assert event.finish_reason == "error"
    assert isinstance(event.error, EngineError)
    assert isinstance(event.error.__cause__, ZeroDivisionError)
    assert "the chip is on fire" in str(event.error)


def test_fault_of_a_whole_batch_fails_no_request() -> None:
    """A step that fails once is repeated from scratch: no token is lost, none is sent twice."""
    faults = iter([False] * 9 + [True] + [False] * 30 + [True] + [False] * 10_000)
    e, reader, given = engine(HashModel(lambda chunk: next(faults))), Reader(), prompts(6)
    e.submit(request("first", [1, 2]), reader)
    for i, prompt in enumerate(given):
        e.submit(request(f"r{i}", prompt, prompt_logprobs=0), reader)
    finish(e)
    assert not next(faults)
    for i, prompt in enumerate(given):
        assert reader.tokens(f"r{i}") == oracle(prompt, 5)
        first = reader.events[f"r{i}", 0][0]
        assert [lp.token_id for lp in first.prompt_logprobs or ()] == prompt[1:]


def test_an_error_of_ours_is_passed_on_as_it_is() -> None:
    class Refuses:
        def launch(self, plan: StepPlan, sampling: SamplingBatch) -> Ticket:
            raise EngineError("the model computed nan")

    e, reader = engine(Refuses()), Reader()
    for i in range(3):
        e.submit(request(f"r{i}", [1], n=2), reader)
    finish(e)
    for i in range(3):
        assert [str(es[0].error) for (r, _), es in reader.events.items() if r == f"r{i}"] == [
            "the model computed nan"
        ] * 2


def test_a_lost_gpu_ends_the_engine_and_no_request_is_tried_again_or_blamed() -> None:
    class Lost:
        num_calls = 0

        def launch(self, plan: StepPlan, sampling: SamplingBatch) -> Ticket:
            self.num_calls += 1
            raise DeviceLost("the GPU cuda:0 was lost in a step")

    runner, reader = Lost(), Reader()
    e = engine(runner)
    for i in range(3):
        e.submit(request(f"r{i}", [1]), reader)
    with pytest.raises(DeviceLost):
        e.step()
    assert runner.num_calls == 1
    assert len(e.open_requests) == 3, "another engine replays them"
    assert not reader.events


def test_a_runner_that_answers_too_little_is_a_fault_of_the_step() -> None:
    class Silent:
        def launch(self, plan: StepPlan, sampling: SamplingBatch) -> Ticket:
            return Done([])

    e, reader = engine(Silent()), Reader()
    e.submit(request("r", [1]), reader)
    finish(e)
    assert "0 answers for 1 chunks" in str(reader.events["r", 0][0].error)


def test_dead_engine_reports_to_every_request() -> None:
    e, reader = engine(), Reader()
    e.submit(request("r", [1], n=2), reader)
    e.fail_all(EngineError("gone"))
    assert reader.ends("r") == ["error", "error"]
    assert not e.open_requests


def test_a_sequence_that_always_fails_where_memory_is_moved_is_not_tried_for_ever() -> None:
    e, reader = engine(HashModel(moves_break=lambda plan: bool(plan.moves))), Reader()
    e.submit(request("long", range(60)), reader)
    e.submit(request("short", [5]), reader)
    finish(e)
    assert isinstance(reader.last("long").error, EngineError)
    assert "out of memory" in str(reader.last("long").error)
    assert reader.tokens("short") == oracle([5], 5)


def test_a_sequence_that_failed_leaves_nothing_for_others_to_find() -> None:
    e, reader = engine(HashModel(lambda chunk: chunk.start > 20)), Reader()
    e.submit(request("bad", range(40)), reader)
    finish(e)
    assert reader.ends("bad") == ["error"]
    assert e.stats()["num_cached_blocks"] == e.stats()["num_snapshots"] == 0
    assert e.metrics.num_failed_steps > 0
    assert (
        make_registry(e.metrics.families).get_sample_value("plait_requests_total", {"finish_reason": "error"})
        == 1
    )


@pytest.mark.parametrize("kinds", [(Save, Load), (Save, Load, CopySlot, CopyBlock)])
def test_moves_that_fail_are_nobodys_fault(kinds: Any) -> None:
    """Every seventh plan that moves memory so fails, and no reply suffers."""
    seen = count()

    def breaks(plan: StepPlan) -> bool:
        moves = any(isinstance(move, kinds) for move in plan.moves)
        return moves and next(seen) % 7 == 0

    model = HashModel(moves_break=breaks)
    e, reader = engine(model, blocks=26, length=70, cache=HOST, max_num_seqs=3), Reader()
    given = prompts(8)
    for i, prompt in enumerate(given):
        e.submit(request(f"r{i}", prompt, max_tokens=20), reader)
    finish(e)
    assert e.metrics.num_failed_steps > 0
    for i, prompt in enumerate(given):
        assert reader.tokens(f"r{i}") == oracle(prompt, 20)


def test_audit_repairs_logs_and_counts_wrong_block_tables(caplog: pytest.LogCaptureFixture) -> None:
    e, reader = engine(), Reader()
    assert e.audit() == ""
    e.submit(request("r", range(20)), reader)
    e.step()
    e.scheduler.memory.pools.blocks[0].take(3)  # held by no sequence
    with caplog.at_level(logging.ERROR, "plait.engine"):
        assert e.audit()
    assert e.metrics.num_repairs == 1
    assert any("block tables were wrong" in r.getMessage() for r in caplog.records)
    e.scheduler.check()
    finish(e)
    assert reader.tokens("r") == oracle(range(20), 5)
    assert e.audit() == ""
