"""The request of /v1/responses: its fields, and what they are called in a chat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

import msgspec
from msgspec import Struct

from plait.engine.admission import ServiceOptions
from plait.errors import InvalidField
from plait.sampling_fields import NO_ENTRIES, MaxTokens, NumLogprobs, SamplingFields
from plait.server.api import validate
from plait.server.api.content_blocks import refuse_words_of_a_chat
from plait.server.api.parse_fields import field_names, parse_as
from plait.server.api.schema import Objects
from plait.server.api.stored_metadata import read_metadata
from plait.server.api.unread_keys import HARMLESS, list_keys
from plait.server.gateway.request_context import RequestContext
from plait.server.openai import chat
from plait.server.responses.input_items import (
    NameTool,
    ResponseConversation,
    chat_format,
    chat_tool_choice,
    chat_tools,
    conversation,
)
from plait.server.responses.mcp_tools import RequestedServer, name_with_label, read_servers
from plait.server.responses.state import Item, conversation_items, earlier_items, resolve_references

TextOrItems = Annotated[str | list[dict[str, object]], msgspec.Meta(extra_json_schema={"default": []})]


class TextOptions(msgspec.Struct, kw_only=True, frozen=True):
    format: dict[str, object] | None = None
    verbosity: Literal["medium"] | None = None


class ReasoningOptions(msgspec.Struct, kw_only=True, frozen=True):
    effort: str | None = None
    summary: Literal["auto"] | None = None
    generate_summary: Literal["auto"] | None = None


class ResponseStreamOptions(msgspec.Struct, kw_only=True, frozen=True):
    include_obfuscation: Literal[False] | None = None


class ConversationParam(msgspec.Struct, kw_only=True, frozen=True):
    id: str


PLAIN_TEXT, USUAL_REASONING = TextOptions(), ReasoningOptions()


@dataclass(frozen=True, kw_only=True)
class ResponsesRequest(SamplingFields, ServiceOptions):
    """POST /v1/responses. The other fields of a chat (`seed`, `top_k`, `stop`, …) are accepted here too.

    `input` may be left out where a conversation has items already.
    """

    model: str | None = None
    input: TextOrItems = field(default_factory=list)
    instructions: str | None = None
    max_output_tokens: MaxTokens = None
    stream: bool = False
    stream_options: ResponseStreamOptions | None = None
    tools: Objects = field(default_factory=list)
    tool_choice: str | dict[str, object] = "auto"
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
    conversation: str | ConversationParam | None = None
    max_tool_calls: Annotated[int, msgspec.Meta(ge=1)] | None = None

    @property
    def conversation_id(self) -> str | None:
        found = self.conversation
        return found.id if isinstance(found, ConversationParam) else found


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
NAMES = {
    "messages": "input",
    "prompt": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "logprobs": "include",
    "parameters": "parameters",
}
_REFUSED = ("prompt", "context_management", "moderation")
_FUNCTION_KEYS = frozenset({"type", "name", "description", "parameters", "strict"})
_ITEM_KEYS = frozenset(
    {
        *("type", "id", "status", "role", "content", "summary", "encrypted_content", "call_id", "name"),
        *("arguments", "output", "error", "server_label", "tools"),
        *("approval_request_id", "approve", "reason"),
        *("caller", "created_by"),  # of items that another server made
    }
)
_PART_KEYS = HARMLESS | {"type", "text", "refusal", "logprobs"}


class ReadRequest(Struct, frozen=True):
    """A request with what it stands for.

    `sent`: its other fields as a chat has them, with the client's own functions alone. `earlier`: the items
    before its input. `servers`: of its `mcp` tools.
    """

    asked: ResponsesRequest
    sent: dict[str, object]
    earlier: Sequence[Item]
    servers: Sequence[RequestedServer]

    def conversation(
        self, name_tool: NameTool = name_with_label, output: Sequence[Item] = ()
    ) -> ResponseConversation:
        """The chat that the items stand for. `output`: those that the response has made so far."""
        return conversation(self.asked.input, self.asked.instructions, self.earlier, output, name_tool)


def read_request(context: RequestContext, body: Mapping[str, object]) -> ReadRequest:
    """Validate the fields that are not a chat's, and find the items. Raises RequestErrors."""
    for name in _REFUSED:
        if body.get(name):
            raise InvalidField(f"{name}: this server cannot honour it; leave it out", name)
    _check_caching(body.get("prompt_cache_options"))
    refuse_words_of_a_chat(body, _UNREAD, NAMES)
    validate.refuse(body, FIELDS)
    asked = parse_as(body, ResponsesRequest)
    context.report_unread(_list_unread(body), {})
    read_metadata(asked.metadata)
    asked = replace(asked, input=resolve_references(context, asked.input))
    servers = read_servers(asked.tools, context.mcp)
    earlier = _earlier(context, asked)
    sent = {name: value for name, value in body.items() if name in _PASSED - {"tools", "tool_choice"}}
    return ReadRequest(asked, sent | _translate_fields(asked, has_servers=bool(servers)), earlier, servers)


def _list_unread(body: Mapping[str, object]) -> list[str]:
    """Fields of objects that change nothing here, such as `reasoning.context` and `tools.defer_loading`."""
    tools, items = (value if isinstance(value, list) else [] for value in map(body.get, ("tools", "input")))
    functions = [tool for tool in tools if isinstance(tool, Mapping) and tool.get("type") == "function"]
    contents = [item.get(key) for item in items if isinstance(item, Mapping) for key in ("content", "output")]
    texts = [part for content in contents if isinstance(content, list) for part in content]
    parts = {"text": TextOptions, "reasoning": ReasoningOptions}
    sent = {at: value for at in parts if isinstance(value := body.get(at), Mapping)}
    unread = (
        f"{at}.{name}" for at, value in sent.items() for name in value if name not in field_names(parts[at])
    )
    return [
        *unread,
        *list_keys(functions, _FUNCTION_KEYS, "tools"),
        *list_keys(items, _ITEM_KEYS, "input"),
        *list_keys(texts, _PART_KEYS, "input.content"),
    ]


def _check_caching(options: object) -> None:
    """Raises InvalidField for options under which OpenAI would generate nothing."""
    if isinstance(options, Mapping) and options.get("prewarm"):
        at = "prompt_cache_options.prewarm"
        raise InvalidField(f"{at}: this server cannot honour it; send the request itself", at)


def _earlier(context: RequestContext, asked: ResponsesRequest) -> list[Item]:
    """The items before the input."""
    if asked.conversation_id is None:
        return earlier_items(context, asked.previous_response_id)
    if asked.previous_response_id is not None:
        text = "conversation: a request goes on from it or from previous_response_id; send one of them"
        raise InvalidField(text, "conversation")
    return conversation_items(context, asked.conversation_id)


def _translate_fields(asked: ResponsesRequest, *, has_servers: bool) -> dict[str, object]:
    """The fields that have other names in a chat."""
    sent: dict[str, object] = {}
    if asked.max_output_tokens is not None:
        sent["max_completion_tokens"] = asked.max_output_tokens
    choice = chat_tool_choice(asked.tool_choice, has_servers=has_servers)
    if functions := chat_tools(asked.tools):
        sent["tools"] = functions
        # With servers the choice is honoured once their tools are known.
        sent["tool_choice"] = "auto" if has_servers else choice
    elif asked.tool_choice not in ("auto", "none") and not has_servers:
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
