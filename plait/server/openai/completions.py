"""POST /v1/completions: text in, text out, with echo and log-probabilities as OpenAI writes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from plait.errors import InvalidField
from plait.frontend import best_of
from plait.request import Request
from plait.server.api import validate
from plait.server.api.completion_reply import Head, best, finite
from plait.server.api.endpoint import Endpoint
from plait.server.api.reply_extras import Extras
from plait.server.api.schema import CompletionRequest, StreamOptions, field_names, typed
from plait.server.http.tasks import new_id
from plait.text.grammar.request_fields import grammar_from
from plait.text.tokenizers.detokenize import StreamDecoder, text_offsets

if TYPE_CHECKING:
    from plait.frontend.delta import Delta, TextLogprob
    from plait.frontend.frontend import Front
    from plait.text.tokenizers.tokenizer import Tokenizer

FIELDS = field_names(CompletionRequest)
MAX_CHOICES = 1024  # prompts × n of one request
Lists = dict[str, list[Any]]


def plan(front: Front, model: str, body: Mapping[str, Any]) -> CompletionReply:
    """Everything that can be refused before the engine is asked. Tokenizes. Raises RequestErrors."""
    validate.refuse(body, FIELDS)
    asked = typed(body, CompletionRequest)
    params, wish = validate.completion_params(asked), grammar_from(body)
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
    prepared = (front.prepare(p, params, terms=asked, **read) for p in prompts)
    shows = asked.stream and asked.return_progress
    requests = [replace(front.held(request, wish), shows_progress=shows) for request in prepared]
    head = Head(new_id("cmpl"), "text_completion", model, front.fingerprint)
    return CompletionReply(front.tokenizer, head, asked, requests)


class CompletionReply:
    """A response of /v1/completions. Choice j of prompt i has index i·n + j; with best_of, j is its rank."""

    chunk_kind = "text_completion"

    def __init__(
        self, tokenizer: Tokenizer | None, head: Head, asked: CompletionRequest, requests: Sequence[Request]
    ) -> None:
        self.head, self.requests, self.stream = head, requests, asked.stream
        self._n, self._is_ranked = asked.n, requests[0].params.n > asked.n
        self.told = asked.stream_options or StreamOptions()
        self.extras, self.warning = Extras(asked, requests), ""
        prompts = validate.prompts(asked.prompt)
        self._prompts = [_Prompt(tokenizer, p, r, asked) for p, r in zip(prompts, requests, strict=True)]

    def chunks(self, i: int, delta: Delta) -> list[dict[str, Any]]:
        prompt = self._prompts[i]
        pieces = [prompt.choices[ready.index].piece(ready) for ready in prompt.ready(delta)]
        return [self._body(i, piece) for piece in pieces if piece is not None]

    def add(self, i: int, delta: Delta) -> None:
        prompt = self._prompts[i]
        for ready in prompt.ready(delta):
            prompt.choices[ready.index].keep(ready)

    def choices(self) -> list[dict[str, Any]]:
        found = []
        for i, prompt in enumerate(self._prompts):
            scores = [choice.score for choice in prompt.choices]
            kept = best_of.best(scores, self._n) if self._is_ranked else range(self._n)
            found += [self._body(i, {**prompt.choices[j].whole(), "index": at}) for at, j in enumerate(kept)]
        return found

    def _body(self, i: int, piece: dict[str, Any]) -> dict[str, Any]:
        return {**piece, "index": i * self._n + piece["index"]}


class _Prompt:
    """One prompt of a request: what its choices echo, and deltas that wait for its log-probabilities."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        prompt: str | list[int],
        request: Request,
        asked: CompletionRequest,
    ) -> None:
        ids = request.prompt_token_ids
        is_read = isinstance(prompt, str) and asked.parse_special
        skip_special = asked.skip_special_tokens and not is_read  # the echo shows what was sent
        self._tokenizer, self._ids, self._skip_special = tokenizer, ids, skip_special
        self.text, self.lists = "", None if asked.logprobs is None else _no_lists()
        self._waits = asked.echo and asked.logprobs is not None
        self._held: list[Delta] = []
        if asked.echo:
            shown = tokenizer.decode(ids, skip_special=skip_special) if tokenizer else ""
            self.text = prompt if isinstance(prompt, str) else shown
        if self._waits and len(ids) == 1:
            self._score(())
        with_ids = asked.return_token_ids or tokenizer is None
        self.choices = [_Choice(self, j, tokenizer, request, with_ids) for j in range(request.params.n)]

    def ready(self, delta: Delta) -> list[Delta]:
        """Deltas that can be shown now: with echo, none before the prompt's log-probabilities are there."""
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
        first = self._ids[0]
        token = _shown(first, self._tokenizer)
        lists: Lists = {
            "tokens": [token],
            "token_logprobs": [None],
            "top_logprobs": [None],
            "text_offset": [],
        }
        for lp in scores:
            _append(lists, lp)
        offsets = [0] * len(self._ids)
        if self._tokenizer:
            offsets = text_offsets(self._tokenizer, self._ids, (), self._skip_special)
            shown = self._tokenizer.decode(self._ids, skip_special=self._skip_special)
            before = max(shown.find(self.text), 0)  # tokens that were put around the text are not in its echo
            offsets = [max(offset - before, 0) for offset in offsets]
        lists["text_offset"] = [min(offset, len(self.text)) for offset in offsets]
        self.lists = lists


