"""/v1/score and /v1/rerank: cosines of embeddings, and they say that they are."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.contract.wire import Answer, Client
from tests.server.conftest import serving
from tests.server.fake import EchoLoop, embedding
from tests.server.real_engine import engine_front


def cosine(a: str, b: str) -> float:
    x, y = (embedding([ord(text[-1])], "last") for text in (a, b))
    return sum(p * q for p, q in zip(x, y, strict=True)) / math.hypot(*x) / math.hypot(*y)


def ask(client: Client, path: str, **body: Any) -> Answer:
    return client.post(path, {"model": client.model, **body})


@pytest.mark.parametrize("path", ["/v1/score", "/score"])
def test_one_text_against_many_and_pairs(client: Client, path: str) -> None:
    one = ask(client, path, text_1="a", text_2=["a", "z"])
    assert [entry["score"] for entry in one.json["data"]] == pytest.approx([1.0, cosine("a", "z")])
    assert (one.json["method"], one.json["object"], one.json["model"]) == ("cosine", "list", client.model)
    assert one.json["usage"] == {"prompt_tokens": 6, "total_tokens": 6}
    pairs = ask(client, path, text_1=["a", "q"], text_2=["b", "q"])
    assert [e["score"] for e in pairs.json["data"]] == pytest.approx([cosine("a", "b"), 1.0])
    assert [(e["index"], e["object"]) for e in pairs.json["data"]] == [(0, "score"), (1, "score")]


def test_vllm_s_other_names(client: Client) -> None:
    want = ask(client, "/score", text_1="a", text_2=["b"]).json["data"]
    assert ask(client, "/score", queries="a", documents=["b"]).json["data"] == want
    assert ask(client, "/score", data_1="a", data_2=["b"]).json["data"] == want
    assert ask(client, "/score", queries="a", text_1="a", text_2="b").status == 400


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])
def test_documents_come_nearest_first(client: Client, path: str) -> None:
    documents = ["z", "q", {"text": "a"}, "b"]
    answer = ask(client, path, query="a", documents=documents)
    results = answer.json["results"]
    assert sorted(r["index"] for r in results) == [0, 1, 2, 3]
    assert results[0] == {"index": 2, "relevance_score": pytest.approx(1.0), "document": {"text": "a"}}
    scores = [r["relevance_score"] for r in results]
    assert scores == sorted(scores, reverse=True)
    assert answer.json["method"] == "cosine"
    best = ask(client, path, query="a", documents=documents, top_n=2, return_documents=False).json["results"]
    assert best == [{k: r[k] for k in ("index", "relevance_score")} for r in results[:2]]


def test_equal_documents_keep_their_order(client: Client) -> None:
    results = ask(client, "/rerank", query="a", documents=["xa", "a", "ya"]).json["results"]
    assert [r["index"] for r in results] == [0, 1, 2]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/score", {"text_1": "a"}, "text_2"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1"),
        ("/v1/score", {"text_1": [], "text_2": "a"}, "text_1"),
        ("/v1/rerank", {"query": "a", "documents": []}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": ["b", {"image": "c"}]}, "documents[1].text"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n"),
        ("/v1/rerank", {"query": ["a"], "documents": ["b"]}, "query"),
        ("/v1/rerank", {"query": "a", "documents": ["b", "c" * 9000]}, "documents[1]"),
    ],
)
def test_refusals_name_the_field(client: Client, path: str, body: dict[str, Any], param: str) -> None:
    answer = ask(client, path, **body)
    assert answer.status == 400
    assert answer.error["param"] == param


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/score", {"text_1": "a", "text_2": "b"}), ("/v1/rerank", {"query": "a", "documents": ["b"]})],
)
def test_the_terms_of_a_request_reach_the_engine(
    client: Client, engine: EchoLoop, path: str, body: dict[str, Any]
) -> None:
    answer = ask(client, path, **body, cache_salt="mine", priority=3, timeout_s=9.5)
    assert answer.status == 200, answer.body
    assert "x-plait-ignored" not in answer.headers
    found = [(one.cache_salt, one.priority, one.timeout_s) for one in engine.requests[-2:]]
    assert found == [("mine", 3, 9.5)] * 2
    assert ask(client, path, **body, cache_salt="").error["param"] == "cache_salt"


def test_through_the_engine_a_text_is_nearest_to_itself() -> None:
    front = engine_front()
    try:
        with serving(front) as client:
            documents = [f"document {i}" * (i + 1) for i in range(20)]
            answer = ask(client, "/v1/rerank", query=documents[7], documents=documents, top_n=1)
            (result,) = answer.json["results"]
            assert result["index"] == 7
            assert result["relevance_score"] == pytest.approx(1.0)
    finally:
        front.close()
