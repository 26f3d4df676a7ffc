"""Requests from a file through the application: each line is answered, and few run at once."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from plait.config import ServerConfig
from plait.errors import ConfigError, EngineLost
from plait.server.app import create_app
from plait.server.openai.batch import Counts, lines, run
from tests.server.fake import EchoLoop, fake_front
from tests.server.real_engine import engine_front

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def line(custom_id: Any, url: str = COMPLETIONS, **body: Any) -> bytes:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body}).encode()


def answered(*requests: bytes, front: Any = None, at_once: int = 4) -> tuple[dict[str, Any], Counts]:
    """What was written, by custom id."""
    written: list[bytes] = []
    app = create_app(front or fake_front(), ServerConfig())
    counts = asyncio.run(run(app, lines(requests), written.append, at_once=at_once, on_done=lambda _: None))
    assert all(one.endswith(b"\n") and one.count(b"\n") == 1 for one in written)
    found = [json.loads(one) for one in written]
    assert all(set(one) == {"id", "custom_id", "response", "error"} for one in found)
    assert len({one["id"] for one in found}) == len(found)
    return {one["custom_id"]: one for one in found}, counts


def test_every_kind_of_request_is_answered_as_over_http() -> None:
    messages = [{"role": "user", "content": "hello"}]
    found, counts = answered(
        line("a", prompt="hi", max_tokens=9),
        line("b", CHAT, messages=messages),
        line("c", "/v1/embeddings", input="x"),
        line("d", "/v1/responses", input="yes"),
        line("e", "/v1/messages", messages=messages, max_tokens=9),
        line("f", "/v1/score", text_1="a", text_2="b"),
        b"\n",
        line("g", "/tokenize", prompt="a"),
        line("h", "/api/chat", messages=messages),
    )
    assert {one["response"]["status_code"] for one in found.values()} == {200}
    assert found["a"]["response"]["body"]["choices"][0]["text"] == "hi"
    assert found["b"]["response"]["body"]["choices"][0]["message"]["content"] == "hello"
    assert found["e"]["response"]["body"]["content"][0]["text"] == "hello"
    assert found["h"]["response"]["body"]["message"]["content"] == "hello"
    assert all(one["response"]["request_id"] for one in found.values())
    assert (counts.done, counts.failed) == (8, 0)


def test_a_batch_ends_when_its_engine_is_given_up() -> None:
    front, written, lost = fake_front(), list[bytes](), EngineLost("the engine has ended 6 times")
    loop: Any = front.loop

    def write(one: bytes) -> None:
        written.append(one)
        loop.fault = lost

    requests = [line(str(n), prompt="hi", max_tokens=2) for n in range(50)]
    work = run(
        create_app(front, ServerConfig()),
        lines(requests),
        write,
        at_once=2,
        on_done=lambda _: None,
        fault=lambda: front.fault,
    )
    with pytest.raises(EngineLost, match="6 times"):
        asyncio.run(work)
    assert len(written) <= 3


def test_what_is_wrong_with_a_line_is_its_own_matter() -> None:
    found, counts = answered(
        line("good", prompt="hi"),
        line("bad", prompt="hi", temperature=9),
        line("path", "/v1/nothing", prompt="hi"),
        line("boom", prompt="BOOM"),
        line("stream", prompt="hi", stream=True),
        line("option", prompt="hi", options={"stream": True}),
        line("relative", "v1/completions", prompt="hi"),
        json.dumps({"custom_id": "get", "method": "GET", "url": "/v1/models", "body": {}}).encode(),
        json.dumps({"custom_id": "empty", "url": COMPLETIONS}).encode(),
    )
    assert found["bad"]["response"]["status_code"] == 400
    assert found["bad"]["response"]["body"]["error"]["param"] == "temperature"
    assert found["path"]["response"]["status_code"] == 404
    assert found["boom"]["response"]["status_code"] == 500
    for name, word in {
        "stream": "stream",
        "option": "stream",
        "relative": "url",
        "get": "GET",
        "empty": "body",
    }.items():
        assert found[name]["response"] is None
        assert word in found[name]["error"]["message"]
    assert found["good"]["response"]["status_code"] == 200
    assert (counts.done, counts.failed) == (9, 8)


@pytest.mark.parametrize("text", [b"{", b"[]", b"\xff\n", json.dumps({"custom_id": 3}).encode()])
def test_lines_that_are_no_requests_are_answered_by_number(text: bytes) -> None:
    found, counts = answered(text)
    assert found[None]["error"]["message"].startswith("line 1: ")  # type: ignore[index]
    assert counts.failed == 1


def test_few_run_at_once_and_the_file_is_read_as_needed() -> None:
    front = fake_front()
    assert isinstance(front.loop, EchoLoop)
    most, read = 0, 0

    def source() -> Any:
        nonlocal most, read
        for i in range(30):
            read += 1
            most = max(most, front.loop.stats()["running"])
            yield line(str(i), prompt=f"SLOW{i}", max_tokens=3)

    app, seen = create_app(front, ServerConfig()), list[int]()

    def done(counts: Counts) -> None:
        seen.append(read - counts.done)

    asyncio.run(run(app, lines(source()), lambda _: None, at_once=3, on_done=done))
    assert most <= 3
    assert len(seen) == 30
    assert max(seen) <= 3


def test_a_full_engine_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plait.server.openai.batch.PAUSES_S", (0.01, 0.01))
    found, _ = answered(line("a", prompt="FULL"))
    assert found["a"]["response"]["status_code"] in {429, 503}


def test_none_at_once_is_refused() -> None:
    with pytest.raises(ConfigError, match="at_once"):
        answered(line("a", prompt="x"), at_once=0)


def test_through_the_engine_a_batch_gives_what_requests_alone_give() -> None:
    front = engine_front()
    try:
        body = {"max_tokens": 12, "temperature": 1, "seed": 3}
        requests = [line(str(i), prompt=f"number {i}", **body) for i in range(24)]
        together, _ = answered(*requests, front=front, at_once=16)
        alone, _ = answered(*requests, front=front, at_once=1)
        texts = [
            {name: one["response"]["body"]["choices"][0]["text"] for name, one in found.items()}
            for found in (together, alone)
        ]
        assert texts[0] == texts[1]
    finally:
        front.close()


def test_fields_that_are_not_read_are_named_in_the_answer() -> None:
    found, _ = answered(line("a", prompt="hi", strange=1, odd=2), line("b", prompt="hi"))
    assert found["a"]["response"]["ignored_fields"] == ["strange", "odd"]
    assert "ignored_fields" not in found["b"]["response"]
