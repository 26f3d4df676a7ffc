"""Admission: the limits that requests are validated against, and the requests that are open.

`Front.prepare` admits every request of every entry point, once. The engine admits it again: its process
trusts no other, and one token id that the model lacks would end every request there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from msgspec import Struct

from plait.errors import CapacityError, ContextTooLong, EngineError, InvalidField, PlaitError
from plait.request import Event, FinishReason, Request, RequestTrace
from plait.sampling_fields import shorten
from plait.schedule.sequence import TokenSequence, num_computed

MAX_SALT_CHARS = 256
MAX_PRIORITY = 2**31 - 1
MAX_CACHE_PLACES = 4  # in a request, as Anthropic's clients send them
MAX_CHARS_PER_TOKEN = 64  # longer text cannot fit the context and is refused before it is tokenized
OnEvent = Callable[[Event], None]


class RequestLimits(Struct, frozen=True):
    """The limits of a model that requests are validated against.

    `longest`: the most tokens of one sequence that memory holds; None: only the scheduler knows. `may_grow`:
    what else a client of a prompt that is too long may do, if anything. `has_canvas`: the model writes on
    canvases, so that some requests cannot be served.
    """

    vocab_size: int
    max_model_len: int
    longest: int | None = None
    may_grow: str = ""
    has_canvas: bool = False

    def admit(self, request: Request, vocabulary: str = "") -> Request:
        """Validate a request. Returns it with a `max_tokens` that fits into the rest of the context.

        `vocabulary`: the one that wrote the prompt; "": its ids were sent. Raises InvalidField,
        ContextTooLong, and CapacityError for a sequence that memory can never hold.
        """
        params, num_prompt = request.params, max(len(request.prompt_token_ids), len(request.negative_ids))
        longer = "prompt" if num_prompt == len(request.prompt_token_ids) else "negative_prompt"
        if not request.prompt_token_ids:
            text = "it is empty, and this model has no beginning-of-text token; send at least one token"
            raise InvalidField(f"prompt: {text}", "prompt")
        least = 0 if params.max_tokens == 0 else max(params.min_tokens, 1)
        left = self.max_model_len - num_prompt
        if least > left:
            parts = f" ({num_prompt} in the {longer}, {least} in the completion)"
            advice = f"shorten the {longer} to {self.max_model_len - least} tokens{self.may_grow}"
            raise self._too_long(num_prompt, f"{num_prompt + least} tokens{parts}", advice, longer)
        self.check_ids("prompt", request.prompt_token_ids, vocabulary)
        self.check_ids("negative_prompt", request.negative_ids, vocabulary)
        if params.is_guided != bool(request.negative_ids):
            text = "guidance needs a negative prompt of at least one token, and a scale that is not 1"
            raise InvalidField(f"guidance_scale: {text}", "guidance_scale")
        if self.has_canvas:
            _check_canvas(request)
        self.check_ids("logit_bias", params.logit_bias)
        self.check_ids("stop_token_ids", params.stop_token_ids)
        self.check_ids("allowed_token_ids", params.allowed_token_ids)
        self.check_ids("bad_words", chain.from_iterable(params.bad_word_ids))
        if (
            params.min_tokens
            and params.allowed_token_ids
            and request.stop_token_ids.issuperset(params.allowed_token_ids)
        ):
            text = "allowed_token_ids has none but tokens that would end the reply; allow others, or send 0"
            raise InvalidField(f"min_tokens: {text}", "min_tokens")
        if request.resumed and len(request.resumed) != params.n:
            raise InvalidField(f"resumed: {len(request.resumed)} choices of {params.n}", "resumed")
        if request.resumed_mu and len(request.resumed_mu) != params.n:
            raise InvalidField(f"resumed_mu: {len(request.resumed_mu)} choices of {params.n}", "resumed_mu")
        most = left if params.max_tokens is None else min(params.max_tokens, left)
        length = num_computed(num_prompt, num_prompt + most)
        if self.longest is not None and length > self.longest:
            raise CapacityError(
                f"a sequence of {length} tokens does not fit, and the longest that does has {self.longest}; "
                "send a shorter prompt, request fewer tokens, or start with a larger --memory-limit"
            )
        fits = most == params.max_tokens
        return request if fits else replace(request, params=replace(params, max_tokens=most))

    def check_ids(self, name: str, ids: Iterable[int], vocabulary: str = "") -> None:
        """Raises InvalidField where the field `name` has a token id that the model lacks."""
        last = self.vocab_size - 1
        for i in ids:
            if type(i) is int and 0 <= i <= last:
                continue
            text = f"token id {shorten(i)} is not one of this model's 0..{last}"
            if vocabulary:
                text = f"the vocabulary {vocabulary} writes it with token {i}, and this model has 0..{last}; "
                text += "name the vocabulary it was trained with by --vocab"
            raise InvalidField(f"{name}: {text}", name)

    def check_chars(self, count: int, param: str) -> None:
        """Raises ContextTooLong for text that no tokenizer could make fit."""
        least = -(-count // MAX_CHARS_PER_TOKEN)
        if least > self.max_model_len:
            requested = f"{least} tokens or more ({count} characters in the {param})"
            raise self._too_long(least, requested, f"shorten the {param}{self.may_grow}", param)

    def check_count(self, count: int, param: str) -> None:
        """Raises ContextTooLong for a list of more tokens than the context has."""
        if count > self.max_model_len:
            raise self._too_long(count, f"{count} tokens", "send them in parts", param)

    def _too_long(self, num_prompt: int, requested: str, advice: str, param: str) -> ContextTooLong:
        """The error for a prompt that is too long.

        Its first two sentences are OpenAI's and vLLM's, because clients look for them and read the numbers.
        """
        return ContextTooLong(
            f"This model's maximum context length is {self.max_model_len} tokens. However, you requested "
            f"{requested}. Please {advice}.",
            param,
            num_prompt_tokens=num_prompt,
            max_model_len=self.max_model_len,
        )


def _check_canvas(request: Request) -> None:
    """Raises InvalidField for what needs tokens that come one after the other, or logits of the next one."""
    params = request.params
    grammar = "follow a grammar (response_format, structured outputs, a tool that must be called)"
    wants = (
        (request.grammar is not None, "structured_outputs", grammar),
        (request.thinking is not None, "thinking_token_budget", "end its thinking after so many tokens"),
        (params.use_beam_search, "use_beam_search", "search with beams"),
        (params.is_guided, "guidance_scale", "be guided by a negative prompt"),
        (bool(params.mirostat), "mirostat", "hold a surprise from token to token"),
        (bool(params.dry_multiplier), "dry_multiplier", "tell which token would repeat"),
        (any(len(ids) > 1 for ids in params.bad_word_ids), "bad_words", "ban words of several tokens"),
        (params.prompt_logprobs is not None, "prompt_logprobs", "score a text that is there (echo)"),
        (request.pooling is not None, "pooling", "give embeddings or scores"),
    )
    for is_there, name, what in wants:
        if is_there:
            text = f"this model fills the places of a canvas in any order, and cannot {what}; leave it out"
            raise InvalidField(f"{name}: {text}", name)


class OpenRequest(Struct):
    """A request with choices that have not ended. `open`: those choices, by their index."""

    request: Request
    on_event: OnEvent
    open: dict[int, OpenChoice] = {}


class OpenChoice(Struct):
    """A choice that has not ended. Times are seconds on the engine's clock.

    `sequence`: read only here. `num_failures`: failed steps since its last token in which it was alone.
    """

    entry: OpenRequest
    sequence: TokenSequence
    arrival_s: float
    first_scheduled_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float = 0.0
    num_steps: int = 0
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0
    num_failures: int = 0

    @property
    def is_searched(self) -> bool:
        """Whether it is a result of a beam search, which all choices of its request share."""
        return self.sequence.gang is not None and self.sequence.gang.search is not None

    @property
    def member_ids(self) -> list[int]:
        """The ids of sequences that it answers for: its own, its negative prompt's, or those of all beams
        that are no choice."""
        members = [seq.id for seq in self.sequence.members]
        if not self.is_searched:
            return members
        choices = {choice.sequence.id for choice in self.entry.open.values()}
        return [self.sequence.id, *(seq_id for seq_id in members if seq_id not in choices)]

    @property
    def misguided_by(self) -> Exception | None:
        """Why the choice's guide cannot be followed any more; None while it can."""
        return None if self.sequence.guide is None else self.sequence.guide.error

    def trace(self, finish_s: float, finish_reason: FinishReason) -> RequestTrace:
        """The trace of the choice at its end."""
        seq = self.sequence
        return RequestTrace(
            request_id=seq.request_id,
            index=seq.index,
            arrival_s=self.arrival_s,
            first_scheduled_s=self.first_scheduled_s,
            first_token_s=self.first_token_s,
            finish_s=finish_s,
            finish_reason=finish_reason,
            num_prompt_tokens=seq.prompt_len,
            num_cached_tokens=seq.num_cached_tokens,
            miss_cause=seq.miss_cause,
            num_output_tokens=seq.num_output_tokens,
            num_preemptions=seq.num_preemptions,
            num_steps=self.num_steps,
            num_drafted_tokens=self.num_drafted_tokens,
            num_accepted_tokens=self.num_accepted_tokens,
        )

    def overdue(self) -> str:
        """The error text of a choice past its deadline: the limit, and how far the choice got until then."""
        limit, num_tokens = self.entry.request.timeout_s, self.sequence.num_output_tokens
        if num_tokens:
            so_far = f"{num_tokens} tokens were generated until then, and reach those who stream"
        elif self.first_scheduled_s is not None:
            so_far = f"its prompt of {self.sequence.prompt_len} tokens was still being computed"
        else:
            so_far = "it was still waiting for its turn"
        return f"not done within timeout_s ({limit:g} s): {so_far}; ask for less, or allow it more time"


