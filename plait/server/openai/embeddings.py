"""Texts as vectors, /v1/embeddings.

A vector is the state after the last norm of the last token (or the mean of all), of length 1. Modules of
sentence-transformers decide otherwise where a model has them. A model that was not trained for it gives
vectors all the same, but they may mean little.
"""

from __future__ import annotations

import base64
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import msgspec

from plait.engine.admission import ServiceOptions
from plait.errors import EngineError, InvalidField, RequestError
from plait.frontend.model_head import check_left_out
from plait.llm.embed import NOTHING
from plait.request import Pooling, Request, RequestTrace
from plait.server.api import validate
from plait.server.api.endpoint import Endpoint
from plait.server.api.parse_fields import field_names, parse_as
from plait.server.api.reply import ApiReply, PromptUsage
from plait.server.api.token_scores import Count
from plait.server.gateway.request_context import RequestContext

if TYPE_CHECKING:
    from plait.frontend.deltas import Delta


Inputs = str | list[object]  # a text, token ids, or a list of either
Document = str | dict[str, object]  # a text, or an object with a `text`
MAX_INPUTS = 2048
AT_ONCE = 64  # requests of one call that the engine has at a time: a list of inputs must not fill its queue


@dataclass(frozen=True, kw_only=True)
class EmbeddingRequest(ServiceOptions):
    """POST /v1/embeddings. `input`: text, token ids, or a list of either.

    `pooling` and `normalize` are ours: the hidden state of which tokens, and whether the vector has length 1;
    left out, the model decides. `prompt_name`: which of the model's prompts comes before each text.
    `dimensions` keeps the first so many, which is useful with models that were trained for it.
    """

    model: str | None = None
    input: Inputs
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None
    pooling: Pooling | None = None
    normalize: bool | None = None
    prompt_name: str | None = None
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
    size = context.front.head.width(context.front.spec.hidden_size)
    if asked.dimensions is not None and not 1 <= asked.dimensions <= size:
        text = f"dimensions: {asked.dimensions} is outside [1, {size}], the size of this model's vectors"
        raise InvalidField(text, "dimensions")
    texts = validate.prompts(asked.input, "input")
    if len(texts) > MAX_INPUTS:
        raise InvalidField(f"input: {len(texts)} inputs are more than {MAX_INPUTS}", "input")
    many = not isinstance(asked.input, str) and not all(type(part) is int for part in asked.input)
    requests = [
        embedding_request(context, one, asked.pooling, asked, f"input[{i}]" if many else "input", asked)
        for i, one in enumerate(texts)
    ]
    return EmbeddingsReply(context, asked, requests)


def embedding_request(
    context: RequestContext,
    text: str | Sequence[int],
    pooling: Pooling | None,
    terms: ServiceOptions,
    at: str,
    asked: EmbeddingRequest | None = None,
) -> Request:
    """A request for the hidden state of a text, with the model's prompt before it.

    `pooling` None: the model's own. Raises InvalidField and ContextTooLong, both naming `at`.
    """
    head = context.front.head
    before = head.prompt_text(asked.prompt_name if asked else None)
    kind, special, left_out = pooling or head.pooling or "last", asked is None or asked.add_special_tokens, 0
    if before and isinstance(text, str):
        left_out = head.count_left_out(
            before, kind, lambda one: context.front.encode(one, add_special=special)
        )
        text = before + text
    try:
        made = context.prepare(text, NOTHING, add_special=special, terms=terms)
    except RequestError as error:
        if error.param != "prompt":
            raise
        text = str(error).removeprefix("prompt: ")
        raise error.reword(f"{at}: {text}", at) from error
    check_left_out(left_out, len(made.prompt_token_ids), at)
    return replace(made, pooling=kind, pooled_from=left_out)


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

    def __init__(self, context: RequestContext, asked: EmbeddingRequest, requests: Sequence[Request]) -> None:
        super().__init__(context.model, requests)
        self._asked, self._head = asked, context.front.head

    def whole(self, traces: Iterable[RequestTrace | None]) -> Embeddings:
        data = [
            EmbeddingItem(index=i, embedding=self._encode(vector)) for i, vector in enumerate(self.vectors)
        ]
        return Embeddings(data=data, model=self.model, usage=self.count.prompt_usage())

    def _encode(self, vector: Sequence[float]) -> list[float] | str:
        numbers = array("f", self._head.embed(vector, self._asked.dimensions, self._asked.normalize))
        if self._asked.encoding_format == "float":
            return numbers.tolist()
        if array("H", [1]).tobytes() != b"\1\0":  # the wire has the low byte first
            numbers.byteswap()
        return base64.b64encode(numbers.tobytes()).decode()


ENDPOINTS = (Endpoint("/v1/embeddings", FIELDS, plan=plan),)
