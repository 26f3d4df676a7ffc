"""Every API through a gateway gives the bytes that one engine behind the same server gives.

Engine, scheduler and sampler are the real ones, over a model that is one matrix. What may differ are ids,
times and how many tokens were found in the cache: a reply may end just before they are kept.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.cluster.test_moved_replies import Replicas, closing_front
from tests.contract.wire import Answer, Client
from tests.server.conftest import serving
from tests.server.real_engine import engine_front

Body = dict[str, object]
NUM_TOKENS = 8
# Ids of requests, replies, items and calls; when they were made; how long they took.
VARIES = (
    (re.compile(rb"[0-9a-f]{24,}"), b"ID"),
    (re.compile(rb'("(?:created|created_at|completed_at|modified_at)":)(?:"[^"]*"|[\d.]+)'), rb"\1TIME"),
    (re.compile(rb'("(?:cached_tokens|cache_read_input_tokens|tokens_cached)":)\d+'), rb"\1N"),
    (re.compile(rb'("[a-z_]*(?:_duration|_ms|_per_second|_s)":)[\d.e+-]+'), rb"\1TIME"),
)
DRAWS: tuple[Body, ...] = (
    {"temperature": 0.0, "seed": 0},
    *({"temperature": 1.0, "seed": seed} for seed in (1, 2, 3)),
)


def make_generating(draw: Body, i: int) -> Iterator[tuple[str, Body]]:
    """Requests that generate, of every API, whole and streamed."""
    text = f"In the beginning, {i}"
    turns = {"messages": [{"role": "user", "content": text}]}
    options = {"options": {**draw, "num_predict": NUM_TOKENS}}
    for stream in (False, True):
        more: Body = {**draw, "stream": stream, "max_tokens": NUM_TOKENS}
        several: Body = {} if stream else {"n": 2}  # choices of a stream come in any order
        yield "/v1/completions", {**more, **several, "prompt": text, "logprobs": 2}
        yield "/v1/completions", {**more, "prompt": text, "echo": True, "stop": ["e", "a"]}
        yield "/v1/chat/completions", {**more, **turns, "logprobs": True, "top_logprobs": 2}
        yield "/v1/chat/completions", {**more, **turns, "response_format": {"type": "json_object"}}
        greedy: Body = {"stream": stream, "temperature": 0.0}  # these two have no seed
        yield "/v1/messages", {**greedy, **turns, "max_tokens": NUM_TOKENS}
        limit = {"max_output_tokens": NUM_TOKENS, "store": False}
        yield "/v1/responses", {**greedy, "input": text, **limit}
        yield "/api/generate", {"prompt": text, "stream": stream, **options}
        yield "/api/chat", {**turns, "stream": stream, **options}
        yield "/completion", {**draw, "prompt": text, "stream": stream, "n_predict": NUM_TOKENS}


def make_others() -> Iterator[tuple[str, Body]]:
    """Requests without a reply of tokens, and those that are refused."""
    turns = {"messages": [{"role": "user", "content": "In the beginning"}]}
    yield "/v1/embeddings", {"input": ["In the beginning", "was"]}
    yield "/v1/score", {"text_1": "beginning", "text_2": ["end", "start"]}
    yield "/tokenize", {"prompt": "In the beginning"}
    yield "/detokenize", {"tokens": [72, 105]}
    yield "/apply-template", turns
    yield "/v1/completions/render", {"prompt": "In the beginning"}
    yield "/v1/chat/completions/render", turns
    yield "/v1/messages/count_tokens", turns
    yield "/v1/responses/input_tokens", {"input": "In the beginning"}
    yield "/v1/completions", {"prompt": "x" * 5000}
    yield "/v1/completions", {"prompt": "x", "temperature": -1}
    yield "/v1/chat/completions", {**turns, "model": "another"}
    yield "/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "/nowhere"}


REQUESTS = [
    *(
        request
        for i, draw in enumerate(DRAWS)
        for request in make_generating({**draw, "model": "bigrams"}, i)
    ),
    *((path, {"model": "bigrams", **body}) for path, body in make_others()),
    *((path, body) for path, body in make_generating({**DRAWS[0], "model": "bigrams"}, 0)),  # cached
]


def ask(client: Client, path: str, body: Body) -> Answer:
    answer = client.post(path, body)
    for pattern, instead in VARIES:
        answer.body = pattern.sub(instead, answer.body)
    return answer


@pytest.fixture(scope="module")
def answers() -> Iterator[list[tuple[Answer, Answer]]]:
    """Of each request, by one engine's server and by a gateway."""
    with ExitStack() as stack:
        alone = stack.enter_context(serving(stack.enter_context(closing_front(engine_front()))))
        replicas = Replicas(step_s=0.0)
        stack.callback(replicas.close)
        gateway = stack.enter_context(serving(replicas.front))
        yield [(ask(alone, *request), ask(gateway, *request)) for request in REQUESTS]


@pytest.mark.slow
def test_answers_through_a_gateway_are_those_of_one_engine(answers: list[tuple[Answer, Answer]]) -> None:
    assert len(answers) >= 100
    for (path, body), (wanted, found) in zip(REQUESTS, answers, strict=True):
        assert (found.status, found.body) == (wanted.status, wanted.body), (path, body)
        assert found.headers.get("content-type") == wanted.headers.get("content-type")


@pytest.mark.slow
def test_replies_are_there_and_what_is_refused_says_why(answers: list[tuple[Answer, Answer]]) -> None:
    generated = [
        found for (path, body), (_, found) in zip(REQUESTS, answers, strict=True) if "stream" in body
    ]
    assert {answer.status for answer in generated} == {200}
    assert len({answer.body for answer in generated}) > len(generated) // 2
    refused = [found for _, found in answers if found.status >= 400]
    assert len(refused) == 4
