"""Requests and events, which go in and out of the engine: plain data, token ids, never text or tensors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from msgspec import Meta

from plait.config import JsonSpace
from plait.errors import InvalidField

FinishReason = Literal["stop", "length", "cancelled", "error"]
Pooling = Literal["last", "mean"]
MAX_LOGPROBS, MAX_N = 20, 128
_INT64 = 2**63 - 1


def _words(
    text: str, low: float | None = None, high: float = _INT64, *, also: str = "", ours: float | None = None
) -> Meta:
    """What a field does, and its range from `low` to `high`, which `SamplingParams` checks.

    `also`: other servers' names for it. `ours`: its value where neither the request nor the model's
    generation_config.json has one.
    """
    if ours is not None:
        text += f" [default: the model's generation_config.json, else {ours:g}]"
    bounds = {} if low is None else {"minimum": low, "maximum": high}
    return Meta(description=text, extra_json_schema=bounds, extra={"also": tuple(also.split()), "ours": ours})


NO_ENTRIES = Meta(extra_json_schema={"default": {}})
_STOP = _words("text that ends it; may be repeated")
MaxTokens = Annotated[
    int | None, _words("most tokens to write", 0, also="n_predict num_predict max_new_tokens")
]
NumLogprobs = Annotated[int | None, _words("alternatives with each token; 0: itself alone", 0, MAX_LOGPROBS)]


@dataclass(frozen=True, kw_only=True)
class SamplingFields:
    """Sampling fields of HTTP requests of every API that generates, of `SamplingParams` and of the command
    line, in vLLM's spelling; None: the model decides."""

    min_tokens: Annotated[int, _words("tokens before anything may stop it", 0, also="min_new_tokens")] = 0
    temperature: Annotated[float | None, _words("0: always the likeliest token", 0, 2, ours=0.7)] = None
    top_p: Annotated[float | None, _words("the likeliest tokens of this probability", 0, 1, ours=0.9)] = None
    top_k: Annotated[int | None, _words("the likeliest so many tokens; 0: no limit", -1, ours=40)] = None
    min_p: Annotated[float | None, _words("least share of the likeliest's probability", 0, 1, ours=0)] = None
    seed: Annotated[int | None, _words("makes a text repeatable", -_INT64 - 1, also="random_seed")] = None
    repetition_penalty: Annotated[
        float | None,
        _words("above 1: less of what was there", 0.01, 100, ours=1, also="repeat_penalty penalty_repeat"),
    ] = None
    presence_penalty: Annotated[
        float, _words("subtracted once from tokens already written", -2, 2, also="penalty_present")
    ] = 0.0
    frequency_penalty: Annotated[
        float, _words("subtracted for each time a token was written", -2, 2, also="penalty_freq")
    ] = 0.0
    logit_bias: Annotated[
        Mapping[int, float], _words("added to logits, by token id; -100 to 100"), NO_ENTRIES
    ] = field(default_factory=dict)
    stop_token_ids: Annotated[tuple[int, ...], _words("tokens that end it")] = ()
    ignore_eos: Annotated[bool, _words("go on after an end-of-text token")] = False
    include_stop_str_in_output: Annotated[
        bool, _words("the text has the stop string that ended it", also="no_stop_trim")
    ] = False
    skip_special_tokens: Annotated[bool, _words("the text leaves control tokens out")] = True


@dataclass(frozen=True, kw_only=True)
class ChoiceFields(SamplingFields):
    """Sampling fields of the APIs that can generate several choices, and of `SamplingParams`."""

    n: Annotated[int, _words("choices that are returned", 1, MAX_N, also="n_cmpl")] = 1
    best_of: Annotated[int | None, _words("choices to generate; the best n return", 1, MAX_N)] = None
    max_tokens: MaxTokens = None
    stop: Annotated[str | tuple[str, ...], _STOP] = ()


