"""What a body's fields become, and what the engine reports on the way back."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_type_hints

import msgspec
import pytest

from plait.request import SAMPLING
from plait.sampling_fields import Declared, SamplingFields
from plait.server.anthropic.messages import MessagesRequest
from plait.server.api.schema import CompletionRequest, StorableChat
from plait.server.responses.request import ResponsesRequest
from tests.server.conftest import Client
from tests.server.fake import EchoLoop

PATHS = ("complete", "chat")
ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("path", PATHS)
def test_terms_reach_the_engine(client: Client, engine: EchoLoop, path: str) -> None:
    sent = {"cache_salt": "tenant 7", "priority": -5, "timeout_s": 12.5}
    for more in ({}, {"stream": True}):
        assert getattr(client, path)(max_tokens=2, **sent, **more).status == 200
        request = engine.requests[-1]
        assert (request.cache_salt, request.priority, request.timeout_s) == ("tenant 7", -5, 12.5)
    assert getattr(client, path)(max_tokens=2).status == 200
    request = engine.requests[-1]
    assert (request.cache_salt, request.priority, request.timeout_s) == ("", 0, None)


@pytest.mark.parametrize("path", PATHS)
def test_best_of_reaches_the_engine_as_that_many_choices(client: Client, engine: EchoLoop, path: str) -> None:
    answer = getattr(client, path)(max_tokens=2, n=2, best_of=6)
    assert len(answer.json["choices"]) == 2
    assert engine.requests[-1].params.n == 6


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("more", [{}, {"n": 3}, {"best_of": 3}])
def test_cached_tokens_are_those_of_the_first_choice(client: Client, path: str, more: dict[str, int]) -> None:
    """The fake engine says 3, and for later choices, which share the first one's prompt, all but one."""
    usage = getattr(client, path)(max_tokens=2, **more).json["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 3}
    if "best_of" not in more:
        asked: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
        streamed = getattr(client, path)(max_tokens=2, **more, **asked).events[-1]["usage"]
        assert streamed == usage


def test_cached_tokens_of_several_prompts_are_summed(client: Client) -> None:
    usage = client.complete(["One", "Another"], max_tokens=2, n=2).json["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 6}


def test_a_timeout_without_a_unit_is_refused_with_the_right_name(client: Client) -> None:
    error = client.complete(timeout=5).error
    assert (error["param"], "timeout_s, in seconds" in error["message"]) == ("timeout", True)


@pytest.mark.parametrize(
    ("path", "body", "param", "told"),
    [
        ("/v1/embeddings", {"pooling": "cls"}, "pooling", '\'cls\' is not "last" or "mean"'),
        ("/v1/responses", {"truncation": "auto"}, "truncation", "'auto' is not \"disabled\""),
        ("/v1/responses", {"text": {"verbosity": "low"}}, "text.verbosity", "'low' is not \"medium\""),
        ("/v1/responses", {"include": ["x"]}, "include[0]", '"reasoning.encrypted_content"'),
    ],
)
def test_a_value_that_is_none_of_a_few_is_answered_with_them(
    client: Client, path: str, body: dict[str, Any], param: str, told: str
) -> None:
    error = client.post(path, {"input": "a", **body}).error
    assert error["param"] == param
    assert told in error["message"]


REQUESTS = (CompletionRequest, StorableChat, ResponsesRequest, MessagesRequest)


@pytest.mark.parametrize("request_type", REQUESTS)
def test_requests_take_sampling_fields_from_their_one_declaration(request_type: type) -> None:
    ours, theirs = (get_type_hints(kind, include_extras=True) for kind in (SamplingFields, request_type))
    assert {name: theirs[name] for name in ours} == ours
    assert issubclass(request_type, SamplingFields)


def test_the_document_shows_words_and_range_of_a_sampling_field() -> None:
    document = msgspec.json.decode((ROOT / "docs" / "openapi.json").read_bytes())
    for request_type in REQUESTS:
        shown = document["components"]["schemas"][request_type.__name__]["properties"]["temperature"]
        assert (shown["minimum"], shown["maximum"]) == SAMPLING["temperature"].bounds
        assert shown["description"] == SAMPLING["temperature"].words


def test_the_table_of_sampling_fields_is_made_from_their_declaration() -> None:
    text = (ROOT / "docs" / "apis.md").read_text(encoding="utf-8")
    rows = {name: sampling_row(name, told) for name, told in SAMPLING.items()}
    assert [row for row in rows.values() if row not in text] == []


def sampling_row(name: str, told: Declared) -> str:
    """A field as the table of docs/apis.md has it."""
    large: dict[float, str] = {2**63 - 1: "2⁶³ - 1", -(2**63): "-2⁶³"}
    bounds = " to ".join(large.get(bound, str(bound)) for bound in told.bounds or ())
    return f"| `{name}` | {bounds} | {told.words} | {', '.join(f'`{also}`' for also in told.also)} |"
