"""Prompts and vocabulary without a reply: conversations as the chat template renders them.

`/apply-template` is llama.cpp's, `/tokenizer_info` vLLM's: clients that build their prompts themselves, such
as lm-eval, read it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from plait.errors import InvalidField
from plait.server.api import validate
from plait.server.api.endpoint import Endpoint
from plait.server.api.schema import field_names, parse_as
from plait.server.api.tool_choice import allow_tools, from_template_kwargs
from plait.server.gateway.request_context import RequestContext

if TYPE_CHECKING:
    from plait.frontend.frontend import Front
    from plait.text.tokenizers.tokenizer import Tokenizer


class TemplateRequest(msgspec.Struct, kw_only=True, frozen=True):
    """POST /apply-template: the fields of a chat that its prompt depends on."""

    model: str | None = None
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = []
    tool_choice: str | dict[str, Any] | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] = {}
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False


FIELDS = field_names(TemplateRequest)


def prompt_ids(context: RequestContext, asked: TemplateRequest, words: Mapping[str, str] = {}) -> list[int]:
    """The prompt of a chat, however long it is. Raises InvalidField and BadTemplate.

    `words`: see `chat.plan_chat`.
    """
    front = context.front
    validate.check_messages(asked.messages)
    validate.check_template_kwargs(asked.chat_template_kwargs)
    listed, wishes = from_template_kwargs(asked.tools, asked.chat_template_kwargs, front.speech)
    choosable, choice = allow_tools(listed, asked.tool_choice)
    validate.check_tools(choosable, choice)
    kwargs, _, unread = front.speech.switched(wishes, asked.reasoning_effort)
    context.report_unread(unread, words)
    tools: Sequence[Any] = () if choice == "none" else choosable
    options = {**kwargs, **validate.turn_options(asked), "tools": list(tools) or None}
    return front.render_chat(asked.messages, **options)


def apply_template(context: RequestContext, body: Mapping[str, Any]) -> dict[str, Any]:
    """A conversation as the text that the model would get. Raises InvalidField and BadTemplate."""
    validate.refuse(body, FIELDS)
    ids = prompt_ids(context, parse_as(body, TemplateRequest))
    return {"prompt": tokenizer_of(context.front).decode(ids, skip_special=False)}


def tokenizer_info(front: Front) -> dict[str, Any]:
    """The vocabulary in the words of a tokenizer_config.json. Raises InvalidField without one."""
    tokenizer, template = tokenizer_of(front), front.chat_template
    special = sorted(tokenizer.special_ids)
    return {
        "tokenizer_class": type(tokenizer).__name__,
        "name": tokenizer.name,
        "vocab_size": front.spec.vocab_size,
        "model_max_length": front.max_model_len,
        "bos_token": _text(tokenizer, tokenizer.bos_token_id),
        "eos_token": _text(tokenizer, tokenizer.eos_token_id),
        "pad_token": None,
        "unk_token": None,
        "add_bos_token": tokenizer.add_bos,
        "added_tokens_decoder": {
            str(i): {"content": tokenizer.token_text(i), "special": True} for i in special
        },
        "chat_template": (template.source or None) if template else None,
        "chat_template_name": template.name if template else None,
    }


def tokenizer_of(front: Front) -> Tokenizer:
    """Raises InvalidField for a model that has none."""
    if front.tokenizer is None:
        raise InvalidField(f"{front.name} has no tokenizer; name a vocabulary with --vocab")
    return front.tokenizer


def _text(tokenizer: Tokenizer, token_id: int | None) -> str | None:
    return None if token_id is None else tokenizer.token_text(token_id)


ENDPOINTS = (Endpoint("/apply-template", FIELDS, answer=apply_template),)
