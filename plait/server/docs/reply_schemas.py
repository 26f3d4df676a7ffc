"""What clients get, typed: the document at /openapi.json is made of it, and tests hold every reply to it.

Replies are built as plain objects where they are made; nothing here runs when a request is served.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from plait.server.api.reply_extras import PromptProgress, Timings

Count = Annotated[int, msgspec.Meta(ge=0)]
Logprob = Annotated[float, msgspec.Meta(le=0)]
FinishReason = Literal["stop", "length", "tool_calls"]


class ErrorObject(msgspec.Struct, kw_only=True, frozen=True):
    """OpenAI's error object, with all four keys. A prompt that is too long has llama.cpp's numbers, too."""

    message: str
    type: str
    param: str | None
    code: str | None
    n_prompt_tokens: Count | msgspec.UnsetType = msgspec.UNSET
    n_ctx: Count | msgspec.UnsetType = msgspec.UNSET


class ErrorBody(msgspec.Struct, kw_only=True, frozen=True):
    """The body of every answer that is not a 2xx."""

    error: ErrorObject


class PromptTokensDetails(msgspec.Struct, kw_only=True, frozen=True):
    """`cached_tokens`: how many of the prompt's tokens were found computed already."""

    cached_tokens: Count


class CompletionTokensDetails(msgspec.Struct, kw_only=True, frozen=True):
    """`reasoning_tokens` of the generated ones were thinking."""

    reasoning_tokens: Count


class Usage(msgspec.Struct, kw_only=True, frozen=True):
    """Each prompt counts once, every generated choice counts."""

    prompt_tokens: Count
    completion_tokens: Count
    total_tokens: Count
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class CompletionLogprobs(msgspec.Struct, kw_only=True, frozen=True):
    """Parallel lists; offsets are in characters of `text`."""

    tokens: list[str]
    token_logprobs: list[Logprob | None]
    top_logprobs: list[dict[str, Logprob] | None]
    text_offset: list[Count]


class CompletionChoice(msgspec.Struct, kw_only=True, frozen=True):
    """One choice; in a stream, the next piece of one. `finish_reason` is null until it ends."""

    index: Count
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None = None
    token_ids: list[Count] | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[Count] | msgspec.UnsetType = msgspec.UNSET


class Completion(msgspec.Struct, kw_only=True, frozen=True):
    """The reply of /v1/completions, and each event of its stream."""

    id: Annotated[str, msgspec.Meta(pattern="^cmpl-[A-Za-z0-9_-]+$")]
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str | None
    choices: list[CompletionChoice]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET
    timings: Timings | msgspec.UnsetType = msgspec.UNSET
    prompt_progress: PromptProgress | msgspec.UnsetType = msgspec.UNSET


class AlternativeToken(msgspec.Struct, kw_only=True, frozen=True):
    """A token with its log-probability; `bytes` are its own, also when they are half a character."""

    token: str
    logprob: Logprob
    bytes: list[Annotated[int, msgspec.Meta(ge=0, le=255)]]


class ChosenToken(AlternativeToken, kw_only=True, frozen=True):
    """A token of the reply, and the most likely ones in its place, best first."""

    top_logprobs: list[AlternativeToken]


class ChatLogprobs(msgspec.Struct, kw_only=True, frozen=True):
    content: list[ChosenToken]
    refusal: None


class FunctionCall(msgspec.Struct, kw_only=True, frozen=True):
    """`arguments` is JSON text."""

    name: str
    arguments: str


class ToolCall(msgspec.Struct, kw_only=True, frozen=True):
    id: str
    type: Literal["function"]
    function: FunctionCall


