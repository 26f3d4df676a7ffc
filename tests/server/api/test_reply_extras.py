"""What OpenAI's replies have not: llama.cpp's timings and progress, vLLM's prompt ids; and fingerprints."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.conftest import Client, serving
from tests.server.fake import BOS, TURN
from tests.server.real_engine import engine_front

TIMINGS = {
    *("cache_n", "prompt_n", "prompt_ms", "prompt_per_token_ms", "prompt_per_second"),
    *("predicted_n", "predicted_ms", "predicted_per_token_ms", "predicted_per_second"),
}
KINDS = ["complete", "chat"]


@pytest.fixture(scope="module")
def real() -> Iterator[Client]:
    with serving(engine_front()) as client:
        yield client


@pytest.mark.parametrize("ask", KINDS)
def test_timings_come_with_the_reply_and_with_each_chunk(client: Client, ask: str) -> None:
    body = getattr(client, ask)("Hello", timings_per_token=True).json
    found, usage = body["timings"], body["usage"]
    assert set(found) == TIMINGS
    assert found["predicted_n"] == usage["completion_tokens"] == 5
    assert found["cache_n"] + found["prompt_n"] == usage["prompt_tokens"]
    events = getattr(client, ask)("Hello", timings_per_token=True, stream=True).events
    assert all(set(event["timings"]) == TIMINGS for event in events)
    assert events[-1]["timings"]["predicted_n"] == 5
    for more in ({}, {"timings_per_token": False}):
        assert "timings" not in getattr(client, ask)("Hello", **more).json


@pytest.mark.parametrize("ask", KINDS)
def test_times_are_those_of_the_engine(real: Client, ask: str) -> None:
    found = getattr(real, ask)("Hello", timings_per_token=True, max_tokens=8, ignore_eos=True)
    timings = found.json["timings"]
    assert timings["prompt_ms"] > 0
    assert timings["predicted_ms"] > 0
    per_second = timings["predicted_n"] * 1000 / timings["predicted_ms"]
    assert timings["predicted_per_second"] == pytest.approx(per_second, rel=0.01)


@pytest.mark.parametrize("ask", KINDS)
@pytest.mark.parametrize("interval", [1, 8])
def test_a_stream_reports_how_far_its_prompt_is(ask: str, interval: int) -> None:
    with serving(engine_front(), stream_interval=interval) as client:
        asked: dict[str, Any] = {"return_progress": True, "max_tokens": 3, "ignore_eos": True}
        prompt = "many words " * 40
        events = getattr(client, ask)(prompt, stream=True, **asked).events
        shown = [event["prompt_progress"] for event in events if "prompt_progress" in event]
        assert shown
        done = [one["processed"] for one in shown]
        assert done == sorted(done)
        assert shown[-1]["processed"] == shown[-1]["total"] > 400
        assert all(set(one) == {"total", "cache", "processed", "time_ms"} for one in shown)
        assert all("prompt_progress" not in event for event in events[len(shown) :])
        plain = getattr(client, ask)(prompt, stream=True, max_tokens=3, ignore_eos=True).events
        assert _text(events) == _text(plain)
        assert "prompt_progress" not in getattr(client, ask)(prompt, **asked).json


def test_each_prompt_of_a_stream_has_its_own_progress(client: Client) -> None:
    asked = {"prompt": ["Hello", "Hello again"], "stream": True, "return_progress": True}
    events = client.post("/v1/completions", asked).events
    shown = {
        (event["choices"][0]["index"], event["prompt_progress"]["total"])
        for event in events
        if "prompt_progress" in event
    }
    assert shown == {(0, 6), (1, 12)}


def test_other_apis_refuse_these_by_name(client: Client) -> None:
    for name in ("timings_per_token", "return_progress"):
        asked = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, name: True}
        assert name in client.post("/v1/messages", asked).json["error"]["message"]
        assert client.post("/v1/responses", {"input": "a", name: True}).error["param"] == name
        assert client.post("/v1/responses", {"input": "a", name: False}).status == 200


def test_prompt_ids_come_with_the_ids_of_the_reply(client: Client) -> None:
    asked = {"return_token_ids": True, "max_tokens": 2}
    assert client.chat("Hi", **asked).json["prompt_token_ids"] == [TURN, *b"Hi"]
    first, *rest = client.chat("Hi", stream=True, **asked).events
    assert first["prompt_token_ids"] == [TURN, *b"Hi"]
    assert all("prompt_token_ids" not in event for event in rest)
    whole = client.post("/v1/completions", {"prompt": ["Hi", "Ho"], "n": 2, **asked}).json["choices"]
    wanted = [[BOS, *b"Hi"]] * 2 + [[BOS, *b"Ho"]] * 2
    assert [choice["prompt_token_ids"] for choice in whole] == wanted
    choices = [event["choices"][0] for event in client.complete("Hi", stream=True, **asked).events]
    assert [choice.get("prompt_token_ids") for choice in choices[:2]] == [[BOS, *b"Hi"], None]
    assert "prompt_token_ids" not in client.chat("Hi").json


def test_the_fingerprint_is_the_engines(client: Client) -> None:
    for ask in (client.complete, client.chat):
        assert ask(max_tokens=1).json["system_fingerprint"] == "fp_echo"
        assert {e["system_fingerprint"] for e in ask(max_tokens=1, stream=True).events} == {"fp_echo"}
    assert "user" not in client.post("/v1/responses", {"input": "a"}).json


def _text(events: list[dict[str, Any]]) -> str:
    choices = [choice for event in events for choice in event["choices"]]
    return "".join(c.get("text") or c.get("delta", {}).get("content") or "" for c in choices)
