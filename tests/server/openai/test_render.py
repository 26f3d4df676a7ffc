"""The tokens that a gateway is given are those of the request itself."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.conftest import Client
from tests.server.fake import BOS

CHAT: dict[str, Any] = {
    "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
    "max_tokens": 1,
}


def test_chat_is_rendered_as_the_reply_has_it(client: Client) -> None:
    rendered = client.post("/v1/chat/completions/render", {**CHAT, "model": client.model, "stream": True})
    assert rendered.status == 200
    assert "x-plait-ignored" not in rendered.headers
    whole = client.post("/v1/chat/completions", {**CHAT, "return_token_ids": True}).json
    assert rendered.json["token_ids"] == whole["prompt_token_ids"]
    assert rendered.json["model"] == client.model
    assert rendered.json["request_id"]


def test_completions_are_rendered_one_by_one(client: Client) -> None:
    found = client.post("/v1/completions/render", {"prompt": ["Hi", "Ho"], "max_tokens": 1}).json
    assert [one["token_ids"] for one in found] == [[BOS, *b"Hi"], [BOS, *b"Ho"]]
    (one,) = client.post("/v1/completions/render", {"prompt": [BOS, 5]}).json
    assert one["token_ids"] == [BOS, 5]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/chat/completions/render", {"messages": []}, "messages"),
        ("/v1/chat/completions/render", {"messages": [{"role": "user", "content": 5}]}, "messages"),
        ("/v1/completions/render", {"prompt": [[]]}, "prompt"),
        ("/v1/completions/render", {"prompt": "Hi", "max_tokens": -1}, "max_tokens"),
    ],
)
def test_what_the_engine_would_not_get_is_refused(
    client: Client, path: str, body: dict[str, Any], param: str
) -> None:
    refused = client.post(path, body)
    assert refused.status == 400
    assert refused.json["error"]["param"].startswith(param)


def test_nothing_is_generated(client: Client, front: Any) -> None:
    before = len(front.loop.requests)
    client.post("/v1/chat/completions/render", CHAT)
    assert len(front.loop.requests) == before
