"""/v1/messages: content blocks and named events over the generation of a chat, for Anthropic's client."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from plait.errors import InvalidField
from plait.frontend.deltas import Delta
from plait.server.anthropic.message_blocks import (
    chat_output,
    chat_tool_choice,
    chat_tools,
    conversation,
    convert_thinking,
)
from plait.server.anthropic.messages import MessagesReply
from plait.server.api.validate import IGNORED_HEADER
from plait.server.http.errors import Problem
from tests.contract.wire import Answer, Client
from tests.lazy_modules import import_lazily
from tests.server.conftest import serving, wait_until
from tests.server.fake import EchoLoop
from tests.server.real_engine import engine_front
from tests.server.responses.test_responses import PLAN, as_read, fed, said

if TYPE_CHECKING:
    from anthropic import Anthropic

anthropic = import_lazily("anthropic")

PATH = "/v1/messages"


@pytest.fixture
def claude(base_url: str) -> Iterator[Anthropic]:
    """It reads strictly: a field that is missing, or of another type than it declares, raises."""
    with anthropic.Anthropic(
        base_url=base_url, api_key="none", max_retries=0, _strict_response_validation=True
    ) as found:
        yield found


def ask(client: Client, content: Any = "Hello there", **body: Any) -> Answer:
    messages = [{"role": "user", "content": content}]
    return client.post(PATH, {"model": client.model, "max_tokens": 100, "messages": messages, **body})


def user(text: str) -> Any:
    return [{"role": "user", "content": text}]


def test_text_in_text_out(client: Client) -> None:
    answer = ask(client)
    assert answer.status == 200, answer.body
    body = answer.json
    assert (body["type"], body["role"], body["model"]) == ("message", "assistant", client.model)
    assert [(block["type"], block["text"]) for block in body["content"]] == [("text", "Hello there")]
    assert (body["stop_reason"], body["stop_sequence"]) == ("end_turn", None)
    usage = body["usage"]
    assert usage["output_tokens"] == len("Hello there")
    assert usage["output_tokens_details"] == {"thinking_tokens": 0}
    assert usage["cache_read_input_tokens"] == 3
    assert usage["input_tokens"] + 3 == len("Hello there") + 1


def test_a_limit_and_a_stop_sequence_say_so(client: Client) -> None:
    assert ask(client, max_tokens=4).json["stop_reason"] == "max_tokens"
    stopped = ask(client, "Hello there", stop_sequences=["lo", "xx"]).json
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "lo")
    assert stopped["content"][0]["text"] == "Hel"


def test_events_are_those_of_anthropic_in_their_order(client: Client) -> None:
    events = ask(client, "Hi", stream=True).named_events
    assert [event["type"] for event in events] == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    start = events[0]["message"]
    assert (start["content"], start["stop_reason"]) == ([], None)
    assert start["usage"]["input_tokens"] == 3
    assert events[1]["content_block"]["text"] == ""
    assert events[-2]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert events[-2]["usage"]["output_tokens"] == 2
    assert ask(client, "Hi", stream=True).body.count(b"[DONE]") == 0


def test_anthropic_s_client_whole_and_streamed(claude: Anthropic, client: Client) -> None:
    more: dict[str, Any] = {"model": client.model, "max_tokens": 50}
    whole = claude.messages.create(messages=user("Good morning"), **more)
    assert [block.text for block in whole.content if block.type == "text"] == ["Good morning"]
    with claude.messages.stream(messages=user("Good morning"), system="be good", **more) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == "Good morning"
    assert [block.text for block in final.content if block.type == "text"] == [text]
    assert final.stop_reason == whole.stop_reason == "end_turn"
    assert final.usage.output_tokens == whole.usage.output_tokens
    counted = claude.messages.count_tokens(model=client.model, messages=user("Good morning"))
    assert counted.input_tokens == len("Good morning") + 1


def test_anthropic_s_client_lists_models(claude: Anthropic, client: Client) -> None:
    found = claude.models.list()
    (card,) = found.data
    assert (card.type, card.id, card.display_name) == ("model", client.model, client.model)
    assert card.created_at.timestamp() == client.get("/v1/models").json["data"][0]["created"]
    assert (found.has_more, found.first_id, found.last_id) == (False, card.id, card.id)
    assert claude.models.retrieve(client.model) == card
    assert (card.lifecycle, card.capabilities) == ("active", None)
    assert isinstance(client.get("/v1/models").json["data"][0]["capabilities"], list)


def test_errors_are_those_of_anthropic(claude: Anthropic, client: Client) -> None:
    answer = ask(client, max_tokens=0)
    assert answer.status == 400
    assert set(answer.json) == {"type", "error"}
    assert answer.json["type"] == "error"
    assert answer.json["error"]["type"] == "invalid_request_error"
    assert "max_tokens" in answer.json["error"]["message"]
    assert ask(client, model="nobody").json["error"]["type"] == "not_found_error"
    assert client.post(PATH, b"{").json["error"]["type"] == "invalid_request_error"
    assert ask(client, "x" * (9 << 20)).json["error"]["type"] in {
        "request_too_large",
        "invalid_request_error",
    }
    with pytest.raises(anthropic.NotFoundError):
        claude.messages.create(model="nobody", max_tokens=5, messages=user("a"))


@pytest.mark.parametrize(
    ("field", "value", "ours"),
    [
        ("response_format", {"type": "json_object"}, "output_config.format"),
        ("stop", ["x"], "stop_sequences"),
        ("max_completion_tokens", 2, "max_tokens"),
        ("reasoning_effort", "none", "output_config.effort"),
        ("thinking_token_budget", 5, "thinking.budget_tokens"),
        ("parallel_tool_calls", False, "tool_choice.disable_parallel_tool_use"),
        ("n", 2, "leave it out"),
        ("logprobs", True, "leave it out"),
    ],
)
def test_what_a_chat_calls_otherwise_is_refused_and_not_forgotten(
    client: Client, field: str, value: Any, ours: str
) -> None:
    answer = ask(client, **{field: value})
    assert answer.status == 400, answer.body
    assert field in answer.json["error"]["message"]
    assert ours in answer.json["error"]["message"]


def test_words_of_a_chat_that_say_nothing_are_taken(client: Client) -> None:
    nothing = {"n": 1, "logprobs": False, "stop": [], "stream_options": None, "thinking_token_budget": -1}
    assert ask(client, parallel_tool_calls=True, **nothing).status == 200


def test_a_failure_in_a_stream_is_an_error_event(claude: Anthropic, client: Client) -> None:
    last = ask(client, "BOOM", stream=True).named_events[-1]
    assert last["type"] == "error"
    assert last["error"]["type"] == "api_error"
    assert "failed here" in last["error"]["message"]
    with (
        pytest.raises(anthropic.APIStatusError),
        claude.messages.stream(model=client.model, max_tokens=5, messages=user("BOOM")) as stream,
    ):
        list(stream)


def test_the_client_s_version_and_key_headers_are_optional(client: Client) -> None:
    assert ask(client).status == 200
    messages = {"model": client.model, "max_tokens": 5, "messages": user("a")}
    assert client.post(PATH, messages, anthropic_version="2023-06-01", x_api_key="k").status == 200


def test_count_tokens_takes_what_messages_takes(client: Client) -> None:
    body = {"model": client.model, "messages": user("abc"), "system": "de"}
    assert client.post(PATH + "/count_tokens", body).json == {"input_tokens": 7}
    assert client.post(PATH + "/count_tokens", {**body, "messages": []}).status == 400


CALL_BLOCK = {"type": "tool_use", "id": "a", "name": "f", "input": {}}


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "system", "content": "a"}]}, "messages: there is none of a user"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role"),
        ({"messages": [*user("a"), {"role": "system", "content": []}]}, "messages[1].content"),
        ({"messages": [*user("a"), {"role": "system", "content": [CALL_BLOCK]}]}, "messages[1].content[0]"),
        ({"cache_control": {"type": "for ever"}}, "cache_control"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "tool_use_id"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "input": 1}]}]}, "input"),
        (
            {"messages": [*user("a"), {"role": "assistant", "content": [CALL_BLOCK]}]},
            "messages[1]: a reply goes on",
        ),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"system": 3}, "system"),
        ({"max_tokens": None}, "max_tokens"),
        ({"stop_sequences": ["a"] * 99}, "stop_sequences"),
        ({"temperature": 9}, "temperature"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"compaction": {"type": "enabled"}}, "compaction"),
        ({"thread": {"type": "continue", "previous_message_id": "msg_1"}}, "thread"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management"),
        ({"context_management": {"edits": [{"type": "clear_thinking_20251015"}]}}, "context_management"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "deep"}}, "thinking.type"),
        ({"output_config": {"speed": "fast"}}, "output_config.speed"),
    ],
)
def test_refusals_name_the_field(client: Client, body: dict[str, Any], word: str) -> None:
    sent = {"model": client.model, "max_tokens": 5, "messages": user("a"), **body}
    answer = client.post(PATH, sent)
    assert answer.status == 400, answer.body
    assert word in answer.json["error"]["message"]


def test_a_management_of_context_that_keeps_all_is_taken(client: Client) -> None:
    for edits in ([], [{"type": "clear_thinking_20251015", "keep": "all"}]):
        assert ask(client, context_management={"edits": edits}).status == 200


def test_a_reply_goes_on_from_the_assistant_s_last_words(client: Client) -> None:
    """The fake model says its last message again."""
    told = {"role": "assistant", "content": [{"type": "text", "text": "so be it"}]}
    body = {"model": client.model, "messages": [*user("abc"), told]}
    answer = client.post(PATH, {**body, "max_tokens": 5}).json
    assert answer["content"][0]["text"] == "so be"
    usage, counted = answer["usage"], client.post(PATH + "/count_tokens", body).json["input_tokens"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == counted


def test_a_system_message_has_its_place_in_the_conversation(claude: Anthropic, client: Client) -> None:
    brief: Any = {
        "role": "system",
        "content": [{"type": "text", "text": "Be"}, {"type": "text", "text": "brief"}],
    }
    messages: Any = [*user("Hello"), {"role": "assistant", "content": "Hi"}, brief, *user("More")]
    found = conversation(messages, "Be kind")
    assert [message["role"] for message in found.messages] == [
        "system",
        "user",
        "assistant",
        "system",
        "user",
    ]
    assert found.messages[3]["content"] == "Be\nbrief"
    assert claude.messages.create(model=client.model, max_tokens=50, messages=messages).content


def test_keys_that_nothing_reads_are_named_in_the_header(client: Client) -> None:
    quiet = {"type": "text", "text": "Hello", "citations": [{}], "cache_control": {"type": "ephemeral"}}
    tool = {"name": "look", "input_schema": {"type": "object"}, "defer_loading": False, "strict": True}
    body: dict[str, Any] = {"cache_control": {"type": "ephemeral"}, "tool_choice": {"type": "none"}}
    assert IGNORED_HEADER not in ask(client, [quiet], tools=[tool], **body).headers
    tool |= {"defer_loading": True, "input_examples": [{"at": "sea"}]}
    told = [{**quiet, "title": "a"}]
    answer = ask(client, told, tools=[tool], system=[{**quiet, "weight": 0}], speed="fast", **body)
    named = "speed,system.weight,messages.content.title,tools.defer_loading,tools.input_examples"
    assert answer.headers[IGNORED_HEADER] == named
    looked = [*user("a"), {"role": "assistant", "content": [CALL_BLOCK]}]
    result = {"type": "tool_result", "tool_use_id": CALL_BLOCK["id"], "content": told}
    inner = {"model": client.model, "messages": [*looked, {"role": "user", "content": [result]}]}
    answer = client.post(PATH + "/count_tokens", inner)
    assert answer.headers[IGNORED_HEADER] == "messages.content.content.title"
    counted = {"model": client.model, "messages": [{"role": "user", "content": told}]}
    assert client.post(PATH + "/count_tokens", counted).headers[IGNORED_HEADER] == "messages.content.title"


def test_blocks_become_messages_and_tools_functions() -> None:
    messages = [
        {"role": "user", "content": "weather?"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": ""},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "t1", "name": "look", "input": {"at": "sea"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "t1",
                    "content": [{"type": "text", "text": "no"}],
                    "is_error": True,
                },
                {"type": "text", "text": "so?", "cache_control": {"type": "ephemeral"}},
            ],
        },
    ]
    found = conversation(messages, [{"type": "text", "text": "be brief"}])
    call = {"id": "t1", "type": "function", "function": {"name": "look", "arguments": '{"at":"sea"}'}}
    assert found.messages == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": "I look.", "tool_calls": [call], "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": "t1", "content": "Error: no"},
        {"role": "user", "content": "so?"},
    ]
    assert found.places == ["system", "messages[0]", "messages[1]", "messages[2].content[0]", "messages[2]"]
    schema = {"type": "object", "properties": {}}
    (tool,) = chat_tools([{"name": "look", "description": "looks", "input_schema": schema}])
    assert tool["function"] == {"name": "look", "description": "looks", "parameters": schema}
    (tool,) = chat_tools([{"name": "look", "input_schema": schema, "strict": True, "input_examples": [{}]}])
    assert tool["function"] == {"name": "look", "parameters": schema, "strict": True}
    assert chat_tool_choice({"type": "any", "disable_parallel_tool_use": True}) == {
        "tool_choice": "required",
        "parallel_tool_calls": False,
    }
    assert chat_tool_choice({"type": "tool", "name": "look"})["tool_choice"]["function"] == {"name": "look"}


def test_thinking_and_output_become_fields_of_a_chat() -> None:
    assert convert_thinking({"type": "disabled"}) == {"reasoning_effort": "none"}
    asked = {"type": "enabled", "budget_tokens": 9, "display": "omitted"}
    assert convert_thinking(asked) == {"thinking_token_budget": 9, "include_reasoning": False}
    assert convert_thinking({"type": "adaptive"}) == convert_thinking({}) == {}
    schema = {"type": "object"}
    form = {"type": "json_schema", "schema": schema}
    found = chat_output({"effort": "low", "format": form})
    assert (
        chat_output({"effort": "low"}, form) == chat_output({"format": form, "effort": "low"}, form) == found
    )
    with pytest.raises(InvalidField, match=r"output_config\.format is another one"):
        chat_output({"format": {}}, form)
    assert found["reasoning_effort"] == "low"
    assert found["response_format"]["json_schema"]["schema"] == schema


def played(stream: bool, deltas: Sequence[Delta] = ()) -> Any:
    found = MessagesReply("m", PLAN)
    if stream:
        return [*as_read(found.begin()), *fed(found, deltas or said()), *as_read(found.end())]
    for delta in deltas or said():
        found.count.add(0, delta)
        found.add(0, delta)
    return msgspec.to_builtins(found.whole())


def test_thinking_text_and_calls_are_blocks_one_after_the_other() -> None:
    body = played(stream=False)
    assert body["content"] == [
        {"type": "thinking", "thinking": "let me think", "signature": ""},
        {"type": "text", "text": "I look.", "citations": None},
        {"type": "tool_use", "id": "call_1", "name": "look", "input": {"at": "sea"}},
        {"type": "tool_use", "id": "call_2", "name": "ask", "input": {}},
    ]
    assert body["stop_reason"] == "tool_use"
    anthropic.types.Message.model_validate(body)
    deltas = [msgspec.structs.replace(delta, num_reasoning_tokens=2) for delta in said()]
    thought = {"thinking_tokens": 2}
    assert played(stream=False, deltas=deltas)["usage"]["output_tokens_details"] == thought
    (end,) = [event for event in played(stream=True, deltas=deltas) if event["type"] == "message_delta"]
    assert end["usage"]["output_tokens_details"] == thought


def test_events_of_every_block_add_up() -> None:
    events, body = played(stream=True), played(stream=False)
    for i, block in enumerate(body["content"]):
        mine = [event for event in events if event.get("index") == i]
        assert [mine[0]["type"], mine[-1]["type"]] == ["content_block_start", "content_block_stop"]
        assert {event["type"] for event in mine[1:-1]} == {"content_block_delta"}
        pieces = "".join(_piece(event["delta"]) for event in mine[1:-1])
        assert mine[0]["content_block"]["type"] == block["type"]
        want = (
            block.get("text") or block.get("thinking") or {"look": '{"at":"sea"}', "ask": "{}"}[block["name"]]
        )
        assert pieces == want
    assert mine[0]["content_block"]["input"] == {}


def _piece(delta: Mapping[str, str]) -> str:
    return delta.get("text") or delta.get("thinking") or delta["partial_json"]


def test_a_call_that_was_cut_is_none() -> None:
    body = played(stream=False, deltas=said("length", without=2))
    assert body["stop_reason"] == "max_tokens"
    assert [block["type"] for block in body["content"]] == ["thinking", "text"]


def test_a_call_that_broke_is_no_tool_use() -> None:
    events = played(stream=True, deltas=said(without=2))
    assert [event["type"] for event in events[-5:-3]] == ["content_block_start", "content_block_delta"]
    assert events[-2]["delta"]["stop_reason"] == "end_turn"


def test_whole_calls_of_a_reply_that_stops_by_itself_are_a_tool_use() -> None:
    assert played(stream=False)["stop_reason"] == "tool_use"


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (429, "rate_limit_error"),
        (503, "overloaded_error"),
        (502, "api_error"),
        (415, "invalid_request_error"),
    ],
)
def test_kinds_of_errors(status: int, kind: str) -> None:
    (event,) = as_read(MessagesReply("m", PLAN).fail(Problem(status, "no")))
    assert event == {"type": "error", "error": {"type": kind, "message": "no"}}


def test_a_client_that_leaves_ends_its_message(claude: Anthropic, client: Client, engine: EchoLoop) -> None:
    more: Any = {"model": client.model, "max_tokens": 500}
    with claude.messages.stream(messages=user("SLOW" * 100), **more) as stream:
        next(iter(stream.text_stream))
        assert engine.stats()["running"] == 1
    assert wait_until(lambda: engine.stats()["running"] == 0)


def test_through_the_engine_a_seed_gives_the_chat_s_text() -> None:
    front = engine_front()
    try:
        with serving(front) as client:
            more = {"seed": 5, "temperature": 1, "top_k": 20, "max_tokens": 30}
            found = ask(client, "tell me", **more).json
            chat = client.chat("tell me", **more).json
            assert found["content"][0]["text"] == chat["choices"][0]["message"]["content"]
    finally:
        front.close()


def test_cache_control_marks_places_worth_keeping() -> None:
    kept = {"cache_control": {"type": "ephemeral"}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a long document", **kept}]},
        {"role": "assistant", "content": "Read."},
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t", "content": "4"},
                {"type": "text", "text": "and?", "cache_control": {"type": "ephemeral", "ttl": "1h"}},
            ],
        },
    ]
    found = conversation(messages, [{"type": "text", "text": "Be short.", **kept}])
    assert found.cached == [1, 2, 5]
    assert [message["role"] for message in found.messages] == ["system", "user", "assistant", "tool", "user"]
    assert conversation(messages[1:2], None).cached == []


def test_cache_control_and_cache_at_reach_the_chat(client: Client) -> None:
    block = {"type": "text", "text": "Hello", "cache_control": {"type": "ephemeral"}}
    assert ask(client, [block]).status == 200
    assert ask(client, [block], cache_at=[1]).status == 200
    for content, more in (
        ([{**block, "cache_control": {"type": "for ever"}}], {}),
        ([{**block, "cache_control": "yes"}], {}),
        ([block] * 5, {}),
        ([block], {"cache_at": [2]}),
        ("Hello", {"cache_at": [0]}),
        ("Hello", {"cache_at": 1}),
    ):
        answer = ask(client, content, **more)
        assert answer.status == 400, (content, more)
        assert "cache_" in answer.json["error"]["message"]
