"""`LLM`, the entry point of Python, on the small hybrid that is in the repository."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from plait import LLM, SamplingParams
from plait.engine.admission import ServiceOptions
from plait.errors import BadGrammar, ConfigError, ContextTooLong, InvalidField
from plait.llm.outputs import CompletionOutput
from plait.request import Request

GREEDY = SamplingParams(max_tokens=12, temperature=0.0)


@pytest.fixture(scope="module")
def llm(nano_hybrid: Path) -> Iterator[LLM]:
    with LLM(str(nano_hybrid), device="cpu", max_num_batched_tokens=32, max_num_seqs=8) as loaded:
        yield loaded


def test_text_and_its_token_ids_are_one_prompt(llm: LLM) -> None:
    text = "And it came to pass"
    by_text = llm.generate(text, GREEDY)[0]
    by_ids = llm.generate(by_text.prompt_token_ids, GREEDY)[0]
    assert by_ids.outputs[0].token_ids == by_text.outputs[0].token_ids
    assert (by_text.prompt, by_ids.prompt) == (text, None)
    assert by_text.finished
    assert by_text.outputs[0].finish_reason == "length"
    assert len(by_text.outputs[0].token_ids) == 12


def test_many_prompts_give_what_each_gives_alone(llm: LLM) -> None:
    prompts = ["In the beginning", "And the king said " * 9, "Fear not", "Behold, " * 30]
    together = [out.outputs[0].text for out in llm.generate(prompts, GREEDY)]
    alone = [llm.generate(prompt, GREEDY)[0].outputs[0].text for prompt in prompts]
    assert together == alone


def test_choices_of_a_seed_differ_and_repeat(llm: LLM) -> None:
    params = SamplingParams(n=3, seed=5, temperature=1.0, max_tokens=10)
    first, again = (llm.generate("The LORD", params)[0].outputs for _ in range(2))
    assert [c.text for c in first] == [c.text for c in again]
    assert len({c.text for c in first}) == 3
    assert [c.index for c in first] == [0, 1, 2]


def test_scores_are_the_log_probabilities_of_the_logits(llm: LLM) -> None:
    prompt = "And God said, Let there be light: and there was light."
    logits = llm.logits(prompt)
    ids = llm.front.prepare(prompt, GREEDY).prompt_token_ids
    assert logits.shape == (len(ids), llm.spec.vocab_size)
    assert logits.dtype is torch.float32
    want = logits.log_softmax(-1)[torch.arange(len(ids) - 1), torch.tensor(ids[1:])]
    torch.testing.assert_close(torch.tensor(llm.score(prompt)[0]), want, rtol=0, atol=1e-4)


def test_logprobs_have_the_shape_that_users_know(llm: LLM) -> None:
    params = SamplingParams(max_tokens=6, temperature=0.0, logprobs=2, prompt_logprobs=1)
    result = llm.generate("The children of", params)[0]
    out = result.outputs[0]
    assert out.logprobs is not None
    assert len(out.logprobs) == len(out.token_ids)
    for token_id, entry in zip(out.token_ids, out.logprobs, strict=True):
        assert entry[token_id].rank == 1  # greedy takes the most likely
        assert len(entry) == 2
        assert max(e.logprob for e in entry.values()) == entry[token_id].logprob <= 0
    assert (
        "".join(entry[i].decoded_token for i, entry in zip(out.token_ids, out.logprobs, strict=True))
        == out.text
    )
    assert result.prompt_logprobs is not None
    assert result.prompt_logprobs[0] is None
    for token_id, entry in zip(result.prompt_token_ids[1:], result.prompt_logprobs[1:], strict=True):
        assert entry is not None
        assert token_id in entry


def test_a_stop_string_ends_the_text_before_it(llm: LLM) -> None:
    whole = (
        llm.generate("And it came to pass", SamplingParams(max_tokens=30, temperature=0.0))[0].outputs[0].text
    )
    stop = whole[10:14]
    params = SamplingParams(max_tokens=30, temperature=0.0, stop=(stop,))
    out = llm.generate("And it came to pass", params)[0].outputs[0]
    assert out.text == whole[: whole.index(stop)]
    assert (out.finish_reason, out.stop_reason) == ("stop", stop)


def test_chat_answers_and_stops(llm: LLM) -> None:
    out = llm.chat(
        [{"role": "user", "content": "Who are you?"}], SamplingParams(temperature=0.0, max_tokens=60)
    )
    assert out[0].outputs[0].text.strip()
    assert "<|" not in out[0].outputs[0].text
    assert out[0].outputs[0].finish_reason == "stop"


def test_streamed_text_is_the_whole_text(llm: LLM) -> None:
    # Long enough that a reader who falls behind, and is given several tokens at once, has not all at once.
    params = SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True)
    pieces = list(llm.stream("In the beginning", params))
    assert "".join(p.text for p in pieces) == llm.generate("In the beginning", params)[0].outputs[0].text
    assert pieces[-1].finish_reason == "length"
    assert len(pieces) > 3


def test_limits_are_reported_with_both_numbers(llm: LLM) -> None:
    with pytest.raises(ContextTooLong, match=r"is 512 tokens.*\(700 in"):
        llm.generate([5] * 700, GREEDY)
    with pytest.raises(InvalidField, match=r"token id 4096 is not one of this model's 0\.\.4095"):
        llm.generate([1, 4096], GREEDY)
    with pytest.raises(InvalidField, match="it is empty"):
        llm.generate("", GREEDY)
    with pytest.raises(InvalidField, match="a list of 2 was given, and there are 1 prompts"):
        llm.generate(["a"], [GREEDY, GREEDY])
    with pytest.raises(InvalidField, match=r"a dict of 1 was given.*give one SamplingParams"):
        llm.generate("a", {"max_tokens": 2})


def test_an_option_that_does_not_exist_is_refused(nano_hybrid: Path) -> None:
    with pytest.raises(ConfigError, match="gpu_memory_utilization"):
        LLM(str(nano_hybrid), gpu_memory_utilization=0.9)


def test_nothing_is_left_after_close(nano_hybrid: Path) -> None:
    before = set(threading.enumerate())
    model = LLM(str(nano_hybrid), device="cpu")
    model.generate("And", GREEDY)
    stats = dict(model.front.stats())
    model.close()
    model.close()
    assert set(threading.enumerate()) <= before
    assert all(value == 0 for key, value in stats.items() if "running" in key or "waiting" in key)


def test_best_of_returns_the_most_likely_per_token(llm: LLM) -> None:
    asked = {"seed": 5, "temperature": 1.0, "max_tokens": 10}
    every = llm.generate("The LORD", SamplingParams(n=6, logprobs=0, **asked))[0].outputs

    def mean(out: CompletionOutput) -> float:
        assert out.logprobs is not None
        pairs = zip(out.token_ids, out.logprobs, strict=True)
        return sum(entry[i].logprob for i, entry in pairs) / len(out.token_ids)

    wanted = sorted(every, key=mean, reverse=True)[:2]
    ranked = llm.generate("The LORD", SamplingParams(n=2, best_of=6, **asked))[0].outputs
    assert [out.token_ids for out in ranked] == [out.token_ids for out in wanted]
    assert [(out.index, out.logprobs) for out in ranked] == [(0, None), (1, None)]
    told = llm.generate("The LORD", SamplingParams(n=1, best_of=6, logprobs=1, **asked))[0].outputs
    assert [out.text for out in told] == [wanted[0].text]
    assert told[0].logprobs is not None
    chat = llm.chat([{"role": "user", "content": "Who are you?"}], SamplingParams(best_of=3, **asked))[0]
    assert len(chat.outputs) == 1


def test_a_best_of_that_would_have_to_wait_is_not_streamed(llm: LLM) -> None:
    with pytest.raises(InvalidField, match="best_of: 3 choices are ranked at their end"):
        llm.stream("And", SamplingParams(best_of=3))
    with pytest.raises(InvalidField, match="best_of: 3 choices"):
        llm.stream_chat([{"role": "user", "content": "Hi"}], SamplingParams(best_of=3))
    assert list(llm.stream("And", SamplingParams(best_of=1, max_tokens=2)))


def test_terms_are_for_all_prompts_and_priorities_for_each(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Request] = []
    submit = llm.front.submit
    monkeypatch.setattr(llm.front, "submit", lambda r, *how: (seen.append(r), submit(r, *how))[1])
    params = SamplingParams(max_tokens=1)
    llm.generate(["And", "The"], params, cache_salt="me", priority=[2, -1], timeout_s=600)
    llm.chat([{"role": "user", "content": "Hi"}], params, cache_salt="you", priority=4)
    list(llm.stream("And", params, terms=ServiceOptions(cache_salt="us")))
    assert [(r.cache_salt, r.priority, r.timeout_s) for r in seen] == [
        ("me", 2, 600),
        ("me", -1, 600),
        ("you", 4, None),
        ("us", 0, None),
    ]
    with pytest.raises(InvalidField, match="priority: 1 were given for 2 prompts"):
        llm.generate(["And", "The"], params, priority=[1])
    with pytest.raises(InvalidField, match="cache_salt: "):
        llm.generate("And", params, cache_salt="")


def test_only_a_stream_is_observed(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    submit = llm.front.loop.submit
    monkeypatch.setattr(llm.front.loop, "submit", lambda r, on: (seen.append(r.watched), submit(r, on))[1])
    params = SamplingParams(max_tokens=2)
    llm.generate("And", params)
    llm.chat([{"role": "user", "content": "Hi"}], params)
    list(llm.stream("And", params))
    assert seen == [False, False, True]


def test_a_result_says_where_its_time_went_and_what_was_cached(llm: LLM) -> None:
    prompt = "And the king said unto his servants, Behold. " * 6
    first, second = (llm.generate(prompt, SamplingParams(n=2, max_tokens=3))[0] for _ in range(2))
    assert 0 <= first.num_cached_tokens < second.num_cached_tokens < len(second.prompt_token_ids)
    for result in (first, second):
        assert result.metrics is not None
        assert result.metrics.num_cached_tokens == result.num_cached_tokens
        assert [out.trace and out.trace.index for out in result.outputs] == [0, 1]
        assert result.metrics.num_output_tokens == 3


def test_a_stop_string_leaves_a_trace_too(llm: LLM) -> None:
    whole = llm.generate("And it came to pass", SamplingParams(max_tokens=30, temperature=0.0))[0]
    stop = whole.outputs[0].text[10:14]
    params = SamplingParams(max_tokens=30, temperature=0.0, stop=(stop,))
    assert llm.generate("And it came to pass", params)[0].outputs[0].trace is not None


def test_conversations_share_the_system_message_and_those_of_other_tenants_do_not(llm: LLM) -> None:
    system = {"role": "system", "content": "You are a prophet of old. " * 8}
    asked = [[system, {"role": "user", "content": text}] for text in ("Who are you?", "Is it far?")]
    first, second = (llm.front.prepare_chat(messages, GREEDY) for messages in asked)
    shared = first.boundaries[0]
    assert first.prompt_token_ids[:shared] == second.prompt_token_ids[:shared]
    assert first.prompt_token_ids[shared] != second.prompt_token_ids[shared]
    for salt in ("one tenant", "another"):
        cached = [llm.chat(messages, GREEDY, cache_salt=salt)[0].num_cached_tokens for messages in asked]
        assert cached == [0, shared]


def test_a_reply_is_what_was_requested(llm: LLM) -> None:
    asked = SamplingParams(max_tokens=40, temperature=0.0, structured_outputs={"regex": "[a-c]{3}-[0-9]{2}"})
    (out,) = llm.generate("And the number was", asked)
    assert re.fullmatch("[a-c]{3}-[0-9]{2}", out.outputs[0].text)
    assert out.outputs[0].finish_reason == "stop"
    several = [asked, SamplingParams(max_tokens=12, temperature=0.0)] * 2
    texts = [found.outputs[0].text for found in llm.generate(["And the number was"] * 4, several)]
    assert texts == [texts[0], texts[1]] * 2
    assert texts[0] == out.outputs[0].text
    with pytest.raises(BadGrammar):
        llm.generate("x", SamplingParams(structured_outputs={"regex": "("}))
    choice = SamplingParams(temperature=0.0, structured_outputs={"choice": ["yes", "no"]})
    (answer,) = llm.chat([{"role": "user", "content": "Is it so?"}], choice)
    assert answer.outputs[0].text in ("yes", "no")