class ChatMessage(msgspec.Struct, kw_only=True, frozen=True):
    """`content` is null if there are calls and nothing else; without calls the key `tool_calls` is absent."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | msgspec.UnsetType | None = msgspec.UNSET
    reasoning: str | msgspec.UnsetType = msgspec.UNSET
    tool_calls: list[ToolCall] | msgspec.UnsetType = msgspec.UNSET


class ChatChoice(msgspec.Struct, kw_only=True, frozen=True):
    index: Count
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    stop_reason: int | str | None = None
    token_ids: list[Count] | msgspec.UnsetType = msgspec.UNSET


class ChatCompletion(msgspec.Struct, kw_only=True, frozen=True):
    """The reply of /v1/chat/completions."""

    id: Annotated[str, msgspec.Meta(pattern="^chatcmpl-[A-Za-z0-9_-]+$")]
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str | None
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[Count] | msgspec.UnsetType = msgspec.UNSET
    timings: Timings | msgspec.UnsetType = msgspec.UNSET


class FunctionCallDelta(msgspec.Struct, kw_only=True, frozen=True):
    name: str | msgspec.UnsetType = msgspec.UNSET
    arguments: str | msgspec.UnsetType = msgspec.UNSET


class ToolCallDelta(msgspec.Struct, kw_only=True, frozen=True):
    """`id`, `type` and the name come in the first delta of a call, and only there."""

    index: Count
    id: str | msgspec.UnsetType = msgspec.UNSET
    type: Literal["function"] | msgspec.UnsetType = msgspec.UNSET
    function: FunctionCallDelta


class ChatDelta(msgspec.Struct, kw_only=True, frozen=True):
    """The next piece of a message; empty in the last chunk of a choice."""

    role: Literal["assistant"] | msgspec.UnsetType = msgspec.UNSET
    content: str | msgspec.UnsetType | None = msgspec.UNSET
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    reasoning: str | msgspec.UnsetType = msgspec.UNSET
    tool_calls: list[ToolCallDelta] | msgspec.UnsetType = msgspec.UNSET


class ChatChunkChoice(msgspec.Struct, kw_only=True, frozen=True):
    index: Count
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None = None
    token_ids: list[Count] | msgspec.UnsetType = msgspec.UNSET


class ChatChunk(msgspec.Struct, kw_only=True, frozen=True):
    """One event of a chat's stream. With include_usage, the last one has no choices and has the usage.

    `warning`: what a whole reply has in the header x-plait-warning, in the last chunk of a choice.
    """

    id: Annotated[str, msgspec.Meta(pattern="^chatcmpl-[A-Za-z0-9_-]+$")]
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str | None
    choices: list[ChatChunkChoice]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET
    prompt_token_ids: list[Count] | msgspec.UnsetType = msgspec.UNSET
    timings: Timings | msgspec.UnsetType = msgspec.UNSET
    prompt_progress: PromptProgress | msgspec.UnsetType = msgspec.UNSET
    warning: str | msgspec.UnsetType = msgspec.UNSET


class ModelCard(msgspec.Struct, kw_only=True, frozen=True):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: Count


class ModelList(msgspec.Struct, kw_only=True, frozen=True):
    object: Literal["list"]
    data: list[ModelCard]


class Piece(msgspec.Struct, kw_only=True, frozen=True):
    """A token. `piece`: its text, or its bytes where they are no characters."""

    id: Count
    piece: str | list[Count]


class Tokens(msgspec.Struct, kw_only=True, frozen=True):
    """The reply of /tokenize; with pieces `tokens` holds objects."""

    count: Count
    max_model_len: Count
    tokens: list[Count | Piece]
    token_strs: list[str] | msgspec.UnsetType = msgspec.UNSET


class Text(msgspec.Struct, kw_only=True, frozen=True):
    """The reply of /detokenize; llama.cpp calls the same text `content`."""

    prompt: str
    content: str


class Health(msgspec.Struct, kw_only=True, frozen=True):
    """`engine`: numbers as they are now; `totals`: numbers that only grow; `progress`: while it loads."""

    status: Literal["ok", "loading", "unhealthy", "stopping"]
    engine: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET
    totals: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET
    progress: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET


class Version(msgspec.Struct, kw_only=True, frozen=True):
    version: str


class Readiness(msgspec.Struct, kw_only=True, frozen=True):
    """Whether new requests are taken, or why not."""

    status: str


class PromptUsage(msgspec.Struct, kw_only=True, frozen=True):
    """Tokens where nothing is generated."""

    prompt_tokens: Count
    total_tokens: Count


class Embedding(msgspec.Struct, kw_only=True, frozen=True):
    """`embedding`: numbers, or with encoding_format base64 their float32 bytes, the low byte first."""

    object: Literal["embedding"]
    index: Count
    embedding: list[float] | str


class Embeddings(msgspec.Struct, kw_only=True, frozen=True):
    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: PromptUsage


Cosine = Annotated[float, msgspec.Meta(ge=-1, le=1)]


class Score(msgspec.Struct, kw_only=True, frozen=True):
    index: Count
    object: Literal["score"]
    score: Cosine


class Scores(msgspec.Struct, kw_only=True, frozen=True):
    id: str
    object: Literal["list"]
    model: str
    method: Literal["cosine"]
    data: list[Score]
    usage: PromptUsage


class RankedText(msgspec.Struct, kw_only=True, frozen=True):
    text: str


class Ranked(msgspec.Struct, kw_only=True, frozen=True):
    """`index`: the document's place in the request."""

    index: Count
    relevance_score: Cosine
    document: RankedText | msgspec.UnsetType = msgspec.UNSET


class Ranking(msgspec.Struct, kw_only=True, frozen=True):
    """The nearest document first."""

    id: str
    model: str
    method: Literal["cosine"]
    results: list[Ranked]
    usage: PromptUsage


class ResponseUsage(msgspec.Struct, kw_only=True, frozen=True):
    input_tokens: Count
    output_tokens: Count
    total_tokens: Count


class Response(msgspec.Struct, kw_only=True, frozen=True):
    """The reply of /v1/responses. `output`: messages, reasoning and calls, as items."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete", "failed", "in_progress"]
    model: str
    output: list[dict[str, Any]]
    usage: ResponseUsage


class ResponseInputTokens(msgspec.Struct, kw_only=True, frozen=True):
    """The reply of /v1/responses/input_tokens."""

    object: Literal["response.input_tokens"]
    input_tokens: Count


class MessageUsage(msgspec.Struct, kw_only=True, frozen=True):
    """Tokens that were found computed already are not among `input_tokens`."""

    input_tokens: Count
    output_tokens: Count
    cache_read_input_tokens: Count
    cache_creation_input_tokens: Count


class Message(msgspec.Struct, kw_only=True, frozen=True):
    """The reply of /v1/messages. `content`: text, thinking and calls, as blocks."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: MessageUsage


class InputTokens(msgspec.Struct, kw_only=True, frozen=True):
    """The reply of /v1/messages/count_tokens."""

    input_tokens: Count


class MessageError(msgspec.Struct, kw_only=True, frozen=True):
    """The body of every refusal of /v1/messages."""

    type: Literal["error"]
    error: dict[str, Any]
