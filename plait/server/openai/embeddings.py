"""Texts as vectors, /v1/embeddings, and how near they are, /v1/score and /v1/rerank.

A vector is the state after the last norm of the last token (or the mean of all, if requested), of length 1.
A score is the cosine of two vectors, from -1 to 1: no probability. A model that was not trained for it gives
vectors and ranks all the same, but they may mean little.
"""

from __future__ import annotations

import base64
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec

from plait.engine.admission import ServiceOptions
from plait.errors import EngineError, InvalidField, RequestError
from plait.llm.embed import NOTHING, unit
from plait.request import Pooling, Request, RequestTrace
from plait.server.api import validate
from plait.server.api.endpoint import Endpoint
from plait.server.api.parse_fields import field_names, parse_as
from plait.server.api.reply import ApiReply, PromptUsage
from plait.server.api.token_scores import Count
from plait.server.gateway.request_context import RequestContext
from plait.server.http.transfer import new_id

if TYPE_CHECKING:
    from plait.frontend.deltas import Delta


MAX_INPUTS = 2048
AT_ONCE = 64  # requests of one call that the engine has at a time: a list of inputs must not fill its queue


@dataclass(frozen=True, kw_only=True)
class EmbeddingRequest(ServiceOptions):
    """POST /v1/embeddings. `input`: text, token ids, or a list of either.

    `pooling` and `normalize` are ours: the hidden state of which tokens, and whether the vector has length 1.
    `dimensions` keeps the first so many, which is useful with models that were trained for it.
    """

    model: str | None = None
    input: str | list[Any]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None
    pooling: Pooling = "last"
    normalize: bool = True
    add_special_tokens: bool = True


FIELDS = field_names(EmbeddingRequest)


class EmbeddingItem(msgspec.Struct, kw_only=True, frozen=True):
    """`embedding`: numbers, or with encoding_format base64 their float32 bytes, the low byte first."""

    object: Literal["embedding"] = "embedding"
    index: Count
    embedding: list[float] | str


class Embeddings(msgspec.Struct, kw_only=True, frozen=True):
    """The reply of /v1/embeddings."""

    object: Literal["list"] = "list"
    data: list[EmbeddingItem]
    model: str
    usage: PromptUsage


def plan(context: RequestContext, body: Mapping[str, object]) -> EmbeddingsReply:
    """Validate and tokenize a request, before the engine gets it. Raises RequestErrors."""
    validate.refuse(body, FIELDS)
    asked = parse_as(body, EmbeddingRequest)
    size = context.front.spec.hidden_size
    if asked.dimensions is not None and not 1 <= asked.dimensions <= size:
        text = f"dimensions: {asked.dimensions} is outside [1, {size}], the size of this model's hidden state"
        raise InvalidField(text, "dimensions")
    texts = validate.prompts(asked.input, "input")
    if len(texts) > MAX_INPUTS:
        raise InvalidField(f"input: {len(texts)} inputs are more than {MAX_INPUTS}", "input")
    many = not isinstance(asked.input, str) and not all(type(part) is int for part in asked.input)
    requests = [
        embedding_request(context, one, asked.pooling, asked, f"input[{i}]" if many else "input", asked)
        for i, one in enumerate(texts)
    ]
    return EmbeddingsReply(context.model, asked, requests)


def embedding_request(
    context: RequestContext,
    text: str | Sequence[int],
    pooling: Pooling,
    terms: ServiceOptions,
    at: str,
    asked: EmbeddingRequest | None = None,
) -> Request:
    """A request for the hidden state of a text. Raises InvalidField and ContextTooLong, both naming `at`."""
    try:
        special = asked.add_special_tokens if asked else True
        made = context.prepare(text, NOTHING, add_special=special, terms=terms)
    except RequestError as error:
        if error.param != "prompt":
            raise
        text = str(error).removeprefix("prompt: ")
        raise error.reworded(f"{at}: {text}", at) from error
    return replace(made, pooling=pooling)


