"""/tokenize and /detokenize: control tokens, llama.cpp's words, and bounds."""

from __future__ import annotations

import pytest

from tests.server.conftest import Client
from tests.server.fake import BOS, CONTEXT, TURN, EchoLoop

CONTROL = "<turn>Hi"


@pytest.mark.parametrize("field", ["prompt", "content"])
def test_control_tokens_in_a_prompt_are_control_tokens_unless_set_otherwise(
    client: Client, field: str
) -> None:
    asked = {field: CONTROL, "add_special_tokens": False}
    assert client.post("/tokenize", asked).json["tokens"] == [TURN, *b"Hi"]
    plain = client.post("/tokenize", {**asked, "parse_special": False})
    assert plain.json["tokens"] == [*CONTROL.encode()]


def test_so_they_are_in_completions_and_never_in_a_message(client: Client, engine: EchoLoop) -> None:
    client.complete(CONTROL, max_tokens=1)
    assert engine.requests[-1].prompt_token_ids == (BOS, TURN, *b"Hi")
    client.complete(CONTROL, max_tokens=1, parse_special=False)
    assert engine.requests[-1].prompt_token_ids == (BOS, *CONTROL.encode())
    client.chat(CONTROL, max_tokens=1)
    assert engine.requests[-1].prompt_token_ids == (TURN, *CONTROL.encode())


@pytest.mark.parametrize("read", [True, False])
def test_the_echo_is_what_was_sent_and_its_offsets_are_those_of_its_tokens(
    client: Client, read: bool
) -> None:
    asked = {"echo": True, "logprobs": 0, "max_tokens": 1, "parse_special": read}
    choice = client.complete("ab" + CONTROL, **asked).json["choices"][0]
    assert choice["text"].startswith("ab" + CONTROL)
    offsets = choice["logprobs"]["text_offset"]
    wanted = [0, 0, 1, 2, 8, 9, 10] if read else [0, *range(11)]
    assert offsets == wanted  # the first is that of the token before the text


def test_llama_cpps_words(client: Client) -> None:
    found = client.post("/tokenize", {"content": "Hé"}).json
    assert found["tokens"] == [*"Hé".encode()]  # nothing is put around it
    assert client.post("/tokenize", {"content": "H", "add_special": True}).json["tokens"] == [BOS, ord("H")]
    pieces = client.post("/tokenize", {"content": "Hé", "with_pieces": True}).json["tokens"]
    assert pieces == [{"id": 72, "piece": "H"}, {"id": 0xC3, "piece": [0xC3]}, {"id": 0xA9, "piece": [0xA9]}]
    text = client.post("/detokenize", {"tokens": [*"Hé".encode()]}).json
    assert text == {"prompt": "Hé", "content": "Hé"}
    for body in ({"content": "a", "prompt": "b"}, {}, {"content": "a", "messages": []}):
        assert client.post("/tokenize", body).error["param"] == "prompt"


def test_more_ids_than_the_context_has_are_refused_before_they_are_looked_at(client: Client) -> None:
    assert client.post("/detokenize", {"tokens": [65] * CONTEXT}).json["prompt"] == "A" * CONTEXT
    answer = client.post("/detokenize", {"tokens": [-5] * 500_000})
    assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")
    assert (answer.error["param"], answer.error["n_prompt_tokens"]) == ("tokens", 500_000)
    long = client.post("/tokenize", {"prompt": "x" * 20_000, "return_token_strs": True}).json
    assert len(long["token_strs"]) == long["count"] == 20_001
