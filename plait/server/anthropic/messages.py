"""POST /v1/messages and /v1/messages/count_tokens: chat in Anthropic's format.

The request becomes a chat, and the chat's reply becomes content blocks and named events, so tools and
reasoning are those of /v1/chat/completions. Errors have Anthropic's shape here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from plait.engine.admission import MAX_CACHE_PLACES, ServiceOptions, check_places
from plait.errors import InvalidField
from plait.request import RequestTrace
from plait.sampling_fields import SamplingFields, shorten
from plait.server.anthropic.message_blocks import (
    MessageConversation,
    chat_output,
    chat_tool_choice,
    chat_tools,
    check_cache_control,
    conversation,
    convert_thinking,
    keeps_context,
    list_unread,
)
from plait.server.api import validate
from plait.server.api.content_blocks import (
    BlockReply,
    BlockStep,
    ReplyBlock,
    in_words_of,
    refuse_words_of_a_chat,
)
from plait.server.api.endpoint import Endpoint
from plait.server.api.parse_fields import field_names, parse_as
from plait.server.api.reply import ChatPlan, Usage
from plait.server.api.schema import Objects
from plait.server.api.token_scores import Count
from plait.server.gateway.request_context import RequestContext
from plait.server.http.errors import Problem
from plait.server.http.transfer import new_id
from plait.server.openai import chat, models

if TYPE_CHECKING:
    from plait.frontend.deltas import Delta


@dataclass(frozen=True, kw_only=True)
class CountRequest:
    """POST /v1/messages/count_tokens."""

    model: str | None = None
    messages: list[dict[str, object]]
    system: str | list[dict[str, object]] | None = None
    tools: Objects = field(default_factory=list)
    tool_choice: dict[str, object] | None = None
    thinking: dict[str, object] | None = None
    output_config: dict[str, object] | None = None
    output_format: dict[str, object] | None = None  # an older name of output_config.format
    cache_control: dict[str, object] | None = None  # the end of a conversation is kept in any case


@dataclass(frozen=True, kw_only=True)
class MessagesRequest(CountRequest, SamplingFields, ServiceOptions):
    """POST /v1/messages. The other fields of a chat (`seed`, `min_p`, …) are accepted here too."""

    max_tokens: int
    stop_sequences: tuple[str, ...] = ()
    stream: bool = False
    metadata: dict[str, object] | None = None


StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class OutputDetails(msgspec.Struct, frozen=True):
    thinking_tokens: Count


class MessageUsage(msgspec.Struct, frozen=True):
    """Tokens that were in the prefix cache are not among `input_tokens`."""

    input_tokens: Count
    output_tokens: Count = 0
    cache_read_input_tokens: Count = 0
    cache_creation_input_tokens: Count = 0
    output_tokens_details: OutputDetails | UnsetType = UNSET


class ContentBlock(msgspec.Struct, frozen=True):
    """Text, thinking, or a call of a tool with its `input`."""

    type: Literal["text", "thinking", "tool_use"]
    text: str | UnsetType = UNSET
    citations: UnsetType | None = UNSET
    thinking: str | UnsetType = UNSET
    signature: str | UnsetType = UNSET
    id: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    input: dict[str, object] | UnsetType = UNSET


class MessageEnd(msgspec.Struct, frozen=True):
    stop_reason: StopReason
    stop_sequence: str | None = None


class MessageReply(msgspec.Struct, kw_only=True, frozen=True):
    """The reply of /v1/messages; in the first event of its stream, without content."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[ContentBlock] = []
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    usage: MessageUsage = MessageUsage(0)


class BlockDelta(msgspec.Struct, frozen=True):
    """The next part of a block."""

    type: Literal["text_delta", "thinking_delta", "input_json_delta"]
    text: str | UnsetType = UNSET
    thinking: str | UnsetType = UNSET
    partial_json: str | UnsetType = UNSET


class MessageEvent(msgspec.Struct, frozen=True):
    """One event of a stream. `warning`: what a whole reply has in the header x-plait-warning."""

    type: str
    message: MessageReply | UnsetType = UNSET
    index: Count | UnsetType = UNSET
    content_block: ContentBlock | UnsetType = UNSET
    delta: BlockDelta | MessageEnd | UnsetType = UNSET
    usage: MessageUsage | UnsetType = UNSET
    warning: str | UnsetType = UNSET


class InputTokens(msgspec.Struct, frozen=True):
    """The reply of /v1/messages/count_tokens."""

    input_tokens: Count


class ErrorText(msgspec.Struct, frozen=True):
    type: str
    message: str


class MessageError(msgspec.Struct, frozen=True):
    """The body of every refusal of /v1/messages."""

    type: Literal["error"]
    error: ErrorText