class VectorsReply(ApiReply):
    """Collects the hidden states of the requests of one call, in their order."""

    at_once = AT_ONCE

    def __init__(self, model: str, requests: Sequence[Request]) -> None:
        super().__init__(requests)
        self.model = model
        self.vectors: list[tuple[float, ...]] = [() for _ in requests]

    def add(self, i: int, delta: Delta) -> None:
        if not delta.embedding:
            raise EngineError("the engine has computed this text and gave no hidden state")
        self.vectors[i] = delta.embedding


class EmbeddingsReply(VectorsReply):
    """One reply of /v1/embeddings."""

    def __init__(self, model: str, asked: EmbeddingRequest, requests: Sequence[Request]) -> None:
        super().__init__(model, requests)
        self._asked = asked

    def whole(self, traces: Iterable[RequestTrace | None]) -> Embeddings:
        data = [
            EmbeddingItem(index=i, embedding=self._written(vector)) for i, vector in enumerate(self.vectors)
        ]
        return Embeddings(data=data, model=self.model, usage=self.count.prompt_usage())

    def _written(self, vector: Sequence[float]) -> list[float] | str:
        kept = vector[: self._asked.dimensions]
        numbers = array("f", unit(kept) if self._asked.normalize else kept)
        if self._asked.encoding_format == "float":
            return numbers.tolist()
        if array("H", [1]).tobytes() != b"\1\0":  # the wire has the low byte first
            numbers.byteswap()
        return base64.b64encode(numbers.tobytes()).decode()


Cosine = Annotated[float, msgspec.Meta(ge=-1, le=1)]


@dataclass(frozen=True, kw_only=True)
class ScoreRequest(ServiceOptions):
    """POST /v1/score: each `text_2` against its `text_1`, or against the only one."""

    model: str | None = None
    text_1: str | list[str]
    text_2: str | list[str]
    pooling: Pooling = "last"


@dataclass(frozen=True, kw_only=True)
class RerankRequest(ServiceOptions):
    """POST /v1/rerank. `documents`: texts, or objects with a `text`. `top_n` 0: all of them."""

    model: str | None = None
    query: str
    documents: list[str | dict[str, Any]]
    top_n: int = 0
    return_documents: bool = True
    pooling: Pooling = "last"


class ScoreItem(msgspec.Struct, kw_only=True, frozen=True):
    index: Count
    object: Literal["score"] = "score"
    score: Cosine


class Scores(msgspec.Struct, kw_only=True, frozen=True):
    """The reply of /v1/score."""

    id: str
    object: Literal["list"] = "list"
    model: str
    method: Literal["cosine"] = "cosine"
    data: list[ScoreItem]
    usage: PromptUsage


class RankedText(msgspec.Struct, frozen=True):
    text: str


class Ranked(msgspec.Struct, frozen=True):
    """`index`: the document's place in the request."""

    index: Count
    relevance_score: Cosine
    document: RankedText | msgspec.UnsetType = msgspec.UNSET


class Ranking(msgspec.Struct, kw_only=True, frozen=True):
    """The nearest document first. `object` is llama.cpp's."""

    id: str
    object: Literal["list"] = "list"
    model: str
    method: Literal["cosine"] = "cosine"
    results: list[Ranked]
    usage: PromptUsage


# Further names of vLLM for the two sides.
_SIDES = {"queries": "text_1", "documents": "text_2", "data_1": "text_1", "data_2": "text_2"}
SCORE_FIELDS = field_names(ScoreRequest) | frozenset(_SIDES)
RERANK_FIELDS = field_names(RerankRequest)


def score(context: RequestContext, body: Mapping[str, object]) -> ScoresReply:
    """Tokenizes both sides. Raises RequestErrors."""
    validate.refuse(body, SCORE_FIELDS)
    renamed = {_SIDES.get(name, name): value for name, value in body.items()}
    if len(renamed) < len(body):
        raise InvalidField("text_1: it is given under two names; send one of them", "text_1")
    asked = parse_as(renamed, ScoreRequest)
    left, right = ([t] if isinstance(t, str) else t for t in (asked.text_1, asked.text_2))
    _check_count(left, "text_1")
    _check_count(right, "text_2")
    if len(left) not in {1, len(right)}:
        text = f"text_1: {len(left)} texts against {len(right)} of text_2; send one, or as many"
        raise InvalidField(text, "text_1")
    requests = [*_requests(context, left, "text_1", asked), *_requests(context, right, "text_2", asked)]
    return ScoresReply(context.model, requests, len(left))


