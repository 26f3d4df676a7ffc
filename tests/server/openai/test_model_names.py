"""What requests may call the model, and what replies call it then."""

from __future__ import annotations

import pytest

from tests.server.conftest import Client, serving
from tests.server.fake import fake_front

CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 9}


@pytest.mark.parametrize("stream", [False, True])
def test_any_name_is_taken_and_repeated_if_the_server_is_set_so(stream: bool) -> None:
    with serving(fake_front(), any_model_name=True) as client:
        for path in ("/v1/chat/completions", "/v1/messages"):
            answer = client.post(path, {**CHAT, "model": "gpt-9", "stream": stream})
            assert answer.status == 200
            assert b'"model":"gpt-9"' in answer.body
        own = client.get("/v1/models").json["data"][0]["id"]
        assert own != "gpt-9"
        assert client.complete(max_tokens=1).json["model"] == own
        assert client.get("/v1/models/gpt-9").json["id"] == "gpt-9"
        assert client.get("/v1/models/" + "x" * 257).error["param"] == "model"
        for wrong in (5, "x" * 257):
            assert client.complete(max_tokens=1, model=wrong).error["param"] == "model"


def test_otherwise_only_its_own_is(client: Client) -> None:
    assert client.complete(max_tokens=1, model="gpt-9").status == 404
    assert client.get("/v1/models/gpt-9").status == 404


@pytest.mark.parametrize("any_name", [False, True])
def test_the_name_default_always_means_the_served_model(any_name: bool) -> None:
    with serving(fake_front(), any_model_name=any_name) as client:
        (own,) = client.get("/v1/models").json["data"]
        assert client.get("/v1/models/default").json == own
        for path in ("/v1/chat/completions", "/v1/messages", "/v1/embeddings", "/tokenize"):
            asked = {"input": "a"} if path == "/v1/embeddings" else CHAT
            answer = client.post(path, {**asked, "model": "default"})
            assert answer.status == 200, answer.body
            assert answer.json.get("model", own["id"]) == own["id"]
