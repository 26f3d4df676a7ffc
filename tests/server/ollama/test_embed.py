"""/api/embed and /api/embeddings: the vectors of /v1/embeddings in Ollama's shapes."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.contract.wire import Answer, Client
from tests.server.fake import CONTEXT, HIDDEN_SIZE, embedding


def embed(client: Client, given: Any, **body: Any) -> Answer:
    return client.post("/api/embed", {"model": client.model, "input": given, **body})


def test_texts_become_vectors_of_length_one(client: Client) -> None:
    answer = embed(client, ["a", "bc"])
    assert answer.status == 200, answer.body
    found = answer.json
    assert [math.hypot(*vector) for vector in found["embeddings"]] == pytest.approx([1, 1])
    assert found["prompt_eval_count"] == len("a") + len("bc") + 2
    assert found["total_duration"] > 0
    assert embed(client, "a").json["embeddings"] == found["embeddings"][:1]
    assert embed(client, []).json["embeddings"] == []


def test_the_older_path_does_not_scale_the_vector(client: Client) -> None:
    found = client.post("/api/embeddings", {"model": client.model, "prompt": "a"}).json
    assert found == {"embedding": list(embedding([ord("a")], "last"))}


def test_dimensions_keep_the_first_numbers(client: Client) -> None:
    (vector,) = embed(client, "w", dimensions=4).json["embeddings"]
    assert len(vector) == 4
    assert math.hypot(*vector) == pytest.approx(1)
    answer = embed(client, "w", dimensions=HIDDEN_SIZE + 1)
    assert (answer.status, answer.json["error"].split(":")[0]) == (400, "dimensions")


def test_a_text_is_cut_only_on_request(client: Client) -> None:
    text = "x" * (CONTEXT + 10)
    assert embed(client, text).status == embed(client, text, truncate=False).status == 400
    answer = embed(client, text, truncate=True)
    assert (answer.status, answer.json["prompt_eval_count"]) == (200, CONTEXT)
    assert embed(client, "x", truncate=True).json["prompt_eval_count"] == 2


@pytest.mark.parametrize(
    ("body", "name"),
    [
        ({"input": 3}, "input"),
        ({"input": ["a", 3]}, "input"),
        ({"truncate": "yes"}, "truncate"),
        ({"options": 3}, "options"),
        ({"keep_alive": "soon"}, "keep_alive"),
    ],
)
def test_a_bad_field_is_refused_by_name(client: Client, body: Any, name: str) -> None:
    answer = embed(client, **{"given": "a", **body})
    assert (answer.status, answer.json["error"].split(":")[0]) == (400, name)


def test_options_are_reported_because_they_change_no_vector(client: Client) -> None:
    answer = embed(client, "a", options={"num_ctx": 2048}, keep_alive="1h")
    assert {*answer.headers["x-plait-ignored"].split(",")} == {"options.num_ctx", "keep_alive"}
