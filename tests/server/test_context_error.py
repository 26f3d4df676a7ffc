"""A prompt longer than the context: the error's words and numbers that other projects' clients match."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from plait.config import EngineConfig
from plait.frontend.frontend import Front, Language
from tests.server.conftest import Client, serving
from tests.server.fake import CONTEXT, EOS, ByteTokenizer, EchoLoop, TurnTemplate, fake_front

# As LiteLLM compares them, in lower case: its ContextWindowExceededError is what starts its fallbacks.
PHRASES = ("this model's maximum context length is", "context_length_exceeded")
NUMBERS = re.compile(r"maximum context length is (\d+) tokens\. However, you requested (\d+) tokens")
LONG = "x" * (CONTEXT + 100)
MESSAGES = [{"role": "user", "content": LONG}]
ASKED = [
    ("/v1/completions", {"prompt": LONG}),
    ("/v1/completions", {"prompt": [1] * (CONTEXT + 101)}),
    ("/v1/chat/completions", {"messages": MESSAGES}),
    ("/v1/responses", {"input": LONG}),
    ("/v1/embeddings", {"input": LONG}),
]


@pytest.mark.parametrize(("path", "body"), ASKED)
def test_a_long_prompt_is_refused_in_words_that_clients_match(
    client: Client, path: str, body: dict[str, Any]
) -> None:
    answer = client.post(path, body)
    assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")
    for phrase in PHRASES:
        assert phrase in answer.body.decode().lower()
    numbers = NUMBERS.search(answer.error["message"])
    assert numbers is not None
    num_reply = path != "/v1/embeddings"
    assert (int(numbers[1]), int(numbers[2])) == (CONTEXT, CONTEXT + 101 + num_reply)


def test_llama_cpps_numbers_are_in_the_same_error(client: Client) -> None:
    error = client.complete(LONG).error
    assert (error["n_prompt_tokens"], error["n_ctx"]) == (CONTEXT + 101, CONTEXT)
    assert error["type"] == "exceed_context_size_error"
    huge = client.complete("x" * CONTEXT * 65).error  # is not tokenized: the number is the least it can be
    assert CONTEXT < huge["n_prompt_tokens"] < CONTEXT * 65
    assert NUMBERS.search(huge["message"])


def test_messages_say_it_in_anthropics_words(client: Client) -> None:
    answer = client.post("/v1/messages", {"messages": MESSAGES, "max_tokens": 5})
    error = answer.json["error"]
    assert (answer.status, error["type"]) == (400, "invalid_request_error")
    assert error["message"].startswith(f"prompt is too long: {CONTEXT + 101} tokens > {CONTEXT - 1} maximum")
    assert PHRASES[0] in error["message"].lower()


@pytest.mark.parametrize(
    ("config", "made_for", "advised"),
    [
        (EngineConfig(), CONTEXT, False),
        (EngineConfig(), 2 * CONTEXT, False),  # memory made it shorter: a longer one would be refused
        (EngineConfig(max_model_len=CONTEXT), CONTEXT, False),
        (EngineConfig(max_model_len=CONTEXT), 2 * CONTEXT, True),
    ],
)
def test_a_larger_max_model_len_is_advised_only_where_the_model_can_do_more(
    config: EngineConfig, made_for: int, advised: bool
) -> None:
    spec = replace(fake_front().spec, max_len=made_for)
    language = Language(ByteTokenizer(), TurnTemplate(), {}, frozenset({EOS}))
    with serving(Front("fake", spec, CONTEXT, EchoLoop(), language, config)) as client:
        for prompt in (LONG, "x" * CONTEXT * 65):
            message = client.complete(prompt).error["message"]
            assert ("--max-model-len" in message) is advised
            assert (str(2 * CONTEXT) in message) is advised
