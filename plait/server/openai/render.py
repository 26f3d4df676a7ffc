"""A request's prompt as the tokens that the engine would get: vLLM's paths, which gateways ask to route.

Bodies are those of /v1/completions and /v1/chat/completions, and are checked in the same way.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from plait.request import Request
from plait.server.api.endpoint import Endpoint
from plait.server.api.token_scores import Count
from plait.server.gateway.request_context import RequestContext
from plait.server.openai import chat, completions


class RenderedPrompt(msgspec.Struct, kw_only=True, frozen=True):
    """A prompt. `token_ids`: with all that the template and the tokenizer add to the text."""

    request_id: str
    token_ids: list[Count]
    model: str


def render_chat(context: RequestContext, body: Mapping[str, object]) -> RenderedPrompt:
    """The prompt of a chat. Raises what /v1/chat/completions raises before it generates."""
    return _describe_prompt(context, chat.plan_chat(context, body).request)


def render_completions(context: RequestContext, body: Mapping[str, object]) -> list[RenderedPrompt]:
    """The prompts of a completion, of which there may be several. Raises as /v1/completions does."""
    return [_describe_prompt(context, request) for request in completions.plan(context, body).requests]


def _describe_prompt(context: RequestContext, request: Request) -> RenderedPrompt:
    ids = [*request.prompt_token_ids]
    return RenderedPrompt(request_id=request.id, token_ids=ids, model=context.model)


ENDPOINTS = (
    Endpoint("/v1/completions/render", completions.FIELDS, answer=render_completions),
    Endpoint("/v1/chat/completions/render", chat.FIELDS, answer=render_chat),
)
