"""A request that cannot be honoured is refused before work on it begins, and the error names the field."""

from __future__ import annotations

from typing import Any

import pytest

from plait.errors import InvalidField
from plait.request import SamplingParams


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"n": 1.5}, "n"),
        ({"best_of": 0}, "best_of"),
        ({"best_of": 129}, "best_of"),
        ({"best_of": 2.5}, "best_of"),
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"max_tokens": 2.5}, "max_tokens"),
        ({"top_k": 2.5}, "top_k"),
        ({"seed": 0.5}, "seed"),
        ({"seed": True}, "seed"),
        ({"logprobs": 21}, "logprobs"),
        ({"temperature": float("nan")}, "temperature"),
        ({"stop": [5]}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"stop_token_ids": ["</s>"]}, "stop_token_ids"),
        ({"logit_bias": {"5": 1.0}}, "logit_bias"),
        ({"logit_bias": {5: 101.0}}, "logit_bias"),
    ],
)
def test_a_setting_that_cannot_be_is_refused_by_name(params: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidField, match=f"^{field}: ") as caught:
        SamplingParams(**params)
    assert caught.value.param == field


@pytest.mark.parametrize("name", ["temperature", "max_tokens", "n", "seed", "presence_penalty"])
@pytest.mark.parametrize("digits", [400, 5000])
def test_a_number_beyond_all_floats_is_refused_in_a_short_message(name: str, digits: int) -> None:
    with pytest.raises(InvalidField, match=f"^{name}: ") as caught:
        SamplingParams(**{name: 10**digits})
    assert len(str(caught.value)) < 160


def test_open_choices_are_the_requests_then_the_models_then_ours() -> None:
    asked = SamplingParams(temperature=0.1)
    found = asked.resolve({"temperature": 0.5, "top_p": 0.8})
    assert (found.temperature, found.top_p, found.top_k) == (0.1, 0.8, 40)
    assert (found.min_p, found.repetition_penalty) == (0.0, 1.0)


def test_a_model_that_is_not_sampled_keeps_its_penalty() -> None:
    greedy = SamplingParams().resolve({"do_sample": False, "temperature": 0.5, "repetition_penalty": 1.1})
    assert (greedy.temperature, greedy.repetition_penalty) == (0.0, 1.1)
    assert SamplingParams(repetition_penalty=1.0).resolve({"repetition_penalty": 1.1}).repetition_penalty == 1


def test_best_of_is_how_many_are_generated_and_n_how_many_return() -> None:
    for given, count, ranked in (({}, 1, False), ({"n": 3}, 3, False), ({"n": 3, "best_of": 3}, 3, False)):
        params = SamplingParams(**given)
        assert (params.num_sequences, params.is_ranked) == (count, ranked)
    params = SamplingParams(n=2, best_of=5)
    assert (params.num_sequences, params.is_ranked) == (5, True)


def test_a_bound_is_shown_to_its_last_digit() -> None:
    with pytest.raises(InvalidField, match=r"\[-9223372036854775808, 9223372036854775807\]"):
        SamplingParams(seed=2**64)
