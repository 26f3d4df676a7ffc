"""What passes the engine's door: requests in, events out. Plain data: token ids, never text or tensors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from plait.config import JsonSpace
from plait.errors import InvalidField

FinishReason = Literal["stop", "length", "cancelled", "error"]
Pooling = Literal["last", "mean"]
MAX_LOGPROBS = 20
MAX_N = 128
DEFAULT_TEMPERATURE, DEFAULT_TOP_P, DEFAULT_TOP_K = 0.7, 0.9, 40


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen, in vLLM's spelling.

    `temperature`, `top_p`, `top_k`, `min_p`, `repetition_penalty` None: the model's generation_config.json
    decides, then 0.7, 0.9, 40, 0, 1.
    `top_k` 0: no limit (and -1, as vLLM spells it). `max_tokens` None: the rest of the context. `logprobs`:
    how many alternatives are reported beside the chosen token (0: the chosen one only); raw model
    log-probabilities, natural log, before penalties and temperature. `best_of`: how many choices are
    generated, of which the `n` with the highest log-probability per token are returned, best first (None:
    `n`, in their order); OpenAI's meaning, where vLLM's V0 took the sum, which favours short replies.
    `structured_outputs`: what the reply must be, in vLLM's shape: one of `json` (a schema), `regex`,
    `choice`, `grammar` and `json_object`. Raises InvalidField, naming the field.
    """

    n: int = 1
    best_of: int | None = None
    max_tokens: int | None = 100
    min_tokens: int = 0
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    structured_outputs: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", _listed("stop", self.stop))
        object.__setattr__(self, "stop_token_ids", _listed("stop_token_ids", self.stop_token_ids))
        for name, low, high in _RANGES:
            _check(name, getattr(self, name), low, high)
        for name in _WHOLE:
            _check_whole(name, getattr(self, name))
        if self.best_of is not None and self.best_of < self.n:
            raise InvalidField(f"best_of: {self.best_of} is less than n ({self.n})", "best_of")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            shown = shorten(self.min_tokens), shorten(self.max_tokens)
            text = "min_tokens: {} is more than max_tokens ({})".format(*shown)
            raise InvalidField(text, "min_tokens")
        for stop in self.stop:
            if not isinstance(stop, str):
                raise InvalidField(f"stop: {stop!r} is not a string; token ids go in stop_token_ids", "stop")
            if not stop:
                raise InvalidField("stop: an empty stop string would stop at once; leave it out", "stop")
        for token_id in self.stop_token_ids:
            _check_whole("stop_token_ids", token_id)
        for token_id, bias in self.logit_bias.items():
            _check_whole("logit_bias", token_id)
            _check("logit_bias", bias, -100, 100)

    @property
    def num_sequences(self) -> int:
        """How many choices are generated."""
        return self.n if self.best_of is None else self.best_of

    @property
    def is_ranked(self) -> bool:
        """Whether more choices are generated than returned."""
        return self.num_sequences > self.n

    def resolved(self, generation_config: Mapping[str, Any]) -> SamplingParams:
        """With every open choice filled in: the request's, else the model's, else Plait's default."""
        sampled = generation_config.get("do_sample", True)
        pick = generation_config if sampled else {**generation_config, "temperature": 0.0}
        return replace(
            self,
            temperature=_first(self.temperature, pick.get("temperature"), DEFAULT_TEMPERATURE),
            top_p=_first(self.top_p, pick.get("top_p"), DEFAULT_TOP_P),
            top_k=_first(self.top_k, pick.get("top_k"), DEFAULT_TOP_K),
            min_p=_first(self.min_p, pick.get("min_p"), 0.0),
            repetition_penalty=_first(self.repetition_penalty, pick.get("repetition_penalty"), 1.0),
        )


def _listed(name: str, value: Any) -> tuple[Any, ...]:
    """A list as a tuple, one string as a list of it, None as an empty one."""
    if isinstance(value, str):
        return (value,)
    if value is not None and not isinstance(value, Iterable):
        raise InvalidField(f"{name}: {value!r} is not a list", name)
    return tuple(value or ())


def _first(*values: Any) -> Any:
    return next(v for v in values if v is not None)


