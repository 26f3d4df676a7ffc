"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's way to ask for a chat.

The request becomes a chat, and the chat's chunks become content blocks and named events, so tools and
reasoning are those of /v1/chat/completions. Errors have Anthropic's shape here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from plait.errors import InvalidField
from plait.frontend.request_options import Terms
from plait.request import SamplingFields
from plait.server.anthropic.message_blocks import (
    Conversation,
    chat_output,
    chat_thinking,
    chat_tool_choice,
    chat_tools,
    conversation,
)
from plait.server.api import validate
from plait.server.api.content_blocks import Block, Blocks, Step
from plait.server.api.endpoint import Endpoint
from plait.server.api.error_translation import in_words_of, refuse_words_of_a_chat
from plait.server.api.event_reply import Event
from plait.server.api.schema import Objects, field_names, typed
from plait.server.http.tasks import new_id
from plait.server.openai import chat, tokenize

if TYPE_CHECKING:
    from plait.frontend.delta import Delta
    from plait.frontend.frontend import Front
    from plait.server.api.completion_reply import Reply, Usage
    from plait.server.http.errors import Problem


@dataclass(frozen=True, kw_only=True)
class CountRequest:
    """POST /v1/messages/count_tokens."""

    model: str | None = None
    messages: list[dict[str, Any]]
    system: str | list[dict[str, Any]] | None = None
    tools: Objects = field(default_factory=list)
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class MessagesRequest(CountRequest, SamplingFields, Terms):
    """POST /v1/messages. What a chat takes beside this (`seed`, `min_p`, …) is taken here too."""

    max_tokens: int
    stop_sequences: tuple[str, ...] = ()
    stream: bool = False
    metadata: dict[str, Any] | None = None


# What is the chat's own matter, and said differently here.
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
_REFUSED = ("mcp_servers", "container", "context_management")
_STOPS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
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


def outcome(front: Front, model: str, body: Mapping[str, Any]) -> Messages:
    """Everything that can be refused before the engine is asked. Renders, tokenizes. Raises RequestErrors."""
    refuse_words_of_a_chat(body, _UNREAD, _NAMES)
    _refuse(body, FIELDS)
    asked = typed(body, MessagesRequest)
    found = conversation(asked.messages, asked.system)
    sent = {name: value for name, value in body.items() if name in _PASSED}
    sent |= _translated(asked) | {"stream": asked.stream}
    if asked.stop_sequences:
        sent["stop"] = asked.stop_sequences
    return Messages(model, asked.stream, _planned(front, model, found, sent), found.places)