def rerank(context: RequestContext, body: Mapping[str, object]) -> RankingReply:
    """Tokenizes the query and the documents. Raises RequestErrors."""
    validate.refuse(body, RERANK_FIELDS)
    asked = parse_as(body, RerankRequest)
    if asked.top_n < 0:
        raise InvalidField(f"top_n: {asked.top_n} is less than 0", "top_n")
    _check_count(asked.documents, "documents")
    texts = [_text(document, f"documents[{i}]") for i, document in enumerate(asked.documents)]
    query = _requests(context, [asked.query], "query", asked)
    return RankingReply(context.model, [*query, *_requests(context, texts, "documents", asked)], texts, asked)


class ScoresReply(VectorsReply):
    """One reply of /v1/score: the requests are `num_left` texts and those they are compared with."""

    def __init__(self, model: str, requests: Sequence[Request], num_left: int) -> None:
        super().__init__(model, requests)
        self._num_left = num_left

    def whole(self, traces: Iterable[RequestTrace | None]) -> Scores:
        left, right = self.vectors[: self._num_left], self.vectors[self._num_left :]
        pairs = zip(left if len(left) == len(right) else [left[0]] * len(right), right, strict=True)
        data = [ScoreItem(index=i, score=cosine(a, b)) for i, (a, b) in enumerate(pairs)]
        return Scores(id=new_id("score"), model=self.model, data=data, usage=self.count.prompt_usage())


class RankingReply(VectorsReply):
    """One reply of /v1/rerank: the nearest document first, the earlier one among equals."""

    def __init__(
        self, model: str, requests: Sequence[Request], texts: Sequence[str], asked: RerankRequest
    ) -> None:
        super().__init__(model, requests)
        self._texts, self._asked = texts, asked

    def whole(self, traces: Iterable[RequestTrace | None]) -> Ranking:
        query, *documents = self.vectors
        scores = [cosine(query, one) for one in documents]
        order = sorted(range(len(scores)), key=lambda i: -scores[i])[: self._asked.top_n or None]
        results = [Ranked(i, scores[i], self._shown(i)) for i in order]
        return Ranking(
            id=new_id("rerank"), model=self.model, results=results, usage=self.count.prompt_usage()
        )

    def _shown(self, i: int) -> RankedText | msgspec.UnsetType:
        return RankedText(self._texts[i]) if self._asked.return_documents else msgspec.UNSET


def cosine(a: Sequence[float], b: Sequence[float]) -> float:
    """The cosine of the angle between two vectors; 0 if one is all zeros."""
    return max(-1.0, min(1.0, sum(x * y for x, y in zip(unit(a), unit(b), strict=True))))


def _requests(
    context: RequestContext, texts: Sequence[str], at: str, asked: ScoreRequest | RerankRequest
) -> list[Request]:
    places = [f"{at}[{i}]" for i in range(len(texts))] if at != "query" else [at]
    pairs = zip(texts, places, strict=True)
    return [embedding_request(context, text, asked.pooling, asked, place) for text, place in pairs]


def _check_count(texts: Sequence[object], at: str) -> None:
    if not texts:
        raise InvalidField(f"{at}: the list is empty; send at least one text", at)
    if len(texts) > MAX_INPUTS:
        raise InvalidField(f"{at}: {len(texts)} texts are more than {MAX_INPUTS}", at)


def _text(document: str | Mapping[str, object], at: str) -> str:
    if isinstance(document, str):
        return document
    if not isinstance(text := document.get("text"), str):
        raise InvalidField(f"{at}.text: it must be a string", f"{at}.text")
    return text


ENDPOINTS = (
    Endpoint("/v1/embeddings", FIELDS, plan=plan),
    *(Endpoint(path, SCORE_FIELDS, plan=score) for path in ("/v1/score", "/score")),
    *(Endpoint(path, RERANK_FIELDS, plan=rerank) for path in ("/v1/rerank", "/v2/rerank", "/rerank")),
)
