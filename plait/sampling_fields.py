"""The sampling fields of requests, each declared once: its name, its range, what it does, its other names.

The names are vLLM's where it has the field, else llama.cpp's. The schemas of the server, `SamplingParams`,
the options of the command line and the table in docs/apis.md are made from what is here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, get_args

from msgspec import Meta

from plait.errors import InvalidField

MAX_LOGPROBS, MAX_N, MAX_DRY_LENGTH = 20, 128, 512
MAX_WORDS, MAX_WORD_CHARS = 1024, 1024  # texts of one field, and characters of one of them
MAX_BEAMS = 64  # each is a sequence, with memory of its own
MAX_EXPRESSIONS = 16  # of stop_regex
MAX_BREAKERS = 32  # texts of dry_sequence_breakers: the vocabulary is searched for each
MAX_ALLOWED = 8192  # token ids of allowed_token_ids, which every step reads
_INT64 = 2**63 - 1
# The default order; llama.cpp's has the temperature last. "smoothing" is no sampler of llama.cpp's.
SAMPLERS = (
    *("penalties", "dry", "top_n_sigma", "temperature", "smoothing"),
    *("top_k", "top_p", "min_p", "typ_p", "xtc"),
)
# llama.cpp's other names, and the letters of its --sampling-seq.
SAMPLER_NAMES: Mapping[str, str] = {
    **{name: name for name in SAMPLERS},
    **{name.replace("_", "-"): name for name in SAMPLERS},
    **dict.fromkeys(("temp", "t"), "temperature"),
    **dict.fromkeys(("nucleus", "p"), "top_p"),
    **dict.fromkeys(("typical", "typical_p", "typical-p", "typ", "y"), "typ_p"),
    "e": "penalties",
    "d": "dry",
    "s": "top_n_sigma",
    "k": "top_k",
    "m": "min_p",
    "x": "xtc",
}


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
STOP = _words("text that ends it; may be repeated")
STOP_REGEX = _words("an expression of which a match ends it; may be repeated")
MaxTokens = Annotated[
    int | None, _words("most tokens to write", 0, also="n_predict num_predict max_new_tokens")
]
NumLogprobs = Annotated[int | None, _words("alternatives with each token; 0: itself alone", 0, MAX_LOGPROBS)]


@dataclass(frozen=True, kw_only=True)
class TokenRules:
    """What is forbidden, favoured or penalised by token, before tokens are drawn."""

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
    dry_multiplier: Annotated[float, _words("DRY, against repeated passages; 0: off", 0, 100)] = 0.0
    dry_base: Annotated[float, _words("DRY: the growth of the penalty per repeated token", 1, 100)] = 1.75
    dry_allowed_length: Annotated[
        int, _words("DRY: tokens that may repeat unpenalised", 0, MAX_DRY_LENGTH)
    ] = 2
    dry_penalty_last_n: Annotated[int, _words("DRY: tokens it looks back at; -1: all", -1)] = -1
    dry_sequence_breakers: Annotated[
        tuple[str, ...], _words("DRY: texts that no repetition reaches across; may be repeated")
    ] = ("\n", ":", '"', "*")
    logit_bias: Annotated[
        Mapping[int, float], _words("added to logits, by token id; -100 to 100"), NO_ENTRIES
    ] = field(default_factory=dict)
    logit_bias_strings: Annotated[
        Mapping[str, float], _words("the same, for every token of a text"), NO_ENTRIES
    ] = field(default_factory=dict)
    allowed_token_ids: Annotated[tuple[int, ...], _words("no other token is written; empty: any is")] = ()
    bad_words: Annotated[tuple[str, ...], _words("texts that are never written; may be repeated")] = ()


@dataclass(frozen=True, kw_only=True)
class SamplingFields(TokenRules):
    """Sampling fields of HTTP requests of every API that generates, of `SamplingParams` and of the command
    line, in vLLM's spelling; None: the model decides."""

    min_tokens: Annotated[int, _words("tokens before anything may stop it", 0, also="min_new_tokens")] = 0
    temperature: Annotated[float | None, _words("0: always the likeliest token", 0, 2, ours=0.7)] = None
    dynatemp_range: Annotated[
        float, _words("dynamic temperature: the temperature ± this, by entropy; 0: off", 0, 2)
    ] = 0.0
    dynatemp_exponent: Annotated[
        float, _words("dynamic temperature: the power of the relative entropy", 0, 10)
    ] = 1.0
    smoothing_factor: Annotated[float, _words("quadratic smoothing of logits; 0: off", 0, 100)] = 0.0
    smoothing_curve: Annotated[float, _words("smoothing: above 1 with a cubic part", 1, 10)] = 1.0
    top_p: Annotated[float | None, _words("the likeliest tokens of this probability", 0, 1, ours=0.9)] = None
    top_k: Annotated[int | None, _words("the likeliest so many tokens; 0: no limit", -1, ours=40)] = None
    min_p: Annotated[float | None, _words("least share of the likeliest's probability", 0, 1, ours=0)] = None
    typical_p: Annotated[
        float, _words("the most typical tokens of this probability; 1: off", 0, 1, also="typical typ_p")
    ] = 1.0
    top_n_sigma: Annotated[
        float,
        _words("tokens within so many deviations of the largest logit; 0: off", -1, 100, also="nsigma"),
    ] = -1.0
    xtc_probability: Annotated[float, _words("how often XTC drops the likeliest tokens; 0: never", 0, 1)] = (
        0.0
    )
    xtc_threshold: Annotated[
        float, _words("XTC: the probability from which tokens are dropped, but for one", 0, 1)
    ] = 0.1
    mirostat: Annotated[int, _words("mirostat 1 or 2, in place of the other cuts; 0: off", 0, 2)] = 0
    mirostat_tau: Annotated[float, _words("mirostat: the surprise of a token, in bits", 0, 100)] = 5.0
    mirostat_eta: Annotated[float, _words("mirostat: how fast its bound follows", 0, 1)] = 0.1
    samplers: Annotated[
        tuple[str, ...], _words("which samplers run, in this order; empty: all; may be repeated")
    ] = ()
    seed: Annotated[int | None, _words("makes a text repeatable", -_INT64 - 1, also="random_seed")] = None
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
    stop: Annotated[str | tuple[str, ...], STOP] = ()
    stop_regex: Annotated[str | tuple[str, ...], STOP_REGEX] = ()
    guidance_scale: Annotated[
        float,
        _words("classifier-free guidance: away from the negative prompt; 1: off", 0, 100, also="cfg_scale"),
    ] = 1.0
    negative_prompt: Annotated[
        str | tuple[int, ...] | None,
        _words("guidance: the text or token ids to go away from; none: the prompt's last token"),
    ] = None
    use_beam_search: Annotated[bool, _words("the likeliest texts by beam search, in place of draws")] = False
    beam_width: Annotated[
        int | None, _words("beam search: beams; none: n", 1, MAX_BEAMS, also="num_beams")
    ] = None
    length_penalty: Annotated[
        float, _words("beam search: scores are divided by the length to this power", -10, 10)
    ] = 1.0
    early_stopping: Annotated[
        bool | Literal["never"], _words('beam search: end at beam_width finished beams; or "never"')
    ] = False
    truncate_prompt_tokens: Annotated[
        int | None,
        _words("the prompt's last so many tokens; -1: as many as fit", -1, also="truncate"),
    ] = None


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
            check_whole(name, value)


