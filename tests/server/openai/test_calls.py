"""Calls of tools over HTTP: points 20, 21 and 25 to 31 of the wire contract."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai import OpenAI

from plait.text.output.json_stream import is_json
from tests.server.conftest import Client, serving
from tests.server.fake import fake_front
from tests.server.openai.speaking import CLOCK, TOOLS, WEATHER, SpeakingTemplate, said_call
from tests.server.real_engine import engine_front

PARIS = '{"city": "Paris", "days": 2}'
TWO = f"{said_call('weather', PARIS)}\n{said_call('clock', '{}')}"


@pytest.fixture(scope="module")
def template() -> SpeakingTemplate:
    return SpeakingTemplate()


@pytest.fixture(scope="module")
def base_url(template: SpeakingTemplate) -> Iterator[str]:
    with serving(fake_front(template=template)) as client:
        yield client.base_url


@pytest.fixture(scope="module")
def real() -> Iterator[Client]:
    with serving(engine_front(template=SpeakingTemplate())) as client:
        yield client


def whole(client: Client, text: str, **more: Any) -> dict[str, Any]:
    """The choice of a reply that says `text`."""
    answer = client.chat(text, **{"tools": TOOLS, **more})
    assert answer.status == 200, answer.body
    found: dict[str, Any] = answer.json["choices"][0]
    return found


def told(client: Client, text: str, **more: Any) -> dict[str, Any]:
    """The same, put together from a stream as clients do, which checks how calls are streamed."""
    message: dict[str, Any] = {"role": "assistant", "content": "", "refusal": None}
    calls: list[dict[str, Any]] = []
    finish = None
    for event in client.chat(text, **{"tools": TOOLS, "stream": True, **more}).events:
        (choice,) = event["choices"]
        delta = choice["delta"]
        assert finish is None
        finish = choice["finish_reason"]
        message["content"] += delta.get("content") or ""
        if "reasoning_content" in delta:
            assert "content" not in delta
            for name in ("reasoning_content", "reasoning"):
                message[name] = message.get(name, "") + delta[name]
        for piece in delta.get("tool_calls", ()):
            if "id" in piece:
                assert piece["index"] == len(calls)
                assert piece["type"] == "function"
                assert piece["function"]["arguments"] == ""
                calls.append({key: value for key, value in piece.items() if key != "index"})
            else:
                assert set(piece) == {"index", "function"}
                assert set(piece["function"]) == {"arguments"}
                calls[piece["index"]]["function"]["arguments"] += piece["function"]["arguments"]
    if calls:
        message |= {"content": message["content"] or None, "tool_calls": calls}
    return {"message": message, "finish_reason": finish}


def without_ids(choice: dict[str, Any]) -> tuple[Any, ...]:
    """Of a stream only the calls that are whole, as of a reply that is not streamed."""
    message = dict(choice["message"])
    found = [call["function"] for call in message.pop("tool_calls", ())]
    calls = [call for call in found if is_json(call["arguments"])]
    return (
        {**message, "content": message["content"] or (None if calls else "")},
        calls,
        choice["finish_reason"],
    )


def test_a_call_is_a_message_without_content(client: Client) -> None:
    choice = whole(client, said_call("weather", PARIS))
    (call,) = choice["message"]["tool_calls"]
    assert choice["message"]["content"] is None
    assert (call["type"], call["function"]) == ("function", {"name": "weather", "arguments": PARIS})
    assert call["id"]
    assert choice["finish_reason"] == "tool_calls"


def test_text_before_a_call_is_its_content(client: Client) -> None:
    choice = whole(client, f"Let me look.\n{said_call('clock', '{}')}")
    assert choice["message"]["content"] == "Let me look."
    assert len(choice["message"]["tool_calls"]) == 1


@pytest.mark.parametrize("more", [{}, {"tools": []}, {"tools": None}])
def test_without_a_call_there_is_no_such_key(client: Client, more: dict[str, Any]) -> None:
    for choice in (whole(client, "Just words", **more), told(client, "Just words", **more)):
        assert "tool_calls" not in choice["message"]
        assert choice["message"]["content"] == "Just words"
        assert choice["finish_reason"] == "stop"


def test_parallel_calls_have_numbers_and_ids_of_their_own(client: Client) -> None:
    for choice in (whole(client, TWO), told(client, TWO)):
        first, second = choice["message"]["tool_calls"]
        assert first["id"] != second["id"]
        assert [first["function"]["name"], second["function"]["name"]] == ["weather", "clock"]


def test_one_call_at_most_where_parallel_ones_are_forbidden(client: Client) -> None:
    for choice in (
        whole(client, TWO, parallel_tool_calls=False),
        told(client, TWO, parallel_tool_calls=False),
    ):
        (call,) = choice["message"]["tool_calls"]
        assert call["function"] == {"name": "weather", "arguments": PARIS}
        assert (choice["message"]["content"], choice["finish_reason"]) == (None, "tool_calls")


PIECES = (
    "Hello",
    " ",
    "\n",
    "é🦜",
    said_call("weather", PARIS),
    said_call("clock", "{}"),
    said_call("weather", '{"city": "}</tool'),
    "<tool_call>",
    "</tool_call>",
    "<tool_ca",
    "<think>",
    "</think>",
    '{"name": "clock", "arguments": {}}',
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    text=st.lists(st.sampled_from(PIECES), min_size=1, max_size=6).map("".join),
    max_tokens=st.one_of(st.none(), st.integers(1, 120)),
    parallel=st.booleans(),
)
def test_what_is_streamed_is_what_is_answered_whole(
    client: Client, text: str, max_tokens: int | None, parallel: bool
) -> None:
    more = {"max_tokens": max_tokens, "parallel_tool_calls": parallel}
    streamed, answered = told(client, text, **more), whole(client, text, **more)
    assert without_ids(streamed) == without_ids(answered)
    for call in answered["message"].get("tool_calls", ()):
        assert isinstance(json.loads(call["function"]["arguments"]), dict)


def test_no_marker_is_ever_in_the_content(client: Client) -> None:
    for event in client.chat(f"So:\n{TWO}", tools=TOOLS, stream=True).events:
        assert "tool_call" not in (event["choices"][0]["delta"].get("content") or "")


@pytest.mark.parametrize("parallel", [True, False])
def test_a_call_that_is_cut_off_is_none_and_says_so(client: Client, parallel: bool) -> None:
    text = said_call("weather", PARIS)
    for length in range(1, len(text)):
        more = {"max_tokens": length, "parallel_tool_calls": parallel}
        choice, streamed = whole(client, text, **more), told(client, text, **more)
        is_whole = PARIS in text[:length]
        assert len(choice["message"].get("tool_calls", [])) == is_whole
        assert is_whole or (choice["finish_reason"], streamed["finish_reason"]) == ("length",) * 2
        marker = "<tool_call>"  # a part of it may be text; what it opened is none
        shown = text[:length] if length < len(marker) else ""
        assert is_whole or choice["message"]["content"] == shown
        for call in streamed["message"].get("tool_calls", []):
            assert PARIS.startswith(call["function"]["arguments"])


@pytest.mark.parametrize("parallel", [True, False])
def test_the_other_apis_never_give_out_a_cut_call_as_a_whole_one(client: Client, parallel: bool) -> None:
    text = said_call("weather", PARIS)
    length, say = text.index("Par"), [{"role": "user", "content": text}]
    schema = WEATHER["function"]["parameters"]
    choice = {"type": "auto", "disable_parallel_tool_use": not parallel}
    tools: list[Any] = [{"name": "weather", "input_schema": schema}]
    asked = {"messages": say, "tools": tools, "tool_choice": choice, "max_tokens": length}
    answer = client.post("/v1/messages", asked).json
    assert (answer["stop_reason"], answer["content"]) == ("max_tokens", [])
    tools = [{"type": "function", "name": "weather", "parameters": schema}]
    more = {"max_output_tokens": length, "parallel_tool_calls": parallel}
    answer = client.post("/v1/responses", {"input": say, "tools": tools, **more}).json
    assert answer["status"] == "incomplete"
    assert [(item["type"], item["status"]) for item in answer["output"]] == [("function_call", "incomplete")]


def test_none_means_no_call_and_a_model_that_knows_of_no_tools(
    client: Client, template: SpeakingTemplate
) -> None:
    text = said_call("weather", PARIS)
    choice = whole(client, text, tool_choice="none")
    assert "tool_calls" not in choice["message"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (text, "stop")
    assert template.asked[-1][1]["tools"] is None
    whole(client, text, tool_choice="auto")
    assert template.asked[-1][1]["tools"] == TOOLS


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"tool_choice": {"type": "function", "function": {"name": "nothing"}}}, "tool_choice"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tools": None, "tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "function"}]}, "tools[0]"),
        ({"tools": [CLOCK, CLOCK]}, "tools[1].function.name"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [CLOCK] * 2000}, "tools"),
        (
            {
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {"if": {}}}}],
                "tool_choice": "required",
            },
            "tools[0].function.parameters",
        ),
    ],
)
def test_a_choice_or_a_tool_that_cannot_be_honoured_is_named(
    client: Client, more: dict[str, Any], param: str
) -> None:
    answer = client.chat("Hello", **{"tools": TOOLS, **more})
    assert (answer.status, answer.error["param"]) == (400, param)


def test_a_template_without_tools_refuses_them() -> None:
    with serving(fake_front()) as client:
        answer = client.chat("Hello", tools=TOOLS)
        assert (answer.status, answer.error["param"]) == (400, "tools")
        assert client.chat("Hello", tools=TOOLS, tool_choice="none").status == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("params", [{}, {"temperature": 1.2, "seed": 5}])
def test_a_required_call_is_one_that_its_schema_allows(
    real: Client, params: dict[str, Any], stream: bool
) -> None:
    more = {"tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 400, **params}
    asked = {"tools": [WEATHER], "thinking_token_budget": 0, **more}
    choice = told(real, "Weather?", **asked) if stream else whole(real, "Weather?", **asked)
    (call,) = choice["message"]["tool_calls"]
    jsonschema.validate(json.loads(call["function"]["arguments"]), WEATHER["function"]["parameters"])
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None


def test_a_named_call_is_that_one(real: Client) -> None:
    named = {"type": "function", "function": {"name": "weather"}}
    asked = {"tool_choice": named, "max_tokens": 400, "thinking_token_budget": 0}
    for choice in (whole(real, "Weather?", **asked), told(real, "Weather?", **asked)):
        (call,) = choice["message"]["tool_calls"]
        assert call["function"]["name"] == "weather"
        jsonschema.validate(json.loads(call["function"]["arguments"]), WEATHER["function"]["parameters"])
        assert choice["finish_reason"] == "stop"


def test_an_answer_goes_back_with_its_call(client: Client, template: SpeakingTemplate) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": PARIS}}
    messages = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": "c1", "content": "Sunny"},
    ]
    answer = client.post("/v1/chat/completions", {"messages": messages, "tools": TOOLS})
    assert answer.status == 200
    assert answer.json["choices"][0]["message"]["content"] == "Sunny"
    broken = {**call, "function": {"name": "weather", "arguments": "{"}}
    messages[1] = {**messages[1], "tool_calls": [broken]}
    answer = client.post("/v1/chat/completions", {"messages": messages, "tools": TOOLS})
    assert answer.error["param"] == "messages[1].tool_calls[0].function.arguments"


def test_openais_client_reads_calls_whole_and_streamed(openai: OpenAI) -> None:
    messages: Any = [{"role": "user", "content": TWO}]
    tools: Any = TOOLS
    answer = openai.chat.completions.create(model="fake", messages=messages, tools=tools)
    assert [call.function.arguments for call in answer.choices[0].message.tool_calls or ()] == [PARIS, "{}"]  # type: ignore[union-attr]
    with openai.chat.completions.stream(model="fake", messages=messages, tools=tools) as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion().choices[0].message.tool_calls or []
    assert [call.function.arguments for call in final] == [PARIS, "{}"]


@pytest.mark.parametrize("stop", ["Paris", '"', "\n"])
def test_a_stop_string_ends_content_and_no_call(client: Client, stop: str) -> None:
    choice = whole(client, said_call("weather", PARIS), stop=stop)
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == PARIS
    choice = whole(client, f"See Paris.{said_call('weather', PARIS)}", stop="Paris")
    assert (choice["message"]["content"], choice["finish_reason"]) == ("See ", "stop")
    assert "tool_calls" not in choice["message"]
