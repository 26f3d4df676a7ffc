"""The API as an OpenAPI 3.1 document, made from the types of requests and replies, and as a page.

`tools/print_openapi.py` prints the document; `docs/openapi.json` is that output. An endpoint that is not in
the tables below is in the document all the same, with the fields it reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.routing import Route

from plait.server.anthropic import messages
from plait.server.api import schema
from plait.server.api.endpoint import Endpoint
from plait.server.docs.assets import Asset
from plait.server.docs.page import POLICY, page
from plait.server.gateway.readiness import Health, Readiness
from plait.server.http.errors import ErrorBody
from plait.server.openai import (
    chat,
    completions,
    embeddings,
    models,
    rerank,
    response_items,
    responses,
    tokenize,
)
from plait.version import __version__

SCHEMA = "#/components/schemas/{name}"
TITLE = "Plait"
ABOUT = (
    "An inference engine for hybrid language models, behind OpenAI's API. In requests a null equals "
    "absence; unknown fields are accepted and named in the header x-plait-ignored; a known field that cannot "
    "be honoured is refused by name."
)
ITEM_EVENTS = "With stream: named and numbered events, from response.created to response.completed."
BLOCK_EVENTS = "With stream: named events, from message_start to message_stop."
Struct = type  # a msgspec Struct or a dataclass


class Version(msgspec.Struct, frozen=True):
    version: str


@dataclass(frozen=True, slots=True)
class Operation:
    """One path of the document. `stream`: the type of its stream's events, if it has one."""

    summary: str
    reply: Struct | None = None
    body: Struct | None = None
    stream: Struct | str | None = None
    refusal: Struct = ErrorBody


GETS: Mapping[str, Operation] = {
    "/health": Operation("Whether the server can serve; 503: not now", Health),
    "/ready": Operation("Whether new requests are taken; 503: not now", Readiness),
    "/live": Operation("Whether it works or will again; 503: only a new start helps", Readiness),
    "/version": Operation("The version of Plait", Version),
    "/metrics": Operation("The engine's numbers, in Prometheus's text format"),
    "/v1/models": Operation("The models that are served", models.ModelList),
    "/tokenizer_info": Operation("The vocabulary and the chat template"),
    "/v1/models/{id}": Operation("One model", models.ModelCard),
}
_SCORE = Operation("How near texts are to each other", rerank.Scores, rerank.ScoreRequest)
_RERANK = Operation("Documents by how near they are to a query", rerank.Ranking, rerank.RerankRequest)
POSTS: Mapping[str, Operation] = {
    "/v1/completions": Operation(
        "Text that follows a prompt",
        completions.Completion,
        schema.CompletionRequest,
        completions.Completion,
    ),
    "/v1/chat/completions": Operation(
        "The reply to a conversation",
        chat.ChatCompletion,
        schema.ChatRequest,
        chat.ChatChunk,
    ),
    "/v1/embeddings": Operation("Texts as vectors", embeddings.Embeddings, embeddings.EmbeddingRequest),
    **dict.fromkeys(("/v1/score", "/score"), _SCORE),
    **dict.fromkeys(("/v1/rerank", "/v2/rerank", "/rerank"), _RERANK),
    "/apply-template": Operation("A conversation as the model's prompt", body=tokenize.TemplateRequest),
    "/v1/responses": Operation(
        "The reply to a conversation, as items",
        response_items.Response,
        responses.ResponsesRequest,
        ITEM_EVENTS,
    ),
    "/v1/responses/input_tokens": Operation(
        "How many tokens the prompt of a response has",
        responses.ResponseInputTokens,
        responses.ResponsesRequest,
    ),
    "/v1/messages": Operation(
        "The reply to a conversation, as blocks",
        messages.MessageReply,
        messages.MessagesRequest,
        BLOCK_EVENTS,
        messages.MessageError,
    ),
    "/v1/messages/count_tokens": Operation(
        "How many tokens a conversation has",
        messages.InputTokens,
        messages.CountRequest,
        refusal=messages.MessageError,
    ),
    "/tokenize": Operation("Text or messages as token ids", models.Tokens, schema.TokenizeRequest),
    "/detokenize": Operation("Token ids as text", models.DetokenizeReply, schema.DetokenizeRequest),
}