class _Choice:
    """One choice as it grows; the echo is its first piece."""

    def __init__(
        self, prompt: _Prompt, index: int, tokenizer: Tokenizer | None, request: Request, with_ids: bool
    ) -> None:
        self._prompt, self._index, self._with_ids = prompt, index, with_ids
        self._decoder = (
            StreamDecoder(
                tokenizer,
                skip_special=request.params.skip_special_tokens,
                prefix_ids=request.prompt_token_ids,
            )
            if tokenizer and prompt.lists is not None
            else None
        )
        self.score = best_of.Score()
        self._once = {"prompt_token_ids": request.prompt_token_ids}  # vLLM's: in the first chunk of a stream
        self._begun, self._offset = False, 0
        self._text: list[str] = []
        self._lists: Lists | None = None
        self._ids: list[int] = []
        self._end: dict[str, Any] = {"finish_reason": None}

    def piece(self, delta: Delta) -> dict[str, Any] | None:
        """The next chunk of this choice, or None if nothing new can be shown."""
        text, lists = self._new(delta)
        new = (text, delta.finish_reason, delta.prompt_progress, lists and lists["tokens"])
        shows = any(new) or (self._with_ids and delta.token_ids)
        return self._body(text, lists, delta.token_ids, _end(delta)) if shows else None

    def keep(self, delta: Delta) -> None:
        text, lists = self._new(delta)
        self.score.add(delta.logprobs)
        self._text.append(text)
        self._ids += delta.token_ids
        self._end = _end(delta)
        if self._lists is None:
            self._lists = lists
        elif lists is not None:
            for name, values in lists.items():
                self._lists[name] += values

    def whole(self) -> dict[str, Any]:
        return self._body("".join(self._text), self._lists, self._ids, self._end)

    def _body(
        self, text: str, lists: Lists | None, ids: Sequence[int], end: Mapping[str, Any]
    ) -> dict[str, Any]:
        body = {"index": self._index, "text": text, "logprobs": lists, **end}
        if self._with_ids:
            body["token_ids"] = list(ids)
            body |= self._once
            self._once = {}
        return body

    def _new(self, delta: Delta) -> tuple[str, Lists | None]:
        text, lists = delta.text, None
        if self._prompt.lists is not None:
            lists = _no_lists()
            if not self._begun:
                lists = {name: list(values) for name, values in self._prompt.lists.items()}
            for lp in delta.logprobs or ():
                _append(lists, lp)
                lists["text_offset"].append(len(self._prompt.text) + self._offset)
                self._offset += len(self._decoder.push(lp.token_id)) if self._decoder else 0
        if not self._begun:
            text, self._begun = self._prompt.text + text, True
        return text, lists


def _end(delta: Delta) -> dict[str, Any]:
    if delta.finish_reason is None:
        return {"finish_reason": None}
    return {"finish_reason": delta.finish_reason, "stop_reason": delta.stop_reason}


def _no_lists() -> Lists:
    return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}


def _append(lists: Lists, lp: TextLogprob) -> None:
    """The chosen token is in its own alternatives with the very same float: lm-eval compares them."""
    chosen, value = _named(lp), finite(lp.logprob)
    lists["tokens"].append(chosen)
    lists["token_logprobs"].append(value)
    top: dict[str, float] = {}
    for one in best(lp):
        top.setdefault(_named(one), finite(one.logprob))
    lists["top_logprobs"].append({**top, chosen: value})


def _named(lp: TextLogprob) -> str:
    return _bytes_text(lp.bytes) if lp.bytes else lp.token


def _shown(token_id: int, tokenizer: Tokenizer | None) -> str:
    return _bytes_text(tokenizer.token_bytes(token_id)) if tokenizer else f"token_id:{token_id}"


def _bytes_text(data: bytes) -> str:
    """A token's text; half a character as OpenAI writes it, `bytes:\\xe2\\x82`, so tokens stay apart."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


ENDPOINTS = (Endpoint("/v1/completions", FIELDS, plan=plan),)
