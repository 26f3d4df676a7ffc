"""What clients may send, typed. Unknown fields are accepted and reported; an explicit null equals absence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from plait.errors import InvalidField
from plait.frontend.request_options import Terms
from plait.request import NO_ENTRIES, ChoiceFields, MaxTokens, NumLogprobs
from plait.server.api.param_aliases import rename_params


class StreamOptions(msgspec.Struct, kw_only=True, frozen=True):
    """`continuous_usage_stats`, vLLM's: every chunk has the usage so far, not only the last one."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


Objects = Annotated[list[dict[str, Any]], msgspec.Meta(extra_json_schema={"default": []})]


@dataclass(frozen=True, kw_only=True)
class Sampling(ChoiceFields, Terms):
    """Fields of both kinds of generation. An absent field has its default; None: the model decides.

    `cache_salt` and `priority` are vLLM's. `timeout_s`, in seconds, is ours: servers have no common field for
    it, and the `timeout` of OpenAI's clients never leaves the client. `timings_per_token` (of a stream: with
    every chunk) and `return_progress` (of a stream alone) are llama.cpp's. One of the fields from
    `response_format` on sets the format of the reply: OpenAI's, vLLM's, llama.cpp's, Ollama's
    (`text.grammar.request_fields`).
    """

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_completion_tokens: MaxTokens = None
    return_token_ids: bool = False
    timings_per_token: bool = False
    return_progress: bool = False
    response_format: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    grammar: Any = None
    json_schema: Any = None
    format: Any = None


@dataclass(frozen=True, kw_only=True)
class CompletionRequest(Sampling):
    """POST /v1/completions. `prompt`: text, token ids, or a list of either.

    `parse_special`, llama.cpp's: what looks like a control token in the prompt is that token, as in a prompt
    that a chat template wrote. False: such text is text, for prompts that hold what a user wrote.
    """

    prompt: str | list[Any]
    echo: bool = False
    logprobs: NumLogprobs = None
    add_special_tokens: bool = True
    parse_special: bool = True


@dataclass(frozen=True, kw_only=True)
class ChatRequest(Sampling):
    """POST /v1/chat/completions.

    `reasoning_effort`: "none", or a level for the model's template; one that does not read it is reported.
    `thinking_token_budget`: tokens of thinking, after which its end is written; -1: no limit.
    `include_reasoning` False: thinking is left out of the answer; `reasoning_field`: its only name there,
    None: both names. `continue_final_message`: the reply goes on from the last message, the assistant's;
    without it `add_generation_prompt` is true unless set otherwise.
    """

    messages: list[dict[str, Any]]
    tools: Objects = field(default_factory=list)
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    reasoning_effort: str | None = None
    include_reasoning: bool = True
    reasoning_field: Literal["reasoning_content", "reasoning"] | None = None
    thinking_token_budget: int | None = None
    logprobs: bool = False
    top_logprobs: NumLogprobs = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: Annotated[dict[str, Any], NO_ENTRIES] = field(default_factory=dict)


class TokenizeRequest(msgspec.Struct, kw_only=True, frozen=True):
    """POST /tokenize: a prompt, or messages through the chat template, with what its prompt depends on.

    `content` and `with_pieces` are llama.cpp's: a prompt without the tokens around it unless
    `add_special_tokens` says so, and tokens as objects of `id` and `piece`. `parse_special` as for
    /v1/completions.
    """

    model: str | None = None
    prompt: str | None = None
    content: str | None = None
    messages: list[dict[str, Any]] | None = None
    with_pieces: bool = False
    add_special_tokens: bool | None = None
    parse_special: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    return_token_strs: bool = False
    tools: list[dict[str, Any]] = []
    tool_choice: str | dict[str, Any] | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] = {}


class DetokenizeRequest(msgspec.Struct, kw_only=True, frozen=True):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[int]


S = TypeVar("S")


def parse_as(body: Mapping[str, Any], kind: type[S]) -> S:
    """`body` as `kind`. Raises InvalidField, naming the field as OpenAI does: `messages[0].content`."""
    try:
        return msgspec.convert(body, kind)
    except msgspec.ValidationError as error:
        what, param = _split_place(str(error))
        if what.startswith("Invalid enum value") and (known := _choices(kind, param or "")):
            what = f"{what.removeprefix('Invalid enum value ')[:80]} is not {known}"
        raise InvalidField(f"{param}: {what}" if param else what, param) from None


def present(body: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that are not null, under their own names rather than aliases. Raises InvalidField."""
    return rename_params({name: value for name, value in body.items() if value is not None})


def string_of(found: Mapping[str, Any], name: str, at: str) -> str:
    """A field that must be text, of an object at `at`. Raises InvalidField."""
    value = found.get(name)
    if not isinstance(value, str):
        raise InvalidField(f"{at}.{name}: it must be a string", f"{at}.{name}")
    return value


def field_names(kind: type) -> frozenset[str]:
    """The names of what a Struct or a dataclass holds."""
    return frozenset(get_type_hints(kind))


def _choices(kind: Any, param: str) -> str:
    """The values that a field may have, as a client writes them; "" if it is not one of a few."""
    name, _, rest = param.partition(".")
    name, is_entry, _ = name.partition("[")
    hint = get_type_hints(kind).get(name)
    found = [hint, *get_args(hint)] if is_entry else [hint]
    for part in (part for one in found for part in (one, *get_args(one))):
        if rest and isinstance(part, type) and issubclass(part, msgspec.Struct):
            return _choices(part, rest)
        if get_origin(part) is Literal and not rest:
            return " or ".join(msgspec.json.encode(value).decode() for value in get_args(part))
    return ""


def _split_place(message: str) -> tuple[str, str | None]:
    """msgspec's 'what - at `$.path`' in two parts; a missing field is the place itself."""
    what, at, path = message.rpartition(" - at `$")
    if not at:
        what, path = message, ""
    param = path.rstrip("`").removeprefix(".") or None
    if what.startswith("Object missing required field `"):
        name = what.split("`")[1]
        return "it is required", f"{param}.{name}" if param else name
    return what.replace(" | null", ""), param