@dataclass(frozen=True, kw_only=True)
class SamplingParams(ChoiceFields):
    """Sampling parameters: how tokens are chosen. `SamplingFields` and `ChoiceFields` describe the fields.

    `top_k` -1 is 0, as vLLM spells it. `max_tokens` None: the rest of the context. `logprobs` are the raw
    model's, natural log, before penalties and temperature. The best of `best_of` choices have the highest
    log-probability per token, best first; this is OpenAI's meaning, where vLLM's V0 took the sum.
    `structured_outputs`: what the reply must be, in vLLM's shape: one of `json` (a schema), `regex`,
    `choice`, `grammar` and `json_object`. Raises InvalidField, naming the field.
    """

    max_tokens: MaxTokens = 100
    stop: Annotated[tuple[str, ...], _STOP] = ()
    logprobs: NumLogprobs = None
    prompt_logprobs: NumLogprobs = None
    structured_outputs: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", _as_tuple("stop", self.stop))
        object.__setattr__(self, "stop_token_ids", _as_tuple("stop_token_ids", self.stop_token_ids))
        for name, declared in SAMPLING.items():
            declared.check(name, getattr(self, name))
        if self.best_of is not None and self.best_of < self.n:
            raise InvalidField(f"best_of: {self.best_of} is less than n ({self.n})", "best_of")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            least, most = shorten(self.min_tokens), shorten(self.max_tokens)
            raise InvalidField(f"min_tokens: {least} is more than max_tokens ({most})", "min_tokens")
        for stop in self.stop:
            if not isinstance(stop, str):
                raise InvalidField(f"stop: {stop!r} is not a string; token ids go in stop_token_ids", "stop")
            if not stop:
                raise InvalidField("stop: an empty stop string would stop at once; leave it out", "stop")
        for token_id in self.stop_token_ids:
            _check_whole("stop_token_ids", token_id)
        for token_id, bias in self.logit_bias.items():
            _check_whole("logit_bias", token_id)
            check_range("logit_bias", bias, -100, 100)

    @property
    def num_sequences(self) -> int:
        """How many choices are generated."""
        return self.n if self.best_of is None else self.best_of

    @property
    def is_ranked(self) -> bool:
        """Whether more choices are generated than returned."""
        return self.num_sequences > self.n

    def resolved(self, generation_config: Mapping[str, Any]) -> SamplingParams:
        """With every open parameter filled in: the request's, else the model's, else Plait's default."""
        is_greedy = not generation_config.get("do_sample", True)
        theirs = {**generation_config, "temperature": 0.0} if is_greedy else generation_config
        found: dict[str, Any] = {}
        for name, declared in SAMPLING.items():
            values = (getattr(self, name), theirs.get(name), declared.ours)
            if declared.ours is not None:
                found[name] = next(value for value in values if value is not None)
        return replace(self, **found)


def _as_tuple(name: str, value: Any) -> tuple[Any, ...]:
    """A list as a tuple, one string as a list of it, None as an empty one."""
    if isinstance(value, str):
        return (value,)
    if value is not None and not isinstance(value, Iterable):
        raise InvalidField(f"{name}: {value!r} is not a list", name)
    return tuple(value or ())


def check_range(name: str, value: Any, low: float, high: float) -> None:
    """Raises InvalidField for what is neither None nor a number from `low` to `high`."""
    if value is None:
        return
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or (isinstance(value, float) and not math.isfinite(value)):
        raise InvalidField(f"{name}: {shorten(value)} is not a finite number", name)
    if not low <= value <= high:
        raise InvalidField(
            f"{name}: {shorten(value)} is outside [{_limit_text(low)}, {_limit_text(high)}]", name
        )


def _limit_text(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:g}"


def shorten(value: Any) -> str:
    """A value as messages show it, at most 80 characters of it."""
    try:
        text = repr(value)
    except ValueError:  # an integer with more digits than Python prints
        return "such a number"
    return text if len(text) <= 80 else text[:77] + "…"


