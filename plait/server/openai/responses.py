"""POST /v1/responses: OpenAI's Responses API.

The request becomes a chat, and the chat's reply becomes items and named events, so tools, reasoning and
structured output are those of /v1/chat/completions. `response_state` stores responses, if the server has a
store, and has the items of those that a conversation goes on from.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import UNSET

from plait.engine.admission import ServiceOptions
from plait.errors import InvalidField
from plait.request import Request, RequestTrace
from plait.sampling_fields import NO_ENTRIES, MaxTokens, NumLogprobs, SamplingFields
from plait.server.api import validate
from plait.server.api.content_blocks import (
    BlockKind,
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
from plait.server.http.transfer import new_id
from plait.server.openai import chat, models
from plait.server.openai.response_items import (
    DeltaEvent,
    DoneEvent,
    ErrorEvent,
    InputDetails,
    ItemEvent,
    ItemStatus,
    ItemType,
    OutputItem,
    OutputPart,
    PartEvent,
    Response,
    ResponseConversation,
    ResponseEvent,
    ResponseStatus,
    ResponseUsage,
    StateEvent,
    chat_format,
    chat_tool_choice,
    chat_tools,
    conversation,
)
from plait.server.openai.response_state import (
    ResponseKeeper,
    Stored,
    earlier_items,
    keeper_of,
    resolve_references,
)

if TYPE_CHECKING:
    from plait.frontend.deltas import Delta
    from plait.server.http.errors import Problem


class TextOptions(msgspec.Struct, kw_only=True, frozen=True):
    format: dict[str, Any] | None = None
    verbosity: Literal["medium"] | None = None


class ReasoningOptions(msgspec.Struct, kw_only=True, frozen=True):
    effort: str | None = None
    summary: Literal["auto"] | None = None
    generate_summary: Literal["auto"] | None = None


class ResponseStreamOptions(msgspec.Struct, kw_only=True, frozen=True):
    include_obfuscation: Literal[False] | None = None


PLAIN_TEXT, USUAL_REASONING = TextOptions(), ReasoningOptions()


@dataclass(frozen=True, kw_only=True)
class ResponsesRequest(SamplingFields, ServiceOptions):
    """POST /v1/responses. The other fields of a chat (`seed`, `top_k`, `stop`, …) are accepted here too."""

    model: str | None = None
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: MaxTokens = None
    stream: bool = False
    stream_options: ResponseStreamOptions | None = None
    tools: Objects = field(default_factory=list)
    tool_choice: str | dict[str, Any] = "auto"
    parallel_tool_calls: bool = True
    text: TextOptions = PLAIN_TEXT
    reasoning: ReasoningOptions = USUAL_REASONING
    top_logprobs: NumLogprobs = None
    include: tuple[Literal["message.output_text.logprobs", "reasoning.encrypted_content"], ...] = ()
    metadata: Annotated[dict[str, str], NO_ENTRIES] = field(default_factory=dict)
    truncation: Literal["disabled"] = "disabled"
    background: bool = False
    store: bool | None = None
    previous_response_id: str | None = None


class ResponseInputTokens(msgspec.Struct, kw_only=True, frozen=True):
    """The reply of /v1/responses/input_tokens."""

    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: Count


LOGPROBS = "message.output_text.logprobs"
# Fields of a chat that have other names or values here.
_TRANSLATED = frozenset(
    {
        *("messages", "n", "best_of", "stream", "stream_options", "max_tokens", "max_completion_tokens"),
        *("logprobs", "top_logprobs", "response_format", "reasoning_effort", "return_token_ids"),
        *("reasoning_field", "timings_per_token", "return_progress"),
    }
)
_PASSED = chat.FIELDS - _TRANSLATED
FIELDS = field_names(ResponsesRequest) | _PASSED
_UNREAD = _TRANSLATED - FIELDS
_NAMES = {
    "messages": "input",
    "prompt": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "logprobs": "include",
    "parameters": "parameters",
}
_REFUSED = ("conversation", "prompt", "max_tool_calls", "context_management", "moderation")


def plan(context: RequestContext, body: Mapping[str, object]) -> ResponsesReply:
    """Validate, render and tokenize a request, before the engine gets it. Raises RequestErrors."""
    asked, found, sent = _read(context, body)
    keeper = keeper_of(context, asked)
    with in_words_of(_NAMES, found.places):
        asking = {**sent, "messages": found.messages, "stream": asked.stream}
        planned = chat.plan_chat(context, asking, _NAMES)
    return ResponsesReply(context.model, asked, planned, found.places, keeper)


def count(context: RequestContext, body: Mapping[str, object]) -> ResponseInputTokens:
    """Count the tokens of a response's prompt. Raises RequestErrors."""
    _, found, sent = _read(context, body)
    seen = {name: value for name, value in sent.items() if name in models.TEMPLATE_FIELDS}
    with in_words_of(_NAMES, found.places):
        asking = parse_as({**seen, "messages": found.messages}, models.TemplateRequest)
        return ResponseInputTokens(input_tokens=len(models.prompt_ids(context, asking, _NAMES)))


