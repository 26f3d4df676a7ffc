"""Limits of requests, and what an open request reports: events, times, deadlines."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from plait.engine.admission import MAX_CHARS_PER_TOKEN, RequestLimits
from plait.engine.core import Engine
from plait.engine.metric_registry import make_registry
from plait.errors import CapacityError, ContextTooLong, DeadlineExceeded, EngineError, InvalidField
from plait.request import Event, Request, SamplingParams
from plait.schedule.plan import SamplingBatch, StepPlan, Ticket
from tests.engine.hash_model import HashModel, Reader, engine, finish, oracle, request

LIMITS = RequestLimits(vocab_size=97, max_model_len=20, longest=15, may_grow=", or grow")


def prompt_request(prompt: Any, **params: Any) -> Request:
    return Request("r", tuple(prompt), SamplingParams(**{"max_tokens": 1, **params}))


@pytest.mark.parametrize(
    ("prompt", "params", "kind", "message"),
    [
        ([], {}, InvalidField, "prompt: it is empty"),
        ([1, 97], {}, InvalidField, r"prompt: token id 97 is not one of this model's 0\.\.96"),
        ([-1], {}, InvalidField, "prompt: token id -1"),
        ([True], {}, InvalidField, "prompt: token id True"),
        ([None], {}, InvalidField, "prompt: token id None"),
        ([1], {"logit_bias": {97: 1.0}}, InvalidField, "logit_bias: token id 97"),
        ([1], {"stop_token_ids": (97,)}, InvalidField, "stop_token_ids: token id 97"),
        (range(20), {}, ContextTooLong, r"is 20 tokens\. However, you requested 21 tokens \(20 in the"),
        (range(18), {"max_tokens": 9, "min_tokens": 3}, ContextTooLong, r"18 in the prompt, 3 in the comp"),
        (range(21), {"max_tokens": 0}, ContextTooLong, "shorten the prompt to 20 tokens, or grow"),
        (range(16), {}, CapacityError, "16 tokens does not fit, and the longest that does has 15"),
        ([1], {"max_tokens": 16}, CapacityError, "16 tokens does not fit"),
    ],
)
def test_admit_refuses_what_the_model_cannot_serve(
    prompt: Any, params: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        LIMITS.admit(prompt_request(prompt, **params))


@pytest.mark.parametrize(("asked", "most"), [(None, 17), (3, 3), (99, 17), (0, 0)])
def test_admit_makes_max_tokens_what_the_context_has_left(asked: int | None, most: int) -> None:
    roomy = RequestLimits(97, 20)
    admitted = roomy.admit(prompt_request([1, 2, 3], max_tokens=asked))
    assert admitted.params.max_tokens == most
    assert roomy.admit(admitted) is admitted


def test_admit_blames_the_vocabulary_that_wrote_the_prompt() -> None:
    with pytest.raises(InvalidField, match="the vocabulary cl100k_base writes it with token 97"):
        LIMITS.admit(prompt_request([97]), "cl100k_base")


def test_check_chars_refuses_text_that_no_tokenizer_makes_fit() -> None:
    LIMITS.check_chars(20 * MAX_CHARS_PER_TOKEN, "prompt")
    with pytest.raises(ContextTooLong, match=r"21 tokens or more \(1281 characters in the messages\)"):
        LIMITS.check_chars(20 * MAX_CHARS_PER_TOKEN + 1, "messages")


def test_check_count_asks_for_parts() -> None:
    LIMITS.check_count(20, "tokens")
    with pytest.raises(ContextTooLong, match=r"you requested 21 tokens\. Please send them in parts"):
        LIMITS.check_count(21, "tokens")


SHARED = [5, 4, 3, 2, 1, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Timed(HashModel):
    """Takes a second for every step."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock

    def launch(self, plan: StepPlan, sampling: SamplingBatch) -> Ticket:
        self.clock.now += 1.0
        return super().launch(plan, sampling)


def timed(**options: Any) -> tuple[Engine, Clock, Reader]:
    clock = Clock()
    return engine(Timed(clock), options={"clock": clock}, **options), clock, Reader()


def test_last_event_has_the_times_of_its_choice() -> None:
    e, _, reader = timed(max_num_seqs=1)
    e.submit(request("first", [1, 2, 3]), reader)
    e.submit(request("second", [4, 5]), reader, 99.0)
    finish(e)
    assert [event.trace for event in reader.events["second", 0][:-1]] == [None] * 4
    trace = reader.last("second").trace
    assert trace is not None
    assert (trace.request_id, trace.index, trace.finish_reason) == ("second", 0, "length")
    times = (trace.arrival_s, trace.first_scheduled_s, trace.first_token_s, trace.finish_s)
    assert times == (99.0, 105.0, 106.0, 110.0)
    assert (trace.num_prompt_tokens, trace.num_output_tokens, trace.num_steps) == (2, 5, 5)
    assert (trace.num_preemptions, trace.num_drafted_tokens, trace.num_accepted_tokens) == (0, 0, 0)
    sample = make_registry(e.metrics.families).get_sample_value
    assert sample("plait_queue_time_seconds_sum") == 6.0
    assert sample("plait_time_to_first_token_seconds_sum") == 1.0 + 7.0
    assert sample("plait_inter_token_latency_seconds_sum") == 8.0
    assert sample("plait_request_latency_seconds_sum") == 5.0 + 11.0
    assert sample("plait_step_seconds_sum") == sample("plait_steps_total") == 10.0


