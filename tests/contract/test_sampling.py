"""Sampling parameters, seen from outside: seeds, biases, penalties, and no effect on other requests."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.contract.wire import Client


def text(client: Client, prompt: str = "And it came to pass", **more: Any) -> str:
    answer = client.complete(prompt, **{"max_tokens": 12, **more})
    assert answer.status == 200, answer.body
    found: str = answer.json["choices"][0]["text"]
    return found


def test_a_seed_says_the_same_again_and_another_does_not(client: Client) -> None:
    """Point 50."""
    said = [text(client, temperature=1.5, seed=seed) for seed in (1, 2, 3, 1, 2, 3)]
    assert said[:3] == said[3:]
    assert len(set(said[:3])) > 1


@pytest.mark.parametrize("seed", [0, -1, 2**63 - 1, -(2**63)])
def test_any_int64_is_a_seed(client: Client, seed: int) -> None:
    """Point 50."""
    assert text(client, seed=seed, temperature=1) == text(client, seed=seed, temperature=1)


def test_choices_of_one_seed_differ(client: Client) -> None:
    """Point 50."""
    asked: dict[str, Any] = {"n": 4, "seed": 9, "temperature": 1.5, "max_tokens": 12}
    found = client.complete("And it came to pass", **asked).json["choices"]
    assert len({choice["text"] for choice in found}) > 1


def test_greedy_is_greedy_in_any_batch_composition(client: Client) -> None:
    """Points 50 and 53. The same text alone and next to requests with penalties, biases and seeds."""
    others: list[dict[str, Any]] = [
        {"presence_penalty": 2, "frequency_penalty": 2, "repetition_penalty": 3},
        {"temperature": 2, "seed": 1},
        {"logit_bias": {str(i): 100 for i in range(5, 40)}},
        {"top_k": 1, "temperature": 1},
        {"min_p": 0.5, "top_p": 0.2, "temperature": 1},
    ]
    alone = text(client)
    with ThreadPoolExecutor(10) as pool:
        beside = [pool.submit(text, client) for _ in range(5)]
        for more in others:
            pool.submit(text, client, **more)
    assert {one.result() for one in beside} == {alone}


@pytest.mark.parametrize("more", [{"top_k": 1}, {"top_p": 0}, {"min_p": 1}])
def test_the_narrowest_choice_is_the_greedy_one(client: Client, more: dict[str, Any]) -> None:
    """Point 51."""
    assert text(client, temperature=1, seed=4, **more) == text(client)


@pytest.mark.parametrize("temperature", [0.0, 1e-9, 0.3, 2])
def test_logprobs_are_the_models_own_whatever_the_temperature(client: Client, temperature: float) -> None:
    """Point 42. Raw: before temperature, penalties and bias."""
    asked: dict[str, Any] = {"max_tokens": 1, "logprobs": 5}
    plain = client.complete("In the beginning", **asked).json["choices"][0]["logprobs"]["top_logprobs"][0]
    more: dict[str, Any] = {"temperature": temperature, "seed": 1, "presence_penalty": 1.5, "top_k": 5}
    found = client.complete("In the beginning", **asked, **more).json["choices"][0]["logprobs"]
    assert all(plain[token] == value for token, value in found["top_logprobs"][0].items() if token in plain)
    assert len(set(plain) & set(found["top_logprobs"][0])) >= 5
    assert sum(map(math.exp, plain.values())) <= 1.0001


def first_ids(client: Client, **more: Any) -> list[int]:
    asked: dict[str, Any] = {"max_tokens": 4, "return_token_ids": True, "ignore_eos": True, **more}
    found: list[int] = client.complete("And it came to pass", **asked).json["choices"][0]["token_ids"]
    return found


def test_a_bias_of_100_forces_and_of_minus_100_bans(client: Client) -> None:
    """Point 52."""
    plain = first_ids(client)
    other = plain[0] + 1
    assert first_ids(client, logit_bias={str(other): 100}) == [other] * 4
    banned = first_ids(client, logit_bias={str(i): -100 for i in set(plain)})
    assert not set(banned) & set(plain)


@pytest.mark.parametrize("bias", [{"1": 100.5}, {"1": -101}, {"123456789": 1}, {"": 1}, {"1": "x"}])
def test_a_wrong_bias_is_refused(client: Client, bias: dict[str, Any]) -> None:
    """Point 52."""
    answer = client.complete(logit_bias=bias)
    assert answer.status == 400
    assert answer.error["param"].startswith("logit_bias")


@pytest.mark.parametrize(
    "penalty", [{"repetition_penalty": 5}, {"presence_penalty": 2}, {"frequency_penalty": 2}]
)
def test_a_penalty_changes_what_repeats(client: Client, penalty: dict[str, float]) -> None:
    """Point 53."""
    prompt = "the son of the son of the son of the son of"
    assert text(client, prompt, max_tokens=24, **penalty) != text(client, prompt, max_tokens=24)


@pytest.mark.parametrize("raw", [b"NaN", b"Infinity", b'"0.7"', b"-0.1", b"2.1", b"1e999", b"[]", b"true"])
@pytest.mark.parametrize("field", ["temperature", "top_p", "min_p"])
def test_what_is_no_number_in_range_is_400(client: Client, field: str, raw: bytes) -> None:
    """Point 51."""
    body = b'{"prompt": "a", "max_tokens": 1, "%s": %s}' % (field.encode(), raw)
    answer = client.post("/v1/completions", body)
    assert answer.status == 400
    assert answer.error["type"] == "invalid_request_error"


def test_samplers_of_front_ends_are_repeatable_and_change_the_text(client: Client) -> None:
    plain = {"temperature": 1.2, "seed": 3, "max_tokens": 24, "top_k": 0, "top_p": 1}
    given: list[dict[str, Any]] = [
        {"xtc_probability": 1, "xtc_threshold": 0.02},
        {"typical_p": 0.2},
        {"top_n_sigma": 0.3},
        {"dynatemp_range": 1.2},
        {"smoothing_factor": 3},
        {"dry_multiplier": 20, "dry_allowed_length": 0, "dry_sequence_breakers": []},
        {"samplers": ["temperature"], "top_k": 1},
    ]
    alone = [text(client, **{**plain, **more}) for more in given]
    with ThreadPoolExecutor(8) as pool:
        beside = [pool.submit(text, client, **{**plain, **more}) for more in given]
        assert [one.result() for one in beside] == alone
    assert text(client, **plain) not in alone[:-1]
    assert alone[-1] == text(client, **plain)  # a sampler that is not in the list does not run


def test_token_rules_hold_over_http(client: Client) -> None:
    plain = first_ids(client)
    assert first_ids(client, allowed_token_ids=[5]) == [5] * 4
    word = text(client).split()[0]
    assert word not in text(client, bad_words=[word])
    assert set(first_ids(client, logit_bias={word: -100})) != set(plain)
