"""Requests and events, which go in and out of the engine: plain data, token ids, never text or tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Annotated, Any, Literal, get_origin, get_type_hints

from msgspec import Struct

from plait.config import JsonSpace
from plait.errors import InvalidField
from plait.sampling_fields import (
    MAX_ALLOWED,
    MAX_BREAKERS,
    MAX_EXPRESSIONS,
    STOP,
    STOP_REGEX,
    ChoiceFields,
    Declared,
    MaxTokens,
    NumLogprobs,
    as_tuple,
    check_range,
    check_texts,
    check_whole,
    declare,
    read_samplers,
    shorten,
)

FinishReason = Literal["stop", "length", "cancelled", "error"]
Pooling = Literal["last", "mean"]


@dataclass(frozen=True, kw_only=True)
class SamplingParams(ChoiceFields):
    """Sampling parameters: how tokens are chosen. `SamplingFields` and `ChoiceFields` describe the fields.

    `top_k` -1 is 0, as vLLM spells it. `max_tokens` None: the rest of the context. `logprobs` are the raw
    model's, natural log, before penalties and temperature. The best of `best_of` choices have the highest
    log-probability per token, best first; this is OpenAI's meaning, where vLLM's V0 took the sum.
    `structured_outputs`: what the reply must be, in vLLM's shape: one of `json` (a schema), `regex`,
    `choice`, `grammar` and `json_object`. Raises InvalidField, naming the field.

    `bad_word_ids` and `dry_breaker_ids`: what the texts of `bad_words` and `dry_sequence_breakers` are in
    tokens. Where text becomes tokens they are filled in, and the engine reads them alone.
    """

    max_tokens: MaxTokens = 100
    stop: Annotated[tuple[str, ...], STOP] = ()
    stop_regex: Annotated[tuple[str, ...], STOP_REGEX] = ()
    logprobs: NumLogprobs = None
    prompt_logprobs: NumLogprobs = None
    structured_outputs: Mapping[str, Any] | None = None
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    dry_breaker_ids: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        for name in _LISTS:
            object.__setattr__(self, name, as_tuple(name, getattr(self, name)))
        if self.samplers:
            object.__setattr__(self, "samplers", read_samplers(self.samplers))
        for name, declared in SAMPLING.items():
            declared.check(name, getattr(self, name))
        if self.best_of is not None and self.best_of < self.n:
            raise InvalidField(f"best_of: {self.best_of} is less than n ({self.n})", "best_of")
        if self.use_beam_search and self.n > self.num_beams:
            raise InvalidField(f"beam_width: {self.beam_width} is less than n ({self.n})", "beam_width")
        if self.negative_prompt is not None and not isinstance(self.negative_prompt, str):
            object.__setattr__(self, "negative_prompt", as_tuple("negative_prompt", self.negative_prompt))
        if self.early_stopping not in (True, False, "never"):
            text = f'early_stopping: {shorten(self.early_stopping)} is none of true, false and "never"'
            raise InvalidField(text, "early_stopping")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            least, most = shorten(self.min_tokens), shorten(self.max_tokens)
            raise InvalidField(f"min_tokens: {least} is more than max_tokens ({most})", "min_tokens")
        if self.truncate_prompt_tokens == 0:
            text = "truncate_prompt_tokens: 0 leaves no prompt; send 1 or more, or -1"
            raise InvalidField(text, "truncate_prompt_tokens")
        self._check_lists()

    def _check_lists(self) -> None:
        for stop in self.stop:
            if not isinstance(stop, str):
                raise InvalidField(f"stop: {stop!r} is not a string; token ids go in stop_token_ids", "stop")
            if not stop:
                raise InvalidField("stop: an empty stop string would stop at once; leave it out", "stop")
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            for token_id in getattr(self, name):
                check_whole(name, token_id)
        for name in ("bad_words", "logit_bias_strings"):
            check_texts(name, getattr(self, name))
        check_texts("dry_sequence_breakers", self.dry_sequence_breakers, MAX_BREAKERS)
        check_texts("stop_regex", self.stop_regex, MAX_EXPRESSIONS)
        if (count := len(self.allowed_token_ids)) > MAX_ALLOWED:
            text = f"allowed_token_ids: it has {count} ids; send at most {MAX_ALLOWED}"
            raise InvalidField(text, "allowed_token_ids")
        for name in ("logit_bias", "logit_bias_strings"):
            for bias in getattr(self, name).values():
                check_range(name, bias, -100, 100)

    @cached_property
    def needs_chain(self) -> bool:
        """Whether tokens are chosen by more than penalties, biases, temperature, top-k, top-p and min-p."""
        rules = self.dry_multiplier or self.allowed_token_ids or self.bad_word_ids
        cuts = self.typical_p < 1 or self.top_n_sigma > 0 or self.xtc_probability
        shapes = self.dynatemp_range or self.smoothing_factor or self.mirostat
        return bool(rules or cuts or shapes or self.samplers)

    @cached_property
    def dry_breaks(self) -> tuple[frozenset[int], tuple[tuple[int, ...], ...]]:
        """DRY's breakers: single tokens, and those of several."""
        several = tuple(ids for ids in self.dry_breaker_ids if len(ids) > 1)
        return frozenset(ids[0] for ids in self.dry_breaker_ids if len(ids) == 1), several

    @cached_property
    def needs_history(self) -> bool:
        """Whether the sampler must know what came before."""
        penalties = (self.repetition_penalty or 1, self.presence_penalty, self.frequency_penalty)
        return penalties != (1, 0, 0) or bool(self.dry_multiplier or self.bad_word_ids)

    @property
    def is_ended_by_text(self) -> bool:
        """Whether text may end a choice, which only its reader sees."""
        return bool(self.stop or self.stop_regex)

    @property
    def is_guided(self) -> bool:
        """Whether a second sequence with the negative prompt guides each choice."""
        return self.guidance_scale != 1

    @property
    def num_beams(self) -> int:
        """The beams of a beam search."""
        return self.n if self.beam_width is None else self.beam_width

    @property
    def num_sequences(self) -> int:
        """How many choices are generated."""
        return self.n if self.best_of is None else self.best_of

    @property
    def is_ranked(self) -> bool:
        """Whether more choices are generated than returned."""
        return self.num_sequences > self.n

    def resolve(self, generation_config: Mapping[str, Any]) -> SamplingParams:
        """With every open parameter filled in: the request's, else the model's, else Plait's default.

        `bad_words_ids` of several tokens join the request's. Those of one token are never drawn at all.
        """
        is_greedy = not generation_config.get("do_sample", True)
        theirs = {**generation_config, "temperature": 0.0} if is_greedy else generation_config
        found: dict[str, Any] = {}
        for name, declared in SAMPLING.items():
            values = (getattr(self, name), theirs.get(name), declared.ours)
            if declared.ours is not None:
                found[name] = next(value for value in values if value is not None)
        if words := [tuple(ids) for ids in generation_config.get("bad_words_ids") or () if len(ids) > 1]:
            found["bad_word_ids"] = (*self.bad_word_ids, *words)
        return replace(self, **found)