def _check_whole(name: str, value: Any) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
        raise InvalidField(f"{name}: {shorten(value)} is not a whole number", name)


@dataclass(frozen=True, slots=True)
class Declared:
    """A sampling field: what it does, its range, if any, other servers' names for it, and Plait's default."""

    words: str
    bounds: tuple[float, float] | None
    is_whole: bool
    also: tuple[str, ...]
    ours: float | None

    def check(self, name: str, value: Any) -> None:
        """Raises InvalidField for a value that is outside of its range, or no whole number."""
        if self.bounds is not None:
            check_range(name, value, *self.bounds)
        if self.is_whole:
            _check_whole(name, value)


def _declare(hint: Any) -> Declared:
    kind, meta, *_ = get_args(hint)
    bounds = tuple(meta.extra_json_schema.values()) or None
    return Declared(meta.description, bounds, kind in (int, int | None), **meta.extra)


_HINTS = get_type_hints(SamplingParams, include_extras=True).items()
SAMPLING: Mapping[str, Declared] = {n: _declare(h) for n, h in _HINTS if get_origin(h) is Annotated}


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probability of one token, and the best alternatives, most likely first. `top` holds (id, logprob).

    When alternatives were requested, the chosen token is always among `top` with the very same float.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


GrammarKind = Literal["json_schema", "regex", "choice", "lark", "gbnf"]


@dataclass(frozen=True, slots=True)
class JsonStyle:
    """How JSON is written where a schema leaves it open.

    `open_objects`: an object with `properties` may have others, as JSON Schema says; by default only where
    `additionalProperties` is given. `space` between two tokens: "line" (at most one space, or one line break
    with indentation), "any" (up to 32 of any white space) or "none".
    """

    open_objects: bool = False
    space: JsonSpace = "line"


USUAL_STYLE = JsonStyle()


@dataclass(frozen=True, slots=True)
class Grammar:
    """A grammar (structured output): what a reply must be, from its first to its last byte.

    `source`, by `kind`: the JSON text of a schema, a regular expression (Rust's syntax, anchored at both
    ends), the JSON text of a list of strings, or a grammar in Lark's or llama.cpp's notation. `param` is the
    request's field that it came from, for messages; two grammars that differ in nothing else are equal.

    `lead`, `opening` and `instead` are Lark sources of the server's own, "" for none. `lead` comes before the
    described reply (a block of thinking), `opening` begins it (the name of its channel). `instead` may
    replace both (tool calls).

    `open_objects` and `space`: of a schema's `JsonStyle`; None: the server's. `form`: the form that the
    library compiles, of a grammar that was tried out and found good; "": it was not tried.
    """

    kind: GrammarKind
    source: str
    param: str | None = field(default=None, compare=False)
    lead: str = ""
    instead: str = ""
    opening: str = ""
    open_objects: bool | None = None
    space: JsonSpace | None = None
    form: str = ""

    def styled(self, style: JsonStyle) -> Grammar:
        """The same, with the style of `style` where it has none of its own."""
        is_open = style.open_objects if self.open_objects is None else self.open_objects
        return replace(self, open_objects=is_open, space=self.space or style.space)


@dataclass(frozen=True, slots=True)
class ThinkingBudget:
    """At most `num_tokens` tokens of thinking in a reply; `closing_ids` are written then.

    Thinking lies between the texts `opening` and `closing`. `is_open`: the prompt ends inside of it.
    `anywhere`: it may also begin behind content, and not only where a reply begins.
    """

    num_tokens: int
    opening: str
    closing: str
    closing_ids: tuple[int, ...]
    is_open: bool = False
    anywhere: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyShape:
    """How to parse the text of a reply: what it may contain in addition to content.

    `tools`: those that may be called, as OpenAI writes them; `choice`: its tool_choice. `parallel`: more than
    one may be called. `thinks` False: the request turned thinking off. `is_open`: the prompt ends inside of
    thinking; `has_begun`: inside of content, for a model that names the channel of its texts. `may_think`
    False: no thinking begins in the reply, because it goes on from content, or its grammar allows none.
    """

    tools: tuple[Mapping[str, Any], ...] = ()
    choice: Any = None
    parallel: bool = True
    thinks: bool = True
    is_open: bool = False
    has_begun: bool = False
    may_think: bool = True


