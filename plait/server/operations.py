"""What the OpenAPI document says of each path: its types, in tables.

A path that is not in them is in the document all the same, with the fields it reads.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from plait.server import mcp_routes
from plait.server.anthropic import messages
from plait.server.api import schema, versions
from plait.server.gateway import operator_views
from plait.server.gateway.request_context import Health, Readiness
from plait.server.http.errors import ErrorBody
from plait.server.http.transfer import EVENTS, JSON_LINES, UNMARKED_EVENTS, StreamForm
from plait.server.llamacpp import completion, server_facts
from plait.server.models import admin
from plait.server.ollama import embed, generate, manage, wire
from plait.server.openai import adapters, chat, completions, embeddings, models, render, scores
from plait.server.responses import endpoints, items, request
from plait.server.stored import batch_objects, chats, conversations, file_objects, routes

ITEM_EVENTS = "With stream: named and numbered events, from response.created to response.completed."
BLOCK_EVENTS = "With stream: named events, from message_start to message_stop."
Schema = type  # a msgspec Struct or a dataclass


class Operation(Struct, frozen=True):
    """One path of the document. `stream`: the type of its stream's events, if it has one, of that `form`."""

    summary: str
    reply: Schema | None = None
    body: Schema | None = None
    stream: Schema | str | None = None
    form: StreamForm = EVENTS
    refusal: Schema = ErrorBody


def _describe_stream(summary: str, line: Schema, form: StreamForm, refusal: Schema = ErrorBody) -> Operation:
    """An endpoint of which a stream has the events that a whole reply is one of."""
    return Operation(summary, line, stream=line, form=form, refusal=refusal)


MCP: Mapping[tuple[str, str], Operation] = {
    ("GET", "/v1/mcp/servers"): Operation("The MCP servers that may be used", mcp_routes.McpServerList),
    ("POST", "/v1/mcp/tools"): Operation(
        "The tools of an MCP server", mcp_routes.ToolList, mcp_routes.ToolsRequest
    ),
    ("POST", "/v1/mcp/call"): Operation(
        "Call a tool of an MCP server", mcp_routes.CallAnswer, mcp_routes.CallRequest
    ),
}

