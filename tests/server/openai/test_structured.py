"""Structured output over HTTP: point 54 of the wire contract, in every spelling of its field."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jsonschema
import pytest

from plait.config import EngineConfig
from plait.frontend.frontend import Front, Language
from plait.request import Grammar
from plait.spec.model import ModelSpec, NormSpec
from plait.text.grammar.library import GrammarLimits
from plait.text.grammar.trial_pool import Verdict
from plait.worker import client as process
from tests.server.conftest import Client, serving, wait_until
from tests.server.fake import ByteTokenizer, fake_front
from tests.server.openai.speaking import TOOLS, WEATHER, SpeakingTemplate
from tests.server.real_engine import engine_front

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
@pytest.mark.parametrize("requested", WISHES)
def test_the_reply_is_what_the_schema_says(client: Client, path: str, requested: dict[str, Any]) -> None:
    for text in said(getattr(client, path)(max_tokens=300, n=2, temperature=1, seed=3, **requested)):
        jsonschema.validate(json.loads(text), SCHEMA)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("requested", "pattern"),
    [
        ({"guided_regex": "[ab]{4}"}, "[ab]{4}"),
        ({"guided_choice": ["one", "two"]}, "one|two"),
        ({"grammar": 'root ::= "x" [0-9] "y"'}, "x[0-9]y"),
        ({"guided_grammar": "start: /[0-9]{3}/"}, "[0-9]{3}"),
        ({"structured_outputs": {"regex": "a?b"}}, "a?b"),
    ],
)
def test_the_reply_is_what_the_grammar_says(
    client: Client, path: str, requested: dict[str, Any], pattern: str
) -> None:
    (text,) = said(getattr(client, path)(max_tokens=300, **requested))
    assert re.fullmatch(pattern, text)
    (streamed,) = ["".join(_pieces(getattr(client, path)(max_tokens=300, stream=True, **requested).events))]
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
    ("requested", "param"),
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
    client: Client, path: str, requested: dict[str, Any], param: str
) -> None:
    for stream in (False, True):
        answer = getattr(client, path)(max_tokens=5, stream=stream, **requested)
        assert (answer.status, answer.error["param"]) == (400, param)
        assert len(answer.error["message"]) > len(param) + 10
    assert client.complete(max_tokens=2).status == 200


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "requested",
    [
        {"response_format": {"type": "text"}},
        {"response_format": None},
        {"structured_outputs": {}},
        {"grammar": "", "format": ""},
    ],
)
def test_free_text_is_no_grammar(client: Client, path: str, requested: dict[str, Any]) -> None:
    free = getattr(client, path)(max_tokens=9).json["choices"][0]
    assert getattr(client, path)(max_tokens=9, **requested).json["choices"][0] == free


@pytest.fixture(scope="module")
def speaking() -> Iterator[Client]:
    with serving(engine_front(template=SpeakingTemplate())) as client:
        yield client


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("more", [{}, {"tools": TOOLS}])
def test_what_is_requested_is_the_content_behind_the_thinking(
    speaking: Client, more: dict[str, Any], seed: int
) -> None:
    requested = {"response_format": {"type": "json_schema", "json_schema": {"name": "w", "schema": SCHEMA}}}
    asked = {
        "max_tokens": 400,
        "thinking_token_budget": 15,
        "temperature": 1.3,
        "seed": seed,
        **requested,
        **more,
    }
    choice = speaking.chat("Weather?", **asked).json["choices"][0]
    message = choice["message"]
    if "tool_calls" in message and choice["finish_reason"] == "tool_calls":
        assert message["content"] is None
    elif choice["finish_reason"] == "stop":
        jsonschema.validate(json.loads(message["content"]), SCHEMA)


def test_a_switch_that_is_off_leaves_no_thinking(speaking: Client) -> None:
    asked: dict[str, Any] = {"guided_choice": ["yes", "no"], "logit_bias": {str(ord("<")): 100}}
    for requested in ({"reasoning_effort": "none"}, {"chat_template_kwargs": {"enable_thinking": False}}):
        message = speaking.chat("Well?", **asked, **requested).json["choices"][0]["message"]
        assert message["content"] in ("yes", "no")
        assert "reasoning_content" not in message


def test_grammars_that_wait_hold_no_thread_and_leave_the_queue_with_their_client(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    front, asked = fake_front(), list[Future[Verdict]]()
    assert front.grammars is not None

    def submit(grammar: Grammar, key: str = "") -> Future[Verdict]:
        asked.append(Future())
        return asked[-1]

    monkeypatch.setattr(front.grammars, "submit", submit)
    with serving(front) as client, ThreadPoolExecutor(65) as asking:
        waiting = [asking.submit(client.complete, "hi", guided_regex="a") for _ in range(64)]
        try:
            with socket.create_connection(client.address, 30) as gone:
                body = b'{"prompt": "hi", "guided_regex": "b"}'
                head = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n"
                head += b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n"
                gone.sendall(head % len(body) + body)
                assert wait_until(lambda: len(asked) == 65, 30)
                assert client.complete("hi").status == 200
                assert not any(one.done() for one in (*waiting, *asked))
            assert wait_until(lambda: sum(one.cancelled() for one in asked) == 1, 30)
        finally:
            for one in asked:
                if one.set_running_or_notify_cancel():
                    one.set_result(Verdict(True, "form"))
        assert {one.result().status for one in waiting} == {200}


@pytest.mark.parametrize(
    ("timeout_s", "status", "says"), [(0.05, 504, "before the request's grammar"), (None, 503, "try again")]
)
def test_a_grammar_that_gets_no_turn_ends_at_the_requests_own_deadline(
    monkeypatch: pytest.MonkeyPatch, timeout_s: float | None, status: int, says: str
) -> None:
    front = fake_front()
    assert front.grammars is not None
    front.grammars.limits = GrammarLimits(wait_s=0.05)
    monkeypatch.setattr(front.grammars, "submit", lambda grammar, key="": Future[Verdict]())
    more: dict[str, Any] = {} if timeout_s is None else {"timeout_s": timeout_s}
    with serving(front) as client:
        answer = client.complete("hi", guided_regex="a", **more)
    assert (answer.status, says in answer.error["message"]) == (status, True)


def test_the_processes_that_try_grammars_are_up_before_a_server_is_ready(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[Front] = []
    monkeypatch.setattr(Front, "start", lambda front: made.append(front))
    monkeypatch.setattr(process, "EngineProcess", lambda *_, **__: StubProcess())
    assert made == [process.load_process("m", EngineConfig(), lambda *_: None)]


class StubProcess:
    """An engine that is up."""

    name, longest, chat_template = "stub", None, None

    def source(self, report: Any) -> Any:
        return self

    def language(self) -> Language:
        return Language(ByteTokenizer(), None, {}, frozenset())

    def ready(self, report: Any) -> tuple[ModelSpec, int]:
        return ModelSpec("stub", 8, 300, (), NormSpec(), 64), 64
