"""The wire contract of /v1/completions."""

from __future__ import annotations

import json
from typing import Any

import pytest


def text_of(answer: Any) -> str:
    assert answer.status == 200, answer.body
    found: str = answer.json["choices"][0]["text"]
    return found


def test_a_completion_has_every_required_key(client: Any) -> None:
    """Points 19 and 32."""
    found = client.complete(max_tokens=4).json
    assert found["object"] == "text_completion"
    assert found["id"].startswith("cmpl-")
    assert found["model"] == client.model
    (choice,) = found["choices"]
    assert {"text", "index", "logprobs", "finish_reason"} <= set(choice)
    assert choice["logprobs"] is None


def test_completions_stop_after_16_tokens(client: Any) -> None:
    """Point 32."""
    answer = client.complete("Hello there " * 20, ignore_eos=True).json
    assert answer["usage"]["completion_tokens"] == 16
    assert answer["choices"][0]["finish_reason"] == "length"


def test_choices_of_several_prompts_are_in_order(client: Any) -> None:
    """Points 33 and 38."""
    prompts = ["One, two", "Red, green", "Mon, Tue"]
    answer = client.complete(prompts, n=2, max_tokens=4).json
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    alone = [client.complete(p, n=2, max_tokens=4).json for p in prompts]
    texts = [choice["text"] for one in alone for choice in one["choices"]]
    assert [choice["text"] for choice in answer["choices"]] == texts
    assert answer["usage"]["prompt_tokens"] == sum(one["usage"]["prompt_tokens"] for one in alone)
    streamed = [""] * 6
    for chunk in client.complete(prompts, n=2, max_tokens=4, stream=True).events:
        streamed[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert streamed == texts


def test_token_ids_are_as_good_as_text(client: Any) -> None:
    """Point 33."""
    ids = client.post("/tokenize", {"prompt": "Hello there"}).json["tokens"]
    text = client.complete("Hello there", max_tokens=6).json["choices"]
    assert client.complete(ids, max_tokens=6).json["choices"] == text
    assert client.complete([ids], max_tokens=6).json["choices"] == text


@pytest.mark.parametrize(
    "prompt",
    [[], [[]], [1, "a"], ["a", 1], [[1], "a"], [-1], [10**9], [10**30], [1.5], [True], 5, {}, [None]],
)
def test_a_wrong_prompt_is_refused(client: Any, prompt: Any) -> None:
    """Point 33."""
    answer = client.complete(prompt, max_tokens=1)
    assert answer.status == 400
    assert answer.error["param"].startswith("prompt")


def test_a_missing_prompt_is_refused(client: Any) -> None:
    """Point 33."""
    for body in ({}, {"prompt": None}):
        answer = client.post("/v1/completions", body)
        assert answer.status == 400
        assert answer.error["param"] == "prompt"


def test_an_empty_prompt_never_fails_the_server(client: Any) -> None:
    """Point 33."""
    assert client.complete("", max_tokens=2).status in {200, 400}


def test_echo_begins_with_the_prompt(client: Any) -> None:
    """Point 34."""
    plain = text_of(client.complete("Hello there", max_tokens=4))
    assert text_of(client.complete("Hello there", max_tokens=4, echo=True)) == "Hello there" + plain
    streamed = client.complete("Hello there", max_tokens=4, echo=True, stream=True).events
    assert "".join(c["choices"][0]["text"] for c in streamed) == "Hello there" + plain


def test_echo_without_generating_scores_the_prompt(client: Any) -> None:
    """Points 34 and 35."""
    answer = client.complete("Hello there", max_tokens=0, echo=True, logprobs=2).json
    (choice,) = answer["choices"]
    assert choice["text"] == "Hello there"
    assert choice["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 0
    lists = choice["logprobs"]
    assert len(lists["tokens"]) == answer["usage"]["prompt_tokens"]
    assert lists["token_logprobs"][0] is lists["top_logprobs"][0] is None
    assert all(value <= 0 for value in lists["token_logprobs"][1:])


def check_lists(choice: dict[str, Any], text: str) -> None:
    lists = choice["logprobs"]
    tokens, values, tops, offsets = (
        lists[name] for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    )
    assert len(tokens) == len(values) == len(tops) == len(offsets)
    assert offsets == sorted(offsets)
    for token, value, top, offset in zip(tokens, values, tops, offsets, strict=True):
        if value is not None:
            assert top[token] == value
        if not token.startswith(("bytes:", "<")):
            assert text[offset:].startswith(token) or text[offset:].startswith(token.lstrip())


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("prompt", ["Hello there", "née 漢字 🙂!"])
def test_logprob_lists_fit_the_text(client: Any, echo: bool, prompt: str) -> None:
    """Points 35, 36 and 41."""
    asked: Any = {"max_tokens": 6, "echo": echo, "logprobs": 3}
    (choice,) = client.complete(prompt, **asked).json["choices"]
    check_lists(choice, choice["text"])
    if not echo:
        assert choice["logprobs"]["text_offset"][0] == 0
    whole: dict[str, list[Any]] = {name: [] for name in choice["logprobs"]}
    text = ""
    for chunk in client.complete(prompt, stream=True, **asked).events:
        text += chunk["choices"][0]["text"]
        for name, values in chunk["choices"][0]["logprobs"].items():
            whole[name] += values
    assert text == choice["text"]
    assert whole == choice["logprobs"]


def test_every_choice_echoes_the_scored_prompt(client: Any) -> None:
    """Point 34."""
    asked: Any = {"n": 3, "max_tokens": 2, "echo": True, "logprobs": 1}
    whole = client.complete("Hello there", **asked).json["choices"]
    assert len({json.dumps(c["logprobs"]["token_logprobs"][:5]) for c in whole}) == 1
    streamed = ["", "", ""]
    for chunk in client.complete("Hello there", stream=True, **asked).events:
        streamed[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert streamed == [choice["text"] for choice in whole]


def test_logprobs_0_reports_the_chosen_token_alone(client: Any) -> None:
    """Point 37."""
    (choice,) = client.complete(max_tokens=3, logprobs=0).json["choices"]
    assert all(len(top) == 1 for top in choice["logprobs"]["top_logprobs"])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("temperature", v) for v in (-0.1, 2.1, "0.7", True, [])),
        *(("top_p", v) for v in (-0.1, 1.1, "x")),
        *(("top_k", v) for v in (-2, 1.5, 10**30)),
        *(("min_p", v) for v in (-0.1, 1.1)),
        *(("n", v) for v in (0, -1, 129, 10**30, 1.0)),
        *(("max_tokens", v) for v in (-1, 0, 10**30, "5")),
        *(("min_tokens", v) for v in (-1, 101, 10**30)),
        *(("seed", v) for v in (2**63, -(2**63) - 1, "x")),
        *(("logprobs", v) for v in (-1, 21, True)),
        *(("presence_penalty", v) for v in (-2.1, 2.1)),
        *(("frequency_penalty", v) for v in (-2.1, 2.1)),
        *(("repetition_penalty", v) for v in (0, -1)),
        *(("logit_bias", v) for v in ({"-1": 1}, {"1": 101}, {"999999999": 1}, {"1" * 99: 1}, 5)),
        *(("stop", v) for v in ("", ["a", ""], ["a"] * 17, [1], 5, ["x" * 2000])),
        *(("stop_token_ids", v) for v in (["a"], [1] * 2000)),
        *(("stream", v) for v in ("yes", 1)),
        ("suffix", "x"),
        *(("best_of", v) for v in (-1, 0, 129, "2", True)),
        *(("cache_salt", v) for v in ("", "é", "a\nb", "x" * 257, 5)),
        *(("priority", v) for v in (2**31, -(2**31), 10**30, 0.5, "high", True)),
        *(("timeout_s", v) for v in (0, -1, "soon", True, 10**400)),
        ("timeout", 5),
        ("prompt_logprobs", 21),
    ],
)
def test_a_value_out_of_bounds_is_refused_by_name(client: Any, field: str, value: Any) -> None:
    """Points 37, 45, 48, 51 and 52."""
    answer = client.complete(**{field: value})
    assert answer.status == 400
    assert answer.error["type"] == "invalid_request_error"
    assert answer.error["param"].split("[")[0].rstrip(".") == field


