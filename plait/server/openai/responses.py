"""POST /v1/responses: OpenAI's other way to ask for a chat, without memory of earlier ones.

The request becomes a chat, and the chat's chunks become items and named events, so tools, reasoning and
structured output are those of /v1/chat/completions. Nothing is stored, and every response says so.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec

from plait.errors import InvalidField
from plait.frontend.request_options import Terms
from plait.request import NO_ENTRIES, MaxTokens, NumLogprobs, Request, SamplingFields
from plait.server.api import validate
from plait.server.api.content_blocks import Block, Blocks, Step
from plait.server.api.endpoint import Endpoint
from plait.server.api.error_translation import in_words_of, refuse_words_of_a_chat
from plait.server.api.event_reply import Event
from plait.server.api.schema import Objects, field_names, typed
from plait.server.http.tasks import new_id
from plait.server.openai import chat, tokenize
from plait.server.openai.response_items import (
    Conversation,
    chat_format,
    chat_tool_choice,
    chat_tools,
    conversation,
)

if TYPE_CHECKING:
    from plait.frontend.delta import Delta
    from plait.frontend.frontend import Front
    from plait.server.api.completion_reply import Reply, Usage
    from plait.server.http.errors import Problem


class NotStored(InvalidField):
    """A response of earlier is referred to, and none is kept."""

    code = "previous_response_not_found"


class TextOptions(msgspec.Struct, kw_only=True, frozen=True):
    format: dict[str, Any] | None = None
    verbosity: Literal["medium"] | None = None


class ReasoningOptions(msgspec.Struct, kw_only=True, frozen=True):
    effort: str | None = None
    summary: Literal["auto"] | None = None
    generate_summary: Literal["auto"] | None = None


class StreamOptions(msgspec.Struct, kw_only=True, frozen=True):
    include_obfuscation: Literal[False] | None = None


PLAIN_TEXT, USUAL_REASONING = TextOptions(), ReasoningOptions()


@dataclass(frozen=True, kw_only=True)
class ResponsesRequest(SamplingFields, Terms):
    """POST /v1/responses. What a chat takes beside this (`seed`, `top_k`, `stop`, …) is taken here too."""

    model: str | None = None
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: MaxTokens = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    tools: Objects = field(default_factory=list)
    tool_choice: str | dict[str, Any] = "auto"
    parallel_tool_calls: bool = True
    text: TextOptions = PLAIN_TEXT
    reasoning: ReasoningOptions = USUAL_REASONING
    top_logprobs: NumLogprobs = None
    include: tuple[Literal["message.output_text.logprobs", "reasoning.encrypted_content"], ...] = ()
    metadata: Annotated[dict[str, str], NO_ENTRIES] = field(default_factory=dict)
    truncation: Literal["disabled"] = "disabled"
    background: Literal[False] = False
    store: bool = False
    previous_response_id: str | None = None


LOGPROBS = "message.output_text.logprobs"
# What is the chat's own matter, and said differently here.
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


def outcome(front: Front, model: str, body: Mapping[str, Any]) -> Responses:
    """Everything that can be refused before the engine is asked. Renders, tokenizes. Raises RequestErrors."""
    asked, found, sent = _read(body)
    with in_words_of(_NAMES, found.places):
        asking = {**sent, "messages": found.messages, "stream": asked.stream}
        reply = chat.plan(front, model, asking, _NAMES)
    return Responses(model, asked, reply, found.places)


def count(front: Front, model: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """How long the prompt of a response would be. Raises RequestErrors."""
    _, found, sent = _read(body)
    seen = {name: value for name, value in sent.items() if name in tokenize.FIELDS}
    with in_words_of(_NAMES, found.places):
        asking = typed({**seen, "messages": found.messages}, tokenize.TemplateRequest)
        ids = tokenize.prompt_ids(front, asking, _NAMES)
    return {"object": "response.input_tokens", "input_tokens": len(ids)}


def _read(body: Mapping[str, Any]) -> tuple[ResponsesRequest, Conversation, dict[str, Any]]:
    """What is asked, the conversation in it, and the other fields as a chat says them."""
    for name in _REFUSED:
        if body.get(name):
            raise InvalidField(f"{name}: this server cannot honour it; leave it out", name)
    refuse_words_of_a_chat(body, _UNREAD, _NAMES)
    validate.refuse(body, FIELDS)
    asked = typed(body, ResponsesRequest)
    if asked.previous_response_id is not None:
        text = "previous_response_id: nothing is stored here; send the earlier items in input"
        raise NotStored(text, "previous_response_id")
    found = conversation(asked.input, asked.instructions)
    sent = {name: value for name, value in body.items() if name in _PASSED}
    return asked, found, sent | _translated(asked)


def _translated(asked: ResponsesRequest) -> dict[str, Any]:
    """The fields that a chat calls otherwise."""
    sent: dict[str, Any] = {}
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


class Responses:
    """One response, whole or as events; both are the same items in the end."""

    def __init__(self, model: str, asked: ResponsesRequest, reply: Reply, places: Sequence[str] = ()) -> None:
        self._reply, self._asked, self._blocks, self._places = reply, asked, Blocks(), places
        self.requests, self.stream = reply.requests, asked.stream
        self._head = _head(model, asked, reply.requests[0])
        self._ids: list[str] = []
        self._sent = 0

    @property
    def warning(self) -> str:
        return self._reply.warning

    def words(self) -> AbstractContextManager[None]:
        return in_words_of(_NAMES, self._places)

    def add(self, i: int, delta: Delta) -> None:
        for _ in self._steps(delta):
            pass

    def body(self, usage: Usage) -> dict[str, Any]:
        is_cut = self._blocks.finish_reason == "length"
        return {
            **self._head,
            "status": "incomplete" if is_cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "completed_at": None if is_cut else int(time.time()),
            "output": [self._item(block) for block in self._blocks.kept],
            "usage": _usage(usage.body()),
        }

    def begin(self) -> Iterable[Event]:
        for name in ("created", "in_progress"):
            yield self._event(f"response.{name}", response=self._head)

    def events(self, delta: Delta) -> Iterable[Event]:
        for step in self._steps(delta):
            yield from self._told(step)

    def end(self, usage: Usage) -> Iterable[Event]:
        body = self.body(usage)
        more = {"warning": self.warning} if self.warning else {}
        yield self._event(f"response.{body['status']}", response=body, **more)

    def failed(self, problem: Problem) -> Iterable[Event]:
        yield self._event("error", code=problem.code, message=problem.message, param=problem.param)
        code = "rate_limit_exceeded" if problem.status == 429 else "server_error"
        error = {"code": code, "message": problem.message}
        output = [self._item(block) for block in self._blocks.kept]
        response = {**self._head, "status": "failed", "error": error, "output": output}
        yield self._event("response.failed", response=response)

    def _steps(self, delta: Delta) -> Iterator[Step]:
        for choice in self._reply.chunks(0, delta):
            for step in self._blocks.take(choice):
                if step.what == "open":
                    self._ids.append(new_id(_PREFIXES[step.block.kind], "_"))
                yield step

    def _told(self, step: Step) -> Iterator[Event]:
        block = step.block
        at = {"item_id": self._ids[block.index], "output_index": block.index}
        if block.kind != "call":
            at["content_index"] = 0
        name, field = _EVENTS[block.kind]
        logprobs = {"logprobs": list(step.logprobs or ())} if block.kind == "text" else {}
        match step.what:
            case "open":
                item = {**self._item(block), "status": "in_progress"}
                if block.kind != "call":
                    item["content"] = []
                yield self._event("response.output_item.added", output_index=block.index, item=item)
                if block.kind != "call":
                    yield self._event("response.content_part.added", part=_part(block), **at)
            case "grow":
                yield self._event(f"response.{name}.delta", delta=step.piece, **at, **logprobs)
            case "close":
                yield from self._closed(block, f"response.{name}.done", field, at)

    def _closed(self, block: Block, name: str, field: str, at: Mapping[str, Any]) -> Iterator[Event]:
        whole: dict[str, Any] = {field: block.text}
        if block.kind == "text":
            whole["logprobs"] = block.logprobs
        if block.kind == "call":
            whole["name"] = block.name
        if block.kind != "call" or block.is_whole:
            yield self._event(name, **whole, **at)
        if block.kind != "call":
            yield self._event("response.content_part.done", part=_part(block), **at)
        yield self._event("response.output_item.done", output_index=block.index, item=self._item(block))

    def _item(self, block: Block) -> dict[str, Any]:
        """A block as an item of the output."""
        status = "completed" if block.is_whole else "incomplete"
        item: dict[str, Any] = {"id": self._ids[block.index], "status": status}
        match block.kind:
            case "reasoning":
                return {**item, "type": "reasoning", "summary": [], "content": [_part(block)]}
            case "text":
                return {**item, "type": "message", "role": "assistant", "content": [_part(block)]}
        call = {"call_id": block.id, "name": block.name, "arguments": block.text}
        return {**item, "type": "function_call", **call}

    def _event(self, kind: str, **fields: Any) -> Event:
        event = {"type": kind, "sequence_number": self._sent, **fields}
        self._sent += 1
        return event


_PREFIXES = {"reasoning": "rs", "text": "msg", "call": "fc"}
_EVENTS = {
    "reasoning": ("reasoning_text", "text"),
    "text": ("output_text", "text"),
    "call": ("function_call_arguments", "arguments"),
}


def _part(block: Block) -> dict[str, Any]:
    if block.kind == "reasoning":
        return {"type": "reasoning_text", "text": block.text}
    return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": list(block.logprobs)}


def _head(model: str, asked: ResponsesRequest, request: Request) -> dict[str, Any]:
    """What a response says of its request, before there is any output."""
    return {
        "id": new_id("resp", "_"),
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "completed_at": None,
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": asked.instructions,
        "max_output_tokens": asked.max_output_tokens,
        "max_tool_calls": None,
        "metadata": asked.metadata,
        "model": model,
        "output": [],
        "parallel_tool_calls": asked.parallel_tool_calls,
        "previous_response_id": None,
        "reasoning": {"effort": asked.reasoning.effort, "summary": None},
        "service_tier": "default",
        "store": False,
        "temperature": request.params.temperature,
        "text": {"format": asked.text.format or {"type": "text"}},
        "tool_choice": asked.tool_choice,
        "tools": asked.tools,
        "top_logprobs": asked.top_logprobs or 0,
        "top_p": request.params.top_p,
        "truncation": "disabled",
        "usage": None,
    }


def _usage(chat_usage: Mapping[str, Any]) -> dict[str, Any]:
    details = chat_usage.get("completion_tokens_details") or {}
    cached = chat_usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": chat_usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": chat_usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": details.get("reasoning_tokens", 0)},
        "total_tokens": chat_usage["total_tokens"],
    }


ENDPOINTS = (
    Endpoint("/v1/responses", FIELDS, outcome=outcome),
    Endpoint("/v1/responses/input_tokens", FIELDS, answer=count),
)