@dataclass(frozen=True, kw_only=True)
class ServiceOptions:
    """How a request is served, apart from how its tokens are chosen. Raises InvalidField, naming the field.

    cache_salt: only requests with the same one share what was computed; None: those without one share.
    priority: lower runs first. Both are vLLM's. timeout_s: seconds from its arrival, the queue included,
    after which it ends with an error; None: as long as it takes. adapter: the name of one that is loaded; "":
    the model alone. cache_at: behind so many tokens of a prompt, or messages of a chat, state is kept for
    requests that begin alike; at most four places.
    """

    cache_salt: str | None = None
    priority: int = 0
    timeout_s: float | None = None
    adapter: str = ""
    cache_at: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "cache_at", _read_places(self.cache_at))
        _check_salt(self.cache_salt)
        _check_priority(self.priority)
        _check_timeout(self.timeout_s)


def _read_places(places: object) -> tuple[int, ...]:
    if not isinstance(places, list | tuple):
        text = f"cache_at: a {type(places).__name__} is no list of whole numbers; send [3], for example"
        raise InvalidField(text, "cache_at")
    if len(places) > MAX_CACHE_PLACES:
        text = f"cache_at: it has {len(places)} places; send at most {MAX_CACHE_PLACES}"
        raise InvalidField(text, "cache_at")
    for i, place in enumerate(places):
        if isinstance(place, bool) or not isinstance(place, int) or place < 1:
            raise InvalidField(f"cache_at[{i}]: {place!r:.40} is no whole number of 1 or more", "cache_at")
    return tuple(places)