_ONE = "that this key has stored"
STORED: Mapping[tuple[str, str], Operation] = {
    ("GET", "/v1/responses/{id}"): Operation(
        "A stored response", items.Response, stream="With stream=true: its events, from starting_after."
    ),
    ("DELETE", "/v1/responses/{id}"): Operation("Delete a response", routes.Deleted),
    ("GET", "/v1/responses/{id}/input_items"): Operation("The items of its input", routes.StoredList),
    ("POST", "/v1/responses/{id}/cancel"): Operation(
        "Cancel a response that runs in the background", items.Response
    ),
    ("POST", "/v1/conversations"): Operation(
        "Begin a conversation", conversations.Conversation, conversations.NewConversation
    ),
    ("GET", "/v1/conversations/{id}"): Operation("A conversation", conversations.Conversation),
    ("POST", "/v1/conversations/{id}"): Operation(
        "Change a conversation's metadata", conversations.Conversation, conversations.ConversationChange
    ),
    ("DELETE", "/v1/conversations/{id}"): Operation("Delete a conversation", routes.Deleted),
    ("GET", "/v1/conversations/{id}/items"): Operation("The items of a conversation", routes.StoredList),
    ("POST", "/v1/conversations/{id}/items"): Operation(
        "Add items to a conversation", routes.StoredList, conversations.NewItems
    ),
    ("GET", "/v1/conversations/{id}/items/{item}"): Operation("An item of a conversation"),
    ("DELETE", "/v1/conversations/{id}/items/{item}"): Operation(
        "Delete an item of a conversation", conversations.Conversation
    ),
    ("GET", "/v1/chat/completions"): Operation(f"The chats {_ONE}", routes.StoredList),
    ("GET", "/v1/chat/completions/{id}"): Operation("A stored chat", chat.ChatCompletion),
    ("POST", "/v1/chat/completions/{id}"): Operation(
        "Replace a stored chat's metadata", chat.ChatCompletion, chats.ChatChange
    ),
    ("DELETE", "/v1/chat/completions/{id}"): Operation("Delete a stored chat", routes.Deleted),
    ("GET", "/v1/chat/completions/{id}/messages"): Operation("Its messages", routes.StoredList),
    ("POST", "/v1/files"): Operation("Store a file, sent as a form", file_objects.FileObject),
    ("GET", "/v1/files"): Operation(f"The files {_ONE}", routes.StoredList),
    ("GET", "/v1/files/{id}"): Operation("What is known of a file", file_objects.FileObject),
    ("GET", "/v1/files/{id}/content"): Operation("The file itself"),
    ("DELETE", "/v1/files/{id}"): Operation("Delete a file", routes.Deleted),
    ("POST", "/v1/batches"): Operation(
        "Answer the requests of a file at low priority", batch_objects.BatchObject, batch_objects.BatchRequest
    ),
    ("GET", "/v1/batches"): Operation(f"The batches {_ONE}", routes.StoredList),
    ("GET", "/v1/batches/{id}"): Operation("A batch as it is now", batch_objects.BatchObject),
    ("POST", "/v1/batches/{id}/cancel"): Operation("Cancel a batch", batch_objects.BatchObject),
}
OLLAMAS = wire.OllamaError
GETS: Mapping[str, Operation] = {
    "/health": Operation("Whether the server can serve; 503: not now", Health),
    "/ready": Operation("Whether new requests are taken; 503: not now", Readiness),
    "/live": Operation("Whether it works or will again; 503: only restarting the server helps", Readiness),
    "/version": Operation("Plait's version, and fingerprints of the loaded models", versions.Version),
    "/metrics": Operation("The engine's numbers, in Prometheus's text format"),
    "/v1/models": Operation("The models that are served", models.ModelList),
    "/tokenizer_info": Operation("The vocabulary and the chat template"),
    "/v1/models/{id}": Operation("One model", models.ModelCard),
    "/api/version": Operation("The version of Ollama's API", manage.OllamaVersion, refusal=OLLAMAS),
    "/api/tags": Operation("The models that are served", manage.Tags, refusal=OLLAMAS),
    "/api/ps": Operation("The models that are loaded", manage.RunningModels, refusal=OLLAMAS),
    "/props": Operation("Facts about the server, in llama.cpp's words", server_facts.Props),
    "/admin/models": Operation("The models that are served, for the admin key", models.ModelList),
    "/admin/keys": Operation("Keys with limits and usage, for the admin key", operator_views.KeyUsages),
    "/admin/limits": Operation("The limits that hold now, for the admin key", operator_views.ServerLimits),
    "/admin/requests": Operation("The open requests, for the admin key", operator_views.OpenRequests),
    "/admin/log": Operation(
        "The last requests by id=, key=, limit=, for the admin key", operator_views.LoggedRequests
    ),
    "/slots": Operation("A list: a slot for each sequence that may run, and whether one does"),
}
_LOAD = Operation("Have a model loaded; needs the admin key", admin.Managed, admin.ManageRequest)
_UNLOAD = Operation("Have a model unloaded; needs the admin key", admin.Managed, admin.ManageRequest)
_SCORE = Operation("How well texts fit each other", scores.Scores, scores.ScoreRequest)
_RERANK = Operation("Documents by how well they fit a query", scores.Ranking, scores.RerankRequest)
_CLASSIFY = Operation("Texts with a label each", scores.Classification, scores.ClassifyRequest)
POSTS: Mapping[str, Operation] = {
    "/v1/completions": Operation(
        "Text that follows a prompt", completions.Completion, schema.CompletionRequest, completions.Completion
    ),
    "/v1/chat/completions": Operation(
        "The reply to a conversation", chat.ChatCompletion, schema.StorableChat, chat.ChatChunk
    ),
    "/v1/embeddings": Operation("Texts as vectors", embeddings.Embeddings, embeddings.EmbeddingRequest),
    **dict.fromkeys(("/v1/score", "/score"), _SCORE),
    **dict.fromkeys(("/v1/rerank", "/v2/rerank", "/rerank"), _RERANK),
    **dict.fromkeys(("/v1/classify", "/classify"), _CLASSIFY),
    "/apply-template": Operation("A conversation as the model's prompt", body=models.TemplateRequest),
    "/v1/responses": Operation(
        "The reply to a conversation, as items", items.Response, request.ResponsesRequest, ITEM_EVENTS
    ),
    "/v1/responses/input_tokens": Operation(
        "How many tokens the prompt of a response has",
        endpoints.ResponseInputTokens,
        request.ResponsesRequest,
    ),
    "/v1/messages": Operation(
        "The reply to a conversation, as blocks",
        messages.MessageReply,
        messages.MessagesRequest,
        BLOCK_EVENTS,
        refusal=messages.MessageError,
    ),
    "/v1/messages/count_tokens": Operation(
        "How many tokens a conversation has",
        messages.InputTokens,
        messages.CountRequest,
        refusal=messages.MessageError,
    ),
    "/v1/load_lora_adapter": Operation(
        "Load an adapter from --lora-folder", adapters.AdapterReply, adapters.LoadAdapterRequest
    ),
    "/v1/unload_lora_adapter": Operation(
        "Unload an adapter; its open requests go on", adapters.AdapterReply, adapters.UnloadAdapterRequest
    ),
    "/v1/chat/completions/render": Operation(
        "A conversation as the token ids that the model would get", render.RenderedPrompt, schema.ChatRequest
    ),
    "/v1/completions/render": Operation(
        "A list: each prompt as the token ids that the model would get", body=schema.CompletionRequest
    ),
    "/tokenize": Operation("Text or messages as token ids", models.Tokens, schema.TokenizeRequest),
    "/detokenize": Operation("Token ids as text", models.DetokenizeReply, schema.DetokenizeRequest),
    "/api/generate": _describe_stream("The reply to a prompt", generate.GenerateLine, JSON_LINES, OLLAMAS),
    "/api/chat": _describe_stream("The reply to a conversation", generate.ChatLine, JSON_LINES, OLLAMAS),
    "/api/embed": Operation("Texts as vectors of length 1", embed.EmbedReply, refusal=OLLAMAS),
    "/api/embeddings": Operation("A text as a vector", embed.EmbeddingReply, refusal=OLLAMAS),
    "/api/show": Operation("A served model", manage.ShownModel, refusal=OLLAMAS),
    "/api/pull": Operation(
        "Whether a model is here; with the admin key it is fetched",
        wire.OllamaStatus,
        stream=manage.OllamaPull,
        form=JSON_LINES,
        refusal=OLLAMAS,
    ),
    "/api/copy": Operation("Another name for a model", wire.OllamaStatus, refusal=OLLAMAS),
    "/api/delete": Operation("The model is deleted from its folder", wire.OllamaStatus, refusal=OLLAMAS),
    **{path: Operation(f"Refused: {why}", refusal=OLLAMAS) for path, why in manage.NOT_DONE.items()},
    **dict.fromkeys(("/admin/models/load", "/models/load"), _LOAD),
    **dict.fromkeys(("/admin/models/unload", "/models/unload"), _UNLOAD),
    "/infill": _describe_stream(
        "What belongs between two texts, in llama.cpp's words", completion.NativeCompletion, UNMARKED_EVENTS
    ),
    "/completion": _describe_stream(
        "Text that follows a prompt, in llama.cpp's words", completion.NativeCompletion, UNMARKED_EVENTS
    ),
}
