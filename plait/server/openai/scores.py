"""How well texts fit each other, /v1/score and /v1/rerank, and labels of texts, /v1/classify.

A model with a head for a score computes it of each pair. For any other model a score is the cosine of two
vectors, from -1 to 1: no probability. `method` says which it was.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import msgspec

from plait.engine.admission import ServiceOptions
from plait.errors import InvalidField, RequestError
from plait.frontend.model_head import unit
from plait.frontend.pairs import pair_ids
from plait.llm.embed import NOTHING
from plait.request import Pooling, Request, RequestTrace
from plait.server.api import validate
from plait.server.api.endpoint import Endpoint
from plait.server.api.parse_fields import field_names, parse_as
from plait.server.api.reply import PromptUsage
from plait.server.api.token_scores import Count
from plait.server.gateway.request_context import RequestContext
from plait.server.http.transfer import new_id
from plait.server.openai.embeddings import MAX_INPUTS, Document, Inputs, VectorsReply, embedding_request

Method = Literal["cosine", "head"]


@dataclass(frozen=True, kw_only=True)
class ScoreRequest(ServiceOptions):
    """POST /v1/score: each `text_2` against its `text_1`, or against the only one.

    `pooling` and `prompt_name` are for cosines; `instruction` and `use_activation` (false: the raw output)
    for models with a head for scores.
    """

    model: str | None = None
    text_1: str | list[str]
    text_2: str | list[str]
    pooling: Pooling | None = None
    instruction: str | None = None
    use_activation: bool = True


@dataclass(frozen=True, kw_only=True)
class RerankRequest(ServiceOptions):
    """POST /v1/rerank. `documents`: texts, or objects with a `text`. `top_n` 0: all of them.

    The other fields are those of /v1/score.
    """

    model: str | None = None
    query: str
    documents: list[Document]
    top_n: int = 0
    return_documents: bool = True
    pooling: Pooling | None = None
    instruction: str | None = None
    use_activation: bool = True


class ScoreItem(msgspec.Struct, kw_only=True, frozen=True):
    index: Count
    object: Literal["score"] = "score"
    score: float


class Scores(msgspec.Struct, kw_only=True, frozen=True):
    """The reply of /v1/score."""

    id: str
    object: Literal["list"] = "list"
    model: str
    method: Method
    data: list[ScoreItem]
    usage: PromptUsage


class RankedText(msgspec.Struct, frozen=True):
    text: str


class Ranked(msgspec.Struct, frozen=True):
    """`index`: the document's place in the request."""

    index: Count
    relevance_score: float
    document: RankedText | msgspec.UnsetType = msgspec.UNSET


class Ranking(msgspec.Struct, kw_only=True, frozen=True):
    """The best document first. `object` is llama.cpp's."""

    id: str
    object: Literal["list"] = "list"
    model: str
    method: Method
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
    if _has_score(context, asked):
        texts = left * len(right) if len(left) == 1 else left
        pairs = [(a, b, f"text_2[{i}]") for i, (a, b) in enumerate(zip(texts, right, strict=True))]
        return ScoresReply(context, _pair_requests(context, pairs, asked), 0, asked)
    requests = [*_requests(context, left, "text_1", asked), *_requests(context, right, "text_2", asked)]
    return ScoresReply(context, requests, len(left), asked)


def rerank(context: RequestContext, body: Mapping[str, object]) -> RankingReply:
    """Tokenizes the query and the documents. Raises RequestErrors."""
    validate.refuse(body, RERANK_FIELDS)
    asked = parse_as(body, RerankRequest)
    if asked.top_n < 0:
        raise InvalidField(f"top_n: {asked.top_n} is less than 0", "top_n")
    _check_count(asked.documents, "documents")
    texts = [_text(document, f"documents[{i}]") for i, document in enumerate(asked.documents)]
    if _has_score(context, asked):
        pairs = [(asked.query, text, f"documents[{i}]") for i, text in enumerate(texts)]
        return RankingReply(context, _pair_requests(context, pairs, asked), 0, asked, texts)
    requests = [
        *_requests(context, [asked.query], "query", asked),
        *_requests(context, texts, "documents", asked),
    ]
    return RankingReply(context, requests, 1, asked, texts)


class PairsReply(VectorsReply):
    """Scores of pairs. `num_left` 0: a request for each pair, which the model's head scores.

    Else the requests are `num_left` texts and those that they are compared with, by cosine.
    """

    def __init__(
        self,
        context: RequestContext,
        requests: Sequence[Request],
        num_left: int,
        asked: ScoreRequest | RerankRequest,
    ) -> None:
        super().__init__(context.model, requests)
        self.method: Method = "cosine" if num_left else "head"
        self._num_left, self._head, self._activate = num_left, context.front.head, asked.use_activation

    def scores(self) -> list[float]:
        """One number for each pair, in the order of the request."""
        if self.method == "head":
            return [self._head.classify(one, activate=self._activate)[0] for one in self.vectors]
        made = [self._head.embed(one) for one in self.vectors]
        left, right = made[: self._num_left], made[self._num_left :]
        pairs = zip(left if len(left) == len(right) else [left[0]] * len(right), right, strict=True)
        return [cosine(a, b) for a, b in pairs]


class ScoresReply(PairsReply):
    """One reply of /v1/score."""

    def whole(self, traces: Iterable[RequestTrace | None]) -> Scores:
        data = [ScoreItem(index=i, score=score) for i, score in enumerate(self.scores())]
        usage = self.count.prompt_usage()
        return Scores(id=new_id("score"), model=self.model, method=self.method, data=data, usage=usage)