def check_places(places: Sequence[int], most: int, what: str) -> None:
    """Raises InvalidField for a place of `cache_at` behind all `most` tokens or messages of a request."""
    if places and max(places) > most:
        text = f"cache_at: {max(places)} is behind the end: there are {most} {what}"
        raise InvalidField(text, "cache_at")


def _check_salt(salt: str | None) -> None:
    # An empty salt is a tenant's id that was not filled in: it must not mean sharing with every tenant.
    if salt is None:
        return
    if not isinstance(salt, str):
        raise InvalidField(f"cache_salt: a {type(salt).__name__} is not a string", "cache_salt")
    if not 1 <= len(salt) <= MAX_SALT_CHARS:
        text = f"cache_salt: it has {len(salt)} characters; send 1 to {MAX_SALT_CHARS}, or leave it out"
        raise InvalidField(text, "cache_salt")
    if not (salt.isascii() and salt.isprintable()):
        raise InvalidField("cache_salt: only printable ASCII characters can be in it", "cache_salt")


def _check_priority(priority: int) -> None:
    if isinstance(priority, bool) or not isinstance(priority, int):
        raise InvalidField(f"priority: {priority!r} is not a whole number", "priority")
    if abs(priority) > MAX_PRIORITY:
        raise InvalidField(f"priority: it is outside [-{MAX_PRIORITY}, {MAX_PRIORITY}]", "priority")


def _check_timeout(timeout_s: float | None) -> None:
    if timeout_s is None:
        return
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float):
        raise InvalidField(f"timeout_s: {timeout_s!r} is not a number of seconds", "timeout_s")
    if not 0 < timeout_s < math.inf:
        raise InvalidField(f"timeout_s: {timeout_s} is not more than 0 seconds, or not finite", "timeout_s")


USUAL_SERVICE = ServiceOptions()


def failure_event(request_id: str, choice: int, error: Exception) -> Event:
    """The last event of a choice that failed. Exceptions that are not Plait's are wrapped as the cause."""
    shown = error
    if not isinstance(error, PlaitError):
        shown = EngineError(f"the engine failed at this request: {type(error).__name__}: {error}")
        shown.__cause__ = error
    return Event(request_id, choice, finish_reason="error", error=shown)
