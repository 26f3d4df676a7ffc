"""Calls of tools: forced by a grammar, so that any model makes them; whole and streamed alike."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

import pytest

from tests.contract.wire import Client

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer", "maximum": 9}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
CLOCK: dict[str, Any] = {
    "type": "function",
    "function": {"name": "now", "parameters": {"type": "object", "properties": {}}},
}
QUIET = {"chat_template_kwargs": {"enable_thinking": False}}  # the answer at once
NAMED = {"type": "function", "function": {"name": "get_weather"}}


@pytest.fixture(scope="module")
def base_url(smol_url: str) -> str:
    return smol_url


@pytest.fixture(scope="module", autouse=True)
def place_for_tools(client: Client) -> None:
    """A template without a place for tools refuses them by name, which is all there is to check."""
    answer = client.chat("x", tools=[CLOCK], max_tokens=1)
    if answer.status == 400:
        assert answer.error["param"] == "tools"
        pytest.skip("this model's template has no place for tools")


def ask(client: Client, **more: Any) -> Any:
    asked: dict[str, Any] = {
        "tools": [WEATHER, CLOCK],
        "tool_choice": NAMED,
        "max_tokens": 96,
        **QUIET,
        **more,
    }
    answer = client.chat("What is the weather in Paris?", **asked)
    assert answer.status == 200, answer.body
    return answer


@pytest.mark.parametrize("choice", [NAMED, "required"])
def test_a_forced_call_is_whole_and_valid(client: Client, choice: Any) -> None:
    """Points 20 and 30."""
    (found,) = ask(client, tool_choice=choice, parallel_tool_calls=False).json["choices"]
    assert found["finish_reason"] in {"tool_calls", "stop"}
    assert not found["message"]["content"]
    call = found["message"]["tool_calls"][0]
    assert set(call) == {"id", "type", "function"}
    assert call["type"] == "function"
    assert call["id"].replace("-", "").replace("_", "").isalnum()
    arguments = json.loads(call["function"]["arguments"])
    if call["function"]["name"] == "get_weather":
        assert arguments["city"] in {"Paris", "Rome"}
        assert arguments["days"] <= 9
    else:
        assert choice == "required"


def test_streamed_calls_are_those_of_the_whole_reply(client: Client) -> None:
    """Points 25, 26 and 28."""
    whole = ask(client).json["choices"][0]["message"]["tool_calls"]
    calls: dict[int, list[dict[str, Any]]] = defaultdict(list)
    events = ask(client, stream=True).events
    for event in events:
        delta = event["choices"][0]["delta"]
        assert "<tool_call" not in (delta.get("content") or "")
        for piece in delta.get("tool_calls", ()):
            calls[piece["index"]].append(piece)
    assert sorted(calls) == list(range(len(whole)))
    for index, (first, *others) in calls.items():
        assert first["id"]
        assert first["type"] == "function"
        assert first["function"]["name"] == whole[index]["function"]["name"]
        assert all(set(piece) <= {"index", "function"} for piece in others)
        assert all("name" not in piece["function"] for piece in others)
        joined = "".join(piece["function"].get("arguments", "") for piece in (first, *others))
        assert joined == whole[index]["function"]["arguments"]
    assert events[-1]["choices"][0]["finish_reason"] in {"tool_calls", "stop"}


def test_ids_of_calls_differ(client: Client) -> None:
    """Points 24 and 27."""
    ids = [
        call["id"]
        for _ in range(2)
        for call in ask(client, parallel_tool_calls=False).json["choices"][0]["message"]["tool_calls"]
    ]
    assert len(set(ids)) == len(ids)


def test_no_parallel_calls_means_one_at_most(client: Client) -> None:
    """Point 27."""
    found = ask(client, tool_choice="required", parallel_tool_calls=False).json["choices"][0]["message"]
    assert len(found["tool_calls"]) == 1


def test_none_means_no_call_and_auto_may(client: Client) -> None:
    """Points 21 and 30."""
    found = ask(client, tool_choice="none", max_tokens=12).json["choices"][0]["message"]
    assert "tool_calls" not in found
    assert isinstance(found["content"], str)
    assert ask(client, tool_choice="auto", max_tokens=12).json["choices"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_is_cut_off_is_no_fault(client: Client, stream: bool) -> None:
    """Point 29."""
    answer = ask(client, max_tokens=6, stream=stream)
    last = answer.events[-1] if stream else answer.json
    assert last["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    "choice", [{"type": "function", "function": {"name": "nobody"}}, "sometimes", 5, {"type": "function"}]
)
def test_a_choice_of_nothing_is_refused(client: Client, choice: Any) -> None:
    """Point 30."""
    answer = client.chat(tools=[WEATHER], tool_choice=choice, max_tokens=2)
    assert answer.status == 400
    assert answer.error["param"].startswith("tool")


@pytest.mark.parametrize("arguments", ['{"city": "Paris", "days": 2}', "{}", '{"city": "é\\n"}'])
def test_a_call_and_its_result_go_back_to_the_model(client: Client, arguments: str) -> None:
    """Point 31."""
    call = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": arguments}}
    messages = [
        {"role": "user", "content": "What is the weather in Paris?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "Sunny."},
    ]
    answer = client.post("/v1/chat/completions", {"messages": messages, "max_tokens": 4})
    assert answer.status == 200, answer.body


def test_thinking_is_apart_from_the_answer(client: Client) -> None:
    """Point 17. In a field of its own, whole and streamed, never in both."""
    start = "<think>"
    choice = client.chat("Say " + start, max_tokens=24, chat_template_kwargs={"enable_thinking": False})
    message = choice.json["choices"][0]["message"]
    assert not message.get("reasoning_content")
    assert start not in (message["content"] or "")
    ids = client.post("/tokenize", {"prompt": "<th", "add_special_tokens": False}).json["tokens"]
    forced: dict[str, Any] = {"logit_bias": {str(ids[0]): 20}, "max_tokens": 16, "temperature": 0}
    whole = client.chat("Think.", **forced).json["choices"][0]["message"]
    deltas = [e["choices"][0]["delta"] for e in client.chat("Think.", stream=True, **forced).events]
    for field in ("content", "reasoning_content"):
        assert "".join(delta.get(field) or "" for delta in deltas) == (whole.get(field) or "")
    assert not any(delta.get("content") and delta.get("reasoning_content") for delta in deltas)