@dataclass(frozen=True, slots=True)
class Request:
    """One request as the engine sees it. `stop_token_ids` already holds every end-of-generation token.

    `boundaries`: positions of message ends in the prompt, where other requests are likely to diverge and
    state is worth keeping. `cache_salt`: only requests with the same salt share what was computed.
    `priority`: lower runs first. `timeout_s`: a request that is not done by then, counted from its arrival,
    ends with an error. `resumed`: output tokens so far of each choice, None for one that has ended, of a
    request that goes on in a new engine, with the tokens it would have had in the old one; (): it is new.

    `grammar`: what every choice must be; `thinking`: how much of it may be thinking. `shape`: how its text is
    parsed; None: all of it is content. `pooling`: instead of tokens, return the hidden state after the last
    norm, of the last token or the mean of all. `interval`: tokens of a choice that an engine in another
    process emits at a time; it emits the first, and the end, at once. `watched`: the reply is streamed, so a
    client would see it falter. `shows_progress`: events also report how far the prompt of the first choice is
    computed. `tenant`: an API key or an address; requests of one tenant share its turns.
    """

    id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams  # resolved
    stop_token_ids: frozenset[int] = frozenset()
    boundaries: tuple[int, ...] = ()
    cache_salt: str = ""
    priority: int = 0
    timeout_s: float | None = None
    resumed: tuple[tuple[int, ...] | None, ...] = ()
    grammar: Grammar | None = None
    thinking: ThinkingBudget | None = None
    shape: ReplyShape | None = None
    pooling: Pooling | None = None
    interval: int = 1
    watched: bool = True
    shows_progress: bool = False
    tenant: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTrace:
    """Where the time of one choice of a request went. Holds no text and no token.

    Times are seconds on the engine's clock, which only ever grows; None: it never came so far.
    `num_cached_tokens` of the prompt were cached already when it first ran; `miss_cause` is "hit" then, else
    why there were none ("": it never ran). `num_steps`: steps that computed something of it. Of its
    `num_drafted_tokens` draft tokens, `num_accepted_tokens` were accepted.
    """

    request_id: str
    index: int
    arrival_s: float
    first_scheduled_s: float | None
    first_token_s: float | None
    finish_s: float
    finish_reason: FinishReason
    num_prompt_tokens: int
    num_cached_tokens: int = 0
    miss_cause: str = ""
    num_output_tokens: int = 0
    num_preemptions: int = 0
    num_steps: int = 0
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Event:
    """New tokens of one choice of one request; the last one of a choice carries `finish_reason`.

    `prompt_logprobs` (first event, if requested): one entry per prompt token after the first.
    `token_ids` does not hold the end-of-generation token that stopped it; `stop_token_id` does.
    `num_cached_tokens`: tokens of the prompt that were not computed again. `error`: the exception behind
    finish_reason "error". `trace`: comes with the finish_reason, unless the request was never taken; events
    that differ in it alone are equal. `embedding` (last event of a request with `pooling`): the hidden state.
    `prompt_progress`, of an event without tokens: how many of the prompt's tokens are done, computed or
    cached, and the seconds since it first ran.
    """

    request_id: str
    index: int
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    num_cached_tokens: int = 0
    error: Exception | None = None
    trace: RequestTrace | None = field(default=None, compare=False)
    embedding: tuple[float, ...] | None = None
    prompt_progress: tuple[int, float] | None = None
