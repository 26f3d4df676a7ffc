"""Requests made from the document, and valid ones with a field spoiled: never a 5xx, never a hang.

Every answer is what the document says or an error object. Seeded, and bounded; the long run is marked slow.
"""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from tests.contract.wire import Answer, Client

MOST_TOKENS = 3
POSITIVE = schemathesis.GenerationMode.POSITIVE
PATHS = {"/v1/completions", "/v1/chat/completions", "/v1/models/{id}", "/v1/embeddings", "/detokenize"}
GENERATING = (
    *("/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses"),
    *("/api/chat", "/api/generate", "/completion"),
)


def bounded(examples: int) -> settings:
    return settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )


class Checker:
    """Holds answers to the document."""

    def __init__(self, document: dict[str, Any]) -> None:
        self._document = document
        self._known: dict[tuple[str, str], Draft202012Validator] = {}

    def check(self, path: str, method: str, sent: Any, answer: Answer) -> None:
        """An answer that is no 5xx and has the type that its status promises."""
        if answer.status == 504 and isinstance(sent, dict) and "timeout_s" in sent:
            assert answer.error["code"] == "deadline_exceeded"  # it set a shorter time than it takes
            return
        assert answer.status < 500, (path, sent, answer.status, answer.body[:300])
        if answer.status >= 400:
            if path.startswith("/v1/messages"):
                assert answer.json["type"] == "error", (path, sent)
            elif path.startswith("/api/"):
                assert isinstance(answer.json["error"], str), (path, sent)
            else:
                assert answer.error["message"], (path, sent)
            return
        kind = answer.headers.get("content-type", "")
        if path == "/completion" and kind.startswith("text/event-stream"):
            assert b'"stop":true' in answer.body
        elif kind.startswith("text/event-stream"):
            assert (
                answer.named_events if path.startswith(("/v1/messages", "/v1/responses")) else answer.events
            )
        elif kind.startswith("application/json"):
            self._reply(path, method).validate(answer.json)

    def _reply(self, path: str, method: str) -> Draft202012Validator:
        if (path, method) not in self._known:
            told = self._document["paths"][path][method.lower()]["responses"]["200"]["content"]
            schema = told.get("application/json", {}).get("schema", {})  # {}: any JSON
            self._known[path, method] = Draft202012Validator(
                {**schema, "components": self._document["components"]}
            )
        return self._known[path, method]


@pytest.fixture(scope="module")
def document(client: Client) -> dict[str, Any]:
    found: dict[str, Any] = client.get("/openapi.json").json
    return found


@pytest.fixture(scope="module")
def checker(document: dict[str, Any]) -> Checker:
    return Checker(document)


def short(body: Any) -> Any:
    """The same request, asking for little: what is tried is what is accepted, not how long it takes."""
    if not isinstance(body, dict):
        return body
    found = dict(body)
    for name, most in (
        ("max_tokens", MOST_TOKENS),
        ("max_completion_tokens", MOST_TOKENS),
        ("max_output_tokens", MOST_TOKENS),
        ("n", 4),
        ("best_of", 4),
    ):
        value = found.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and most < value <= 10**6:
            found[name] = most
    if "input" in found:
        found["max_output_tokens"] = found.get("max_output_tokens") or MOST_TOKENS
    elif "max_completion_tokens" not in found and found.get("max_tokens") is None:
        found["max_tokens"] = MOST_TOKENS
    return found


def from_document(
    client: Client, document: dict[str, Any], checker: Checker, examples: int, paths: set[str]
) -> int:
    """Send what schemathesis makes of these paths, right and wrong by their schemas. Returns how many."""
    schema = schemathesis.openapi.from_dict(copy.deepcopy(document))
    num_sent = 0
    found = (one.ok() for one in schema.get_all_operations())
    for operation in (one for one in found if one.path in paths):
        way = document["paths"][operation.path][operation.method.lower()]
        has_body = operation.method.upper() == "POST" and "requestBody" in way  # what may be wrong
        modes = list(schemathesis.GenerationMode) if has_body else [POSITIVE]
        for mode in modes:

            @bounded(examples)
            @given(case=operation.as_strategy(generation_mode=mode))
            def send(case: Any) -> None:
                nonlocal num_sent
                body = (
                    case.body
                    if isinstance(case.body, (dict, list, str, int, float, bool, type(None)))
                    else None
                )
                path = case.formatted_path
                if case.operation.method.upper() == "GET":
                    answer = client.get(path)
                else:
                    if case.operation.path in GENERATING:
                        body = short(body)
                    raw = json.dumps(body).encode("utf-8", "replace")
                    kind = {"Content-Type": "application/json"}
                    answer = client.request(case.operation.method.upper(), path, raw, kind)
                num_sent += 1
                checker.check(case.operation.path, case.operation.method.upper(), body, answer)

            send()
    return num_sent


def test_requests_made_from_the_document(client: Client, document: dict[str, Any], checker: Checker) -> None:
    assert from_document(client, document, checker, 1, set(document["paths"])) > 25


@pytest.mark.slow
def test_many_requests_made_from_the_document(
    client: Client, document: dict[str, Any], checker: Checker
) -> None:
    assert from_document(client, document, checker, 300, set(document["paths"])) > 2000