@pytest.mark.parametrize(
    "extra",
    [
        *({"top_p": v} for v in (0, 1, 0.5)),
        *({"top_k": v} for v in (-1, 0, 1, 10**12)),
        *({"min_p": v} for v in (0, 0.5, 1)),
        *({"seed": v} for v in (0, -5, 2**63 - 1, -(2**63))),
        *({"temperature": v} for v in (0, 1, 2)),
        {"logit_bias": {"65": 100, "66": -100}},
        {"presence_penalty": 2, "frequency_penalty": -2, "repetition_penalty": 1.1},
        {"stop": ["a", "b", "c", "d", "e"]},
        {"n_predict": 2, "repeat_penalty": 1.1},
        {"skip_special_tokens": False, "add_special_tokens": False},
        {"min_tokens": 1, "stop_token_ids": [1]},
    ],
)
def test_a_value_within_bounds_is_taken(client: Any, extra: dict[str, Any]) -> None:
    """Points 45, 50 and 51."""
    asked = extra if "n_predict" in extra else {"max_tokens": 2, **extra}
    answer = client.complete(**asked)
    assert answer.status == 200, answer.body
    assert answer.json["usage"]["completion_tokens"] <= 2
    assert "x-plait-ignored" not in answer.headers


def test_an_alias_that_contradicts_is_refused(client: Any) -> None:
    answer = client.complete(n_predict=3, max_tokens=4)
    assert answer.status == 400
    assert answer.error["param"] == "n_predict"