def test_every_choice_has_a_trace_of_its_own() -> None:
    e, _, reader = timed()
    e.submit(request("r", [1, 2, 3], n=3), reader)
    finish(e)
    assert [reader.last("r", i).trace.index for i in range(3)] == [0, 1, 2]
    assert (
        make_registry(e.metrics.families).get_sample_value(
            "plait_requests_total", {"finish_reason": "length"}
        )
        == 3
    )
    assert make_registry(e.metrics.families).get_sample_value("plait_prompt_tokens_total") == 3


def test_every_event_has_the_number_of_cached_tokens() -> None:
    e, _, reader = timed()
    e.submit(request("a", SHARED), reader)
    finish(e)
    e.submit(request("b", [*SHARED, 50, 51], n=2), reader)
    e.submit(request("salted", [*SHARED, 50, 51], more={"cache_salt": "other"}), reader)
    finish(e)
    assert {event.num_cached_tokens for i in (0, 1) for event in reader.events["b", i]} == {16}
    trace, salted = reader.last("b").trace, reader.last("salted").trace
    assert trace is not None
    assert salted is not None
    assert trace.num_cached_tokens == 16
    assert (salted.num_cached_tokens, salted.miss_cause) == (0, "new")
    assert reader.tokens("b") == reader.tokens("salted") == oracle([*SHARED, 50, 51], 5)
    assert e.metrics.num_cached_tokens == 16  # of the prompt, which counts once
    assert (
        make_registry(e.metrics.families).get_sample_value(
            "plait_prefix_cache_lookups_total", {"cause": "new"}
        )
        == 2
    )


def test_a_request_that_was_never_run_says_so() -> None:
    e, clock, reader = timed()
    e.submit(request("r", [1]), reader)
    clock.now += 3
    e.cancel("r")
    trace = reader.last("r").trace
    assert trace is not None
    assert (trace.first_scheduled_s, trace.first_token_s, trace.num_steps) == (None, None, 0)
    assert trace.finish_s - trace.arrival_s == 3
    assert trace.finish_reason == "cancelled"


def test_a_dead_engine_leaves_traces_too() -> None:
    e, _, reader = timed()
    e.submit(request("r", [1]), reader)
    e.step()
    e.fail_all(EngineError("gone"))
    trace = reader.last("r").trace
    assert trace is not None
    assert trace.finish_reason == "error"


def test_traces_are_logged_without_text(
    caplog: pytest.LogCaptureFixture,
) -> None:
    e, _, reader = timed()
    with caplog.at_level(logging.DEBUG, "plait.trace"):
        for i in range(8):
            e.submit(request(f"r{i}", [91, 92, 93], max_tokens=1), reader)
            finish(e)
    records = [r.getMessage() for r in caplog.records if r.name == "plait.trace"]
    assert len(records) == 8
    assert "request_id='r7'" in records[7]
    assert not any("91" in text or "token_ids" in text for text in records[:80])


def limited(name: str, timeout_s: float, prompt: Any = (1, 2, 3), **params: Any) -> Any:
    return request(name, prompt, more={"timeout_s": timeout_s}, **params)


def refusal(event: Event) -> str:
    assert event.finish_reason == "error"
    assert isinstance(event.error, DeadlineExceeded)
    assert isinstance(event.error, CapacityError)
    assert event.error.status == 504
    assert event.error.code == "deadline_exceeded"
    return str(event.error)


def test_deadline_ends_a_reply_and_keeps_its_tokens() -> None:
    e, _, reader = timed()
    e.submit(limited("late", 2.5, max_tokens=50), reader)
    e.submit(request("other", [7], max_tokens=9), reader)
    finish(e)
    text = refusal(reader.last("late"))
    assert "timeout_s (2.5 s)" in text
    assert "3 tokens were generated until then, and reach those who stream" in text
    assert reader.tokens("late") == oracle([1, 2, 3], 3)
    assert reader.tokens("other") == oracle([7], 9)
    trace = reader.last("late").trace
    assert trace is not None
    assert trace.finish_reason == "error"


def test_a_deadline_ends_a_request_that_still_waits() -> None:
    e, _, reader = timed(max_num_seqs=1)
    e.submit(request("first", [1], max_tokens=20), reader)
    e.submit(limited("late", 3), reader)
    finish(e)
    assert "it was still waiting for its turn" in refusal(reader.last("late"))
    trace = reader.last("late").trace
    assert trace is not None
    assert trace.finish_s == 103.0
    assert reader.tokens("first") == oracle([1], 20)


def test_a_deadline_ends_a_request_while_its_prompt_is_computed() -> None:
    e, _, reader = timed(max_num_batched_tokens=4)
    e.submit(limited("late", 2, list(range(40))), reader)
    finish(e)
    assert "its prompt of 40 tokens was still being computed" in refusal(reader.last("late"))


def test_a_deadline_is_for_every_choice_and_counts_from_the_arrival() -> None:
    e, clock, reader = timed(max_num_seqs=1)
    e.submit(limited("r", 5, n=3), reader, clock.now - 5)
    assert e.step()
    assert not e.step()
    assert reader.ends("r") == ["error"] * 3
    assert not e.open_requests
    assert not e.has_work


def test_who_is_done_in_time_never_hears_of_it() -> None:
    e, _, reader = timed()
    e.submit(limited("r", 5.5), reader)
    finish(e)
    assert reader.ends("r") == ["length"]


def test_a_reader_may_cancel_the_others_when_one_choice_expires() -> None:
    e, clock, seen = engine(), Clock(), []
    e.clock = clock

    def on_event(event: Event) -> None:
        seen.append((event.index, event.finish_reason))
        e.cancel("r")

    e.submit(limited("r", 1, n=2), on_event)
    clock.now += 2
    finish(e)
    assert sorted(seen) == [(0, "error"), (1, "cancelled")]