# Fields of a chat that have other names or values here.
_TRANSLATED = frozenset(
    {
        *("messages", "tools", "tool_choice", "parallel_tool_calls", "n", "best_of", "stop", "stream"),
        *("stream_options", "max_completion_tokens", "logprobs", "top_logprobs", "return_token_ids"),
        *("response_format", "reasoning_effort", "thinking_token_budget", "reasoning_field"),
        *("add_generation_prompt", "continue_final_message", "timings_per_token", "return_progress"),
    }
)
_PASSED = chat.FIELDS - _TRANSLATED
FIELDS = field_names(MessagesRequest) | _PASSED
_UNREAD = _TRANSLATED - FIELDS
COUNT_FIELDS = field_names(CountRequest)
_NAMES = {
    "stop": "stop_sequences",
    "prompt": "messages",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "thinking_token_budget": "thinking.budget_tokens",
    "max_completion_tokens": "max_tokens",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    "parameters": "input_schema",
}
_REFUSED = ("mcp_servers", "container", "context_management", "compaction", "thread")
_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def plan(context: RequestContext, body: Mapping[str, object]) -> MessagesReply:
    """Validate, render and tokenize a request, before the engine gets it. Raises RequestErrors."""
    refuse_words_of_a_chat(body, _UNREAD, _NAMES)
    _refuse(body, FIELDS)
    asked = parse_as(body, MessagesRequest)
    if asked.max_tokens < 0:  # elsewhere clients that want no limit may leave it out
        text = f"{shorten(asked.max_tokens)} is less than 0; send how many tokens the reply may have at most"
        raise InvalidField(f"max_tokens: {text}", "max_tokens")
    found = _read_conversation(context, asked)
    sent = {name: value for name, value in body.items() if name in _PASSED}
    sent |= _translate_fields(asked) | {"stream": asked.stream}
    if asked.stop_sequences:
        sent["stop"] = asked.stop_sequences
    sent["cache_at"] = _cache_places(asked, found)
    with in_words_of(_NAMES, found.places):
        planned = chat.plan_chat(
            context, {**sent, **_continuation(found), "messages": found.messages}, _NAMES
        )
    return MessagesReply(context.model, planned, found.places)


def count(context: RequestContext, body: Mapping[str, object]) -> InputTokens:
    """Count the tokens of a prompt. Raises RequestErrors."""
    _refuse(body, COUNT_FIELDS)
    asked = parse_as(body, CountRequest)
    found, sent = _read_conversation(context, asked), _translate_fields(asked)
    seen = {name: value for name, value in sent.items() if name in models.TEMPLATE_FIELDS}
    with in_words_of(_NAMES, found.places):
        asking = models.TemplateRequest(messages=found.messages, **_continuation(found), **seen)
        return InputTokens(len(models.prompt_ids(context, asking, _NAMES)))


def refusal(found: Problem) -> MessageError:
    """An error as Anthropic's clients read it."""
    kind = _KINDS.get(found.status, "api_error" if found.status >= 500 else "invalid_request_error")
    message = found.message
    if "n_ctx" in found.more:  # Anthropic's own words, which its clients look for
        numbers = f"{found.more['n_prompt_tokens']} tokens > {found.more['n_ctx'] - 1} maximum"
        message = f"prompt is too long: {numbers}. {message}"
    return MessageError("error", ErrorText(kind, message))


def _refuse(body: Mapping[str, object], read: frozenset[str]) -> None:
    for name in _REFUSED:
        if (value := body.get(name)) and not (name == "context_management" and keeps_context(value)):
            raise InvalidField(f"{name}: this server cannot honour it; leave it out", name)
    validate.refuse(body, read)


def _read_conversation(context: RequestContext, asked: CountRequest) -> MessageConversation:
    """The chat of a request; keys that nothing reads are reported. Raises InvalidField."""
    if asked.cache_control is not None:
        check_cache_control(asked.cache_control, "cache_control")
    context.report_unread(list_unread(asked.messages, asked.system, asked.tools), {})
    return conversation(asked.messages, asked.system)


def _cache_places(asked: MessagesRequest, found: MessageConversation) -> list[int]:
    """Behind how many messages of the chat state is kept: where blocks say so, and where `cache_at` does.

    `cache_at` counts the client's messages; a system prompt and results of tools are messages of a chat, too.
    """
    check_places(asked.cache_at, len(asked.messages), "messages")
    first = [f"messages[{place}]" for place in asked.cache_at]
    starts = [next((n for n, at in enumerate(found.places) if at.startswith(one)), None) for one in first]
    own = [len(found.messages) if start is None else start for start in starts]
    places = [*dict.fromkeys([*found.cached, *own])]
    if len(places) > MAX_CACHE_PLACES:
        text = f"cache_at: with cache_control {len(places)} places, more than {MAX_CACHE_PLACES}"
        raise InvalidField(text, "cache_at")
    return places