def test_greedy_is_repeatable_and_seeds_too(client: Any) -> None:
    """Point 50."""
    for asked in ({"temperature": 0}, {"temperature": 1, "seed": 3}):
        assert len({text_of(client.complete(max_tokens=8, **asked)) for _ in range(3)}) == 1


def test_a_stop_string_leaks_nothing(client: Any) -> None:
    """Point 44."""
    text = text_of(client.complete(max_tokens=12, ignore_eos=True))
    stop = text[3:6]
    kept = text[: text.index(stop)]
    (choice,) = client.complete(max_tokens=12, ignore_eos=True, stop=stop).json["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (kept, "stop", stop)
    streamed = client.complete(max_tokens=12, ignore_eos=True, stop=[stop], stream=True).events
    assert "".join(c["choices"][0]["text"] for c in streamed) == kept
    shown = client.complete(max_tokens=12, ignore_eos=True, stop=stop, include_stop_str_in_output=True)
    assert text_of(shown) == kept + stop


def test_return_token_ids_adds_them(client: Any) -> None:
    answer = client.complete(max_tokens=4, ignore_eos=True, return_token_ids=True).json
    assert len(answer["choices"][0]["token_ids"]) == 4


def means(choices: list[dict[str, Any]]) -> list[float]:
    found = [choice["logprobs"]["token_logprobs"] for choice in choices]
    return [sum(values) / len(values) if values else float("-inf") for values in found]


SAMPLED: dict[str, Any] = {"prompt": ["One, two", "Three"], "temperature": 1, "seed": 7, "max_tokens": 4}


def test_best_of_returns_the_choices_with_the_highest_logprob_per_token(client: Any) -> None:
    every = client.complete(n=6, logprobs=0, **SAMPLED).json
    found = client.complete(n=2, best_of=6, logprobs=0, **SAMPLED).json
    assert [choice["index"] for choice in found["choices"]] == [0, 1, 2, 3]
    for i in range(2):
        choices, kept = every["choices"][6 * i : 6 * i + 6], found["choices"][2 * i : 2 * i + 2]
        assert means(kept) == sorted(means(choices), reverse=True)[:2]
        assert all(
            any((one["text"], one["logprobs"]) == (c["text"], c["logprobs"]) for c in choices) for one in kept
        )


def test_best_of_counts_all_choices_and_hides_those_not_requested(client: Any) -> None:
    every = client.complete(n=6, **SAMPLED).json
    found = client.complete(n=1, best_of=6, **SAMPLED).json
    told = client.complete(n=1, best_of=6, logprobs=3, **SAMPLED).json
    assert found["usage"]["completion_tokens"] == every["usage"]["completion_tokens"]
    assert found["usage"]["prompt_tokens"] == every["usage"]["prompt_tokens"]
    assert [choice["logprobs"] for choice in found["choices"]] == [None, None]
    assert [c["text"] for c in found["choices"]] == [c["text"] for c in told["choices"]]
    assert all(choice["logprobs"]["tokens"] for choice in told["choices"])


def test_best_of_n_ranks_nothing_and_may_be_streamed(client: Any) -> None:
    plain = client.complete(n=3, **SAMPLED).json["choices"]
    assert client.complete(n=3, best_of=3, **SAMPLED).json["choices"] == plain
    said = [""] * 6
    for event in client.complete(n=3, best_of=3, stream=True, **SAMPLED).events:
        said[event["choices"][0]["index"]] += event["choices"][0]["text"]
    assert said == [choice["text"] for choice in plain]


@pytest.mark.parametrize("more", [{"n": 3, "best_of": 2}, {"best_of": 2, "stream": True}])
def test_a_best_of_that_cannot_be_is_refused_by_name(client: Any, more: dict[str, Any]) -> None:
    answer = client.complete(**more)
    assert (answer.status, answer.error["param"]) == (400, "best_of")


def test_many_prompts_times_best_of_are_bounded(client: Any) -> None:
    answer = client.complete(["x"] * 11, best_of=100, max_tokens=1)
    assert (answer.status, answer.error["param"]) == (400, "prompt")