VALID: dict[str, list[dict[str, Any]]] = {
    "/v1/completions": [
        {"prompt": "Hello", "temperature": 0.5, "seed": 1, "stop": ["x"], "logit_bias": {"5": 1}},
        {"prompt": ["a", "b"], "n": 2, "echo": True, "logprobs": 2, "top_p": 0.9, "top_k": 5},
        {"prompt": [5, 6, 7], "stream": True, "stream_options": {"include_usage": True}, "min_tokens": 1},
    ],
    "/v1/chat/completions": [
        {
            "messages": [
                {"role": "system", "content": "Be short."},
                {"role": "user", "content": [{"type": "text", "text": "Hello"}]},
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [
                        {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
                    ],
                },
                {"role": "tool", "tool_call_id": "a", "content": "5"},
            ],
            "logprobs": True,
            "top_logprobs": 2,
        },
        {
            "messages": [{"role": "user", "content": "Hi"}],
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {"type": "object"}},
            },
        },
        {
            "messages": [{"role": "user", "content": "Hi"}],
            "tools": [
                {
                    "type": "function",
                    "function": {"name": "f", "parameters": {"type": "object", "properties": {}}},
                }
            ],
            "tool_choice": {"type": "function", "function": {"name": "f"}},
            "stream": True,
        },
    ],
    "/tokenize": [
        {"prompt": "Hello", "return_token_strs": True},
        {"messages": [{"role": "user", "content": "Hi"}]},
    ],
    "/detokenize": [{"tokens": [5, 6, 7]}],
}
SPOILT: st.SearchStrategy[Any] = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from(
        [
            0,
            1,
            -1,
            2**31,
            2**53,
            2**63,
            2**64,
            -(2**63) - 1,
            10**40,
            0.5,
            -0.0,
            1e308,
            "",
            " ",
            "\x00",
            "\u2028",
            "é" * 50,
        ]
    ),
    st.text(max_size=6).filter(lambda text: not any("\ud800" <= c <= "\udfff" for c in text)),
    st.just([]),
    st.just({}),
    st.just([[]]),
    st.just({"type": "object"}),
    st.lists(st.sampled_from([None, 1, "x", {}, []]), max_size=3),
).map(copy.deepcopy)  # what is drawn may be spoilt again


def places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place inside a JSON value, itself left out."""
    inner: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        inner = list(value.items())
    elif isinstance(value, list):
        inner = list(enumerate(value))
    found = [(*at, key) for key, _ in inner]
    for key, one in inner:
        found += places(one, (*at, key))
    return found


def spoil(draw: st.DrawFn, body: dict[str, Any]) -> dict[str, Any]:
    """`body` with a value replaced, a field left out, repeated or added."""
    found = copy.deepcopy(body)
    for _ in range(draw(st.integers(1, 2))):
        at = draw(st.sampled_from(places(found)))
        inside: Any = found
        for key in at[:-1]:
            inside = inside[key]
        how = draw(st.sampled_from(["replace", "replace", "replace", "drop", "wrap", "add"]))
        if how == "replace":
            inside[at[-1]] = draw(SPOILT)
        elif how == "drop":
            del inside[at[-1]]
        elif how == "wrap":
            inside[at[-1]] = [inside[at[-1]]] * draw(st.integers(0, 3))
        else:
            found[draw(st.sampled_from(["best_of", "tools", "guided_regex", "priority", "zzz"]))] = draw(
                SPOILT
            )
        if not places(found):
            break
    return found


@st.composite
def spoilt_requests(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    path = draw(st.sampled_from(sorted(VALID)))
    return path, spoil(draw, draw(st.sampled_from(VALID[path])))


def send_spoilt(client: Client, checker: Checker, examples: int) -> None:
    num_sent = 0

    @bounded(examples)
    @given(request=spoilt_requests())
    def send(request: tuple[str, dict[str, Any]]) -> None:
        nonlocal num_sent
        num_sent += 1
        path, body = request
        body = short(body) if path in GENERATING else body
        checker.check(path, "POST", body, client.post(path, body))

    send()
    assert num_sent >= examples  # hypothesis ends early when it finds nothing new
    assert client.get("/health").status == 200


def test_a_spoilt_request_is_served_or_refused(client: Client, checker: Checker) -> None:
    send_spoilt(client, checker, examples=100)


@pytest.mark.slow
def test_many_spoilt_requests_are_served_or_refused(client: Client, checker: Checker) -> None:
    send_spoilt(client, checker, examples=10_000)


@bounded(30)
@given(cut=st.integers(0, 400), flip=st.integers(0, 400), byte=st.integers(0, 255))
def test_a_spoilt_byte_is_an_error_of_the_client(
    client: Client, checker: Checker, cut: int, flip: int, byte: int
) -> None:
    raw = bytearray(json.dumps({**VALID["/v1/completions"][1], "max_tokens": 1}).encode())
    raw[flip % len(raw)] = byte
    sent = bytes(raw[: max(1, len(raw) - cut % 7)])
    checker.check("/v1/completions", "POST", sent, client.post("/v1/completions", sent))