def document(endpoints: Iterable[Endpoint]) -> dict[str, Any]:
    """The OpenAPI document of the fixed GET routes and of `endpoints`."""
    paths: dict[str, Any] = {path: {"get": _get(path, told)} for path, told in GETS.items()}
    told_of = [*GETS.values()]
    for endpoint in endpoints:
        told = POSTS.get(endpoint.path, Operation(f"POST {endpoint.path}"))
        told_of.append(told)
        paths[endpoint.path] = {"post": _post(endpoint, told)}
    return {
        "openapi": "3.1.0",
        "info": {"title": TITLE, "version": __version__, "description": ABOUT},
        "paths": paths,
        "components": {
            "schemas": _schemas(told_of),
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
        "security": [{}, {"bearer": []}, {"x-api-key": []}],
    }


def routes(endpoints: Iterable[Endpoint]) -> list[Route]:
    """GET /openapi.json, and GET /docs: the same document as an HTML page that loads nothing."""
    found = document(endpoints)
    return [
        Route("/openapi.json", Asset(encode_document(found), "application/json"), methods=["GET"]),
        Route("/docs", Asset(page(found), "text/html; charset=utf-8", POLICY), methods=["GET"]),
    ]


def _get(path: str, told: Operation) -> dict[str, Any]:
    found = _operation(path, told)
    if "{id}" in path:
        found["parameters"] = [
            {"name": "id", "in": "path", "required": True, "schema": {"type": "string"}},
        ]
    if told.reply in {Health, Readiness}:
        found["responses"]["503"] = {"description": "Not now", "content": _json(_ref(told.reply))}
    return found


def _post(endpoint: Endpoint, told: Operation) -> dict[str, Any]:
    if told.body is not None:
        body = _ref(told.body)
    else:
        body = {"type": "object", "properties": {name: {} for name in sorted(endpoint.fields)}}
    return {
        **_operation(endpoint.path, told),
        "requestBody": {"required": True, "content": _json(body)},
    }


def _operation(path: str, told: Operation) -> dict[str, Any]:
    content = _json(_ref(told.reply)) if told.reply else {"*/*": {}}
    if told.stream is not None:
        content["text/event-stream"] = {"schema": {"type": "string", "description": _events(told.stream)}}
    refusal = {"description": "A refusal that says why", "content": _json(_ref(told.refusal))}
    return {
        "operationId": "_".join(part.strip("{}") for part in path.split("/") if part),
        "summary": told.summary,
        "responses": {
            "200": {"description": "Done", "content": content},
            "4XX": refusal,
            "5XX": {**refusal, "description": "The server's fault, or no room now"},
        },
    }


def _events(stream: Struct | str) -> str:
    if isinstance(stream, str):
        return stream
    name = stream.__name__
    return f"With stream: events of one line each, `data: ` and a {name}; the last is `data: [DONE]`."


def _schemas(operations: Iterable[Operation]) -> dict[str, Any]:
    told_of = [*operations]
    sent = [kind for told in told_of for kind in (told.reply, told.stream, told.refusal)]
    replies = _components(kind for kind in sent if kind is not None and not isinstance(kind, str))
    for found in replies.values():  # what has a default in a reply is always sent
        fields = found["properties"]
        found["required"] = [
            name for name in fields if name in found["required"] or "default" in fields[name]
        ]
        for field in fields.values():
            field.pop("default", None)
    return dict(sorted({**_components(told.body for told in told_of if told.body), **replies}.items()))


def _components(kinds: Iterable[Struct]) -> dict[str, Any]:
    _, found = msgspec.json.schema_components(kinds, ref_template=SCHEMA)
    return found


def _ref(kind: Struct) -> dict[str, Any]:
    return {"$ref": SCHEMA.format(name=kind.__name__)}


def _json(found: Mapping[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": found}}


def encode_document(found: Mapping[str, Any]) -> bytes:
    return msgspec.json.format(msgspec.json.encode(found), indent=2) + b"\n"
