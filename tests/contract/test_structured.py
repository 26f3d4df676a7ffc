"""Replies that must be JSON, match a schema or a pattern: they do, or the request is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from tests.contract.wire import Client

QUIET = {"chat_template_kwargs": {"enable_thinking": False}}  # the answer at once
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"enum": ["Ann", "Bob", "née 漢字 🙂"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def base_url(smol_url: str) -> str:
    return smol_url


def told(schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "person", "schema": schema, **more}}


def said(client: Client, **more: Any) -> tuple[str, str]:
    """(content, finish reason), the same whole and streamed."""
    asked: dict[str, Any] = {"max_tokens": 100, **QUIET, **more}
    answer = client.chat("Describe a person as JSON.", **asked)
    assert answer.status == 200, answer.body
    choice = answer.json["choices"][0]
    events = client.chat("Describe a person as JSON.", stream=True, **asked).events
    assert (
        "".join(e["choices"][0]["delta"].get("content") or "" for e in events) == choice["message"]["content"]
    )
    return choice["message"]["content"], choice["finish_reason"]


@pytest.mark.parametrize("more", [{}, {"strict": True, "description": "a person"}])
def test_a_reply_has_the_schema_that_was_requested(
    client: Client, more: dict[str, Any], unable: Callable[[str], None]
) -> None:
    """Point 54."""
    content, reason = said(client, response_format=told(PERSON, **more))
    if reason == "length":
        unable("the model writes white space without end, as JSON may")
    assert reason == "stop"
    Draft202012Validator(PERSON).validate(json.loads(content))


def test_also_when_it_is_sampled_hot(client: Client) -> None:
    """Point 54. Two choices at temperature 2; one that is cut off proves nothing."""
    asked: dict[str, Any] = {"n": 2, "temperature": 2, "seed": 3, "max_tokens": 96, **QUIET}
    for choice in client.chat("A person", response_format=told(PERSON), **asked).json["choices"]:
        if choice["finish_reason"] == "length":
            continue  # much white space
        Draft202012Validator(PERSON).validate(json.loads(choice["message"]["content"]))


def test_any_json_object(client: Client) -> None:
    """Point 54. It parses, unless it was cut off."""
    content, reason = said(client, response_format={"type": "json_object"}, max_tokens=24)
    assert content.lstrip().startswith("{")
    assert reason == "length" or isinstance(json.loads(content), dict)


@pytest.mark.parametrize("field", ["guided_regex", "structured_outputs"])
def test_a_pattern(client: Client, field: str) -> None:
    """Points 43 and 54."""
    pattern = "(🙂|漢字){3} [0-9]{4}"
    content, _ = said(client, **{field: pattern if field == "guided_regex" else {"regex": pattern}})
    assert re.fullmatch(pattern, content)


@pytest.mark.parametrize("field", ["guided_choice", "structured_outputs"])
def test_a_choice(client: Client, field: str) -> None:
    """Point 54."""
    words = ["red", "green", "blue"]
    content, reason = said(client, **{field: words if field == "guided_choice" else {"choice": words}})
    assert content in words
    assert reason == "stop"


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "if": {"required": ["a"]}, "then": {"required": ["b"]}},
        {"type": "object", "dependentSchemas": {"a": {"required": ["b"]}}},
        {"type": "array", "uniqueItems": True, "items": {"type": "integer"}},
        {"not": {"type": "object"}},
    ],
)
def test_what_a_schema_cannot_say_here_is_refused(client: Client, schema: Any) -> None:
    """Point 54. 400 with a reason, never a reply that was not held to it."""
    answer = client.chat("x", response_format=told(schema), max_tokens=2)
    assert answer.status == 400, answer.body
    assert answer.error["param"].startswith("response_format")


def test_reasons_say_what_cannot_be(client: Client) -> None:
    """Point 54."""
    schema = {"type": "object", "if": {"required": ["a"]}, "then": {"required": ["b"]}}
    assert "if" in client.chat("x", response_format=told(schema), max_tokens=2).error["message"]
    assert "not supported yet" not in client.chat("x", response_format=told(schema)).error["message"]
