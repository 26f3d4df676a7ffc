"""POST /completion: text that follows a prompt, in the shapes of llama.cpp's server.

Prompt and sampling are those of /v1/completions; without `n_predict` a reply has as many tokens as fit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from plait.errors import InvalidField
from plait.request import Request, RequestTrace
from plait.server.api import validate
from plait.server.api.content_blocks import refuse_words_of_a_chat
from plait.server.api.endpoint import Endpoint
from plait.server.api.parse_fields import AS_MANY_AS_FIT, field_names, parse_as
from plait.server.api.reply import ApiReply, PromptProgress, Timings
from plait.server.api.schema import CompletionRequest
from plait.server.api.token_scores import Count, Logprob, best, finite
from plait.server.gateway.request_context import RequestContext
from plait.server.http.transfer import UNMARKED_EVENTS
from plait.text.grammar.request_fields import grammar_from

if TYPE_CHECKING:
    from plait.frontend.deltas import Delta, TextLogprob

StopType = Literal["none", "eos", "limit", "word"]
NOT_HERE = frozenset({"n", "best_of", "echo", "stream_options", "max_completion_tokens"})
FIELDS = field_names(CompletionRequest) - NOT_HERE
_SETTINGS = (
    *("temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty", "min_tokens"),
    *("seed", "ignore_eos"),
)


class NativeToken(msgspec.Struct, frozen=True):
    """A token in llama.cpp's shape, with `top_logprobs` where it is one of the text."""

    id: Count
    token: str
    bytes: list[Count]
    logprob: Logprob
    top_logprobs: list[NativeToken] | UnsetType = UNSET


class NativeCompletion(msgspec.Struct, kw_only=True, frozen=True):
    """The reply of /completion, and each event of its stream. Without slots `id_slot` is -1.

    `tokens`: with `return_tokens`. From `model` on: of the last event. `tokens_cached`: of the prompt.
    """

    index: Count = 0
    content: str
    tokens: list[Count]
    id_slot: int = -1
    stop: bool
    tokens_predicted: Count
    tokens_evaluated: Count
    completion_probabilities: list[NativeToken] | UnsetType = UNSET
    prompt_progress: PromptProgress | UnsetType = UNSET
    timings: Timings | UnsetType = UNSET
    model: str | UnsetType = UNSET
    generation_settings: dict[str, Any] | UnsetType = UNSET
    prompt: str | UnsetType = UNSET
    has_new_line: bool | UnsetType = UNSET
    truncated: bool | UnsetType = UNSET
    stop_type: StopType | UnsetType = UNSET
    stopping_word: str | UnsetType = UNSET
    tokens_cached: Count | UnsetType = UNSET


def plan(context: RequestContext, body: Mapping[str, object]) -> NativeReply:
    """Validate and tokenize a request, before the engine gets it. Raises RequestErrors."""
    refuse_words_of_a_chat(body, NOT_HERE, {"max_completion_tokens": "n_predict"})
    validate.refuse(body, FIELDS)
    asked = parse_as({"max_tokens": AS_MANY_AS_FIT, **body}, CompletionRequest)
    params = validate.completion_params(asked)
    grammar = grammar_from(body)
    read = {"add_special": asked.add_special_tokens, "allow_special": asked.parse_special}
    request = context.prepare(_read_prompt(context, asked), params, terms=asked, **read)
    request = replace(
        context.front.constrain(request, grammar), shows_progress=asked.stream and asked.return_progress
    )
    return NativeReply(context, asked, request)


def _read_prompt(context: RequestContext, asked: CompletionRequest) -> str | list[int]:
    """The one prompt: a text, token ids, or parts of both, which are joined. Raises InvalidField."""
    prompt = asked.prompt
    if isinstance(prompt, str):
        return prompt
    if not prompt or not all(type(part) is int or isinstance(part, str) for part in prompt):
        raise InvalidField("prompt: send a text, token ids, or a list of parts of both", "prompt")
    if all(isinstance(part, str) for part in prompt) and len(prompt) > 1:
        text = f"prompt: {len(prompt)} prompts are more than this endpoint takes; /v1/completions takes lists"
        raise InvalidField(text, "prompt")
    ids: list[int] = []
    for part in prompt:
        if isinstance(part, str):
            special = asked.add_special_tokens and not ids
            ids += context.front.encode(part, add_special=special, allow_special=asked.parse_special)
        else:
            ids.append(part)
    return ids