def _read(
    context: RequestContext, body: Mapping[str, object]
) -> tuple[ResponsesRequest, ResponseConversation, dict[str, object]]:
    """The request, the conversation in it, and the other fields as a chat has them."""
    for name in _REFUSED:
        if body.get(name):
            raise InvalidField(f"{name}: this server cannot honour it; leave it out", name)
    refuse_words_of_a_chat(body, _UNREAD, _NAMES)
    validate.refuse(body, FIELDS)
    asked = parse_as(body, ResponsesRequest)
    asked = replace(asked, input=resolve_references(context, asked.input))
    found = conversation(asked.input, asked.instructions, earlier_items(context, asked.previous_response_id))
    sent = {name: value for name, value in body.items() if name in _PASSED}
    return asked, found, sent | _translate_fields(asked)


def _translate_fields(asked: ResponsesRequest) -> dict[str, object]:
    """The fields that have other names in a chat."""
    sent: dict[str, object] = {}
    if asked.max_output_tokens is not None:
        sent["max_completion_tokens"] = asked.max_output_tokens
    if asked.tools:
        sent["tools"] = chat_tools(asked.tools)
        sent["tool_choice"] = chat_tool_choice(asked.tool_choice)
    elif asked.tool_choice not in ("auto", "none"):
        raise InvalidField("tool_choice: there are no tools to choose from", "tool_choice")
    if asked.text.format is not None:
        sent["response_format"] = chat_format(asked.text.format)
    if asked.reasoning.effort is not None:
        sent["reasoning_effort"] = asked.reasoning.effort
    if LOGPROBS in asked.include:
        sent |= {"logprobs": True, "top_logprobs": asked.top_logprobs or 0}
    elif asked.top_logprobs:
        raise InvalidField(f"top_logprobs: it needs include: ['{LOGPROBS}']", "top_logprobs")
    return sent


