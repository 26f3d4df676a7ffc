"""POST /v1/completions: text in, text out, with echo and log-probabilities as OpenAI writes them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
from msgspec import UNSET, UnsetType

from plait.errors import InvalidField
from plait.frontend.deltas import ChoiceScore, best_of
from plait.request import Request, RequestTrace
from plait.server.api import validate
from plait.server.api.endpoint import Endpoint
from plait.server.api.parse_fields import field_names, parse_as
from plait.server.api.reply import ChoicesReply, PromptProgress, Timings, Usage, head
from plait.server.api.schema import CompletionRequest
from plait.server.api.token_scores import (
    Count,
    Logprob,
    PromptScores,
    best,
    finite,
    list_prompt_scores,
    name_by_id,
)
from plait.server.gateway.request_context import RequestContext
from plait.text.fill_in import fill_in_prompt
from plait.text.grammar.request_fields import grammar_from
from plait.text.tokenizers.tokenizer import StreamDecoder, text_offsets

if TYPE_CHECKING:
    from plait.frontend.deltas import Delta, TextLogprob
    from plait.text.tokenizers.tokenizer import Tokenizer

FIELDS = field_names(CompletionRequest)
MAX_CHOICES = 1024  # prompts × n of one request


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """Parallel lists; offsets are in characters of `text`."""

    tokens: list[str] = []
    token_logprobs: list[Logprob | None] = []
    top_logprobs: list[dict[str, Logprob] | None] = []
    text_offset: list[Count] = []

    def extend(self, other: CompletionLogprobs) -> None:
        for name in self.__struct_fields__:
            getattr(self, name).extend(getattr(other, name))


class CompletionChoice(msgspec.Struct, kw_only=True, frozen=True):
    """One choice; in a stream, the next part of one. `finish_reason` is null until it ends."""

    index: Count
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[Count] | UnsetType = UNSET
    prompt_token_ids: Sequence[Count] | UnsetType = UNSET
    prompt_logprobs: PromptScores | UnsetType = UNSET


class Completion(msgspec.Struct, kw_only=True, frozen=True):
    """The reply of /v1/completions, and each event of its stream."""

    id: Annotated[str, msgspec.Meta(pattern="^cmpl-[A-Za-z0-9_-]+$")]
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str | None
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    timings: Timings | UnsetType = UNSET
    prompt_progress: PromptProgress | UnsetType = UNSET


def plan(context: RequestContext, body: Mapping[str, object]) -> CompletionReply:
    """Validate and tokenize a request, before the engine gets it. Raises RequestErrors."""
    front = context.front
    validate.refuse(body, FIELDS)
    asked = parse_as(body, CompletionRequest)
    params, requested = validate.completion_params(asked), grammar_from(body)
    validate.check_stream(asked, params)
    prompts, n = validate.prompts(asked.prompt), params.num_sequences
    if len(prompts) > 1 and len(prompts) * n > MAX_CHOICES:
        text = f"prompt: {len(prompts)} prompts with {n} choices each make more than {MAX_CHOICES} choices"
        raise InvalidField(text, "prompt")
    if len(prompts) > front.max_open:
        text = (
            f"prompt: {len(prompts)} prompts are more than this server takes at once; send {front.max_open}"
        )
        raise InvalidField(f"{text} at most, or serve with a larger --max-waiting", "prompt")
    read = {"add_special": asked.add_special_tokens, "allow_special": asked.parse_special}
    if asked.suffix:
        prompts = _fill_in(context, asked, prompts)
    prepared = (context.prepare(p, params, terms=asked, **read) for p in prompts)
    shows = asked.stream and asked.return_progress
    requests = [replace(front.constrain(request, requested), shows_progress=shows) for request in prepared]
    return CompletionReply(context, asked, requests)


def _fill_in(
    context: RequestContext, asked: CompletionRequest, prompts: Sequence[str | list[int]]
) -> list[str | list[int]]:
    """The prompts with the suffix behind the gap. Raises InvalidField and ContextTooLong."""
    front = context.front
    if asked.echo:
        raise InvalidField("echo: it cannot show a prompt with a suffix; leave one of them out", "echo")
    if asked.truncate_prompt_tokens is not None:
        at = "truncate_prompt_tokens"
        raise InvalidField(f"{at}: it would cut the tokens of suffix off; shorten the prompt", at)
    if front.tokenizer is None or not all(isinstance(prompt, str) for prompt in prompts):
        raise InvalidField("suffix: it needs a prompt of text, and a model with a tokenizer", "suffix")
    found: list[str | list[int]] = []
    for prompt in prompts:
        front.limits.check_chars(len(prompt) + len(asked.suffix), "prompt")
        found.append(fill_in_prompt(front.tokenizer, str(prompt), asked.suffix))
    return found


class CompletionReply(ChoicesReply):
    """A reply of /v1/completions. Choice j of prompt i has index i·n + j; with best_of, j is its rank."""

    def __init__(
        self, context: RequestContext, asked: CompletionRequest, requests: Sequence[Request]
    ) -> None:
        super().__init__(head(context, "cmpl", "text_completion"), asked, requests, Completion)
        self._n, self._is_ranked = asked.n, requests[0].params.n > asked.n
        prompts, tokenizer = validate.prompts(asked.prompt), context.front.tokenizer
        self._prompts = [_Prompt(tokenizer, p, r, asked) for p, r in zip(prompts, requests, strict=True)]

    def events(self, i: int, delta: Delta) -> list[Completion]:
        prompt, fields, first = self._prompts[i], self.fields_of_chunk(i, delta), i * self._n
        pieces = [
            prompt.choices[ready.index].piece(ready, first + ready.index) for ready in prompt.ready(delta)
        ]
        return [Completion(**self.head, choices=[piece], **fields) for piece in pieces if piece is not None]

    def add(self, i: int, delta: Delta) -> None:
        prompt = self._prompts[i]
        for ready in prompt.ready(delta):
            prompt.choices[ready.index].keep(ready)

    def whole(self, traces: Iterable[RequestTrace | None]) -> Completion:
        found: list[CompletionChoice] = []
        for prompt in self._prompts:
            scores = [choice.score for choice in prompt.choices]
            kept = best_of(scores, self._n) if self._is_ranked else range(self._n)
            found += [prompt.choices[j].whole(index) for index, j in enumerate(kept, len(found))]
        return Completion(choices=found, **self.fields_of_whole(traces))


class _Prompt:
    """One prompt of a request: what its choices echo, and deltas that wait for its log-probabilities."""

    def __init__(
        self, tokenizer: Tokenizer | None, prompt: str | list[int], request: Request, asked: CompletionRequest
    ) -> None:
        ids = request.prompt_token_ids
        is_read = isinstance(prompt, str) and asked.parse_special
        skip_special = asked.skip_special_tokens and not is_read  # the echo shows what was sent
        self._tokenizer, self._ids, self._skip_special = tokenizer, ids, skip_special
        self.text, self.lists = "", None if asked.logprobs is None else CompletionLogprobs()
        self._waits = asked.echo and asked.logprobs is not None
        self.asked = asked
        self.scores: PromptScores | UnsetType = UNSET if asked.prompt_logprobs is None else [None]
        self._held: list[Delta] = []
        if asked.echo:
            shown = tokenizer.decode(ids, skip_special=skip_special) if tokenizer else ""
            is_cut = asked.truncate_prompt_tokens is not None
            self.text = prompt if isinstance(prompt, str) and not is_cut else shown
        if self._waits and len(ids) == 1:
            self._score(())
        with_ids = asked.return_token_ids or tokenizer is None
        self.choices = [_Choice(self, tokenizer, request, with_ids) for _ in range(request.params.n)]

    def ready(self, delta: Delta) -> list[Delta]:
        """Deltas that can be shown now: with echo, none before the prompt's log-probabilities are there."""
        num_top = self.asked.prompt_logprobs
        if num_top is not None and delta.prompt_logprobs is not None:
            self.scores = list_prompt_scores(delta.prompt_logprobs, num_top)
        if not self._waits:
            return [delta]
        self._held.append(delta)
        if delta.prompt_logprobs is None:
            return []
        self._score(delta.prompt_logprobs)
        held, self._held = self._held, []
        return held

    def _score(self, scores: Sequence[TextLogprob]) -> None:
        self._waits = False
        first = self.name(self._ids[0])
        lists = CompletionLogprobs([first], [None], [None], [])
        for lp in scores:
            self.append(lists, lp)
        offsets = [0] * len(self._ids)
        if self._tokenizer:
            offsets = text_offsets(self._tokenizer, self._ids, (), self._skip_special)
            shown = self._tokenizer.decode(self._ids, skip_special=self._skip_special)
            before = max(shown.find(self.text), 0)  # tokens that were put around the text are not in its echo
            offsets = [max(offset - before, 0) for offset in offsets]
        lists.text_offset.extend(min(offset, len(self.text)) for offset in offsets)
        self.lists = lists

    def name(self, token_id: int) -> str:
        """A token without a score, as the lists name it."""
        is_shown = self._tokenizer is not None and not self.asked.return_tokens_as_token_ids
        return _token_text(token_id, self._tokenizer if is_shown else None)

    def append(self, lists: CompletionLogprobs, lp: TextLogprob) -> None:
        """Append a token. Its alternatives have it with the same float, because lm-eval compares them."""
        if self.asked.return_tokens_as_token_ids:
            (lp,) = name_by_id([lp], keeps_bytes=False)
        chosen, value = _logprob_text(lp), finite(lp.logprob)
        lists.tokens.append(chosen)
        lists.token_logprobs.append(value)
        top: dict[str, float] = {}
        for one in best(lp)[: self.asked.logprobs]:
            top.setdefault(_logprob_text(one), finite(one.logprob))
        lists.top_logprobs.append({**top, chosen: value})


