"""Thinking over HTTP: point 17 of the wire contract, its switch and its budget."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.conftest import Client, serving
from tests.server.fake import EchoLoop, fake_front
from tests.server.openai.speaking import SpeakingTemplate
from tests.server.real_engine import engine_front

THOUGHT = "<think>\nFirst, hm.\n\nThen.\n</think>\n\nThe answer"


@pytest.fixture(scope="module")
def template() -> SpeakingTemplate:
    return SpeakingTemplate()


@pytest.fixture(scope="module")
def served(template: SpeakingTemplate) -> Iterator[tuple[Client, EchoLoop]]:
    front = fake_front(template=template)
    assert isinstance(front.loop, EchoLoop)
    with serving(front) as client:
        yield client, front.loop


@pytest.fixture
def client(served: tuple[Client, EchoLoop]) -> Client:
    return served[0]


@pytest.fixture(scope="module")
def real() -> Iterator[Client]:
    with serving(engine_front(template=SpeakingTemplate())) as client:
        yield client


def message(client: Client, text: str = THOUGHT, **more: Any) -> dict[str, Any]:
    answer = client.chat(text, **more)
    assert answer.status == 200, answer.body
    found: dict[str, Any] = answer.json["choices"][0]["message"]
    return found


def deltas(client: Client, text: str = THOUGHT, **more: Any) -> list[dict[str, Any]]:
    events = client.chat(text, stream=True, **more).events
    return [choice["delta"] for event in events for choice in event["choices"]]


def test_thinking_is_apart_from_content(client: Client) -> None:
    found = message(client)
    assert (found["reasoning_content"], found["content"]) == ("First, hm.\n\nThen.", "The answer")
    assert "reasoning_content" not in message(client, "No thought")


def test_streamed_thinking_is_the_same_and_never_with_content(client: Client) -> None:
    found = deltas(client)
    assert not any("reasoning_content" in delta and "content" in delta for delta in found)
    assert "".join(delta.get("reasoning_content", "") for delta in found) == "First, hm.\n\nThen."
    assert "".join(delta.get("content", "") for delta in found) == "The answer"
    order = ["t" if "reasoning_content" in delta else "c" for delta in found[1:-1]]
    assert "".join(order).lstrip("t").strip("c") == ""


@pytest.mark.parametrize("max_tokens", range(1, 20, 3))
def test_thinking_that_is_cut_off_is_thinking(client: Client, max_tokens: int) -> None:
    found = message(client, "<think>aaaaaaaaaaaaaaaa", max_tokens=max_tokens)
    thought = "".join(
        delta.get("reasoning_content", "")
        for delta in deltas(client, "<think>aaaaaaaaaaaaaaaa", max_tokens=max_tokens)
    )
    assert found.get("reasoning_content", "") == thought == "a" * max(max_tokens - 7, 0)


def test_a_stop_string_in_thinking_does_not_stop(client: Client) -> None:
    found = message(client, stop="hm")
    assert (found["reasoning_content"], found["content"]) == ("First, hm.\n\nThen.", "The answer")
    assert message(client, stop="ans")["content"] == "The "


def test_thinking_can_be_left_out(client: Client) -> None:
    assert "reasoning_content" not in message(client, include_reasoning=False)
    found = deltas(client, include_reasoning=False, logprobs=True)
    assert all("reasoning_content" not in delta for delta in found)
    assert "".join(delta.get("content", "") for delta in found) == "The answer"


def test_thinking_that_is_left_out_leaves_no_tokens_either(client: Client) -> None:
    asked = {"include_reasoning": False, "logprobs": True, "return_token_ids": True}
    (choice,) = client.chat(THOUGHT, **asked).json["choices"]
    tokens = "".join(one["token"] for one in choice["logprobs"]["content"])
    assert "hm" not in tokens + bytes(i for i in choice["token_ids"] if i < 256).decode()
    assert tokens.endswith("The answer")


def test_thinking_has_both_names(client: Client) -> None:
    """DeepSeek's clients read `reasoning_content`, vLLM's newer ones `reasoning`."""
    found = message(client)
    assert found["reasoning"] == found["reasoning_content"] == "First, hm.\n\nThen."
    thoughts = [delta for delta in deltas(client) if "reasoning" in delta]
    assert "".join(delta["reasoning"] for delta in thoughts) == found["reasoning"]
    assert all(delta["reasoning_content"] == delta["reasoning"] for delta in thoughts)


def test_thinking_can_have_one_name(client: Client) -> None:
    found = message(client, reasoning_field="reasoning")
    assert found["reasoning"] == "First, hm.\n\nThen."
    assert "reasoning_content" not in found
    pieces = deltas(client, reasoning_field="reasoning")
    assert "".join(delta.get("reasoning", "") for delta in pieces) == found["reasoning"]
    assert client.chat("Hello", reasoning_field="thoughts").error["param"] == "reasoning_field"


ENDLESS = {"structured_outputs": {"choice": ["yes", "no"]}, "max_tokens": 12}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
def test_thinking_that_took_the_place_of_a_demanded_form_is_warned_of(client: Client, path: str) -> None:
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": "<think>" + "a" * 40}], **ENDLESS}
    if path == "/v1/responses":
        asked |= {"input": asked.pop("messages"), "max_output_tokens": asked.pop("max_tokens")}
    answer = client.post(path, asked)
    assert answer.status == 200, answer.body
    assert "thinking_token_budget" in answer.headers["x-plait-warning"]
    free = client.post(path, {name: value for name, value in asked.items() if name != "structured_outputs"})
    assert "x-plait-warning" not in free.headers


def test_a_stream_has_that_warning_in_its_last_chunk_and_others_have_none(client: Client) -> None:
    events = client.chat("<think>" + "a" * 40, stream=True, **ENDLESS).events
    assert [n for n, event in enumerate(events) if "warning" in event] == [len(events) - 1]
    assert "thinking_token_budget" in events[-1]["warning"]
    for text in ("<think>a</think>yes, and so on", "yes, and so on and so on"):
        answer = client.chat(text, **{**ENDLESS, "max_tokens": 20})
        assert answer.json["choices"][0]["finish_reason"] == "length"
        assert "x-plait-warning" not in answer.headers


def test_a_stream_warns_in_the_last_chunk_of_the_choice_concerned_only(client: Client) -> None:
    events = client.chat("<think>" + "a" * 40, stream=True, n=2, **ENDLESS).events  # the other one is content
    assert [event["choices"][0]["index"] for event in events if "warning" in event] == [0]


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
def test_streams_of_named_events_end_with_that_warning(client: Client, path: str) -> None:
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": "<think>" + "a" * 40}], **ENDLESS}
    if path == "/v1/responses":
        asked |= {"input": asked.pop("messages"), "max_output_tokens": asked.pop("max_tokens")}
    events = client.post(path, {**asked, "stream": True}).named_events
    warned = [event["type"] for event in events if "warning" in event]
    assert warned == ["message_delta" if path == "/v1/messages" else "response.incomplete"]


def test_usage_counts_thinking(client: Client) -> None:
    usage = client.chat(THOUGHT).json["usage"]
    assert usage["completion_tokens"] == len(THOUGHT)
    thought = THOUGHT.index("</think>") - len("<think>")
    assert thought <= usage["completion_tokens_details"]["reasoning_tokens"] <= thought + len("</think>")
    assert client.chat("Hello").json["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}


@pytest.mark.parametrize(
    ("more", "switch", "budget"),
    [
        ({}, None, None),
        ({"chat_template_kwargs": {"enable_thinking": False}}, False, 0),
        ({"chat_template_kwargs": {"thinking": False}}, False, 0),
        ({"chat_template_kwargs": {"enable_thinking": True}}, True, None),
        ({"reasoning_effort": "none"}, False, 0),
        ({"reasoning_effort": "none", "thinking_token_budget": 9}, False, 0),
        ({"thinking_token_budget": 9}, None, 9),
        ({"thinking_budget": 9}, None, 9),
        ({"thinking_token_budget": -1}, None, None),
    ],
)
def test_the_switch_reaches_the_template_and_the_budget_the_engine(
    served: tuple[Client, EchoLoop],
    template: SpeakingTemplate,
    more: dict[str, Any],
    switch: bool | None,
    budget: int | None,
) -> None:
    client, engine = served
    assert client.chat("Hello", **more).status == 200
    assert template.asked[-1][1].get("enable_thinking") is switch
    assert "thinking" not in template.asked[-1][1]
    found = engine.requests[-1].thinking
    assert (found and found.num_tokens) == budget


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"reasoning_effort": 5}, "reasoning_effort"),
        ({"thinking_token_budget": -2}, "thinking_token_budget"),
        ({"thinking_token_budget": "much"}, "thinking_token_budget"),
        ({"chat_template_kwargs": {"enable_thinking": "no"}}, "chat_template_kwargs.enable_thinking"),
        (
            {"chat_template_kwargs": {"enable_thinking": True}, "reasoning_effort": "none"},
            "reasoning_effort",
        ),
    ],
)
def test_what_is_no_switch_of_thinking_is_named(client: Client, more: dict[str, Any], param: str) -> None:
    answer = client.chat("Hello", **more)
    assert (answer.status, answer.error["param"]) == (400, param)


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_thinking_of_earlier_turns_may_have_either_name(client: Client, name: str) -> None:
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "a", name: "because"},
        {"role": "user", "content": "r"},
    ]
    assert client.post("/v1/chat/completions", {"messages": messages}).status == 200


def test_a_budget_ends_thinking_in_the_engine(real: Client) -> None:
    """The grammar makes this model think; its budget makes it stop."""
    asked = {
        "structured_outputs": {"choice": ["yes", "no"]},
        "max_tokens": 200,
        "thinking_token_budget": 20,
        "logit_bias": {str(ord("<")): 50},
    }
    found = message(real, "Well?", **asked)
    assert found["content"] in ("yes", "no")
    assert len(found.get("reasoning_content", "")) <= 20


def test_a_model_that_does_not_think_gets_no_switch_of_it() -> None:
    with serving(fake_front()) as client:
        assert client.chat(THOUGHT, reasoning_effort="none").json["choices"][0]["message"] == {
            "role": "assistant",
            "content": THOUGHT,
            "refusal": None,
        }


@pytest.mark.parametrize("text", ["So <think> begins it.", '{"tag": "<think>"}', "a</think>\n<think>b"])
def test_a_marker_behind_content_is_content(client: Client, text: str) -> None:
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    for more in ({}, off, {**off, "response_format": {"type": "json_object"}}):
        found = message(client, text, **more)
        assert (found["content"], "reasoning_content" in found) == (text, False)
        assert "".join(delta.get("content", "") for delta in deltas(client, text, **more)) == text


def test_a_form_that_leaves_no_place_for_thinking_has_none(client: Client) -> None:
    more = {"structured_outputs": {"choice": ["<think>a", "b"]}, "reasoning_effort": "none"}
    assert message(client, "<think>a", **more)["content"] == "<think>a"


def test_a_reply_that_goes_on_from_content_does_not_begin_to_think(client: Client) -> None:
    said = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "So <think>b"}]
    asked = {"messages": said, "continue_final_message": True}
    found = client.post("/v1/chat/completions", asked).json["choices"][0]["message"]
    assert "reasoning_content" not in found


HELLO = [{"role": "user", "content": "Hello"}]


@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        ("/v1/chat/completions", {"reasoning_effort": "high"}, "reasoning_effort"),
        ("/v1/chat/completions", {"enable_thinking": True}, "chat_template_kwargs.enable_thinking"),
        ("/v1/chat/completions", {"think": True, "stream": True}, "chat_template_kwargs.enable_thinking"),
        (
            "/v1/chat/completions",
            {"chat_template_kwargs": {"thinking": True}, "odd": 1},
            "odd,chat_template_kwargs.thinking",
        ),
        ("/v1/responses", {"reasoning": {"effort": "low"}, "input": "Hello"}, "reasoning.effort"),
        ("/v1/messages", {"output_config": {"effort": "max"}, "max_tokens": 9}, "output_config.effort"),
        ("/v1/messages/count_tokens", {"output_config": {"effort": "max"}}, "output_config.effort"),
        ("/tokenize", {"reasoning_effort": "high"}, "reasoning_effort"),
        ("/apply-template", {"reasoning_effort": "high"}, "reasoning_effort"),
    ],
)
def test_hints_that_a_model_has_no_use_for_are_taken_and_reported(
    path: str, body: dict[str, Any], name: str
) -> None:
    with serving(fake_front()) as client:
        answer = client.post(path, body if "input" in body else {"messages": HELLO, **body})
        assert (answer.status, answer.headers.get("x-plait-ignored")) == (200, name)


def test_switches_that_contradict_each_other_are_refused(client: Client) -> None:
    answer = client.chat("Hello", chat_template_kwargs={"enable_thinking": True, "thinking": False})
    assert answer.error["param"] == "chat_template_kwargs.thinking"
