"""/completion, /props and /slots: llama-server's own shapes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.contract.wire import Answer, Client
from tests.server.fake import CONTEXT, EchoLoop


def complete(client: Client, prompt: Any = "Hello there", **body: Any) -> Answer:
    return client.post("/completion", {"prompt": prompt, "n_predict": 64, **body})


def events(answer: Answer) -> list[dict[str, Any]]:
    """The events of a stream, which has no end but its last event."""
    assert answer.status == 200, answer.body
    frames = [frame for frame in answer.body.decode().split("\n\n") if frame and not frame.startswith(":")]
    assert all(frame.startswith("data: {") for frame in frames)
    return [json.loads(frame.removeprefix("data: ")) for frame in frames]


def test_a_whole_completion_says_how_it_ended(client: Client) -> None:
    found = complete(client).json
    assert (found["content"], found["stop"], found["stop_type"]) == ("Hello there", True, "eos")
    assert (found["tokens_predicted"], found["tokens_evaluated"]) == (11, 12)
    assert (found["truncated"], found["has_new_line"], found["id_slot"]) == (False, False, -1)
    assert (found["model"], found["timings"]["predicted_n"]) == (client.model, 11)
    assert found["generation_settings"]["n_predict"] == 64
    assert found["prompt"].endswith("Hello there")
    assert complete(client, n_predict=3).json["stop_type"] == "limit"
    word = complete(client, stop=[" th"]).json
    assert (word["content"], word["stop_type"], word["stopping_word"]) == ("Hello", "word", " th")
    assert complete(client, "a\nb").json["has_new_line"] is True


def test_a_stream_ends_with_the_event_that_says_stop(client: Client) -> None:
    *parts, last = events(complete(client, stream=True))
    assert "".join(part["content"] for part in parts) == "Hello there"
    assert not any(part["stop"] for part in parts)
    assert (last["content"], last["stop"], last["stop_type"]) == ("", True, "eos")


def test_tokens_probabilities_and_progress_come_on_request(client: Client) -> None:
    found = complete(client, "ab", n_probs=2, return_tokens=True).json
    assert found["tokens"] == [97, 98]
    assert [one["id"] for one in found["completion_probabilities"]] == [97, 98]
    assert len(found["completion_probabilities"][0]["top_logprobs"]) == 2
    parts = events(complete(client, "abcdef", stream=True, return_progress=True))
    assert parts[0]["prompt_progress"]["total"] == 7
    assert complete(client, "ab").json["tokens"] == []


def test_without_n_predict_the_rest_of_the_context_may_be_used(client: Client, engine: EchoLoop) -> None:
    assert client.post("/completion", {"prompt": "ab"}).status == 200
    request = engine.requests[-1]
    assert request.params.max_tokens == CONTEXT - len(request.prompt_token_ids)


def test_a_prompt_of_texts_and_ids_is_joined(client: Client, engine: EchoLoop) -> None:
    assert complete(client, ["ab", 99]).json["content"] == "abc"
    assert complete(client, [97, 98]).json["content"] == "ab"
    assert engine.requests[-1].prompt_token_ids == (97, 98)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[1], [2]]}, "prompt"),
        ({"n": 2}, "n"),
        ({"tfs_z": 0.5}, "tfs_z"),
        ({"grammar": "x", "json_schema": {}}, "json_schema"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(client: Client, body: Any, param: str) -> None:
    answer = complete(client, **body)
    assert (answer.status, answer.error["param"]) == (400, param)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"n_predict": -5}, "n_predict: -5 is less than 0; send n_predict: -1 for as many tokens as fit"),
        ({"repeat_penalty": -1}, "repeat_penalty: -1.0 is outside"),
        ({"max_tokens": -5, "n_predict": None}, "max_tokens: -5 is less than 0; send n_predict: -1"),
    ],
)
def test_a_refusal_names_the_field_as_it_was_sent(client: Client, body: Any, text: str) -> None:
    error = client.post("/completion", {"prompt": "ab", **body}).json["error"]
    assert error["message"].startswith(text)
    assert error["param"] == text.partition(":")[0]


def test_props_and_slots_show_limits_and_defaults(client: Client) -> None:
    props = client.get("/props").json
    assert props["default_generation_settings"]["n_ctx"] == CONTEXT
    assert props["default_generation_settings"]["params"]["temperature"] == 0.7
    assert (props["model_alias"], props["eos_token"]) == (client.model, "<eos>")
    slots = client.get("/slots").json
    assert [slot["id"] for slot in slots] == [*range(props["total_slots"])]
    assert not any(slot["is_processing"] for slot in slots)


def test_a_ranking_is_a_list_as_llama_cpp_writes_it(client: Client) -> None:
    found = client.post("/v1/rerank", {"query": "a", "documents": ["a", "b"], "top_n": 1}).json
    assert found["object"] == "list"
    assert [sorted(one) for one in found["results"]] == [["document", "index", "relevance_score"]]
