"""The same model behind other APIs: OpenAI's Responses and Anthropic's Messages."""

from __future__ import annotations

from typing import Any

import pytest

from tests.contract.wire import Client

ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "Name three colors."}], "max_tokens": 12}


@pytest.fixture(scope="module")
def base_url(smol_url: str) -> str:
    return smol_url


def test_a_response_is_streamed_in_numbered_events(client: Client) -> None:
    """Point 70."""
    asked: dict[str, Any] = {"model": client.model, "input": "Hi", "max_output_tokens": 16, "temperature": 0}
    whole = client.post("/v1/responses", asked)
    assert whole.status == 200, whole.body
    events = client.post("/v1/responses", {**asked, "stream": True}).named_events
    numbers = [event["sequence_number"] for event in events]
    assert numbers == sorted(set(numbers))
    kinds = [event["type"] for event in events]
    assert kinds[0] == "response.created"
    assert kinds[-1] in {"response.completed", "response.incomplete"}
    for needed in ("response.output_item.added", "response.content_part.added", "response.output_item.done"):
        assert needed in kinds
    text = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    assert text == whole.json["output"][-1]["content"][0]["text"]


def test_a_response_that_is_not_kept_cannot_be_gone_on_from(client: Client) -> None:
    """Point 70."""
    asked = {"model": client.model, "input": "Hi", "previous_response_id": "resp_nothing"}
    answer = client.post("/v1/responses", asked)
    assert answer.status in {400, 404}
    assert answer.error["param"] == "previous_response_id"


def message_events(client: Client) -> list[dict[str, Any]]:
    answer = client.post("/v1/messages", {**ASK, "model": client.model, "temperature": 0, "stream": True})
    assert answer.status == 200, answer.body
    return [event for event in answer.named_events if event["type"] != "ping"]


def test_a_message_is_streamed_in_blocks(client: Client) -> None:
    """Point 70."""
    kinds = [event["type"] for event in message_events(client)]
    middle = [kind for kind in kinds if kind != "content_block_delta"]
    assert middle == [
        "message_start",
        "content_block_start",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert "content_block_delta" in kinds


@pytest.mark.parametrize("headers", [{}, {"anthropic-version": "2023-06-01"}, {"anthropic-version": "x"}])
def test_a_message_says_whole_what_it_says_streamed(client: Client, headers: dict[str, str]) -> None:
    """Point 70. The version header is optional."""
    answer = client.post("/v1/messages", {**ASK, "model": client.model, "temperature": 0}, **headers)
    assert answer.status == 200, answer.body
    events = message_events(client)
    text = "".join(e["delta"]["text"] for e in events if e["type"] == "content_block_delta")
    (block,) = answer.json["content"]
    assert (block["type"], block["text"]) == ("text", text)
    assert answer.json["type"] == "message"
    assert answer.json["stop_reason"] in {"end_turn", "max_tokens"}


@pytest.mark.parametrize(
    "body", [{}, {"messages": []}, {"messages": ASK["messages"]}, {"model": "nobody", **ASK}]
)
def test_an_error_has_anthropics_shape(client: Client, body: dict[str, Any]) -> None:
    """Point 70."""
    answer = client.post("/v1/messages", body)
    assert 400 <= answer.status < 500
    assert answer.json["type"] == "error"
    assert set(answer.json["error"]) >= {"type", "message"}


def test_tokens_are_counted(client: Client) -> None:
    """Point 70."""
    counted = client.post("/v1/messages/count_tokens", {"model": client.model, "messages": ASK["messages"]})
    assert counted.status == 200, counted.body
    whole = client.post("/v1/messages", {**ASK, "model": client.model})
    usage = whole.json["usage"]
    cached = usage["cache_read_input_tokens"] + usage["cache_creation_input_tokens"]
    assert counted.json["input_tokens"] == usage["input_tokens"] + cached
