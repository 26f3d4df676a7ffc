"""/apply-template and /tokenizer_info: what a model would be given, and the words it is written in."""

from __future__ import annotations

from typing import Any

import pytest

from plait.engine.admission import MAX_CHARS_PER_TOKEN
from tests.contract.wire import Client
from tests.server.conftest import serving
from tests.server.fake import CONTEXT, VOCAB_SIZE, ByteTokenizer, TurnTemplate, fake_front

PATH = "/apply-template"


def test_a_conversation_as_the_text_that_the_model_gets(client: Client) -> None:
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": [{"type": "text", "text": "ho"}]},
    ]
    answer = client.post(PATH, {"messages": messages})
    assert answer.status == 200, answer.body
    assert answer.json == {"prompt": "<turn>hi<turn>ho"}
    ids = client.post("/tokenize", {"messages": messages}).json["tokens"]
    assert client.post("/detokenize", {"tokens": ids}).json["prompt"] == answer.json["prompt"]


def test_a_conversation_longer_than_the_context_can_be_looked_at(client: Client) -> None:
    messages = [{"role": "user", "content": "x" * (2 * CONTEXT)}]
    assert len(client.post(PATH, {"messages": messages}).json["prompt"]) > CONTEXT
    counted = client.post("/v1/messages/count_tokens", {"messages": messages})
    assert counted.json == {"input_tokens": 2 * CONTEXT + 1}


def test_what_can_fit_no_context_is_refused_before_it_is_tokenized(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_time_for_it(*_: object, **__: object) -> list[int]:
        raise AssertionError("it was tokenized")

    monkeypatch.setattr(ByteTokenizer, "encode", no_time_for_it)
    monkeypatch.setattr(TurnTemplate, "render", no_time_for_it)
    text = "x" * (CONTEXT * MAX_CHARS_PER_TOKEN)
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": text}}}
    for message in (
        {"role": "user", "content": text + "x"},
        {"role": "user", "content": [{"type": "text", "text": text + "x"}]},
        {"role": "assistant", "tool_calls": [call]},
    ):
        messages = [message, {"role": "user", "content": "a"}]
        for path in (PATH, "/tokenize", "/v1/chat/completions"):
            assert client.post(path, {"messages": messages}).error["code"] == "context_length_exceeded", path
    messages = [{"role": "user", "content": text + "x"}]
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        answer = client.post(path, {"messages": messages, "max_tokens": 1})
        assert "maximum context length" in answer.json["error"]["message"], path
    assert client.post("/v1/responses", {"input": text + "x"}).error["param"] == "input"
    assert client.post("/tokenize", {"prompt": text + "x"}).error["param"] == "prompt"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"chat_template": "x"}, "chat_template"),
        ({"tools": [{"type": "function"}]}, "tools[0]"),
        ({"chat_template_kwargs": {"tools": 1}}, "chat_template_kwargs.tools"),
    ],
)
def test_what_would_change_a_count_is_honoured_or_refused(
    client: Client, body: dict[str, Any], param: str
) -> None:
    messages = [{"role": "user", "content": "a"}]
    assert client.post("/tokenize", {"messages": messages, **body}).error["param"] == param
    going_on = client.post("/tokenize", {"messages": messages, "continue_final_message": True})
    assert going_on.error["param"] == "messages[0]"
    prompt = client.post("/tokenize", {"prompt": "a", "continue_final_message": True})
    assert prompt.error["param"] == "continue_final_message"
    field = param.split("[")[0].split(".")[0]
    assert client.post("/tokenize", {"prompt": "a", **body}).error["param"] == field
    assert client.post("/detokenize", {"tokens": [1], "truncate": 3}).status == 400


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "UNSAYABLE"}]}, "messages"),
        ({"messages": [{"role": "user", "content": "a"}], "chat_template": "x"}, "chat_template"),
        (
            {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"tools": 1}},
            "chat_template_kwargs.tools",
        ),
    ],
)
def test_what_the_chat_refuses_is_refused_here(client: Client, body: dict[str, Any], param: str) -> None:
    answer = client.post(PATH, body)
    assert answer.status == 400
    assert answer.error["param"] == param


def test_the_vocabulary_in_the_words_of_a_tokenizer_config(client: Client) -> None:
    found = client.get("/tokenizer_info").json
    assert (found["bos_token"], found["eos_token"], found["pad_token"]) == ("<bos>", "<eos>", None)
    assert (found["vocab_size"], found["model_max_length"]) == (VOCAB_SIZE, CONTEXT)
    assert found["added_tokens_decoder"]["258"] == {"content": "<turn>", "special": True}
    assert found["chat_template_name"] == "turns"


def test_a_model_without_a_vocabulary_says_so() -> None:
    with serving(fake_front(tokenizer=False)) as client:
        answer = client.get("/tokenizer_info")
        assert answer.status == 400
        assert "--vocab" in answer.error["message"]