def _check(name: str, value: Any, low: float, high: float) -> None:
    if value is None:
        return
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or (isinstance(value, float) and not math.isfinite(value)):
        raise InvalidField(f"{name}: {shorten(value)} is not a finite number", name)
    if not low <= value <= high:
        raise InvalidField(f"{name}: {shorten(value)} is outside [{_bound(low)}, {_bound(high)}]", name)


def _bound(value: float) -> str:
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


_INT64 = 2**63 - 1
_WHOLE = ("n", "best_of", "max_tokens", "min_tokens", "top_k", "seed", "logprobs", "prompt_logprobs")
_RANGES = (
    ("n", 1, MAX_N),
    ("best_of", 1, MAX_N),
    ("max_tokens", 0, _INT64),
    ("min_tokens", 0, _INT64),
    ("temperature", 0, 2),
    ("top_p", 0, 1),
    ("top_k", -1, _INT64),
    ("min_p", 0, 1),
    ("seed", -_INT64 - 1, _INT64),
    ("repetition_penalty", 0.01, 100),
    ("presence_penalty", -2, 2),
    ("frequency_penalty", -2, 2),
    ("logprobs", 0, MAX_LOGPROBS),
    ("prompt_logprobs", 0, MAX_LOGPROBS),
)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probability of one token, and the best alternatives, most likely first. `top` holds (id, logprob).

    When alternatives were asked for, the chosen token is always among `top` with the very same float.
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
    """One description of what a reply must be, from its first to its last byte.

    `source` is the JSON text of a schema, a regular expression (Rust's syntax, anchored at both ends), the
    JSON text of a list of strings, or a grammar in Lark's or llama.cpp's notation. `param` is the request's
    field that it came from, for messages; two grammars that differ in nothing else are equal.

    `lead`, `opening` and `instead` are Lark sources of the server's own, "" for none: what comes before the
    described reply (a block of thinking), what begins it (the name of its channel), and what may stand in the
    place of both (calls of tools).

    `open_objects` and `space`: of a schema's `JsonStyle`; None: the server's. `form`: what the library
    compiles, of a grammar that was tried out and found good; "": it was not tried.
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

    Thinking stands between the texts `opening` and `closing`. `is_open`: the prompt ends inside of it.
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
    """What is in the text of a reply beside content, for whoever reads it.

    `tools`: those that may be called, as OpenAI writes them; `choice`: its tool_choice. `parallel`: more than
    one may be. `thinks` False: the model was told not to; `is_open`: the prompt ends inside of thinking;
    `has_begun`: inside of content, for a model that names the channel of what it says. `may_think` False:
    no thinking begins in the reply, as it goes on from content, or as its grammar has no place for any.
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

    `boundaries`: prompt positions where other requests are likely to part ways (ends of messages), where
    state is worth keeping. `cache_salt`: only requests with the same salt share what was computed.
    `priority`: lower runs first. `timeout_s`: ends with an error when it is not done by then, counted from
    its arrival. `resumed`, of a request that goes on in a new engine: the output tokens of each choice so
    far, None for one that has ended; (): it is new. It gets the tokens that it would have had in the old one.
    `grammar`: what every choice must be; `thinking`: how much of it may be thinking. `shape`: how its text is
    read; None: all of it is content.
    `pooling`: what is wanted is the hidden state after the last norm, of the last token or the mean of all.
    `interval`: tokens of a choice that an engine in another process tells of at a time; the first, and the
    end, it tells at once. `watched`: somebody sees the reply before its end, and would see it falter.
    `shows_progress`: there are events, too, of how far the prompt of the first choice is computed.
    `tenant`: with whom it shares what is dealt out in turns, an API key or an address.
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
    `num_cached_tokens` of the prompt were there already when it first ran; `miss_cause` is "hit" then, else
    why there were none ("": it never ran). `num_steps`: steps that computed something of it. Of the
    `num_drafted_tokens` that were guessed ahead, `num_accepted_tokens` were right.
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

    `prompt_logprobs` (first event of a request that asked): one entry per prompt token after the first.
    `token_ids` does not hold the end-of-generation token that stopped it; `stop_token_id` does.
    `num_cached_tokens`: tokens of the prompt that were not computed again. `error`: the exception behind
    finish_reason "error". `trace`: comes with the finish_reason, unless the request was never taken; events
    that differ in it alone are equal. `embedding` (last event of a request with `pooling`): the hidden state.
    `prompt_progress`, of an event without tokens: so many of the prompt's are done, computed or cached, and
    the seconds since it first ran.
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
