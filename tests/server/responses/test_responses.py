"""/v1/responses: items and named events over the same generation as a chat, for OpenAI's own client."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import pytest
from openai import OpenAI
from openai.types.responses import Response

from plait.errors import BadGrammar
from plait.frontend.deltas import Delta
from plait.request import FinishReason, Request, SamplingParams
from plait.server.anthropic import messages
from plait.server.api.content_blocks import in_words_of
from plait.server.api.reply import ApiReply, ChatPlan, Part
from plait.server.api.schema import ChatRequest
from plait.server.http.errors import Problem
from plait.server.responses.input_items import conversation
from plait.server.responses.reply import ResponsesReply
from plait.server.responses.request import NAMES, ResponsesRequest
from plait.text.output import Arguments, CallEnd, CallStart, Content, Reasoning
from tests.contract.wire import Answer, Client
from tests.server.conftest import serving, wait_until
from tests.server.fake import EchoLoop
from tests.server.real_engine import engine_front

PATH = "/v1/responses"


def respond(client: Client, found: Any, **body: Any) -> Answer:
    return client.post(PATH, {"model": client.model, "input": found, "temperature": 0, **body})


def test_text_in_text_out(client: Client) -> None:
    answer = respond(client, "Hello there")
    assert answer.status == 200, answer.body
    body = answer.json
    assert body["id"].startswith("resp_")
    assert (body["object"], body["status"], body["store"]) == ("response", "completed", False)
    (item,) = body["output"]
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "completed")
    (part,) = item["content"]
    assert (part["type"], part["text"], part["annotations"]) == ("output_text", "Hello there", [])
    usage = body["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert usage["output_tokens"] == len("Hello there")
    assert usage["input_tokens_details"]["cached_tokens"] == 3
    assert usage["output_tokens_details"]["reasoning_tokens"] == 0


def test_input_tokens_are_counted_as_a_response_counts_them(client: Client, openai: OpenAI) -> None:
    asked: Any = {"input": "Good morning", "instructions": "Be brief."}
    counted = openai.responses.input_tokens.count(model=client.model, **asked)
    usage = respond(client, asked["input"], instructions="Be brief.").json["usage"]
    assert (counted.object, counted.input_tokens) == ("response.input_tokens", usage["input_tokens"])
    refused = client.post("/v1/responses/input_tokens", {"input": []})
    assert (refused.status, refused.error["param"]) == (400, "input")


def test_a_limit_makes_it_incomplete(client: Client) -> None:
    body = respond(client, "Hello there", max_output_tokens=4).json
    assert (body["status"], body["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert body["output"][0]["status"] == "incomplete"
    assert body["output"][0]["content"][0]["text"] == "Hell"


def test_events_are_those_of_openai_in_their_order(client: Client) -> None:
    events = respond(client, "Hi", stream=True).named_events
    assert [event["type"] for event in events] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[0]["response"]["status"] == "in_progress"
    assert events[0]["response"]["output"] == []


def test_what_is_streamed_is_what_is_answered_whole(client: Client) -> None:
    def bare(body: Mapping[str, Any]) -> dict[str, Any]:
        output = [{**item, "id": ""} for item in body["output"]]
        return {**body, "id": "", "output": output, "created_at": 0, "completed_at": 0}

    for more in (
        {},
        {"max_output_tokens": 5},
        {"include": ["message.output_text.logprobs"], "top_logprobs": 2},
    ):
        whole = respond(client, "Good evening", **more).json
        last = respond(client, "Good evening", stream=True, **more).named_events[-1]
        assert last["type"] == f"response.{whole['status']}"
        assert bare(last["response"]) == bare(whole)


def test_openai_s_client_whole_and_streamed(openai: OpenAI, client: Client) -> None:
    whole = openai.responses.create(model=client.model, input="Good morning", temperature=0)
    assert whole.output_text == "Good morning"
    assert whole.usage is not None
    Response.model_validate(whole.model_dump(), strict=False)
    with openai.responses.stream(model=client.model, input="Good morning", temperature=0) as stream:
        pieces = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert "".join(pieces) == final.output_text == whole.output_text
    assert final.usage is not None
    assert final.usage.total_tokens == whole.usage.total_tokens


def test_items_instructions_and_parts_are_messages(client: Client, engine: EchoLoop) -> None:
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "one"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "two"}]},
        {"role": "user", "content": "three"},
    ]
    assert respond(client, items, instructions="zero").json["output"][0]["content"][0]["text"] == "three"
    messages = [{"role": "system", "content": "zero"}, *({"role": r, "content": c} for r, c in CHAT)]
    client.post("/v1/chat/completions", {"messages": messages, "temperature": 0})
    one, other = engine.requests[-2:]
    assert one.prompt_token_ids == other.prompt_token_ids


CHAT = (("user", "one"), ("assistant", "two"), ("user", "three"))


def test_calls_results_and_reasoning_become_messages() -> None:
    items = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "weather?"},
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "hm"}],
        },
        {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"},
        {"type": "function_call", "call_id": "c2", "name": "ask", "arguments": '{"a":1}'},
        {"type": "function_call_output", "call_id": "c1", "output": "rain"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "no"}]},
    ]
    found = conversation(items, "you are a cat")
    calls = [
        {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}},
        {"id": "c2", "type": "function", "function": {"name": "ask", "arguments": '{"a":1}'}},
    ]
    assert found.messages == [
        {"role": "system", "content": "you are a cat\n\nbe brief"},
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": None, "tool_calls": calls, "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
        {"role": "tool", "tool_call_id": "c2", "content": "no"},
    ]
    assert found.places == ["input[0]", "input[1]", "input[3]", "input[5]", "input[6]"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": []}, "input"),
        ({"input": 3}, "input"),
        ({"input": [{"role": "nobody", "content": "a"}]}, "input[0].role"),
        ({"input": [{"role": ["x"], "content": "a"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": 3}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        ({"input": [{"type": "web_search_call"}]}, "input[0].type"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"metadata": {f"name{i}": "a" for i in range(17)}}, "metadata"),
        ({"metadata": {"name": "a" * 513}}, "metadata"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_tool_calls": 0}, "max_tool_calls"),
        ({"temperature": 3}, "temperature"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
        ({"input": "x" * 3000}, "input"),
        ({"input": None}, "input"),
        ({"prompt_cache_options": {"prewarm": True}}, "prompt_cache_options.prewarm"),
    ],
)
def test_refusals_are_in_the_words_of_this_api(client: Client, body: dict[str, Any], param: str) -> None:
    answer = client.post(PATH, {"model": client.model, "input": "a", **body})
    assert answer.status == 400, answer.body
    assert answer.error["param"] == param
    word = (
        "prompt" if answer.error["code"] == "context_length_exceeded" else param.split("[")[0].split(".")[0]
    )
    assert word in answer.error["message"]


@pytest.mark.parametrize(
    ("field", "value", "ours"),
    [
        ("max_tokens", 2, "max_output_tokens"),
        ("max_completion_tokens", 2, "max_output_tokens"),
        ("num_predict", 2, "max_output_tokens"),
        ("messages", [{"role": "user", "content": "a"}], "input"),
        ("response_format", {"type": "json_object"}, "text.format"),
        ("reasoning_effort", "none", "reasoning.effort"),
        ("logprobs", True, "include"),
        ("n", 2, "leave it out"),
        ("return_token_ids", True, "leave it out"),
    ],
)
def test_what_a_chat_calls_otherwise_is_refused_and_not_forgotten(
    client: Client, field: str, value: Any, ours: str
) -> None:
    answer = respond(client, "a", **{field: value})
    assert answer.status == 400, answer.body
    assert answer.error["param"] == field
    assert ours in answer.error["message"]


def test_fields_of_objects_that_change_nothing_are_reported(client: Client) -> None:
    answer = respond(client, "a", reasoning={"mode": "pro", "summary": None}, text={"shape": 1})
    assert (answer.status, answer.headers["x-plait-ignored"]) == (200, "text.shape,reasoning.mode")


def test_keys_that_nothing_reads_are_reported(client: Client) -> None:
    part = {"type": "input_text", "text": "a", "prompt_cache_breakpoint": None, "annotations": [{}]}
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", "caller": {"type": "x"}}
    result = {"type": "function_call_output", "call_id": "c", "output": "b", "id": None}
    tool = {"type": "function", "name": "f", "parameters": {}, "strict": False, "defer_loading": False}
    asked: dict[str, Any] = {"tool_choice": "none", "prompt_cache_options": {"mode": "explicit"}}
    answer = respond(client, [{"role": "user", "content": [part]}, call, result], tools=[tool], **asked)
    assert (answer.status, answer.headers["x-plait-ignored"]) == (200, "prompt_cache_options")
    part |= {"prompt_cache_breakpoint": {"mode": "explicit"}}
    message = {"role": "user", "content": [part], "phase": "commentary"}
    tool |= {"defer_loading": True, "output_schema": {"type": "object"}}
    answer = respond(client, [call, result, message], tools=[tool], tool_choice="none")
    named = "tools.defer_loading,tools.output_schema,input.phase,input.content.prompt_cache_breakpoint"
    assert (answer.status, answer.headers["x-plait-ignored"]) == (200, named)
    parts = [{"type": "input_text", "text": "b", "weight": 1}]
    answer = respond(client, [call, {**result, "output": parts}])
    assert (answer.status, answer.headers["x-plait-ignored"]) == (200, "input.content.weight")


def test_words_of_a_chat_that_say_nothing_are_taken(client: Client) -> None:
    nothing = {
        "n": 1,
        "best_of": 1,
        "logprobs": False,
        "max_tokens": None,
        "response_format": {"type": "text"},
    }
    assert respond(client, "a", return_token_ids=False, **nothing).status == 200


def test_an_earlier_response_is_not_found(client: Client) -> None:
    error = respond(client, "a", previous_response_id="resp_1").error
    assert error["code"] == "previous_response_not_found"


def test_nothing_that_openai_s_clients_send_by_themselves_fails(client: Client) -> None:
    answer = respond(client, "a", store=True, metadata={"a": "b"}, user="me", prompt_cache_key="k", tools=[])
    assert answer.status == 200
    assert answer.json["store"] is False
    assert answer.json["metadata"] == {"a": "b"}
    assert respond(client, "a", previous_response_id=None, tools=None).status == 200


def test_a_failure_in_a_stream_is_reported_and_ends_it(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("plait.server.gateway.request_context.FIRST_WAIT_S", 30.0)  # as on an idle machine
    events = respond(client, "BOOM", stream=True).named_events
    assert [event["type"] for event in events[-2:]] == ["error", "response.failed"]
    assert "failed here" in events[-2]["message"]
    assert events[-1]["response"]["error"]["code"] == "server_error"
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert respond(client, "REFUSE", stream=True).status == 503


def test_a_client_that_leaves_ends_its_response(openai: OpenAI, client: Client, engine: EchoLoop) -> None:
    stream = openai.responses.create(model=client.model, input="SLOW" * 100, stream=True)
    for event in stream:
        if event.type == "response.output_text.delta":
            break
    assert engine.stats()["running"] == 1
    stream.close()
    assert wait_until(lambda: engine.stats()["running"] == 0)


def test_through_the_engine_a_seed_gives_the_chat_s_text() -> None:
    front = engine_front()
    try:
        with serving(front) as client:
            more = {"seed": 5, "temperature": 1, "top_k": 20}
            found = respond(client, "tell me", max_output_tokens=30, **more).json
            chat = client.chat("tell me", max_tokens=30, **more).json
            assert found["output"][0]["content"][0]["text"] == chat["choices"][0]["message"]["content"]
            assert found["temperature"] == 1
    finally:
        front.close()


PLAN = ChatPlan(
    ChatRequest(messages=[]), Request("r", (1, 2, 3), SamplingParams(temperature=0.5)), with_ids=False
)


def said(finish_reason: FinishReason = "stop", *, without: int = 0) -> list[Delta]:
    """Reasoning, text, and two calls, in deltas. `without`: so many of the last deltas never came."""
    parts: list[tuple[Part, ...]] = [
        (),
        (Reasoning("let me "),),
        (Reasoning("think"),),
        (Content("I "),),
        (Content("look."),),
        (CallStart(0, "call_1", "look"),),
        (Arguments(0, '{"at":'),),
        (Arguments(0, '"sea"}'), CallEnd(0, complete=True)),
        (CallStart(1, "call_2", "ask"), Arguments(1, "{}"), CallEnd(1, complete=True)),
    ]
    shown = parts[: len(parts) - without]
    deltas = [Delta(0, "", num_tokens=n, parts=one) for n, one in enumerate(shown)]
    return [*deltas, Delta(0, "", num_tokens=len(shown), finish_reason=finish_reason)]


def fed(reply: ApiReply, deltas: Sequence[Delta]) -> Any:
    """The events that these deltas bring, as clients read them."""
    events: list[msgspec.Struct] = []
    for delta in deltas:
        reply.count.add(0, delta)
        events += reply.events(0, delta)
    return as_read(events)


def as_read(bodies: Iterable[msgspec.Struct]) -> Any:
    return msgspec.to_builtins([*bodies])


def played(asked: ResponsesRequest, deltas: Sequence[Delta] = ()) -> list[dict[str, Any]]:
    """The events of a reply."""
    found = ResponsesReply("m", asked, PLAN)
    return [*as_read(found.begin()), *fed(found, deltas or said()), *as_read(found.end())]


def test_reasoning_text_and_calls_are_items_one_after_the_other() -> None:
    events = played(ResponsesRequest(input="x"))
    final = events[-1]["response"]
    assert [(item["type"], item["status"]) for item in final["output"]] == [
        ("reasoning", "completed"),
        ("message", "completed"),
        ("function_call", "completed"),
        ("function_call", "completed"),
    ]
    assert final["output"][0]["content"] == [{"type": "reasoning_text", "text": "let me think"}]
    assert final["output"][1]["content"][0]["text"] == "I look."
    assert [(c["call_id"], c["name"], c["arguments"]) for c in final["output"][2:]] == [
        ("call_1", "look", '{"at":"sea"}'),
        ("call_2", "ask", "{}"),
    ]
    Response.model_validate(final)


def test_deltas_of_every_item_add_up_and_items_are_opened_and_closed_once() -> None:
    events = played(ResponsesRequest(input="x"))
    final = events[-1]["response"]["output"]
    for item, name in zip(
        final, ("reasoning_text", "output_text", *["function_call_arguments"] * 2), strict=True
    ):
        mine = [e for e in events if e.get("item_id") == item["id"]]
        whole = "".join(e["delta"] for e in mine if e["type"] == f"response.{name}.delta")
        (done,) = (e for e in mine if e["type"] == f"response.{name}.done")
        assert whole == (done.get("text") or done.get("arguments"))
    opened = [e["item"]["id"] for e in events if e["type"] == "response.output_item.added"]
    closed = [e["item"] for e in events if e["type"] == "response.output_item.done"]
    assert opened == [item["id"] for item in final]
    assert closed == final
    places = [e["output_index"] for e in events if "output_index" in e]
    assert [place for place, _ in itertools.groupby(places)] == [0, 1, 2, 3]


def test_a_reply_that_was_cut_has_its_last_item_incomplete() -> None:
    events = played(ResponsesRequest(input="x"), said("length", without=4))
    final = events[-1]["response"]
    assert final["status"] == "incomplete"
    assert [item["status"] for item in final["output"]] == ["completed", "incomplete"]


def test_a_call_that_was_cut_is_an_incomplete_item_of_the_output() -> None:
    events = played(ResponsesRequest(input="x"), said("length", without=2))
    final = events[-1]["response"]
    assert final["status"] == "incomplete"
    assert [(item["type"], item["status"]) for item in final["output"]] == [
        ("reasoning", "completed"),
        ("message", "completed"),
        ("function_call", "incomplete"),
    ]
    kinds = [event["type"] for event in events]
    assert "response.function_call_arguments.delta" in kinds
    assert "response.function_call_arguments.done" not in kinds
    assert events[-2]["item"] == final["output"][-1]


def test_a_failure_keeps_the_text_so_far() -> None:
    found = ResponsesReply("m", ResponsesRequest(input="x"), PLAN)
    fed(found, said()[:5])
    error, failed = as_read(found.fail(Problem(429, "too much", "p", "c")))
    assert (error["message"], error["param"], error["code"]) == ("too much", "p", "c")
    assert failed["response"]["error"]["code"] == "rate_limit_exceeded"
    assert [item["type"] for item in failed["response"]["output"]] == ["reasoning", "message"]


def test_a_wrong_schema_is_named_by_its_place_here(client: Client) -> None:
    told = {"type": "json_schema", "name": "a", "schema": {"type": "sound"}}
    answer = client.post("/v1/responses", {"input": "hi", "text": {"format": told}})
    assert (answer.status, answer.error["param"]) == (400, "text.format.schema")


@pytest.mark.parametrize("stream", [False, True])
def test_a_bad_grammar_is_refused_in_words_of_this_api(client: Client, stream: bool) -> None:
    bad = {"type": "object", "properties": {"a": {"type": "string", "pattern": "("}}}
    form = {"format": {"type": "json_schema", "name": "x", "schema": bad}}
    answer = client.post("/v1/responses", {"input": "Hi", "text": form, "stream": stream})
    assert (answer.status, answer.error["param"]) == (400, "text.format.schema")


def test_a_tools_schema_is_named_as_each_api_names_it() -> None:
    for names, name in ((NAMES, "tools[2].parameters"), (messages._NAMES, "tools[2].input_schema")):
        with pytest.raises(BadGrammar) as caught, in_words_of(names, ()):
            raise BadGrammar("it cannot be honoured", "tools[2].function.parameters")
        assert caught.value.param == name
