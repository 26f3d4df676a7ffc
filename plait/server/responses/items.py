"""Items of an output, responses, and their events, as Structs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from plait.server.api.reply import CompletionTokensDetails
from plait.server.api.token_scores import ChosenToken, Count

JsonObject = dict[str, object]
ItemStatus = Literal["in_progress", "completed", "incomplete", "calling", "failed"]
ItemType = Literal[
    "message", "reasoning", "function_call", "mcp_call", "mcp_list_tools", "mcp_approval_request"
]


class OutputPart(msgspec.Struct, frozen=True):
    """The content of an item: its text or its reasoning."""

    type: Literal["output_text", "reasoning_text"]
    text: str
    annotations: list[object] | UnsetType = UNSET
    logprobs: list[ChosenToken] | UnsetType = UNSET


class OutputItem(msgspec.Struct, frozen=True):
    """A message, reasoning, a call of a function, or what was done with an MCP server.

    `arguments` is JSON text. `tools`: of a list; `output` and `error`: of a call.
    """

    id: str
    status: ItemStatus | UnsetType
    type: ItemType
    role: Literal["assistant"] | UnsetType = UNSET
    summary: list[object] | UnsetType = UNSET
    content: list[OutputPart] | UnsetType = UNSET
    call_id: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    server_label: str | UnsetType = UNSET
    tools: list[dict[str, object]] | UnsetType = UNSET
    approval_request_id: str | UnsetType | None = UNSET
    output: str | UnsetType | None = UNSET
    error: dict[str, object] | str | UnsetType | None = UNSET


def server_call(
    item_id: str, status: ItemStatus, named: tuple[str, str], arguments: str, approval_id: str | None = None
) -> OutputItem:
    """The `mcp_call` of a tool before there is a result. `named`: its server's label, and its name."""
    return OutputItem(
        item_id,
        status,
        "mcp_call",
        server_label=named[0],
        name=named[1],
        arguments=arguments,
        approval_request_id=approval_id,
        output=None,
        error=None,
    )


class InputDetails(msgspec.Struct, frozen=True):
    cached_tokens: Count
    cache_write_tokens: Count = 0


class ResponseUsage(msgspec.Struct, kw_only=True, frozen=True):
    input_tokens: Count
    input_tokens_details: InputDetails
    output_tokens: Count
    output_tokens_details: CompletionTokensDetails
    total_tokens: Count


ResponseStatus = Literal["completed", "incomplete", "failed", "in_progress", "queued", "cancelled"]


class InConversation(msgspec.Struct, frozen=True):
    id: str


class Response(msgspec.Struct, kw_only=True, frozen=True):
    """The reply of /v1/responses, and what the first and last events of its stream hold."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: ResponseStatus = "in_progress"
    completed_at: int | None = None
    background: bool = False
    error: dict[str, str] | None = None
    incomplete_details: dict[str, str] | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None = None
    metadata: dict[str, str]
    model: str
    output: list[OutputItem] = []
    parallel_tool_calls: bool
    previous_response_id: str | None = None
    conversation: InConversation | None = None
    reasoning: dict[str, str | None]
    service_tier: Literal["default"] = "default"
    store: bool = False
    temperature: float | None
    text: JsonObject
    tool_choice: str | JsonObject
    tools: list[JsonObject]
    top_logprobs: Count
    top_p: float | None
    truncation: Literal["disabled"] = "disabled"
    usage: ResponseUsage | None = None


class ResponseEvent(msgspec.Struct, kw_only=True, frozen=True):
    """One event of a stream; numbered from 0."""

    type: str
    sequence_number: Count


class StateEvent(ResponseEvent, kw_only=True, frozen=True):
    """`warning`: what a whole reply has in the header x-plait-warning."""

    response: Response
    warning: str | UnsetType = UNSET


class ErrorEvent(ResponseEvent, kw_only=True, frozen=True):
    code: str | None
    message: str
    param: str | None


class ItemEvent(ResponseEvent, kw_only=True, frozen=True):
    output_index: Count
    item: OutputItem


class ServerEvent(ResponseEvent, kw_only=True, frozen=True):
    """How far a call of a server's tool is, or a list of tools."""

    item_id: str
    output_index: Count


class PartEvent(ResponseEvent, kw_only=True, frozen=True):
    part: OutputPart
    item_id: str
    output_index: Count
    content_index: Count


class DeltaEvent(ResponseEvent, kw_only=True, frozen=True):
    delta: str
    item_id: str
    output_index: Count
    content_index: Count | UnsetType = UNSET
    logprobs: Sequence[ChosenToken] | UnsetType = UNSET


class DoneEvent(ResponseEvent, kw_only=True, frozen=True):
    text: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    logprobs: list[ChosenToken] | UnsetType = UNSET
    name: str | UnsetType = UNSET
    item_id: str
    output_index: Count
    content_index: Count | UnsetType = UNSET