def declare(hint: Any) -> Declared:
    """A field as its annotated type says it."""
    kind, meta, *_ = get_args(hint)
    bounds = tuple(meta.extra_json_schema.values()) or None
    return Declared(meta.description, bounds, kind in (int, int | None), **meta.extra)


def as_tuple(name: str, value: Any) -> tuple[Any, ...]:
    """A list as a tuple, one string as a list of it, None as an empty one. Raises InvalidField."""
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
        is_below = value < low and high == _INT64  # which is no limit that a client thinks of
        range_text = f"outside [{_limit_text(low)}, {_limit_text(high)}]"
        wrong = f"less than {_limit_text(low)}" if is_below else range_text
        raise InvalidField(f"{name}: {shorten(value)} is {wrong}", name)


def check_whole(name: str, value: Any) -> None:
    """Raises InvalidField for what is neither None nor a whole number."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
        raise InvalidField(f"{name}: {shorten(value)} is not a whole number", name)


def check_texts(name: str, texts: Iterable[Any], most: int = MAX_WORDS) -> None:
    """Raises InvalidField for a list of texts that is too long, or has what is no text, an empty or a long
    one."""
    for count, text in enumerate(texts, 1):
        if count > most:
            raise InvalidField(f"{name}: it has more than {most} texts; send fewer", name)
        if not isinstance(text, str):
            raise InvalidField(f"{name}: {shorten(text)} is not a string", name)
        if not text or len(text) > MAX_WORD_CHARS:
            chars = f"1 to {MAX_WORD_CHARS} characters"
            raise InvalidField(f"{name}: a text has {len(text)} characters; send {chars}", name)


def read_samplers(given: Iterable[Any]) -> tuple[str, ...]:
    """Samplers under our names; one text may hold several, as "top_k;top_p" or in llama.cpp's letters.

    Raises InvalidField for a sampler that is unknown, or listed twice.
    """
    found: list[str] = []
    for text in given:
        if not isinstance(text, str):
            raise InvalidField(f"samplers: {shorten(text)} is not the name of a sampler", "samplers")
        parts = text.replace(",", ";").split(";")
        if text not in SAMPLER_NAMES and len(parts) == 1 and set(text) <= SAMPLER_NAMES.keys():
            parts = [*text]
        for part in parts:
            if (name := SAMPLER_NAMES.get(part.strip())) is None:
                known = ", ".join(SAMPLERS)
                raise InvalidField(f"samplers: {shorten(part)} is not one of {known}", "samplers")
            found.append(name)
    if twice := [name for i, name in enumerate(found) if name in found[:i]]:
        raise InvalidField(f"samplers: {twice[0]} is listed twice; list each sampler once", "samplers")
    return tuple(found)


def shorten(value: Any) -> str:
    """A value as messages show it, at most 80 characters of it."""
    try:
        text = repr(value)
    except ValueError:  # an integer with more digits than Python prints
        return "such a number"
    return text if len(text) <= 80 else text[:77] + "…"


def _limit_text(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:g}"
