"""How near texts are to each other: /v1/score, and /v1/rerank in the shape of Jina and Cohere.

A score is the cosine of the two texts' embeddings (see `embeddings`), from -1 to 1, and every response says
so: `"method": "cosine"`. It is no probability, and models that were not trained for it rank accordingly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from plait.errors import InvalidField
from plait.frontend.request_options import Terms
from plait.llm.embed import unit
from plait.request import Pooling, Request
from plait.server.api import validate
from plait.server.api.endpoint import Endpoint
from plait.server.api.schema import field_names, typed
from plait.server.http.tasks import new_id
from plait.server.openai.embeddings import MAX_INPUTS, Vectors, embedding_request, prompt_usage

if TYPE_CHECKING:
    from plait.frontend.frontend import Front
    from plait.server.api.completion_reply import Usage

METHOD = "cosine"


@dataclass(frozen=True, kw_only=True)
class ScoreRequest(Terms):
    """POST /v1/score: each `text_2` against its `text_1`, or against the only one."""

    model: str | None = None
    text_1: str | list[str]
    text_2: str | list[str]
    pooling: Pooling = "last"


@dataclass(frozen=True, kw_only=True)
class RerankRequest(Terms):
    """POST /v1/rerank. `documents`: texts, or objects with a `text`. `top_n` 0: all of them."""

    model: str | None = None
    query: str
    documents: list[str | dict[str, Any]]
    top_n: int = 0
    return_documents: bool = True
    pooling: Pooling = "last"


# Names that vLLM takes for the two sides, beside its first ones.
_SIDES = {"queries": "text_1", "documents": "text_2", "data_1": "text_1", "data_2": "text_2"}
SCORE_FIELDS = field_names(ScoreRequest) | frozenset(_SIDES)
RERANK_FIELDS = field_names(RerankRequest)


def score(front: Front, model: str, body: Mapping[str, Any]) -> Scores:
    """Tokenizes both sides. Raises RequestErrors."""
    validate.refuse(body, SCORE_FIELDS)
    renamed = {_SIDES.get(name, name): value for name, value in body.items()}
    if len(renamed) < len(body):
        raise InvalidField("text_1: it is given under two names; send one of them", "text_1")
    asked = typed(renamed, ScoreRequest)
    left, right = ([t] if isinstance(t, str) else t for t in (asked.text_1, asked.text_2))
    _check_count(left, "text_1")
    _check_count(right, "text_2")
    if len(left) not in {1, len(right)}:
        text = f"text_1: {len(left)} texts against {len(right)} of text_2; send one, or as many"
        raise InvalidField(text, "text_1")
    requests = [*_requests(front, left, "text_1", asked), *_requests(front, right, "text_2", asked)]
    return Scores(model, requests, len(left))


def rerank(front: Front, model: str, body: Mapping[str, Any]) -> Ranking:
    """Tokenizes the query and the documents. Raises RequestErrors."""
    validate.refuse(body, RERANK_FIELDS)
    asked = typed(body, RerankRequest)
    if asked.top_n < 0:
        raise InvalidField(f"top_n: {asked.top_n} is less than 0", "top_n")
    _check_count(asked.documents, "documents")
    texts = [_text(document, f"documents[{i}]") for i, document in enumerate(asked.documents)]
    query = _requests(front, [asked.query], "query", asked)
    return Ranking(model, [*query, *_requests(front, texts, "documents", asked)], texts, asked)


class Scores(Vectors):
    """A response of /v1/score: the requests are `num_left` texts and those they are held against."""

    def __init__(self, model: str, requests: Sequence[Request], num_left: int) -> None:
        super().__init__(requests)
        self._model, self._num_left = model, num_left

    def body(self, usage: Usage) -> dict[str, Any]:
        left, right = self.vectors[: self._num_left], self.vectors[self._num_left :]
        pairs = zip(left if len(left) == len(right) else [left[0]] * len(right), right, strict=True)
        found = [{"index": i, "object": "score", "score": cosine(a, b)} for i, (a, b) in enumerate(pairs)]
        return {
            "id": new_id("score"),
            "object": "list",
            "model": self._model,
            "method": METHOD,
            "data": found,
            "usage": prompt_usage(usage),
        }


class Ranking(Vectors):
    """A response of /v1/rerank: the nearest document first, the earlier one among equals."""

    def __init__(
        self, model: str, requests: Sequence[Request], texts: Sequence[str], asked: RerankRequest
    ) -> None:
        super().__init__(requests)
        self._model, self._texts, self._asked = model, texts, asked

    def body(self, usage: Usage) -> dict[str, Any]:
        query, *documents = self.vectors
        scores = [cosine(query, one) for one in documents]
        order = sorted(range(len(scores)), key=lambda i: -scores[i])[: self._asked.top_n or None]
        return {
            "id": new_id("rerank"),
            "model": self._model,
            "method": METHOD,
            "results": [self._result(i, scores[i]) for i in order],
            "usage": prompt_usage(usage),
        }

    def _result(self, i: int, found: float) -> dict[str, Any]:
        shown = {"document": {"text": self._texts[i]}} if self._asked.return_documents else {}
        return {"index": i, "relevance_score": found, **shown}


def cosine(a: Sequence[float], b: Sequence[float]) -> float:
    """Of the angle between two vectors; 0 if one is all zeros."""
    return max(-1.0, min(1.0, sum(x * y for x, y in zip(unit(a), unit(b), strict=True))))


def _requests(
    front: Front, texts: Sequence[str], at: str, asked: ScoreRequest | RerankRequest
) -> list[Request]:
    places = [f"{at}[{i}]" for i in range(len(texts))] if at != "query" else [at]
    pairs = zip(texts, places, strict=True)
    return [embedding_request(front, text, asked.pooling, asked, place) for text, place in pairs]


def _check_count(texts: Sequence[Any], at: str) -> None:
    if not texts:
        raise InvalidField(f"{at}: the list is empty; send at least one text", at)
    if len(texts) > MAX_INPUTS:
        raise InvalidField(f"{at}: {len(texts)} texts are more than {MAX_INPUTS}", at)


def _text(document: str | Mapping[str, Any], at: str) -> str:
    if isinstance(document, str):
        return document
    if not isinstance(text := document.get("text"), str):
        raise InvalidField(f"{at}.text: it must be a string", f"{at}.text")
    return text


ENDPOINTS = (
    *(Endpoint(path, SCORE_FIELDS, outcome=score) for path in ("/v1/score", "/score")),
    *(Endpoint(path, RERANK_FIELDS, outcome=rerank) for path in ("/v1/rerank", "/v2/rerank", "/rerank")),
)
