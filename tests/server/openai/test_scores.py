"""/v1/score, /v1/rerank and /v1/classify by a model's own head, and the refusals of models without one."""

from __future__ import annotations

import base64
import math
from array import array
from collections.abc import Iterator
from typing import Any

import pytest

from plait.frontend.frontend import Front
from plait.frontend.model_head import NO_HEAD, HeadLayer, ModelHead, PairForm
from tests.contract.wire import Answer, Client
from tests.server.conftest import serving
from tests.server.fake import HIDDEN_SIZE, embedding, fake_front


def layer(rows: int) -> HeadLayer:
    """Row r is (r + 1) / 4 of the first bits of the last byte."""
    numbers = array("f", [(row + 1) / 4 * (bit < 3) for row in range(rows) for bit in range(HIDDEN_SIZE)])
    return HeadLayer((rows, HIDDEN_SIZE), base64.b64encode(numbers.tobytes()).decode())


def bits(text: str) -> float:
    """How many of the first three bits its last byte has."""
    return sum(embedding([ord(text[-1])], "last")[:3])


@pytest.fixture(scope="module")
def headed() -> Iterator[tuple[Client, Front]]:
    front = fake_front()
    with serving(front) as client:
        yield client, front


def ask(client: Client, path: str, **body: Any) -> Answer:
    return client.post(path, {"model": client.model, **body})


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


@pytest.mark.parametrize("pairs", ["", "qwen3"])
def test_pairs_are_scored_by_the_head(headed: tuple[Client, Front], pairs: PairForm) -> None:
    client, front = headed
    front.head = ModelHead(scores=(layer(1),), labels=("yes",), activation="sigmoid", pairs=pairs)
    want = [sigmoid(bits(text if not pairs else "\n") / 4) for text in ("a", "g")]
    found = ask(client, "/v1/score", text_1="q", text_2=["a", "g"])
    assert [entry["score"] for entry in found.json["data"]] == pytest.approx(want)
    assert found.json["method"] == "head"
    raw = ask(client, "/score", text_1="q", text_2="g", use_activation=False).json["data"][0]["score"]
    assert raw == pytest.approx(bits("g" if not pairs else "\n") / 4)
    ranked = ask(client, "/v1/rerank", query="q", documents=["a", {"text": "g"}]).json
    assert ranked["method"] == "head"
    if not pairs:
        assert [(r["index"], r["document"]) for r in ranked["results"]] == [
            (1, {"text": "g"}),
            (0, {"text": "a"}),
        ]
    told = ask(client, "/v1/rerank", query="q", documents=["a"], instruction="Find it.")
    assert told.status == 200
    assert (told.json["usage"]["prompt_tokens"] > 20) == bool(pairs)


def test_texts_get_labels(headed: tuple[Client, Front]) -> None:
    client, front = headed
    front.head = ModelHead(scores=(layer(2),), labels=("low", "high"), activation="softmax")
    body = ask(client, "/v1/classify", input=["g", "a"]).json
    assert body["id"].startswith("classify-")
    high = [math.exp(b / 2) / (math.exp(b / 4) + math.exp(b / 2)) for b in (bits("g"), bits("a"))]
    assert [entry["probs"][1] for entry in body["data"]] == pytest.approx(high)
    first = body["data"][0]
    assert (first["label"], first["num_classes"], first["index"]) == ("high", 2, 0)
    assert body["usage"]["prompt_tokens"] == 4
    raw = ask(client, "/classify", input="g", use_activation=False).json["data"][0]["probs"]
    assert raw == pytest.approx([bits("g") / 4, bits("g") / 2])
    refused = ask(client, "/v1/score", text_1="a", text_2="b")
    assert (refused.status, refused.error["param"]) == (400, "model")
    assert "has 2 labels and no single score" in refused.error["message"]


@pytest.mark.parametrize(
    ("head", "path", "body", "param"),
    [
        (NO_HEAD, "/v1/classify", {"input": "a"}, "model"),
        (NO_HEAD, "/v1/rerank", {"query": "a", "documents": ["b"], "instruction": "x"}, "instruction"),
        (NO_HEAD, "/v1/score", {"text_1": "a", "text_2": "b", "use_activation": False}, "use_activation"),
        (NO_HEAD, "/v1/embeddings", {"input": "a", "prompt_name": "query"}, "prompt_name"),
        (ModelHead(scores=(layer(1),), labels=("x",)), "/v1/classify", {"input": []}, "input"),
        (
            ModelHead(scores=(layer(1),), labels=("x",)),
            "/v1/classify",
            {"input": ["a", "b" * 9000]},
            "input[1]",
        ),
        (
            ModelHead(scores=(layer(1),), labels=("x",)),
            "/v1/score",
            {"text_1": "a", "text_2": ["b", "b" * 9000]},
            "text_2[1]",
        ),
        (
            ModelHead(scores=(layer(1),), labels=("x",)),
            "/v1/score",
            {"text_1": "a", "text_2": "b", "pooling": "mean"},
            "pooling",
        ),
        (
            ModelHead(scores=(layer(1),), labels=("x",), generates=False),
            "/v1/completions",
            {"prompt": "a"},
            "model",
        ),
    ],
)
def test_what_a_model_has_no_head_for_is_refused_by_name(
    headed: tuple[Client, Front], head: ModelHead, path: str, body: dict[str, Any], param: str
) -> None:
    client, front = headed
    front.head = head
    answer = ask(client, path, **body)
    assert (answer.status, answer.error["param"]) == (400, param), answer.body


def test_vectors_have_the_model_s_modules(headed: tuple[Client, Front]) -> None:
    client, front = headed
    front.head = ModelHead(pooling="last", layers=(layer(4),), normalize=False, prompts={"query": "find: "})
    body = ask(client, "/v1/embeddings", input="g", prompt_name="query").json
    assert body["data"][0]["embedding"] == pytest.approx([bits("g") * (n + 1) / 4 for n in range(4)])
    assert body["usage"]["prompt_tokens"] >= len("find: g")
    short = ask(client, "/v1/embeddings", input="g", dimensions=2, normalize=True).json["data"][0][
        "embedding"
    ]
    assert short == pytest.approx([1 / math.sqrt(5), 2 / math.sqrt(5)])
    assert ask(client, "/v1/embeddings", input="g", dimensions=5).error["param"] == "dimensions"
