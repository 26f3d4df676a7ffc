"""Point 4: comments keep a silent stream open, and nobody takes them for events."""

from __future__ import annotations

from typing import Any

import pytest
from openai import OpenAI

from plait.server import sse
from tests.server.conftest import Client


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "PING_S", 0.003)


@pytest.mark.usefixtures("soon")
def test_a_slow_stream_has_pings_that_clients_ignore(client: Client) -> None:
    answer = client.complete("SLOW and steady", stream=True, max_tokens=15)
    assert b": ping\n\n" in answer.body
    assert "".join(e["choices"][0]["text"] for e in answer.events) == "SLOW and steady"
    with OpenAI(base_url=client.base_url + "/v1", api_key="x", max_retries=0) as openai:
        messages: Any = [{"role": "user", "content": "SLOW and steady"}]
        stream = openai.chat.completions.create(
            model=client.model, messages=messages, stream=True, max_tokens=15
        )
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == "SLOW and steady"


def test_a_stream_that_talks_has_none(client: Client) -> None:
    assert b": ping" not in client.complete("Hello", stream=True, max_tokens=5).body
