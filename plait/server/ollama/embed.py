"""POST /api/embed and /api/embeddings: texts as vectors, in Ollama's shapes.

The vectors are those of /v1/embeddings. /api/embed scales them to length 1; the older path does not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from plait.engine.admission import MAX_CHARS_PER_TOKEN, ServiceOptions
from plait.errors import InvalidField
from plait.request import Request, RequestTrace
from plait.sampling_fields import shorten
from plait.server.api.endpoint import Endpoint
from plait.server.api.parse_fields import field_names, parse_as
from plait.server.gateway.request_context import RequestContext
from plait.server.ollama.translate import text_of
from plait.server.ollama.wire import Durations, ReplyClock, check_keep_alive, read_body, refusal
from plait.server.openai.embeddings import MAX_INPUTS, VectorsReply, embedding_request

FIELDS = field_names(ServiceOptions) | {"model", "keep_alive", "options"}
EMBED_FIELDS = FIELDS | {"input", "truncate", "dimensions"}


class EmbedReply(Durations, kw_only=True, frozen=True):
    """The reply of /api/embed: a vector of length 1 for each input."""

    model: str
    embeddings: list[list[float]]


class EmbeddingReply(msgspec.Struct, frozen=True):
    """The reply of /api/embeddings; its vector has the length that the model gave it."""

    embedding: list[float]


def plan_embed(context: RequestContext, body: Mapping[str, object]) -> EmbedsReply:
    """Validate and tokenize texts, before the engine gets them. Raises RequestErrors."""
    clock, terms, dimensions = (
        ReplyClock(context.exchange.load_s),
        _terms(context, body),
        body.get("dimensions"),
    )
    size, truncate = context.front.head.width(context.front.spec.hidden_size), body.get("truncate", False)
    if dimensions is not None and not (type(dimensions) is int and 1 <= dimensions <= size):
        text = f"dimensions: {shorten(dimensions)} is outside [1, {size}], the size of this model's vectors"
        raise InvalidField(text, "dimensions")
    if not isinstance(truncate, bool):
        raise InvalidField("truncate: send true or false", "truncate")
    texts, many = body.get("input", []), True
    if isinstance(texts, str):
        texts, many = [texts], False
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise InvalidField("input: it must be a text, or a list of texts", "input")
    if len(texts) > MAX_INPUTS:
        raise InvalidField(f"input: {len(texts)} inputs are more than {MAX_INPUTS}", "input")
    requests = []
    for i, text in enumerate(texts):
        found = _cut(context, text) if truncate else text
        requests.append(embedding_request(context, found, None, terms, f"input[{i}]" if many else "input"))
    return EmbedsReply(context, requests, clock, dimensions if isinstance(dimensions, int) else None)


def plan_embedding(context: RequestContext, body: Mapping[str, object]) -> OneEmbeddingReply:
    """Validate and tokenize a text, before the engine gets it. Raises RequestErrors."""
    text = text_of(body, "prompt")
    return OneEmbeddingReply(
        context, [embedding_request(context, text, None, _terms(context, body), "prompt")]
    )


def _terms(context: RequestContext, body: Mapping[str, object]) -> ServiceOptions:
    """How a request is served; what changes no vector is reported. Raises InvalidField."""
    if not check_keep_alive(body.get("keep_alive")):
        context.report_unread(("keep_alive",), {})
    options = body.get("options", {})
    if not isinstance(options, dict):
        raise InvalidField("options: it must be an object", "options")
    context.report_unread((f"options.{name}" for name, value in options.items() if value is not None), {})
    return parse_as({name: body[name] for name in field_names(ServiceOptions) & body.keys()}, ServiceOptions)


def _cut(context: RequestContext, text: str) -> str | Sequence[int]:
    """As much of a text as the context holds; the text itself if it fits."""
    most = context.front.max_model_len
    ids = context.front.encode(text[: most * MAX_CHARS_PER_TOKEN])
    return text if len(ids) <= most and len(text) <= most * MAX_CHARS_PER_TOKEN else ids[:most]


class EmbedsReply(VectorsReply):
    """One reply of /api/embed."""

    def __init__(
        self, context: RequestContext, requests: Sequence[Request], clock: ReplyClock, dimensions: int | None
    ) -> None:
        super().__init__(context.model, requests)
        self._clock, self._dimensions, self._head = clock, dimensions, context.front.head

    def whole(self, traces: Iterable[RequestTrace | None]) -> EmbedReply:
        num_prompt = self.count.prompt_usage().prompt_tokens
        vectors = [self._head.embed(one, self._dimensions, normalize=True) for one in self.vectors]
        return EmbedReply(model=self.model, embeddings=vectors, **self._clock.durations(num_prompt))


class OneEmbeddingReply(VectorsReply):
    """One reply of /api/embeddings."""

    def __init__(self, context: RequestContext, requests: Sequence[Request]) -> None:
        super().__init__(context.model, requests)
        self._head = context.front.head

    def whole(self, traces: Iterable[RequestTrace | None]) -> EmbeddingReply:
        return EmbeddingReply(self._head.embed(self.vectors[0], normalize=bool(self._head.normalize)))


ENDPOINTS = (
    Endpoint("/api/embed", EMBED_FIELDS, plan=plan_embed, refusal=refusal, read=read_body, any_type=True),
    Endpoint(
        "/api/embeddings",
        FIELDS | {"prompt"},
        plan=plan_embedding,
        refusal=refusal,
        read=read_body,
        any_type=True,
    ),
)
