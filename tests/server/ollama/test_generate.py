"""/api/chat and /api/generate: Ollama's lines of JSON over the generation of a chat."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from typing import Any

import pytest

from plait.server.http import transfer
from plait.server.ollama.translate import read_messages
from tests.contract.wire import Answer, Client
from tests.server.conftest import serving, wait_until
from tests.server.fake import EchoLoop, fake_front
from tests.server.openai.speaking import TOOLS, SpeakingTemplate, said_call

PARIS = '{"city": "Paris", "days": 2}'
DURATIONS = ("total_duration", "prompt_eval_duration", "eval_duration")


def chat(client: Client, content: Any = "Hello there", **body: Any) -> Answer:
    messages = [{"role": "user", "content": content}]
    return client.post("/api/chat", {"model": client.model, "messages": messages, "stream": False, **body})


def generate(client: Client, prompt: Any = "Hello there", **body: Any) -> Answer:
    return client.post("/api/generate", {"model": client.model, "prompt": prompt, "stream": False, **body})


def lines(answer: Answer) -> list[dict[str, Any]]:
    assert answer.status == 200, answer.body
    assert answer.headers["content-type"] == "application/x-ndjson"
    assert answer.body.endswith(b"\n")
    return [json.loads(line) for line in answer.body.decode().splitlines()]


def refused(answer: Answer) -> str:
    """The text of a refusal, which is all of its body."""
    assert answer.status == 400, answer.body
    assert list(answer.json) == ["error"]
    found: str = answer.json["error"]
    return found


def ignored(answer: Answer) -> set[str]:
    return {*answer.headers.get("x-plait-ignored", "").split(",")} - {""}


@pytest.fixture(scope="module")
def template() -> SpeakingTemplate:
    return SpeakingTemplate()


@pytest.fixture(scope="module")
def speaking(template: SpeakingTemplate) -> Iterator[Client]:
    """A client of a server of which the model thinks and calls tools."""
    with serving(fake_front(template=template)) as found:
        yield found


def test_a_whole_chat_has_its_message_counts_and_durations(client: Client) -> None:
    answer = chat(client)
    assert answer.status == 200, answer.body
    body = answer.json
    assert body["message"] == {"role": "assistant", "content": "Hello there"}
    assert (body["model"], body["done"], body["done_reason"]) == (client.model, True, "stop")
    assert (body["prompt_eval_count"], body["eval_count"]) == (len("Hello there") + 1, len("Hello there"))
    assert body["load_duration"] == 0
    assert all(type(body[name]) is int and body[name] >= 0 for name in DURATIONS)
    assert body["total_duration"] > 0
    assert body["created_at"].endswith("Z")


def test_a_chat_streams_unless_it_says_not_to(client: Client) -> None:
    *parts, last = lines(
        client.post("/api/chat", {"model": client.model, "messages": [{"role": "user", "content": "Hi you"}]})
    )
    assert "".join(part["message"]["content"] for part in parts) == "Hi you"
    assert not any(part["done"] or "eval_count" in part for part in parts)
    assert last["message"] == {"role": "assistant", "content": ""}
    assert (last["done"], last["done_reason"], last["eval_count"]) == (True, "stop", 6)


def test_options_reach_the_sampler(client: Client, engine: EchoLoop) -> None:
    options = {"num_predict": 5, "temperature": 0.5, "seed": 7, "repeat_penalty": 1.5, "stop": ["zz"]}
    assert chat(client, options=options).json["done_reason"] == "length"
    params = engine.requests[-1].params
    found = (params.max_tokens, params.temperature, params.seed, params.repetition_penalty, params.stop)
    assert found == (5, 0.5, 7, 1.5, ("zz",))


def test_options_that_change_no_reply_are_reported(client: Client) -> None:
    options = {"num_ctx": 8192, "num_gpu": 99, "use_mmap": True, "made_up": 1, "num_batch": None}
    answer = chat(client, options=options, keep_alive="5m", brand_new=1)
    assert answer.status == 200, answer.body
    expected = {"options.num_ctx", "options.num_gpu", "options.use_mmap", "options.made_up"}
    assert ignored(answer) == expected | {"keep_alive", "brand_new"}
    assert ignored(chat(client, keep_alive=-1)) == set()


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"options": {"tfs_z": 0.5}}, "tfs_z: "),
        ({"options": {"penalize_newline": False}}, "penalize_newline: "),
        ({"options": {"temperature": 3}}, "temperature: "),
        ({"options": {"num_predict": 0}}, "options.num_predict: "),
        ({"options": {"n": 2}}, "n: "),
        ({"options": 5}, "options: "),
        ({"keep_alive": "soon"}, "keep_alive: "),
        ({"truncate": True}, "truncate: "),
        ({"think": 3}, "think: "),
        ({"tools": TOOLS}, "tools: "),
        ({"format": 7}, "format: "),
        ({"messages": [{"role": "user", "content": "x", "images": ["YWJj"]}]}, "messages[0].images: "),
        ({"messages": [{"role": "nobody", "content": "x"}]}, "messages[0].role: "),
        ({"messages": "x"}, "messages: "),
        ({"messages": [3]}, "messages[0]: "),
    ],
)
def test_what_a_chat_cannot_honour_is_refused_by_name(client: Client, body: Any, text: str) -> None:
    assert refused(chat(client, **body)).startswith(text)


def test_a_conversation_that_is_too_long_is_refused_with_both_numbers(client: Client) -> None:
    assert "2048" in refused(chat(client, "x" * 3000))


def test_without_messages_or_a_prompt_the_model_is_loaded(client: Client) -> None:
    for path, field in (("/api/chat", "message"), ("/api/generate", "response")):
        answer = client.post(path, {"model": client.model, "keep_alive": 0})
        assert answer.status == 200, answer.body
        assert (answer.json["done"], answer.json["done_reason"]) == (True, "load")
        assert field in answer.json
        assert ignored(answer) == {"keep_alive"}


def test_a_call_of_a_tool_is_whole_in_one_line(speaking: Client) -> None:
    text = said_call("weather", PARIS)
    whole = chat(speaking, text, tools=TOOLS).json
    (call,) = whole["message"]["tool_calls"]
    expected = {"index": 0, "name": "weather", "arguments": {"city": "Paris", "days": 2}}
    assert (call["function"], whole["done_reason"]) == (expected, "stop")
    found = lines(chat(speaking, text, tools=TOOLS, stream=True))
    calls = [call for line in found for call in line["message"].get("tool_calls", ())]
    assert [call["function"] for call in calls] == [expected]
    assert not any(line["message"]["content"].strip() for line in found)


def test_a_call_that_was_cut_is_none(speaking: Client) -> None:
    answer = chat(speaking, said_call("weather", PARIS), tools=TOOLS, options={"num_predict": 40})
    assert (answer.json["done_reason"], "tool_calls" in answer.json["message"]) == ("length", False)


def test_a_result_of_a_tool_names_its_call(speaking: Client, template: SpeakingTemplate) -> None:
    call = {"function": {"name": "weather", "arguments": {"city": "Rome"}}}
    messages = [
        {"role": "user", "content": "Well?"},
        {"role": "assistant", "content": "", "thinking": "Hm.", "tool_calls": [call]},
        {"role": "tool", "tool_name": "weather", "content": "sun"},
    ]
    assert chat(speaking, messages=messages, tools=TOOLS).status == 200
    _, asked, result = template.asked[-1][0]
    assert asked["tool_calls"][0]["function"]["arguments"] == {"city": "Rome"}
    assert asked["reasoning_content"] == "Hm."
    assert result["tool_call_id"] == asked["tool_calls"][0]["id"]


def test_results_out_of_order_find_their_calls_by_name() -> None:
    calls = [{"function": {"name": name, "arguments": {}}} for name in ("one", "two")]
    results = [{"role": "tool", "tool_name": name, "content": name} for name in ("two", "one")]
    first, *answers = read_messages([{"role": "assistant", "tool_calls": calls}, *results])
    ids = [call["id"] for call in first["tool_calls"]]
    assert [answer["tool_call_id"] for answer in answers] == ids[::-1]


def test_thinking_is_apart_from_content_and_can_be_turned_off(
    speaking: Client, template: SpeakingTemplate
) -> None:
    text = "<think>so it is</think>Yes."
    message = chat(speaking, text, think=True).json["message"]
    assert (message["thinking"], message["content"]) == ("so it is", "Yes.")
    assert template.asked[-1][1]["enable_thinking"] is True
    found = [line["message"] for line in lines(chat(speaking, text, stream=True))]
    assert "".join(part.get("thinking", "") for part in found) == "so it is"
    chat(speaking, "No.", think=False)
    assert template.asked[-1][1]["enable_thinking"] is False


def test_a_level_of_thinking_that_the_model_does_not_read_is_reported(speaking: Client) -> None:
    assert ignored(chat(speaking, think="high")) == {"think"}


def test_the_format_becomes_the_grammar(client: Client, engine: EchoLoop) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    chat(client, format=schema)
    grammar = engine.requests[-1].grammar
    assert grammar is not None
    assert (grammar.kind, bool(grammar.form)) == ("json_schema", True)
    chat(client, format="")
    assert engine.requests[-1].grammar is None


def test_log_probabilities_come_with_their_text(client: Client) -> None:
    whole = chat(client, "abc", logprobs=True, top_logprobs=2).json["logprobs"]
    assert [one["token"] for one in whole] == ["a", "b", "c"]
    assert all(len(one["top_logprobs"]) == 2 and one["logprob"] < 0 for one in whole)
    parts = lines(chat(client, "abc", logprobs=True, top_logprobs=2, stream=True))
    assert [one for part in parts for one in part.get("logprobs", ())] == whole


def test_a_prompt_goes_through_the_template_with_its_system_message(
    speaking: Client, template: SpeakingTemplate
) -> None:
    answer = generate(speaking, system="Be brief.")
    assert (answer.json["response"], answer.json["done_reason"]) == ("Hello there", "stop")
    turns = [(one["role"], one["content"]) for one in template.asked[-1][0]]
    assert turns == [("system", "Be brief."), ("user", "Hello there")]


def test_a_raw_prompt_is_taken_as_it_is(client: Client, engine: EchoLoop) -> None:
    assert generate(client, "<turn>Hi", raw=True).json["response"] == "Hi"
    raw = engine.requests[-1].prompt_token_ids
    generate(client, "Hi", raw=True)
    assert len(raw) == len(engine.requests[-1].prompt_token_ids) + 1  # <turn> was read as a control token
    parts = lines(generate(client, "Hi", raw=True, stream=True))
    assert "".join(part["response"] for part in parts) == "Hi"


@pytest.mark.parametrize(
    ("body", "name"),
    [
        ({"suffix": "x"}, "suffix"),
        ({"template": "{{ .Prompt }}"}, "template"),
        ({"context": [1, 2]}, "context"),
        ({"images": ["YWJj"]}, "images"),
        ({"width": 64}, "width"),
        ({"raw": True, "system": "x"}, "system"),
        ({"raw": True, "think": True}, "think"),
        ({"raw": "yes"}, "raw"),
        ({"prompt": 3}, "prompt"),
        ({"system": 3}, "system"),
    ],
)
def test_what_a_prompt_cannot_have_is_refused_by_name(client: Client, body: Any, name: str) -> None:
    assert refused(generate(client, **body)).startswith(f"{name}: ")
    assert generate(client, suffix="", template="", context=[], images=[]).status == 200


def test_another_model_is_not_found_and_latest_is_no_other(client: Client) -> None:
    answer = chat(client, model="llama3")
    assert (answer.status, list(answer.json)) == (404, ["error"])
    assert chat(client, model=f"{client.model}:latest").status == 200


def test_a_stream_that_fails_ends_with_its_error(client: Client) -> None:
    *parts, last = lines(chat(client, "BOOM goes it", stream=True))
    assert "".join(part["message"]["content"] for part in parts) == "BOO"
    assert last == {"error": "the engine failed here"}


def test_a_silent_stream_is_kept_open_by_spaces(
    client: Client, engine: EchoLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "PING_S", 0.02)
    connection = http.client.HTTPConnection(*client.address, timeout=20)
    messages = [{"role": "user", "content": "HANG"}]
    connection.request(
        "POST", "/api/chat", json.dumps({"messages": messages}), {"Content-Type": "application/json"}
    )
    assert connection.getresponse().read(3) == b"   "
    connection.close()
    assert wait_until(lambda: not engine.stats()["running"])


def test_keys_hold_here_too() -> None:
    with serving(fake_front(), api_key=("a-key",)) as client:
        assert chat(client).status == 401
        assert list(chat(client).json) == ["error"]
        assert client.get("/api/tags").status == 401
        client.headers["Authorization"] = "Bearer a-key"
        assert chat(client).status == 200
        assert client.get("/api/tags").status == 200


def test_a_body_need_not_say_that_it_is_json_unless_a_page_sends_it(client: Client) -> None:
    """Ollama reads any type, so `curl -d` sends a form's, and litellm none. Pages may send these anywhere."""
    messages = [{"role": "user", "content": "Hello there"}]
    raw = json.dumps({"model": client.model, "messages": messages, "stream": False}).encode()
    for kind in ("", "application/x-www-form-urlencoded", "text/plain"):
        headers = {"Content-Type": kind} if kind else {}
        assert client.request("POST", "/api/chat", raw, headers).status == 200
        assert client.request("POST", "/api/show", raw, headers).status == 200
        for mark in ({"Origin": "http://evil.example"}, {"Sec-Fetch-Site": "cross-site"}):
            answer = client.request("POST", "/api/chat", raw, headers | mark)
            assert answer.status in {403, 415}
            assert list(answer.json) == ["error"]
    assert client.request("POST", "/v1/chat/completions", raw, {}).status == 415
