"""Beam search, guidance and their refusals over HTTP, in vLLM's shapes."""

from __future__ import annotations

from typing import Any

import pytest

from tests.contract.wire import Client

PROMPT = "The capital of France is"


@pytest.fixture(scope="module")
def base_url(smol_url: str) -> str:
    return smol_url


def whole(client: Client, **more: Any) -> list[dict[str, Any]]:
    answer = client.complete(PROMPT, **{"max_tokens": 8, "ignore_eos": True, **more})
    assert answer.status == 200, answer.body
    found: list[dict[str, Any]] = answer.json["choices"]
    return found


def test_beam_search_returns_the_best_beams_in_order(client: Client) -> None:
    found = whole(client, use_beam_search=True, n=3, logprobs=0)
    sums = [sum(choice["logprobs"]["token_logprobs"]) for choice in found]
    assert [choice["index"] for choice in found] == [0, 1, 2]
    assert sums == sorted(sums, reverse=True)
    assert len({choice["text"] for choice in found}) == 3
    wider = whole(client, use_beam_search=True, n=1, beam_width=4, temperature=0)
    assert wider[0]["text"]
    greedy = whole(client, temperature=0, logprobs=0)[0]
    assert sums[0] >= sum(greedy["logprobs"]["token_logprobs"]) - 1e-3
    assert whole(client, use_beam_search=True)[0]["text"] == greedy["text"], "one beam is greedy"


def test_beam_search_streams_its_results_at_the_end(client: Client) -> None:
    asked: dict[str, Any] = {"use_beam_search": True, "n": 2, "max_tokens": 8, "ignore_eos": True}
    events = client.complete(PROMPT, stream=True, **asked).events
    texts = ["".join(c["text"] for e in events for c in e["choices"] if c["index"] == i) for i in (0, 1)]
    assert texts == [choice["text"] for choice in whole(client, use_beam_search=True, n=2)]


def test_guidance_leads_away_from_the_negative_prompt_and_is_repeatable(client: Client) -> None:
    plain = whole(client, temperature=0)[0]["text"]
    asked: dict[str, Any] = {"temperature": 0, "guidance_scale": 4.0, "negative_prompt": PROMPT}
    same = whole(client, **{**asked, "guidance_scale": 1.0, "negative_prompt": None})[0]["text"]
    assert same == plain
    nothing = whole(client, **{**asked, "guidance_scale": 0.0})[0]["text"]
    assert nothing == plain, "at 0 the negative prompt alone speaks, which is the prompt here"
    other = whole(client, **{**asked, "negative_prompt": "In Spain it is"})[0]["text"]
    assert other != plain
    assert [whole(client, **{**asked, "negative_prompt": "In Spain it is"})[0]["text"] for _ in range(2)] == [
        other
    ] * 2
    chat = client.chat("Hi", guidance_scale=2.0, negative_prompt="Hello", temperature=0, max_tokens=4)
    assert chat.status == 200, chat.body


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"use_beam_search": True, "temperature": 0.5}, "temperature"),
        ({"use_beam_search": True, "stop": ["a"]}, "stop"),
        ({"use_beam_search": True, "response_format": {"type": "json_object"}}, "response_format"),
        ({"use_beam_search": True, "beam_width": 0}, "beam_width"),
        ({"use_beam_search": True, "beam_width": 64}, "beam_width"),
        ({"use_beam_search": True, "length_penalty": "a"}, "length_penalty"),
        ({"use_beam_search": True, "early_stopping": "maybe"}, "early_stopping"),
        ({"beam_width": 3}, "beam_width"),
        ({"guidance_scale": -1}, "guidance_scale"),
        ({"guidance_scale": 101}, "guidance_scale"),
        ({"negative_prompt": "a"}, "negative_prompt"),
        ({"guidance_scale": 2, "negative_prompt": "a " * 200_000}, "negative_prompt"),
        ({"stop_regex": "a*"}, "stop_regex"),
        ({"stop_regex": ["a"] * 17}, "stop_regex"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(client: Client, more: dict[str, Any], param: str) -> None:
    answer = client.complete(PROMPT, **more)
    assert answer.status == 400, answer.body
    assert answer.json["error"]["param"] == param
