"""Requests of Ollama's API as a chat: names of fields, `options`, and messages.

A field or an option is honoured, or refused by name, or changes no reply and is reported in a header.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from plait.engine.admission import ServiceOptions
from plait.errors import InvalidField
from plait.sampling_fields import SamplingFields, shorten
from plait.server.api.content_blocks import refuse_words_of_a_chat
from plait.server.api.parse_fields import field_names, rename_params
from plait.server.api.unsupported_params import UNREAD
from plait.server.gateway.request_context import RequestContext
from plait.server.ollama.wire import check_keep_alive
from plait.server.openai import chat

# How Ollama would load a model. They change no reply: a prompt that does not fit is refused in any case.
LOADING = frozenset(
    {
        *("num_ctx", "num_batch", "num_gpu", "main_gpu", "num_thread", "use_mmap", "use_mlock"),
        *("numa", "low_vram", "f16_kv"),
    }
)
SHARED = frozenset(
    {
        *("model", "stream", "options", "keep_alive", "format", "think", "logprobs", "top_logprobs"),
        *("truncate", "shift", "max_tokens", "stop"),
    }
)
FIELDS = SHARED | field_names(SamplingFields) | field_names(ServiceOptions)
CHAT_FIELDS = FIELDS | {"messages", "tools", "tool_choice"}
GENERATE_FIELDS = FIELDS | {"prompt", "system", "raw", "suffix", "template", "context", "images"}
# What a chat's fields are called here.
NAMES = {
    "max_tokens": "options.num_predict",
    "repetition_penalty": "options.repeat_penalty",
    "chat_template_kwargs": "think",
    "reasoning_effort": "think",
    "response_format": "format",
    "prompt": "prompt",
}
_NOT_HERE = frozenset(
    {
        *("n", "best_of", "stream_options", "response_format", "return_token_ids", "timings_per_token"),
        *("return_progress", "reasoning_field", "include_reasoning", "max_completion_tokens"),
    }
)
_NEVER_CUT = "what does not fit is refused, never cut; send false, or leave it out"
_NO_IMAGES = "this server reads no images; send text"


def translate_options(
    context: RequestContext, body: Mapping[str, object], read: frozenset[str]
) -> dict[str, Any]:
    """The fields of a request under a chat's names. Raises InvalidField for what cannot be honoured.

    `read`: the fields that the endpoint reads; others are reported.
    """
    sent = {name: value for name, value in body.items() if name in read or name in UNREAD}
    for name in ("truncate", "shift"):
        if sent.pop(name, False) is not False:
            raise InvalidField(f"{name}: {_NEVER_CUT}", name)
    if not check_keep_alive(sent.pop("keep_alive", None)):
        context.report_unread(("keep_alive",), {})
    options = sent.get("options")
    if isinstance(options, dict):
        unread = sorted(LOADING & {name for name, value in options.items() if value is not None})
        sent["options"] = {name: value for name, value in options.items() if name not in LOADING}
        context.report_unread((f"options.{name}" for name in unread), {})
    found = rename_params(sent)
    refuse_words_of_a_chat(found, _NOT_HERE, NAMES)
    unknown = [name for name in found if name not in chat.FIELDS | UNREAD.keys() | read]
    context.report_unread((f"options.{name}" for name in unknown), {})
    return found


def chat_fields(context: RequestContext, body: Mapping[str, object]) -> dict[str, Any]:
    """The body of /api/chat as a chat's. Raises InvalidField."""
    found = translate_options(context, body, CHAT_FIELDS)
    found["messages"] = read_messages(found.get("messages"))
    last = found["messages"][-1] if found["messages"] else {}
    if last.get("role") == "assistant" and not last.get("tool_calls"):
        found["continue_final_message"] = True  # as Ollama's templates do
    return found


def generate_fields(context: RequestContext, body: Mapping[str, object]) -> dict[str, Any]:
    """The body of /api/generate as a chat of its `system` and its `prompt`. Raises InvalidField."""
    rest = {name: value for name, value in body.items() if name not in ("prompt", "system")}
    turns = [
        {"role": role, "content": text_of(body, name)}
        for role, name in (("system", "system"), ("user", "prompt"))
        if body.get(name)
    ]
    return {**translate_options(context, rest, GENERATE_FIELDS), "messages": turns}


def text_of(body: Mapping[str, object], name: str) -> str:
    """A field that is text, "" if it is absent. Raises InvalidField."""
    value = body.get(name, "")
    if not isinstance(value, str):
        raise InvalidField(f"{name}: {shorten(value)} is no string", name)
    return value


def refuse_images(value: object, at: str) -> None:
    """Raises InvalidField for a list of images that is not empty."""
    if value:
        raise InvalidField(f"{at}: {_NO_IMAGES}", at)


def read_messages(messages: object) -> list[dict[str, Any]]:
    """Ollama's messages as a chat's: calls get ids, and results name the call that they answer.

    Raises InvalidField, naming the place.
    """
    if messages is not None and not isinstance(messages, list):
        raise InvalidField(f"messages: {shorten(messages)} is no list", "messages")
    found: list[dict[str, Any]] = []
    waiting: list[tuple[str, object]] = []  # calls without a result: (id, name)
    for i, message in enumerate(messages or ()):
        at = f"messages[{i}]"
        if not isinstance(message, dict):
            raise InvalidField(f"{at}: {shorten(message)} is no object", at)
        sent = {name: value for name, value in message.items() if value is not None}
        refuse_images(sent.pop("images", None), f"{at}.images")
        if "thinking" in sent:
            sent["reasoning_content"] = sent.pop("thinking")
        calls = sent.get("tool_calls")
        if isinstance(calls, list):
            sent["tool_calls"] = [_call(call, f"call_{i}_{j}") for j, call in enumerate(calls)]
            waiting += [_id_and_name(call) for call in sent["tool_calls"]]
        elif sent.get("role") == "tool":
            _answer_call(sent, waiting)
        if not calls:
            sent.setdefault("content", "")
        found.append(sent)
    return found


def _call(call: object, new_id: str) -> object:
    """A call with an id; `validate` refuses what is none."""
    return {"id": new_id, "type": "function", **call} if isinstance(call, dict) else call


def _id_and_name(call: object) -> tuple[str, object]:
    function = call.get("function") if isinstance(call, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    return str(call.get("id")) if isinstance(call, dict) else "", name


def _answer_call(sent: dict[str, Any], waiting: list[tuple[str, object]]) -> None:
    """Name the call that a result answers: by its id, its tool's name, or the first one that waits."""
    name = sent.pop("tool_name", None)
    if name is not None:
        sent.setdefault("name", name)
    known = [one for one in waiting if one[0] == sent.get("tool_call_id")]
    named = [one for one in waiting if one[1] == name]
    if (answered := next(iter(known or named or waiting), None)) is not None:
        waiting.remove(answered)
        sent.setdefault("tool_call_id", answered[0])
