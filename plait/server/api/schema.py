"""What clients may send, typed. Unknown fields are accepted and reported; an explicit null equals absence."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import msgspec

from plait.engine.admission import ServiceOptions
from plait.sampling_fields import NO_ENTRIES, ChoiceFields, MaxTokens, NumLogprobs


class StreamOptions(msgspec.Struct, kw_only=True, frozen=True):
    """`continuous_usage_stats`, vLLM's: every chunk has the usage so far, not only the last one."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


# A field of it has a schema, as one of `object` has not.
JsonValue = Annotated[object, msgspec.Meta(extra_json_schema={"description": "any JSON value"})]
Objects = Annotated[list[dict[str, object]], msgspec.Meta(extra_json_schema={"default": []})]


@dataclass(frozen=True, kw_only=True)
class Sampling(ChoiceFields, ServiceOptions):
    """Fields of both kinds of generation. An absent field has its default; None: the model decides.

    `cache_salt` and `priority` are vLLM's. `timeout_s`, in seconds, is ours: servers have no common field for
    it, and the `timeout` of OpenAI's clients never leaves the client. `prompt_logprobs` and
    `return_tokens_as_token_ids` (log-probabilities with "token_id:5" for a token's text) are vLLM's.
    `timings_per_token` (of a stream: with every chunk) and `return_progress` (of a stream alone) are
    llama.cpp's. One of the fields from `response_format` on sets the format of the reply: OpenAI's, vLLM's,
    llama.cpp's, Ollama's (`text.grammar.request_fields`).
    """

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_completion_tokens: MaxTokens = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    prompt_logprobs: NumLogprobs = None
    timings_per_token: bool = False
    return_progress: bool = False
    response_format: object = None
    structured_outputs: object = None
    guided_json: object = None
    guided_regex: object = None
    guided_choice: object = None
    guided_grammar: object = None
    grammar: object = None
    json_schema: object = None
    format: object = None


@dataclass(frozen=True, kw_only=True)
class CompletionRequest(Sampling):
    """POST /v1/completions. `prompt`: text, token ids, or a list of either.

    `parse_special`, llama.cpp's: what looks like a control token in the prompt is that token, as in a prompt
    that a chat template wrote. False: such text is text, for prompts that hold what a user wrote. `suffix`:
    what comes behind the reply, for models with tokens for filling in; neither text has control tokens then.
    """

    prompt: str | list[Any]
    suffix: str = ""
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

    messages: list[dict[str, object]]
    tools: Objects = field(default_factory=list)
    tool_choice: str | dict[str, object] | None = None
    parallel_tool_calls: bool = True
    reasoning_effort: str | None = None
    include_reasoning: bool = True
    reasoning_field: Literal["reasoning_content", "reasoning"] | None = None
    thinking_token_budget: int | None = None
    logprobs: bool = False
    top_logprobs: NumLogprobs = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: Annotated[dict[str, object], NO_ENTRIES] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class StorableChat(ChatRequest):
    """POST /v1/chat/completions, and whether the chat is stored: only with a store, see `--store`.

    `metadata`: strings that a stored chat has, and that lists are filtered by.
    """

    store: bool = False
    metadata: dict[str, str] | None = None


class TokenizeRequest(msgspec.Struct, kw_only=True, frozen=True):
    """POST /tokenize: a prompt, or messages through the chat template, with what its prompt depends on.

    `content` and `with_pieces` are llama.cpp's: a prompt without the tokens around it unless
    `add_special_tokens` says so, and tokens as objects of `id` and `piece`. `parse_special` as for
    /v1/completions.
    """

    model: str | None = None
    prompt: str | None = None
    content: str | None = None
    messages: list[dict[str, object]] | None = None
    with_pieces: bool = False
    add_special_tokens: bool | None = None
    parse_special: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    return_token_strs: bool = False
    tools: list[dict[str, object]] = []
    tool_choice: str | dict[str, object] | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, object] = {}


class DetokenizeRequest(msgspec.Struct, kw_only=True, frozen=True):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[int]
