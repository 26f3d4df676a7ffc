"""GET /openapi.json says what the server does: real replies have the types it gives them."""

from __future__ import annotations

from typing import Any

import pytest
from jsonschema import Draft202012Validator

from tests.contract.wire import Client


@pytest.fixture(scope="module")
def document(client: Client) -> dict[str, Any]:
    answer = client.get("/openapi.json")
    assert answer.headers["content-type"] == "application/json"
    found: dict[str, Any] = answer.json
    return found


def check(document: dict[str, Any], name: str, value: Any) -> None:
    """`value` is what the document calls `name`."""
    schema = {"$ref": f"#/components/schemas/{name}", "components": document["components"]}
    Draft202012Validator(schema).validate(value)


def test_it_is_openapi_3_1_with_schemas_that_are_schemas(document: dict[str, Any]) -> None:
    assert document["openapi"].startswith("3.1.")
    for schema in document["components"]["schemas"].values():
        Draft202012Validator.check_schema(schema)
    names = [found["operationId"] for ways in document["paths"].values() for found in ways.values()]
    assert len(names) == len({*names})


ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "text": ("Completion", {"prompt": "Hello"}),
    "texts with logprobs": ("Completion", {"prompt": ["Hello", "You"], "n": 2, "logprobs": 2, "echo": True}),
    "text with ids": ("Completion", {"prompt": "Hello", "return_token_ids": True, "stop": "e"}),
    "chat": ("ChatCompletion", {"messages": [{"role": "user", "content": "Hi"}]}),
    "chat with logprobs": (
        "ChatCompletion",
        {"messages": [{"role": "user", "content": "Hi"}], "logprobs": True, "top_logprobs": 3, "n": 2},
    ),
}


@pytest.mark.parametrize("case", ASKED)
def test_a_reply_is_what_the_document_says(client: Client, document: dict[str, Any], case: str) -> None:
    """Points 18, 32 and 39: the required keys, their types and their nulls."""
    name, asked = ASKED[case]
    path = "/v1/chat/completions" if "messages" in asked else "/v1/completions"
    check(document, name, client.post(path, {**asked, "max_tokens": 3}).json)
    chunk = "ChatChunk" if "messages" in asked else "Completion"
    more = {"stream": True, "stream_options": {"include_usage": True}}
    for event in client.post(path, {**asked, **more, "max_tokens": 3}).events:
        check(document, chunk, event)


@pytest.mark.parametrize(
    ("path", "name"), [("/v1/models", "ModelList"), ("/health", "Health"), ("/version", "Version")]
)
def test_what_is_got_is_what_the_document_says(
    client: Client, document: dict[str, Any], path: str, name: str
) -> None:
    check(document, name, client.get(path).json)


def test_token_ids_are_what_the_document_says(client: Client, document: dict[str, Any]) -> None:
    found = client.post("/tokenize", {"prompt": "Hello", "return_token_strs": True}).json
    check(document, "Tokens", found)
    check(document, "DetokenizeReply", client.post("/detokenize", {"tokens": found["tokens"]}).json)


def test_an_error_is_what_the_document_says(client: Client, document: dict[str, Any]) -> None:
    """Point 55: all four keys."""
    check(document, "ErrorBody", client.post("/v1/completions", {}).json)
    check(document, "ErrorBody", client.get("/nothing").json)


def test_the_page_can_be_read(client: Client) -> None:
    answer = client.get("/docs")
    assert answer.status == 200
    assert b"/v1/completions" in answer.body
