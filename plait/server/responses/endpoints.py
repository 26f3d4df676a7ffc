"""POST /v1/responses: OpenAI's Responses API.

The request becomes a chat, and the chat's reply becomes items and named events, so tools, reasoning and
structured output are those of /v1/chat/completions. `state` stores responses, if the server has a
store, and has the items of those that a conversation goes on from. `mcp_reply` calls tools of MCP servers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from plait.errors import InvalidField
from plait.server.api.content_blocks import in_words_of
from plait.server.api.endpoint import Endpoint
from plait.server.api.parse_fields import parse_as
from plait.server.api.reply import ChatPlan
from plait.server.api.token_scores import Count
from plait.server.gateway.request_context import RequestContext
from plait.server.openai import chat, models
from plait.server.responses.mcp_calls import McpCaller, read_pending
from plait.server.responses.mcp_reply import McpReply
from plait.server.responses.reply import ResponsesReply
from plait.server.responses.request import FIELDS, NAMES, ReadRequest, read_request
from plait.server.responses.state import keeper_of


class ResponseInputTokens(msgspec.Struct, kw_only=True, frozen=True):
    """The reply of /v1/responses/input_tokens."""

    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: Count


def plan(context: RequestContext, body: Mapping[str, object]) -> ResponsesReply:
    """Validate, render and tokenize a request, before the engine gets it. Raises RequestErrors."""
    found = read_request(context, body)
    keeper = keeper_of(context, found.asked)
    planned, places = plan_chat_of(context, found)
    pending = read_pending(found.asked.input, found.earlier, found.servers)
    if found.servers:
        caller = McpCaller(context.mcp.timeout_s)
        return McpReply(context.model, found, planned, keeper, caller, pending)
    return ResponsesReply(context.model, found.asked, planned, places, keeper)


def plan_chat_of(context: RequestContext, found: ReadRequest) -> tuple[ChatPlan, Sequence[str]]:
    """The chat of a request without its servers' tools, and where each message came from."""
    said = found.conversation()
    with in_words_of(NAMES, said.places):
        asking = {**found.sent, "messages": said.messages, "stream": found.asked.stream}
        return chat.plan_chat(context, asking, NAMES), said.places


def count(context: RequestContext, body: Mapping[str, object]) -> ResponseInputTokens:
    """Count the tokens of a response's prompt. Raises RequestErrors."""
    found = read_request(context, body)
    if found.servers:
        raise InvalidField(
            "tools: those of an MCP server are listed for a response only; leave it out", "tools"
        )
    said = found.conversation()
    seen = {name: value for name, value in found.sent.items() if name in models.TEMPLATE_FIELDS}
    with in_words_of(NAMES, said.places):
        asking = parse_as({**seen, "messages": said.messages}, models.TemplateRequest)
        return ResponseInputTokens(input_tokens=len(models.prompt_ids(context, asking, NAMES)))


ENDPOINTS = (
    Endpoint("/v1/responses", FIELDS, plan=plan),
    Endpoint("/v1/responses/input_tokens", FIELDS, answer=count),
)