class NativeReply(ApiReply):
    """One reply of /completion, whole or as events; the last event has `stop`."""

    form = UNMARKED_EVENTS

    def __init__(self, context: RequestContext, asked: CompletionRequest, request: Request) -> None:
        super().__init__([request], stream=asked.stream)
        self._context, self._asked, self._request = context, asked, request
        self._text: list[str] = []
        self._ids: list[int] = []
        self._scores: list[NativeToken] = []
        self._last: Delta | None = None
        self._has_new_line = False

    def add(self, i: int, delta: Delta) -> None:
        self._note(delta)
        self._text.append(delta.text)
        self._ids += delta.token_ids
        self._scores += self._probabilities(delta)

    def whole(self, traces: Iterable[RequestTrace | None]) -> NativeCompletion:
        timings = self.count.engine_timings(traces)
        return self._piece("".join(self._text), self._ids, self._scores, **self._end_fields(timings))

    def events(self, i: int, delta: Delta) -> Iterator[NativeCompletion]:
        self._note(delta)
        more: dict[str, Any] = {}
        if delta.prompt_progress is not None:
            more["prompt_progress"] = self.count.progress(i, delta)
        elif self._asked.timings_per_token:
            more["timings"] = self.count.timings()
        if delta.text or delta.token_ids or more:
            yield self._piece(delta.text, delta.token_ids, self._probabilities(delta), **more)

    def end(self) -> Iterator[NativeCompletion]:
        yield self._piece("", (), (), **self._end_fields(self.count.timings()))

    def _note(self, delta: Delta) -> None:
        self._last, self._has_new_line = delta, self._has_new_line or "\n" in delta.text

    def _piece(
        self, text: str, ids: Iterable[int], scores: Iterable[NativeToken], **more: Any
    ) -> NativeCompletion:
        usage, shown = self.count.usage(), [*scores]
        return NativeCompletion(
            content=text,
            tokens=[*ids] if self._asked.return_token_ids else [],
            stop=more.pop("stop", False),
            tokens_predicted=usage.completion_tokens,
            tokens_evaluated=usage.prompt_tokens,
            completion_probabilities=shown or UNSET,
            **more,
        )

    def _probabilities(self, delta: Delta) -> list[NativeToken]:
        if self._asked.logprobs is None:
            return []
        return [_token(lp, self._asked.logprobs) for lp in delta.logprobs or ()]

    def _end_fields(self, timings: Timings) -> dict[str, Any]:
        """The fields of the last event."""
        params, last = self._request.params, self._last
        tokenizer = self._context.front.tokenizer
        word = last.stop_reason if last and isinstance(last.stop_reason, str) else ""
        kind: StopType = "word" if word else "eos"
        if last is not None and last.finish_reason == "length":
            kind = "limit"
        settings = {name: getattr(params, name) for name in _SETTINGS}
        settings |= {
            "n_predict": params.max_tokens,
            "repeat_penalty": params.repetition_penalty,
            "stop": [*params.stop],
            "stream": self.stream,
            "n_probs": self._asked.logprobs or 0,
        }
        shown = tokenizer.decode(self._request.prompt_token_ids, skip_special=False) if tokenizer else ""
        return {
            "stop": True,
            "timings": timings,
            "model": self._context.model,
            "generation_settings": settings,
            "prompt": shown,
            "has_new_line": self._has_new_line,
            "truncated": False,
            "stop_type": kind,
            "stopping_word": word,
            "tokens_cached": self.count.num_cached,
        }


def _token(lp: TextLogprob, num_top: int) -> NativeToken:
    top = [NativeToken(*_show(one)) for one in best(lp)[:num_top]]
    return NativeToken(*_show(lp), top_logprobs=top)


def _show(lp: TextLogprob) -> tuple[int, str, list[int], float]:
    return lp.token_id, lp.token, list(lp.bytes), finite(lp.logprob)


ENDPOINTS = (Endpoint("/completion", FIELDS, plan=plan),)
