"""From a body to typed fields: aliases of parameters, then conversion with errors that name the field.

Aliases are the names of llama.cpp, Ollama, SGLang and Mistral for ours, in one table, which is applied to
every body before it is validated. A name is an alias of ours, or it is refused because nothing here does what
it requests. A name that changes no reply stays, and is reported as ignored. A value that changes nothing is
accepted and dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from plait.errors import InvalidField, RequestError
from plait.request import SAMPLING
from plait.sampling_fields import shorten
from plait.typed_values import convert_to

S = TypeVar("S")
AS_MANY_AS_FIT = 2**31 - 1  # a limit that the free context makes smaller
_THINK = ("think", "enable_thinking")  # of a chat
NO_LIMIT = (-1, -2)  # llama.cpp's and Ollama's words for as many tokens as fit

# alias -> our name
NAMES: Mapping[str, str] = {
    **{also: name for name, field in SAMPLING.items() for also in field.also},
    "return_tokens": "return_token_ids",
    "add_special": "add_special_tokens",
    "thinking_budget": "thinking_token_budget",
    "extra_key": "cache_salt",
    "regex": "guided_regex",
    "ebnf": "guided_grammar",
}

Harmless = Callable[[object], bool]


def _is(*values: object) -> Harmless:
    return lambda value: value in values and isinstance(value, bool) == isinstance(values[0], bool)


def _always(_: object) -> bool:
    return True


def _empty(value: object) -> bool:
    return value in ("", [], {})


_WHOLE = "; penalties look at the whole text here: send -1, or leave it out"
_LOADED = "; how a model is loaded is set when the server starts"
# name -> (which values change nothing, what to do instead)
REFUSED: Mapping[str, tuple[Harmless, str]] = {
    "repeat_last_n": (_is(-1), _WHOLE),
    "penalty_last_n": (_is(-1), _WHOLE),
    "penalize_nl": (_is(True), "; line breaks are penalised like any token"),
    "penalize_newline": (_is(True), "; line breaks are penalised like any token"),
    "min_keep": (_is(0), ""),
    "n_keep": (_always, ""),  # of a context that is cut, which none is here
    "num_keep": (_always, ""),
    "n_discard": (_is(0), "; nothing is ever cut from a context"),
    "n_indent": (_is(0), ""),
    "t_max_predict_ms": (_is(0, -1), "; send timeout_s"),
    "cache_prompt": (_is(True), "; --no-prefix-cache turns the cache off, cache_salt sets a request apart"),
    "post_sampling_probs": (_is(False), "; probabilities are the model's own"),
    "response_fields": (_empty, ""),
    "system_prompt": (_empty, "; send a system message"),
    "image_data": (_empty, ""),
    "multimodal_data": (_empty, ""),
    "adaptive_target": (_is(-1, -1.0), ""),
    "adaptive_decay": (_always, ""),
    "raw": (_is(False), "; /v1/completions takes a prompt as it is"),
    "template": (_empty, "; the server's --chat-template sets it"),
    "images": (_empty, ""),
    "num_gpu": (_is(-1), _LOADED),
    "num_thread": (_is(0), _LOADED),
    "num_batch": (_always, ""),  # changes no text
    "main_gpu": (_is(0), _LOADED),
    "use_mmap": (_always, ""),
    "use_mlock": (_is(False), _LOADED),
    "numa": (_is(False), _LOADED),
    "low_vram": (_is(False), _LOADED),
    "vocab_only": (_is(False), _LOADED),
    "custom_logit_processor": (_empty, "; no code is taken from clients"),
}
# These change no reply, and are reported as ignored unless they request what holds anyway. Sequences have no
# fixed slot here, and the model stays as long as the server runs.
REPORTED: Mapping[str, Harmless] = {
    "id_slot": _is(-1),
    "slot_id": _is(-1),
    "keep_alive": lambda value: value in (-1, "-1"),
}


def parse_as(body: Mapping[str, object], kind: type[S]) -> S:
    """`body` as `kind`. Raises InvalidField, naming the field as OpenAI does: `messages[0].content`."""
    try:
        return convert_to(body, kind)
    except msgspec.ValidationError as error:
        what, param = _split_place(str(error))
        if what == "Number out of range":  # a whole number, where the field is a float
            what = "a number of so many digits is more than any field takes: at most 1.8e308"
        if what.startswith("Invalid enum value") and (known := _choices(kind, param or "")):
            what = f"{what.removeprefix('Invalid enum value ')[:80]} is not {known}"
        raise InvalidField(f"{param}: {what}" if param else what, param) from None


def present(body: Mapping[str, object]) -> dict[str, object]:
    """The fields that are not null, under their own names rather than aliases. Raises InvalidField."""
    return rename_params({name: value for name, value in body.items() if value is not None})


def find_aliases(body: Mapping[str, object]) -> dict[str, str]:
    """Our name -> the one by which a client sent the field, for those that were renamed."""
    options = body.get("options")
    sent = {**(options if isinstance(options, dict) else {}), **body}
    names = [name for name, value in sent.items() if value is not None]
    return {NAMES[name]: name for name in names if name in NAMES and NAMES[name] not in names}


def name_as_sent(error: Exception, aliases: Mapping[str, str]) -> Exception:
    """The same error, of a field that a client sent under another name. `aliases`: of `find_aliases`."""
    param = getattr(error, "param", None) or ""
    text, name = str(error), aliases.get(param)
    if name is None or not isinstance(error, RequestError):
        return error
    return error.reword(f"{name}{text.removeprefix(param)}" if text.startswith(f"{param}: ") else text, name)


def string_of(found: Mapping[str, object], name: str, at: str) -> str:
    """A field that must be text, of an object at `at`. Raises InvalidField."""
    value = found.get(name)
    if not isinstance(value, str):
        raise InvalidField(f"{at}.{name}: it must be a string", f"{at}.{name}")
    return value


def field_names(kind: type) -> frozenset[str]:
    """The names of what a Struct or a dataclass holds."""
    return frozenset(get_type_hints(kind))


def _choices(kind: object, param: str) -> str:
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


def rename_params(body: Mapping[str, object]) -> dict[str, object]:
    """The body under our names, without what changes nothing. Raises InvalidField."""
    found: dict[str, object] = {}
    for name, value in _flat(body).items():
        if name in REPORTED and REPORTED[name](value):
            continue
        if name in REFUSED:
            harmless, hint = REFUSED[name]
            if not harmless(value):
                raise InvalidField(f"{name}: this server cannot honour it{hint or '; leave it out'}", name)
            continue
        for ours, meant in _translate_field(name, value, body).items():
            if name in body and ours in body and ours != name and body[ours] != meant:
                raise InvalidField(f"{name}: {value!r:.80} contradicts {ours}; send one of them", name)
            if found.setdefault(ours, meant) != meant:
                raise InvalidField(f"{name}: {value!r:.80} contradicts another name of {ours}", name)
    return found


def _flat(body: Mapping[str, object]) -> Mapping[str, object]:
    """The body with the fields of Ollama's `options` moved up to the other fields."""
    options = body.get("options")
    if options is None:
        return body
    if not isinstance(options, dict):
        raise InvalidField("options: it must be an object", "options")
    rest = {name: value for name, value in body.items() if name != "options"}
    for name, value in options.items():
        if value is not None and rest.setdefault(name, value) != value:
            raise InvalidField(f"options.{name}: {value!r:.80} contradicts {name}", f"options.{name}")
    return rest