class ResponsesReply(BlockReply):
    """One reply of /v1/responses, whole or as events; both are the same items in the end.

    A call that was cut is an incomplete item, as in its events.
    """

    def __init__(
        self,
        model: str,
        asked: ResponsesRequest,
        chat: ChatPlan,
        places: Sequence[str] = (),
        keeper: ResponseKeeper | None = None,
    ) -> None:
        super().__init__(chat, _NAMES, places)
        self.keeper, self._stored, self.in_background = keeper, Stored(), asked.background
        self.head = msgspec.structs.replace(_head(model, asked, chat.request), store=keeper is not None)
        self._ids: list[str] = []  # of the items
        self._num_sent = 0
        self._last: Response | None = None  # what was stored, and is then sent

    @property
    def warning(self) -> str:
        return super().warning or self._stored.warning

    def whole(self, traces: Iterable[RequestTrace | None] = ()) -> Response:
        is_cut = self.blocks.finish_reason == "length"
        return msgspec.structs.replace(
            self.head,
            store=self._stored.is_stored(self.keeper),
            status="incomplete" if is_cut else "completed",
            incomplete_details={"reason": "max_output_tokens"} if is_cut else None,
            completed_at=None if is_cut else int(time.time()),
            output=[self._item(block) for block in self.blocks.all],
            usage=_usage(self.count.usage()),
        )

    def push(self, delta: Delta) -> list[BlockStep]:
        steps = super().push(delta)
        self._ids += (new_id(_PREFIXES[step.block.kind], "_") for step in steps if step.what == "open")
        return steps

    def begin(self) -> Iterator[ResponseEvent]:
        yield self._event(StateEvent, "response.created", response=self.head)
        if self.in_background:
            yield self._event(StateEvent, "response.queued", response=self.head)
        running = msgspec.structs.replace(self.head, status="in_progress")
        yield self._event(StateEvent, "response.in_progress", response=running)

    def events(self, i: int, delta: Delta) -> Iterator[ResponseEvent]:
        for step in self.push(delta):
            yield from self._events(step)

    def end(self) -> Iterator[ResponseEvent]:
        response, warning = self._last or self.whole(), self.warning or UNSET
        yield self._event(StateEvent, f"response.{response.status}", response=response, warning=warning)

    def failed(self, problem: Problem) -> Iterator[ResponseEvent]:
        found = {"code": problem.code, "message": problem.message, "param": problem.param}
        yield self._event(ErrorEvent, "error", **found)
        yield self._event(StateEvent, "response.failed", response=self.end_early("failed", problem))

    def end_early(self, status: ResponseStatus, problem: Problem | None = None) -> Response:
        """The response of a reply that failed or was cancelled, with the output so far."""
        output = [self._item(block) for block in self.blocks.all]
        found = msgspec.structs.replace(self.head, status=status, output=output)
        if problem is None:
            return found
        code = "rate_limit_exceeded" if problem.status == 429 else "server_error"
        return msgspec.structs.replace(found, error={"code": code, "message": problem.message})

    async def keep(self, whole: msgspec.Struct) -> msgspec.Struct:
        assert isinstance(whole, Response)
        if self.keeper is None:
            return whole
        self._stored = await self.keeper.save(whole)
        return msgspec.structs.replace(whole, store=self._stored.is_stored(self.keeper))

    async def keep_streamed(self) -> None:
        if self.keeper is not None:
            self._last = self.whole()
            self._stored = await self.keeper.save(self._last)
            self._last = msgspec.structs.replace(self._last, store=self._stored.is_stored(self.keeper))

    def _events(self, step: BlockStep) -> Iterator[ResponseEvent]:
        block, index = step.block, step.block.index
        name, is_call = f"response.{_EVENTS[block.kind]}", block.kind == "call"
        at: dict[str, object] = {"item_id": self._ids[index], "output_index": index}
        if not is_call:
            at["content_index"] = 0
        match step.what:
            case "open":
                item = msgspec.structs.replace(self._item(block), status="in_progress")
                if not is_call:
                    item = msgspec.structs.replace(item, content=[])
                yield self._event(ItemEvent, "response.output_item.added", output_index=index, item=item)
                if not is_call:
                    yield self._event(PartEvent, "response.content_part.added", part=_part(block), **at)
            case "grow":
                logprobs = step.logprobs if block.kind == "text" else UNSET
                yield self._event(DeltaEvent, f"{name}.delta", delta=step.text, logprobs=logprobs, **at)
            case "close":
                if not is_call:
                    logprobs = block.logprobs if block.kind == "text" else UNSET
                    yield self._event(DoneEvent, f"{name}.done", text=block.text, logprobs=logprobs, **at)
                    yield self._event(PartEvent, "response.content_part.done", part=_part(block), **at)
                elif block.is_whole:
                    call = {"arguments": block.text, "name": block.name}
                    yield self._event(DoneEvent, f"{name}.done", **call, **at)
                item = self._item(block)
                yield self._event(ItemEvent, "response.output_item.done", output_index=index, item=item)

    def _item(self, block: ReplyBlock) -> OutputItem:
        status: ItemStatus = "completed" if block.is_whole else "incomplete"
        item, parts = OutputItem(self._ids[block.index], status, _TYPES[block.kind]), [_part(block)]
        match block.kind:
            case "reasoning":
                return msgspec.structs.replace(item, summary=[], content=parts)
            case "text":
                return msgspec.structs.replace(item, role="assistant", content=parts)
        return msgspec.structs.replace(item, call_id=block.id, name=block.name, arguments=block.text)

    def _event(self, event: type[E], kind: str, **fields: object) -> E:
        self._num_sent += 1
        return event(type=kind, sequence_number=self._num_sent - 1, **fields)


E = TypeVar("E", bound=ResponseEvent)
_PREFIXES = {"reasoning": "rs", "text": "msg", "call": "fc"}
_TYPES: Mapping[BlockKind, ItemType] = {"reasoning": "reasoning", "text": "message", "call": "function_call"}
_EVENTS = {"reasoning": "reasoning_text", "text": "output_text", "call": "function_call_arguments"}


def _part(block: ReplyBlock) -> OutputPart:
    if block.kind == "reasoning":
        return OutputPart("reasoning_text", block.text)
    return OutputPart("output_text", block.text, [], [*block.logprobs])


def _head(model: str, asked: ResponsesRequest, request: Request) -> Response:
    """The fields of a response that come from its request, before there is any output."""
    return Response(
        id=new_id("resp", "_"),
        status="queued" if asked.background else "in_progress",
        background=asked.background,
        previous_response_id=asked.previous_response_id,
        created_at=int(time.time()),
        instructions=asked.instructions,
        max_output_tokens=asked.max_output_tokens,
        metadata=asked.metadata,
        model=model,
        parallel_tool_calls=asked.parallel_tool_calls,
        reasoning={"effort": asked.reasoning.effort, "summary": None},
        temperature=request.params.temperature,
        text={"format": asked.text.format or {"type": "text"}},
        tool_choice=asked.tool_choice,
        tools=asked.tools,
        top_logprobs=asked.top_logprobs or 0,
        top_p=request.params.top_p,
    )


def _usage(found: Usage) -> ResponseUsage:
    return ResponseUsage(
        input_tokens=found.prompt_tokens,
        input_tokens_details=InputDetails(found.prompt_tokens_details.cached_tokens),
        output_tokens=found.completion_tokens,
        output_tokens_details=found.completion_tokens_details,
        total_tokens=found.total_tokens,
    )


ENDPOINTS = (
    Endpoint("/v1/responses", FIELDS, plan=plan),
    Endpoint("/v1/responses/input_tokens", FIELDS, answer=count),
)
