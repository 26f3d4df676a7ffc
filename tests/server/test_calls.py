"""Tools and thinking through Responses and Messages: what a chat reads out of a reply, in their words."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from anthropic import Anthropic
from openai import OpenAI

from plait.engine.front import Front, Language
from plait.spec import ModelSpec, Norm
from tests.contract.wire import Client
from tests.server.conftest import serving
from tests.server.fake import CONTEXT, EOS, HIDDEN_SIZE, VOCAB_SIZE, ByteTokenizer, EchoLoop, TurnTemplate

CALL = '<tool_call>{"name": "look", "arguments": {"at": "sea", "n": 2}}</tool_call>'
SAID = f"<think>let me see</think>I look.{CALL}"
SCHEMA = {"type": "object", "properties": {"at": {"type": "string"}, "n": {"type": "integer"}}}


class CallingTurns(TurnTemplate):
    """Turns of a model that thinks and calls tools in the most common way."""

    source = "{% if tools %}<tool_call>{name, arguments}</tool_call>{% endif %}<think></think>"


@pytest.fixture(scope="module")
def caller() -> Iterator[Client]:
    """A server of a model that says the last message again."""
    spec = ModelSpec("calls", HIDDEN_SIZE, VOCAB_SIZE, (), Norm(), CONTEXT)
    language = Language(ByteTokenizer(), CallingTurns(), {}, frozenset({EOS}))
    with serving(Front("calls", spec, CONTEXT, EchoLoop(), language)) as found:
        yield found


def test_a_call_is_an_item_of_a_response(caller: Client) -> None:
    tools: Any = [{"type": "function", "name": "look", "parameters": SCHEMA, "strict": False}]
    with OpenAI(base_url=caller.base_url + "/v1", api_key="none", max_retries=0) as client:
        whole = client.responses.create(model=caller.model, input=SAID, tools=tools)
        with client.responses.stream(model=caller.model, input=SAID, tools=tools) as stream:
            events = list(stream)
            final = stream.get_final_response()
    assert [item.type for item in whole.output] == ["reasoning", "message", "function_call"]
    call: Any = whole.output[2]
    assert (call.name, call.arguments) == ("look", '{"at": "sea", "n": 2}')
    assert whole.output_text == final.output_text == "I look."
    assert whole.usage is not None
    assert whole.usage.output_tokens_details.reasoning_tokens > 0
    streamed: Any = final.output[2]
    assert (streamed.name, streamed.arguments) == (call.name, call.arguments)
    pieces = [e.delta for e in events if e.type == "response.function_call_arguments.delta"]
    assert "".join(pieces) == call.arguments
    thought = [e.delta for e in events if e.type == "response.reasoning_text.delta"]
    assert "".join(thought) == "let me see"


def test_a_call_is_a_block_of_a_message(caller: Client) -> None:
    tools: Any = [{"name": "look", "input_schema": SCHEMA}]
    asked: Any = {"model": caller.model, "max_tokens": 500, "tools": tools}
    asked["messages"] = [{"role": "user", "content": SAID}]
    with Anthropic(base_url=caller.base_url, api_key="none", max_retries=0) as client:
        whole = client.messages.create(**asked)
        with client.messages.stream(**asked) as stream:
            final = stream.get_final_message()
    assert [block.type for block in whole.content] == ["thinking", "text", "tool_use"]
    assert whole.stop_reason == final.stop_reason == "tool_use"
    for found in (whole, final):
        call: Any = found.content[2]
        assert (call.name, call.input) == ("look", {"at": "sea", "n": 2})
        thought: Any = found.content[0]
        assert thought.thinking == "let me see"


def test_what_was_called_and_answered_can_be_said_again(caller: Client) -> None:
    tools = [{"name": "look", "input_schema": SCHEMA}]
    messages = [
        {"role": "user", "content": "look"},
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "t1", "name": "look", "input": {"at": "sea"}}],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "waves"}]},
    ]
    body = {"model": caller.model, "max_tokens": 50, "tools": tools, "messages": messages}
    answer = caller.post("/v1/messages", body)
    assert answer.json["content"][0]["text"] == "waves", answer.body
    items = [
        {"role": "user", "content": "look"},
        {"type": "function_call", "call_id": "t1", "name": "look", "arguments": '{"at": "sea"}'},
        {"type": "function_call_output", "call_id": "t1", "output": "waves"},
    ]
    said = caller.post("/v1/responses", {"model": caller.model, "input": items}).json
    assert said["output"][0]["content"][0]["text"] == "waves"


def test_a_tool_that_nobody_knows_is_refused_in_each_one_s_words(caller: Client) -> None:
    tool = {"type": "function", "name": "look", "parameters": SCHEMA}
    choice = {"type": "function", "name": "other"}
    answer = caller.post("/v1/responses", {"input": "x", "tools": [tool], "tool_choice": choice})
    assert answer.status == 400
    assert answer.error["param"] == "tool_choice"
    body = {"max_tokens": 5, "messages": [{"role": "user", "content": "x"}]}
    tools = [{"name": "look", "input_schema": SCHEMA}]
    named = {"type": "tool", "name": "other"}
    refused = caller.post("/v1/messages", {**body, "tools": tools, "tool_choice": named})
    assert refused.status == 400
    assert "tool_choice" in refused.json["error"]["message"]
