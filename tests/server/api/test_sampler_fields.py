"""Fields of samplers, token rules and prompts over HTTP: what reaches the engine, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from tests.contract.wire import Client
from tests.server.fake import BOS, CONTEXT, EOS, VOCAB_SIZE, EchoLoop

PATHS = ("complete", "chat")
GIVEN: dict[str, Any] = {
    "typical_p": 0.5,
    "top_n_sigma": 1.5,
    "xtc_probability": 0.4,
    "xtc_threshold": 0.2,
    "dynatemp_range": 0.5,
    "dynatemp_exponent": 2.0,
    "smoothing_factor": 0.3,
    "smoothing_curve": 2.0,
    "dry_multiplier": 0.8,
    "dry_base": 1.5,
    "dry_allowed_length": 3,
    "dry_penalty_last_n": 64,
    "allowed_token_ids": (65, 66),
    "samplers": ("top_k", "temperature"),
    "mirostat": 2,
    "mirostat_tau": 4.0,
    "mirostat_eta": 0.2,
}


@pytest.mark.parametrize("path", PATHS)
def test_sampler_fields_reach_the_engine(client: Client, engine: EchoLoop, path: str) -> None:
    assert getattr(client, path)(max_tokens=2, **GIVEN).status == 200
    params = engine.requests[-1].params
    assert {name: getattr(params, name) for name in GIVEN} == GIVEN
    assert params.needs_chain
    assert getattr(client, path)(max_tokens=2).status == 200
    assert not engine.requests[-1].params.needs_chain


def test_responses_and_messages_take_them_too(client: Client, engine: EchoLoop) -> None:
    turns = [{"role": "user", "content": "Hi"}]
    assert client.post("/v1/responses", {"input": "Hi", "xtc_probability": 0.5}).status == 200
    assert engine.requests[-1].params.xtc_probability == 0.5
    asked = {"messages": turns, "max_tokens": 2, "typical_p": 0.5, "bad_words": ["ab"]}
    assert client.post("/v1/messages", {"model": client.model, **asked}).status == 200
    assert engine.requests[-1].params.typical_p == 0.5
    assert (97, 98) in engine.requests[-1].params.bad_word_ids


@pytest.mark.parametrize("path", PATHS)
def test_texts_reach_the_engine_as_tokens(client: Client, engine: EchoLoop, path: str) -> None:
    given = {"bad_words": ["ab", " c"], "logit_bias": {"Fo": 3, "70": 2}, "dry_multiplier": 1}
    assert getattr(client, path)(max_tokens=2, **given).status == 200
    params = engine.requests[-1].params
    assert (params.bad_words, params.logit_bias_strings) == ((), {})
    assert set(params.bad_word_ids) == {(97, 98), (32, 97, 98), (99,), (32, 99)}
    assert params.logit_bias == {ord("F"): 2, ord("o"): 3}  # 70 is "F": a token that is named counts
    assert set(params.dry_breaker_ids) == {(ord(c),) for c in '\n:"*'}
    assert getattr(client, path)(dry_multiplier=1, dry_sequence_breakers=["->", "o"]).status == 200
    breakers = engine.requests[-1].params.dry_breaker_ids
    assert set(breakers) == {(111,), (45, 62), (BOS,), (EOS,)}  # "<bos>" has an o, too


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("typical_p", 1.5),
        ("top_n_sigma", -2),
        ("xtc_probability", 1.1),
        ("xtc_threshold", -0.1),
        ("dynatemp_range", 3),
        ("dynatemp_exponent", -1),
        ("smoothing_factor", -1),
        ("smoothing_curve", 0.5),
        ("dry_multiplier", -1),
        ("dry_base", 0.5),
        ("dry_allowed_length", 513),
        ("dry_penalty_last_n", -2),
        ("dry_sequence_breakers", [""]),
        ("dry_sequence_breakers", ["ab"] * 33),
        ("allowed_token_ids", [5] * 8193),
        ("bad_words", ["a" * 1025]),
        ("bad_words", ["a"] * 1025),
        ("allowed_token_ids", [VOCAB_SIZE]),
        ("allowed_token_ids", [-1]),
        ("samplers", ["greedy"]),
        ("samplers", ["top_k", "top_p", "top-k"]),
        ("samplers", "kqz"),
        ("truncate_prompt_tokens", 0),
        ("truncate_prompt_tokens", -2),
        ("prompt_logprobs", 21),
        ("mirostat", 3),
    ],
)
def test_what_is_out_of_range_is_refused_by_name(client: Client, path: str, name: str, value: Any) -> None:
    answer = getattr(client, path)(max_tokens=1, **{name: value})
    assert (answer.status, answer.error["param"]) == (400, name)


def test_only_ends_cannot_be_written_before_min_tokens(client: Client) -> None:
    answer = client.complete(max_tokens=4, min_tokens=2, allowed_token_ids=[5], stop_token_ids=[5, 6])
    assert (answer.status, answer.error["param"]) == (400, "min_tokens")
    assert client.complete(max_tokens=4, allowed_token_ids=[5], stop_token_ids=[5, 6]).status == 200


def test_a_prompt_is_cut_at_its_front(client: Client, engine: EchoLoop) -> None:
    long = "x" * CONTEXT + "The end."
    assert client.complete(long, max_tokens=2).status == 400
    answer = client.complete(long, max_tokens=2, truncate_prompt_tokens=4, echo=True)
    assert engine.requests[-1].prompt_token_ids == tuple(b"end.")
    assert answer.json["choices"][0]["text"].startswith("end.")
    assert answer.json["usage"]["prompt_tokens"] == 4
    assert client.complete(long, max_tokens=48, truncate_prompt_tokens=-1).status == 200
    assert len(engine.requests[-1].prompt_token_ids) == CONTEXT - 48
    assert client.chat(max_tokens=2, truncate_prompt_tokens=5).status == 200
    assert len(engine.requests[-1].prompt_token_ids) == 5


def test_a_prompt_s_log_probabilities_come_as_vllm_has_them(client: Client) -> None:
    answer = client.complete("Fox", max_tokens=2, n=2, prompt_logprobs=1, add_special_tokens=False)
    for choice in answer.json["choices"]:
        first, *rest = choice["prompt_logprobs"]
        assert first is None
        assert [next(iter(place)) for place in rest] == [str(ord(c)) for c in "ox"]
        for place in rest:
            assert {"logprob", "rank", "decoded_token"} == set(next(iter(place.values())))
    assert "prompt_logprobs" not in client.complete("Fox", max_tokens=2).json["choices"][0]
    whole = client.chat(max_tokens=2, prompt_logprobs=0).json
    assert len(whole["prompt_logprobs"]) == whole["usage"]["prompt_tokens"]
    assert "prompt_logprobs" not in client.chat(max_tokens=2).json
    for path in PATHS:
        answer = getattr(client, path)(max_tokens=2, prompt_logprobs=1, stream=True)
        assert (answer.status, answer.error["param"]) == (400, "prompt_logprobs")


def test_tokens_are_named_by_their_ids(client: Client) -> None:
    asked: dict[str, Any] = {"max_tokens": 3, "return_tokens_as_token_ids": True}
    answer = client.complete("Fox", logprobs=1, echo=True, add_special_tokens=False, **asked)
    lists = answer.json["choices"][0]["logprobs"]
    assert lists["tokens"][:3] == [f"token_id:{ord(c)}" for c in "Fox"]
    assert all(name.startswith("token_id:") for place in lists["top_logprobs"][1:] for name in place)
    content = client.chat(logprobs=True, top_logprobs=1, **asked).json["choices"][0]["logprobs"]["content"]
    for one in content:
        assert one["token"] == f"token_id:{one['bytes'][0]}"
        assert all(other["token"].startswith("token_id:") for other in one["top_logprobs"])


def test_a_suffix_that_the_model_cannot_read_is_refused_by_name(client: Client) -> None:
    answer = client.complete("a", max_tokens=2, suffix="b")
    assert (answer.status, answer.error["param"]) == (400, "suffix")
    assert client.complete("a", max_tokens=2, suffix="b", echo=True).error["param"] == "echo"
    assert client.complete([65], max_tokens=2, suffix="b").error["param"] == "suffix"
    cut = client.complete("a", max_tokens=2, suffix="b", truncate_prompt_tokens=1)
    assert cut.error["param"] == "truncate_prompt_tokens"
    assert client.complete("a", max_tokens=2, suffix="").status == 200
    assert client.chat(max_tokens=2, suffix="b").error["param"] == "suffix"