def count(front: Front, model: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """How long a prompt would be. Raises RequestErrors."""
    _refuse(body, COUNT_FIELDS)
    asked = typed(body, CountRequest)
    found, sent = conversation(asked.messages, asked.system), _translated(asked)
    seen = {name: value for name, value in sent.items() if name in tokenize.FIELDS}
    with in_words_of(_NAMES, found.places):
        asking = tokenize.TemplateRequest(messages=found.messages, **_going_on(found), **seen)
        ids = tokenize.prompt_ids(front, asking, _NAMES)
    return {"input_tokens": len(ids)}


def refusal(found: Problem) -> dict[str, Any]:
    """An error as Anthropic's clients read it."""
    kind = _KINDS.get(found.status, "api_error" if found.status >= 500 else "invalid_request_error")
    message = found.message
    if "n_ctx" in found.more:  # Anthropic's own words, which its clients look for
        numbers = f"{found.more['n_prompt_tokens']} tokens > {found.more['n_ctx'] - 1} maximum"
        message = f"prompt is too long: {numbers}. {message}"
    return {"type": "error", "error": {"type": kind, "message": message}}


def _refuse(body: Mapping[str, Any], read: frozenset[str]) -> None:
    for name in _REFUSED:
        if body.get(name):
            raise InvalidField(f"{name}: this server cannot honour it; leave it out", name)
    validate.refuse(body, read)


def _planned(front: Front, model: str, found: Conversation, sent: Mapping[str, Any]) -> Reply:
    with in_words_of(_NAMES, found.places):
        return chat.plan(front, model, {**sent, **_going_on(found), "messages": found.messages}, _NAMES)


def _going_on(found: Conversation) -> dict[str, Any]:
    """A reply goes on from the assistant's words if the conversation ends with them."""
    return {"continue_final_message": True} if found.messages[-1]["role"] == "assistant" else {}


def _translated(asked: CountRequest) -> dict[str, Any]:
    """The fields that a chat calls otherwise."""
    sent: dict[str, Any] = {}
    if asked.tools:
        sent |= {"tools": chat_tools(asked.tools), **chat_tool_choice(asked.tool_choice or {"type": "auto"})}
    elif asked.tool_choice and asked.tool_choice.get("type") not in ("auto", "none"):
        raise InvalidField("tool_choice: there are no tools to choose from", "tool_choice")
    return sent | chat_thinking(asked.thinking or {}) | chat_output(asked.output_config or {})


class Messages:
    """One response, whole or as events; both are the same blocks in the end."""

    def __init__(self, model: str, stream: bool, reply: Reply, places: Sequence[str] = ()) -> None:
        self._model, self._reply, self._blocks, self._places = model, reply, Blocks(), places
        self.requests, self.stream = reply.requests, stream
        self._id = new_id("msg", "_")

    @property
    def warning(self) -> str:
        return self._reply.warning

    def words(self) -> AbstractContextManager[None]:
        return in_words_of(_NAMES, self._places)

    def add(self, i: int, delta: Delta) -> None:
        for _ in self._steps(delta):
            pass

    def body(self, usage: Usage) -> dict[str, Any]:
        content = [_content(block) for block in self._blocks.kept]
        return self._message(content, _usage(usage.body()), self._end())

    def begin(self) -> Iterable[Event]:
        count = len(self.requests[0].prompt_token_ids)
        usage = {"input_tokens": count, "output_tokens": 0, **_cached(0)}
        end = {"stop_reason": None, "stop_sequence": None}
        yield {"type": "message_start", "message": self._message([], usage, end)}

    def events(self, delta: Delta) -> Iterable[Event]:
        return (_told(step) for step in self._steps(delta))

    def end(self, usage: Usage) -> Iterable[Event]:
        more = {"warning": self.warning} if self.warning else {}
        yield {"type": "message_delta", "delta": self._end(), "usage": _usage(usage.body()), **more}
        yield {"type": "message_stop"}

    def failed(self, problem: Problem) -> Iterable[Event]:
        yield refusal(problem)

    def _steps(self, delta: Delta) -> Iterator[Step]:
        for choice in self._reply.chunks(0, delta):
            yield from self._blocks.take(choice)

    def _message(self, content: list[Any], usage: dict[str, Any], end: dict[str, Any]) -> dict[str, Any]:
        head = {"id": self._id, "type": "message", "role": "assistant", "model": self._model}
        return {**head, "content": content, **end, "usage": usage}

    def _end(self) -> dict[str, Any]:
        """Why it ended: a stop sequence is named, and whole calls are calls if nothing cut the reply."""
        reason, matched = self._blocks.finish_reason, self._blocks.stop_reason
        found = _STOPS.get(reason, "end_turn")
        if found == "end_turn" and self._blocks.has_calls:
            found = "tool_use"
        if reason == "stop" and isinstance(matched, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": matched}
        return {"stop_reason": found, "stop_sequence": None}


def _told(step: Step) -> Event:
    block = step.block
    match step.what:
        case "open":
            # A call's input comes in pieces of JSON after an empty object.
            found = _content(block)
            return {"type": "content_block_start", "index": block.index, "content_block": found}
        case "close":
            return {"type": "content_block_stop", "index": block.index}
    kind, field = _DELTAS[block.kind]
    delta = {"type": kind, field: step.piece}
    return {"type": "content_block_delta", "index": block.index, "delta": delta}


_DELTAS = {
    "text": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}


def _content(block: Block) -> dict[str, Any]:
    match block.kind:
        case "text":
            return {"type": "text", "text": block.text, "citations": None}
        case "reasoning":
            return {"type": "thinking", "thinking": block.text, "signature": ""}
    arguments = msgspec.json.decode(block.text) if block.is_whole else {}
    return {"type": "tool_use", "id": block.id, "name": block.name, "input": arguments}


def _usage(chat_usage: Mapping[str, Any]) -> dict[str, Any]:
    """Tokens that were found computed are counted apart from the input."""
    cached = chat_usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": chat_usage["prompt_tokens"] - cached,
        "output_tokens": chat_usage["completion_tokens"],
        **_cached(cached),
    }


def _cached(count: int) -> dict[str, int]:
    return {"cache_read_input_tokens": count, "cache_creation_input_tokens": 0}


ENDPOINTS = (
    Endpoint("/v1/messages", FIELDS, outcome=outcome, refusal=refusal),
    Endpoint("/v1/messages/count_tokens", COUNT_FIELDS, answer=count, refusal=refusal),
)