_LISTS = (
    *(
        "stop",
        "stop_regex",
        "stop_token_ids",
        "allowed_token_ids",
        "bad_words",
        "dry_sequence_breakers",
        "samplers",
    ),
    *("bad_word_ids", "dry_breaker_ids"),
)
_HINTS = get_type_hints(SamplingParams, include_extras=True).items()
SAMPLING: Mapping[str, Declared] = {n: declare(h) for n, h in _HINTS if get_origin(h) is Annotated}


class TokenLogprobs(Struct, frozen=True):
    """Log-probability of one token, and the best alternatives, most likely first. `top` holds (id, logprob).

    When alternatives were requested, the chosen token is always among `top` with the very same float.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


GrammarKind = Literal["json_schema", "regex", "choice", "lark", "gbnf"]


class JsonStyle(Struct, frozen=True):
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

    def with_style(self, style: JsonStyle) -> Grammar:
        """The same, with the style of `style` where it has none of its own."""
        is_open = style.open_objects if self.open_objects is None else self.open_objects
        return replace(self, open_objects=is_open, space=self.space or style.space)


class ThinkingBudget(Struct, frozen=True):
    """At most `num_tokens` tokens of thinking in a reply; `closing_ids` are written then.

    Thinking lies between the texts `opening` and `closing`. `is_open`: the prompt ends inside of it.
    `anywhere`: it may also begin behind content, and not only where a reply begins. `closings`:
    texts that end what the prompt has opened, as `closing` does. `until`: texts that end thinking and are
    no part of it.
    """

    num_tokens: int
    opening: str
    closing: str
    closing_ids: tuple[int, ...]
    is_open: bool = False
    anywhere: bool = False
    closings: tuple[str, ...] = ()
    until: tuple[str, ...] = ()


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
    `resumed_mu`: mirostat's bound of each of these choices, () without mirostat.

    `grammar`: what every choice must be; `thinking`: how much of it may be thinking. `shape`: how its text is
    parsed; None: all of it is content. `pooling`: instead of tokens, return the hidden state after the last
    norm, of the last token or the mean of those from `pooled_from` on. `negative_ids`: the negative prompt
    of a guided request; its sequence goes on with the tokens of the choice. `interval`: tokens of a choice
    that an engine in another process emits at a time; it emits the first, and the end, at once. `watched`:
    the reply is streamed, so a client would see it falter. `shows_progress`: events also report how far the
    prompt of the first choice is computed. `tenant`: an API key or an address; requests of one tenant share
    its turns.
    `adapter`: the name of the adapter that computes it with the model; "": the model alone does.
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
    resumed_mu: tuple[float | None, ...] = ()
    grammar: Grammar | None = None
    thinking: ThinkingBudget | None = None
    shape: ReplyShape | None = None
    pooling: Pooling | None = None
    negative_ids: tuple[int, ...] = ()
    interval: int = 1
    watched: bool = True
    shows_progress: bool = False
    tenant: str = ""
    adapter: str = ""
    pooled_from: int = 0


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


class Event(Struct, frozen=True, array_like=True, omit_defaults=True):
    """New tokens of one choice of one request; the last one of a choice carries `finish_reason`.

    `prompt_logprobs` (first event, if requested): one entry per prompt token after the first.
    `token_ids` does not hold the end-of-generation token that stopped it; `stop_token_id` does.
    `num_cached_tokens`: tokens of the prompt that were not computed again. `error`: the exception behind
    finish_reason "error". `trace`: comes with the finish_reason, unless the request was never taken.
    `embedding` (last event of a request with `pooling`): the hidden state.
    `prompt_progress`, of an event without tokens: how many of the prompt's tokens are done, computed or
    cached, and the seconds since it first ran. `mirostat_mu`: mirostat's bound after its last token.
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
    trace: RequestTrace | None = None
    embedding: tuple[float, ...] | None = None
    prompt_progress: tuple[int, float] | None = None
    mirostat_mu: float | None = None