class _Choice:
    """One choice as it grows; the echo is its first chunk."""

    def __init__(
        self, prompt: _Prompt, tokenizer: Tokenizer | None, request: Request, with_ids: bool
    ) -> None:
        self._prompt, self._with_ids = prompt, with_ids
        self._decoder = (
            StreamDecoder(
                tokenizer,
                skip_special=request.params.skip_special_tokens,
                prefix_ids=request.prompt_token_ids,
            )
            if tokenizer and prompt.lists is not None
            else None
        )
        self.score = ChoiceScore()
        self._once: Sequence[int] | UnsetType = request.prompt_token_ids  # vLLM's: in a stream's first chunk
        self._begun, self._offset = False, 0
        self._pieces: list[CompletionChoice] = []

    def piece(self, delta: Delta, index: int) -> CompletionChoice | None:
        """The next chunk of this choice, or None if nothing new can be shown."""
        text, lists = self._new(delta)
        new = (text, delta.finish_reason, delta.prompt_progress, lists and lists.tokens)
        if not any(new) and not (self._with_ids and delta.token_ids):
            return None
        end: Literal["stop", "length"] | None = None
        if delta.finish_reason is not None:
            end = "length" if delta.finish_reason == "length" else "stop"
        found = CompletionChoice(
            index=index,
            text=text,
            logprobs=lists,
            finish_reason=end,
            stop_reason=delta.stop_reason if end else UNSET,
            token_ids=list(delta.token_ids) if self._with_ids else UNSET,
            prompt_token_ids=self._once if self._with_ids else UNSET,
        )
        self._once = UNSET
        return found

    def keep(self, delta: Delta) -> None:
        self.score.add(delta.logprobs)
        if (piece := self.piece(delta, 0)) is not None:
            self._pieces.append(piece)

    def whole(self, index: int) -> CompletionChoice:
        first, last, text = self._pieces[0], self._pieces[-1], [piece.text for piece in self._pieces]
        for piece in self._pieces[1:]:
            if first.logprobs is not None and piece.logprobs is not None:
                first.logprobs.extend(piece.logprobs)
            if first.token_ids is not UNSET and piece.token_ids is not UNSET:
                first.token_ids.extend(piece.token_ids)
        end = {"finish_reason": last.finish_reason, "stop_reason": last.stop_reason}
        scores = self._prompt.scores
        return msgspec.structs.replace(first, index=index, text="".join(text), prompt_logprobs=scores, **end)

    def _new(self, delta: Delta) -> tuple[str, CompletionLogprobs | None]:
        text, lists = delta.text, None
        if self._prompt.lists is not None:
            lists = CompletionLogprobs()
            if not self._begun:
                lists.extend(self._prompt.lists)
            for lp in delta.logprobs or ():
                self._prompt.append(lists, lp)
                lists.text_offset.append(len(self._prompt.text) + self._offset)
                self._offset += len(self._decoder.push(lp.token_id)) if self._decoder else 0
        if not self._begun:
            text, self._begun = self._prompt.text + text, True
        return text, lists


def _logprob_text(lp: TextLogprob) -> str:
    return _bytes_text(lp.bytes) if lp.bytes else lp.token


def _token_text(token_id: int, tokenizer: Tokenizer | None) -> str:
    return _bytes_text(tokenizer.token_bytes(token_id)) if tokenizer else f"token_id:{token_id}"


def _bytes_text(data: bytes) -> str:
    """A token's text; half a character as OpenAI writes it, `bytes:\\xe2\\x82`, so tokens stay apart."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


ENDPOINTS = (Endpoint("/v1/completions", FIELDS, plan=plan),)
