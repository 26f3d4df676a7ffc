"""Ollama's own Python client against a server."""

from __future__ import annotations

from typing import Any

import ollama
import pytest

from tests.contract.wire import Client

ASK = [{"role": "user", "content": "Hello there"}]


@pytest.fixture
def real(base_url: str) -> Any:
    return ollama.Client(base_url)


def test_the_client_chats_whole_and_in_parts(real: Any, client: Client) -> None:
    whole = real.chat(client.model, ASK, options={"temperature": 0}, keep_alive="5m")
    parts = [*real.chat(client.model, ASK, options={"temperature": 0}, stream=True)]
    assert whole.message.content == "".join(part.message.content for part in parts) == "Hello there"
    assert (whole.done_reason, parts[-1].done_reason) == ("stop", "stop")
    assert real.generate(client.model, "Hello there").response == "Hello there"


def test_the_client_lists_shows_embeds_and_pulls(real: Any, client: Client) -> None:
    assert [one.model for one in real.list().models] == [client.model]
    assert [one.name for one in real.ps().models] == [client.model]
    assert "completion" in real.show(client.model).capabilities
    assert len(real.embed(client.model, ["a", "b"]).embeddings) == 2
    assert len(real.embeddings(client.model, "a").embedding) > 0
    assert [one.status for one in real.pull(client.model, stream=True)] == ["success"]


def test_the_client_raises_the_servers_words(real: Any, client: Client) -> None:
    for call in (
        lambda: real.delete(client.model),
        lambda: real.copy(client.model, "x"),
        lambda: real.pull("llama3"),
        lambda: real.chat("llama3", ASK),
        lambda: [*real.chat(client.model, [{"role": "user", "content": "BOOM goes it"}], stream=True)],
    ):
        with pytest.raises(ollama.ResponseError, match=r"admin key|served|engine failed"):
            call()
