"""Structured output over HTTP: point 54 of the wire contract, in every spelling of a wish."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import pytest

from plait.request import Grammar, Request, ThinkingBudget
from tests.server.conftest import Client, serving
from tests.server.fake import fake_front
from tests.server.real_engine import engine_front
from tests.server.speaking import TOOLS, WEATHER, SpeakingTemplate

SCHEMA = WEATHER["function"]["parameters"]  # type: ignore[index]
PATHS = ("complete", "chat")
WISHES: list[dict[str, Any]] = [
    {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "w", "schema": SCHEMA, "strict": True},
        }
    },
    {"structured_outputs": {"json": SCHEMA}},
    {"guided_json": SCHEMA},
    {"json_schema": SCHEMA},
    {"format": SCHEMA},
]


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with serving(engine_front()) as client:
        yield client


def said(answer: Any) -> list[str]:
    assert answer.status == 200, answer.body
    choices = answer.json["choices"]
    assert all(choice["finish_reason"] == "stop" for choice in choices)
    return [choice["text"] if "text" in choice else choice["message"]["content"] for choice in choices]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("wish", WISHES)
def test_the_reply_is_what_the_schema_says(client: Client, path: str, wish: dict[str, Any]) -> None:
    for text in said(getattr(client, path)(max_tokens=300, n=2, temperature=1, seed=3, **wish)):
        jsonschema.validate(json.loads(text), SCHEMA)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("wish", "pattern"),
    [
        ({"guided_regex": "[ab]{4}"}, "[ab]{4}"),
        ({"guided_choice": ["one", "two"]}, "one|two"),
        ({"grammar": 'root ::= "x" [0-9] "y"'}, "x[0-9]y"),
        ({"guided_grammar": "start: /[0-9]{3}/"}, "[0-9]{3}"),
        ({"structured_outputs": {"regex": "a?b"}}, "a?b"),
    ],
)
def test_the_reply_is_what_the_grammar_says(
    client: Client, path: str, wish: dict[str, Any], pattern: str
) -> None:
    (text,) = said(getattr(client, path)(max_tokens=300, **wish))
    assert re.fullmatch(pattern, text)
    (streamed,) = ["".join(_pieces(getattr(client, path)(max_tokens=300, stream=True, **wish).events))]
    assert streamed == text


def _pieces(events: list[dict[str, Any]]) -> Iterator[str]:
    for event in events:
        for choice in event["choices"]:
            yield choice["text"] if "text" in choice else choice["delta"].get("content") or ""


def test_any_object_is_one(client: Client) -> None:
    answer = client.chat(response_format={"type": "json_object"}, max_tokens=60)
    text, reason = answer.json["choices"][0]["message"]["content"], answer.json["choices"][0]["finish_reason"]
    assert text.lstrip().startswith("{")
    assert reason == "length" or isinstance(json.loads(text), dict)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("wish", "param"),
    [
        ({"response_format": {"type": "sound"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": "json"}, "response_format"),
        ({"guided_json": {"type": "object", "if": {}}}, "guided_json"),
        ({"guided_json": {"type": "nonsense"}}, "guided_json"),
        ({"guided_regex": "("}, "guided_regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"grammar": "root ::= nothing"}, "grammar"),
        ({"structured_outputs": {"something": 1}}, "structured_outputs.something"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
    ],
)
def test_what_cannot_be_kept_is_refused_with_the_reason(
    client: Client, path: str, wish: dict[str, Any], param: str
) -> None:
    for stream in (False, True):
        answer = getattr(client, path)(max_tokens=5, stream=stream, **wish)
        assert (answer.status, answer.error["param"]) == (400, param)
        assert len(answer.error["message"]) > len(param) + 10
    assert client.complete(max_tokens=2).status == 200


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "wish",
    [
        {"response_format": {"type": "text"}},
        {"response_format": None},
        {"structured_outputs": {}},
        {"grammar": "", "format": ""},
    ],
)
def test_free_text_is_no_grammar(client: Client, path: str, wish: dict[str, Any]) -> None:
    free = getattr(client, path)(max_tokens=9).json["choices"][0]
    assert getattr(client, path)(max_tokens=9, **wish).json["choices"][0] == free


@pytest.fixture(scope="module")
def speaking() -> Iterator[Client]:
    with serving(engine_front(template=SpeakingTemplate())) as client:
        yield client


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("more", [{}, {"tools": TOOLS}])
def test_what_is_wished_for_is_the_content_behind_the_thinking(
    speaking: Client, more: dict[str, Any], seed: int
) -> None:
    wish = {"response_format": {"type": "json_schema", "json_schema": {"name": "w", "schema": SCHEMA}}}
    asked = {"max_tokens": 400, "thinking_token_budget": 15, "temperature": 1.3, "seed": seed, **wish, **more}
    choice = speaking.chat("Weather?", **asked).json["choices"][0]
    message = choice["message"]
    if "tool_calls" in message and choice["finish_reason"] == "tool_calls":
        assert message["content"] is None
    elif choice["finish_reason"] == "stop":
        jsonschema.validate(json.loads(message["content"]), SCHEMA)


def test_a_switch_that_is_off_leaves_no_room_for_thinking(speaking: Client) -> None:
    asked: dict[str, Any] = {"guided_choice": ["yes", "no"], "logit_bias": {str(ord("<")): 100}}
    for wish in ({"reasoning_effort": "none"}, {"chat_template_kwargs": {"enable_thinking": False}}):
        message = speaking.chat("Well?", **asked, **wish).json["choices"][0]["message"]
        assert message["content"] in ("yes", "no")
        assert "reasoning_content" not in message


def test_grammars_that_wait_leave_the_other_requests_their_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    front, done = fake_front(), threading.Event()

    def held(request: Request, grammar: Grammar | None, thinking: ThinkingBudget | None = None) -> Request:
        assert grammar is None or done.wait(30)
        return request

    monkeypatch.setattr(front, "held", held)
    with serving(front) as client, ThreadPoolExecutor(64) as asking:
        waiting = [asking.submit(client.complete, "hi", guided_regex="a") for _ in range(64)]
        try:
            assert client.complete("hi").status == 200
            assert not any(one.done() for one in waiting)
        finally:
            done.set()
        assert {one.result().status for one in waiting} == {200}