def _translate_field(name: str, value: object, body: Mapping[str, object]) -> dict[str, object]:
    """A field under our names. Raises InvalidField."""
    if name == "n_probs":
        return _n_probs(value, is_chat="messages" in body)
    if name == "logit_bias":
        return _bias(value)
    if name == "samplers" and isinstance(value, str):
        return {name: [value]}
    if name in _THINK and "prompt" not in body:
        return _thinking(name, value)
    ours = NAMES.get(name, name)
    if ours == "max_tokens" and name != ours and value in NO_LIMIT:
        value = AS_MANY_AS_FIT
    return {ours: value}


def _n_probs(value: object, *, is_chat: bool) -> dict[str, object]:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidField(f"n_probs: {value!r:.80} is not a whole number", "n_probs")
    if not value:
        return {}
    return {"logprobs": True, "top_logprobs": value} if is_chat else {"logprobs": value}


def _thinking(name: str, value: object) -> dict[str, object]:
    """Ollama's switch of thinking, which may be a level, too."""
    if isinstance(value, str):
        return {"reasoning_effort": value}
    if not isinstance(value, bool):
        raise InvalidField(f"{name}: {value!r:.80} is neither true or false nor an effort", name)
    return {"chat_template_kwargs": {"enable_thinking": value}}


def _bias(value: object) -> dict[str, object]:
    """A logit bias by token id or by text: OpenAI's object, and llama.cpp's pairs; false is none.

    In an object a key of digits alone is an id, and any other key a text, as llama.cpp has it.
    """
    pairs: list[object]
    if isinstance(value, dict):
        pairs = [[_token_or_text(key), bias] for key, bias in value.items()]
    else:
        pairs = value if isinstance(value, list) else [] if value is False else [value]
    by_id: dict[int, object] = {}
    by_text: dict[str, object] = {}
    for i, pair in enumerate(pairs):
        if not (isinstance(pair, list) and len(pair) == 2 and type(pair[0]) in (int, str)):
            at = f"logit_bias[{i}]"
            text = "send an object, or pairs, of a token id or a text and a number"
            raise InvalidField(f"{at}: {text}", at)
        bias = -100.0 if pair[1] is False else pair[1]
        (by_id if type(pair[0]) is int else by_text)[pair[0]] = bias
    return {"logit_bias": by_id, **({"logit_bias_strings": by_text} if by_text else {})}


def _token_or_text(key: str) -> int | str:
    digits = key.removeprefix("-")
    if not (digits.isascii() and digits.isdigit()):
        return key
    if len(key) > 9 or digits != key:
        raise InvalidField(f"logit_bias: {shorten(key)} is not a token id", "logit_bias")
    return int(key)