def _continuation(found: MessageConversation) -> dict[str, Any]:
    """A reply continues the assistant's message if the conversation ends with one."""
    return {"continue_final_message": True} if found.messages[-1]["role"] == "assistant" else {}


def _translate_fields(asked: CountRequest) -> dict[str, Any]:
    """The fields that have other names in a chat."""
    sent: dict[str, object] = {}
    if asked.tools:
        sent |= {"tools": chat_tools(asked.tools), **chat_tool_choice(asked.tool_choice or {"type": "auto"})}
    elif asked.tool_choice and asked.tool_choice.get("type") not in ("auto", "none"):
        raise InvalidField("tool_choice: there are no tools to choose from", "tool_choice")
    output = chat_output(asked.output_config or {}, asked.output_format)
    return sent | convert_thinking(asked.thinking or {}) | output


class MessagesReply(BlockReply):
    """One reply of /v1/messages, whole or as events; both are the same blocks in the end."""

    def __init__(self, model: str, chat: ChatPlan, places: Sequence[str] = ()) -> None:
        super().__init__(chat, _NAMES, places)
        self._head = MessageReply(id=new_id("msg", "_"), model=model)

    def whole(self, traces: Iterable[RequestTrace | None] = ()) -> MessageReply:
        content, end = [_content(block) for block in self.blocks.kept], self._end()
        return msgspec.structs.replace(
            self._head,
            content=content,
            stop_reason=end.stop_reason,
            stop_sequence=end.stop_sequence,
            usage=_usage(self.count.usage()),
        )

    def begin(self) -> Iterator[MessageEvent]:
        usage = MessageUsage(input_tokens=len(self.requests[0].prompt_token_ids))
        yield MessageEvent("message_start", message=msgspec.structs.replace(self._head, usage=usage))

    def events(self, i: int, delta: Delta) -> list[MessageEvent]:
        return [_event(step) for step in self.push(delta)]

    def end(self) -> Iterator[MessageEvent]:
        usage = _usage(self.count.usage())
        yield MessageEvent("message_delta", delta=self._end(), usage=usage, warning=self.warning or UNSET)
        yield MessageEvent("message_stop")

    def fail(self, problem: Problem) -> Iterable[MessageError]:
        return (refusal(problem),)

    def _end(self) -> MessageEnd:
        """Why it ended: "tool_use" for whole calls if nothing cut the reply; a stop sequence is named."""
        if self.blocks.finish_reason == "length":
            return MessageEnd("max_tokens")
        if any(block.kind == "call" for block in self.blocks.kept):
            return MessageEnd("tool_use")
        matched = self.blocks.stop_reason
        return MessageEnd("stop_sequence", matched) if isinstance(matched, str) else MessageEnd("end_turn")


def _event(step: BlockStep) -> MessageEvent:
    block = step.block
    match step.what:
        case "open":  # a call's input comes as parts of JSON text after an empty object
            return MessageEvent("content_block_start", index=block.index, content_block=_content(block))
        case "close":
            return MessageEvent("content_block_stop", index=block.index)
    match block.kind:
        case "text":
            delta = BlockDelta("text_delta", text=step.text)
        case "reasoning":
            delta = BlockDelta("thinking_delta", thinking=step.text)
        case "call":
            delta = BlockDelta("input_json_delta", partial_json=step.text)
    return MessageEvent("content_block_delta", index=block.index, delta=delta)


def _content(block: ReplyBlock) -> ContentBlock:
    match block.kind:
        case "text":
            return ContentBlock("text", text=block.text, citations=None)
        case "reasoning":
            return ContentBlock("thinking", thinking=block.text, signature="")
    arguments = msgspec.json.decode(block.text) if block.is_whole else {}
    return ContentBlock("tool_use", id=block.id, name=block.name, input=arguments)


def _usage(found: Usage) -> MessageUsage:
    """Usage in Anthropic's fields: cached tokens are counted apart from the input."""
    cached = found.prompt_tokens_details.cached_tokens
    details = OutputDetails(found.completion_tokens_details.reasoning_tokens)
    read = found.prompt_tokens - cached
    return MessageUsage(read, found.completion_tokens, cached, output_tokens_details=details)


ENDPOINTS = (
    Endpoint("/v1/messages", FIELDS, plan=plan, refusal=refusal),
    Endpoint("/v1/messages/count_tokens", COUNT_FIELDS, answer=count, refusal=refusal),
)