class RankingReply(PairsReply):
    """One reply of /v1/rerank: the best document first, the earlier one among equals."""

    def __init__(
        self,
        context: RequestContext,
        requests: Sequence[Request],
        num_left: int,
        asked: RerankRequest,
        texts: Sequence[str],
    ) -> None:
        super().__init__(context, requests, num_left, asked)
        self._texts, self._asked = texts, asked

    def whole(self, traces: Iterable[RequestTrace | None]) -> Ranking:
        scores, usage = self.scores(), self.count.prompt_usage()
        order = sorted(range(len(scores)), key=lambda i: -scores[i])[: self._asked.top_n or None]
        results = [Ranked(i, scores[i], self._show(i)) for i in order]
        return Ranking(
            id=new_id("rerank"), model=self.model, method=self.method, results=results, usage=usage
        )

    def _show(self, i: int) -> RankedText | msgspec.UnsetType:
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


@dataclass(frozen=True, kw_only=True)
class ClassifyRequest(ServiceOptions):
    """POST /v1/classify. `input`: text, token ids, or a list of either.

    `use_activation` false: raw outputs instead of probabilities.
    """

    model: str | None = None
    input: Inputs
    add_special_tokens: bool = True
    use_activation: bool = True


class ClassifiedText(msgspec.Struct, kw_only=True, frozen=True):
    """`probs`: a number for each label; `label`: the name of the largest, null where there is one output."""

    index: Count
    label: str | None
    probs: list[float]
    num_classes: Count


class Classification(msgspec.Struct, kw_only=True, frozen=True):
    """The reply of /v1/classify, in vLLM's shape."""

    id: str
    object: Literal["list"] = "list"
    created: Count
    model: str
    data: list[ClassifiedText]
    usage: PromptUsage


CLASSIFY_FIELDS = field_names(ClassifyRequest)


def classify(context: RequestContext, body: Mapping[str, object]) -> ClassificationReply:
    """Tokenizes the texts. Raises RequestErrors, and InvalidField for a model without labels."""
    validate.refuse(body, CLASSIFY_FIELDS)
    asked = parse_as(body, ClassifyRequest)
    if not context.front.head.scores:
        text = "this model has no head for labels; /v1/embeddings and /v1/score compare texts with any model"
        raise InvalidField(f"model: {text}", "model")
    texts = validate.prompts(asked.input, "input")
    _check_count(texts, "input")
    many = not isinstance(asked.input, str) and not all(type(part) is int for part in asked.input)
    requests = [
        _blame(f"input[{i}]" if many else "input", _prepare(context, one, asked, asked.add_special_tokens))
        for i, one in enumerate(texts)
    ]
    return ClassificationReply(context, requests, asked)


class ClassificationReply(VectorsReply):
    """One reply of /v1/classify."""

    def __init__(self, context: RequestContext, requests: Sequence[Request], asked: ClassifyRequest) -> None:
        super().__init__(context.model, requests)
        self._head, self._activate = context.front.head, asked.use_activation

    def whole(self, traces: Iterable[RequestTrace | None]) -> Classification:
        made = [self._head.classify(vector, activate=self._activate) for vector in self.vectors]
        data = [
            ClassifiedText(index=i, label=self._head.label(probs), probs=probs, num_classes=len(probs))
            for i, probs in enumerate(made)
        ]
        return Classification(
            id=new_id("classify"),
            created=int(time.time()),
            model=self.model,
            data=data,
            usage=self.count.prompt_usage(),
        )


def _has_score(context: RequestContext, asked: ScoreRequest | RerankRequest) -> bool:
    """Whether the model's own head scores pairs. Raises InvalidField for a field that would be ignored."""
    scores = context.front.head.scores
    if scores and scores[-1].shape[0] != 1:
        text = f"this model's head has {scores[-1].shape[0]} labels and no single score; use /v1/classify"
        raise InvalidField(f"model: {text}", "model")
    if scores and asked.pooling not in (None, "last"):
        raise InvalidField(
            "pooling: this model scores by its own head, of the last token; leave it out", "pooling"
        )
    if not scores and asked.instruction is not None:
        text = "this model has no head for pairs, and a cosine has no place for one; leave it out"
        raise InvalidField(f"instruction: {text}", "instruction")
    if not scores and not asked.use_activation:
        text = "this model has no head for pairs; a cosine has no activation; leave it out"
        raise InvalidField(f"use_activation: {text}", "use_activation")
    return bool(scores)


def _pair_requests(
    context: RequestContext, pairs: Sequence[tuple[str, str, str]], asked: ScoreRequest | RerankRequest
) -> list[Request]:
    """A request for each (query, document, the document's place)."""

    def prepare(query: str, document: str) -> Callable[[], Request]:
        return lambda: _prepare(context, pair_ids(context.front, query, document, asked.instruction), asked)()

    return [_blame(at, prepare(query, document)) for query, document, at in pairs]


def _prepare(
    context: RequestContext, prompt: str | Sequence[int], terms: ServiceOptions, special: bool = True
) -> Callable[[], Request]:
    return lambda: replace(context.prepare(prompt, NOTHING, add_special=special, terms=terms), pooling="last")


def _blame(at: str, prepare: Callable[[], Request]) -> Request:
    """What `prepare` makes. Raises its errors about a prompt as errors about the field `at`."""
    try:
        return prepare()
    except RequestError as error:
        if error.param not in ("prompt", "messages"):
            raise
        raise error.reword(f"{at}: {str(error).removeprefix('prompt: ')}", at) from error


ENDPOINTS = (
    *(Endpoint(path, SCORE_FIELDS, plan=score) for path in ("/v1/score", "/score")),
    *(Endpoint(path, RERANK_FIELDS, plan=rerank) for path in ("/v1/rerank", "/v2/rerank", "/rerank")),
    *(Endpoint(path, CLASSIFY_FIELDS, plan=classify) for path in ("/v1/classify", "/classify")),
)
