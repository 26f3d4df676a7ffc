"""Requests of a soak: of every API and with most options, each with one right reply; and the same, spoilt."""

from __future__ import annotations

import copy
import json
import random
from dataclasses import dataclass
from typing import Any

Body = dict[str, Any]
OPENINGS = (
    "In the beginning",
    "And the king said unto the people of Israel, ",
    "one two three one two three one two three one two",  # drafts by prompt lookup find something in it
    "Blessed is the man that walketh not in the counsel of the ungodly, nor standeth in the way of sinners. ",
)
WORDS = (
    *("the", "king", "said", "unto", "David", ",", "Behold", "I", "will", "go", "up", "house", "of", "LORD"),
    *("my", "son", "water", "bread", "ñandú", "日本語", "🙂", "{", "}", "[1,2]"),
)
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
}
TOOL = {"type": "function", "function": {"name": "lookup", "parameters": SCHEMA}}
# Not drawn are options that a stream refuses, and draws without a seed.
OPTIONS: tuple[Body, ...] = (
    *({"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.05}, {"repetition_penalty": 1.2}),
    *({"frequency_penalty": -0.5}, {"logit_bias": {"300": 5, "301": -100}}, {"bad_words": ["the"]}),
    *(
        {"dry_multiplier": 0.8},
        {"mirostat": 2},
        {"typical_p": 0.8},
        {"stop": ["the"]},
        {"stop_regex": "[A-Z]{3}"},
        {"n": 2},
    ),
    *({"ignore_eos": True}, {"priority": 3}, {"cache_salt": "another"}, {"min_tokens": 1}),
)


@dataclass(frozen=True)
class Asked:
    """A request that is answered the same whenever it is sent."""

    path: str
    body: Body

    @property
    def streams(self) -> bool:
        return self.path.startswith("/v1/") and "input" not in self.body

    def streamed(self) -> Body:
        more: Body = {"stream": True}
        if "completions" in self.path:
            more["stream_options"] = {"include_usage": True}
        return {**self.body, **more}


def _prompt(luck: random.Random) -> str:
    return luck.choice(OPENINGS) + " ".join(luck.choices(WORDS, k=luck.choice((0, 3, 12, 60))))


def _sampling(luck: random.Random) -> Body:
    found: Body = {"temperature": 0}
    if luck.random() < 0.6:
        found = {"temperature": luck.choice((0.5, 1.2)), "seed": luck.randrange(1 << 40)}
    for option in luck.sample(OPTIONS, luck.choice((0, 1, 2))):
        found |= option
    return found


def _completion(luck: random.Random) -> Asked:
    body = {"prompt": _prompt(luck), "max_tokens": luck.choice((1, 8, 24, 60)), **_sampling(luck)}
    more: tuple[Body, ...] = (
        *({}, {}, {"logprobs": 3}, {"echo": True}, {"guidance_scale": 1.5, "negative_prompt": "Woe"}),
        *({"guided_regex": "[a-z]{3,8}( [a-z]+){2}"}, {"guided_choice": ["yes", "no", "perhaps"]}),
    )
    return Asked("/v1/completions", {**body, **luck.choice(more)})


def _chat(luck: random.Random) -> Asked:
    turns = [{"role": "user", "content": _prompt(luck)}]
    if luck.random() < 0.5:
        turns = [*turns, {"role": "assistant", "content": "So be it."}, {"role": "user", "content": "Why?"}]
    body: Body = {"messages": turns, "max_tokens": luck.choice((1, 8, 40))}
    kind = luck.random()
    if kind < 0.2:
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
        return Asked("/v1/chat/completions", {**body, "temperature": 0, "response_format": form})
    if kind < 0.4:
        return Asked(
            "/v1/chat/completions", {**body, "temperature": 0, "tools": [TOOL], "tool_choice": "required"}
        )
    if kind < 0.55:
        return Asked("/v1/messages", {"model": "default", **body, "temperature": 0})
    scored: Body = {"logprobs": True, "top_logprobs": 2} if kind < 0.7 else {}
    return Asked("/v1/chat/completions", {**body, **_sampling(luck), **scored})


def _other(luck: random.Random) -> Asked:
    beams = {"use_beam_search": True, "beam_width": 3, "n": 2, "temperature": 0, "max_tokens": 8}
    return luck.choice(
        (
            Asked("/v1/embeddings", {"input": [_prompt(luck), _prompt(luck)]}),
            Asked("/v1/completions", {"prompt": _prompt(luck), **beams}),
            Asked("/v1/responses", {"input": _prompt(luck), "max_output_tokens": 20, "temperature": 0}),
        )
    )


def draw_requests(count: int, seed: int) -> list[Asked]:
    luck = random.Random(seed)
    return [luck.choices((_completion, _chat, _other), (5, 4, 1))[0](luck) for _ in range(count)]


ODD: tuple[Any, ...] = (
    *(None, True, 0, -1, 0.5, -0.0, 1e308, 2**31, 2**53 + 1, 2**63, -(2**63) - 1, 10**40, "", " ", "\x00"),
    *("é" * 50, "x" * 2000, "null", [], {}, [[]], [None], {"": None}, ["a", 1], {"a": {"b": [1]}}),
    *("\u2028", "../../x", "<|im_start|>", "</think>", "<tool_call>", "auto"),
)
RAW = (
    *(b"NaN", b"-Infinity", b"1e999", b'"\\ud800"', b'"\xff\xfe"', b"01", b"'x'", b"{", b"", b"9" * 400),
    *(b"[" * 70 + b"]" * 70, b'{"a":1,"a":2}', b"/**/1"),
)


def _places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        inner = list(value.items())
    elif isinstance(value, list):
        inner = list(enumerate(value))
    return [place for key, one in inner for place in ((*at, key), *_places(one, (*at, key)))]


def spoil(luck: random.Random, asked: Asked) -> bytes:
    """The request's body with one value replaced, left out or repeated; or with text that is no JSON."""
    body = copy.deepcopy(asked.body)
    at = luck.choice(_places(body))
    inside: Any = body
    for key in at[:-1]:
        inside = inside[key]
    how, mark = luck.random(), "a place for raw bytes"
    if how < 0.5:
        inside[at[-1]] = copy.deepcopy(luck.choice(ODD))
    elif how < 0.65:
        inside[at[-1]] = mark
    elif how < 0.8:
        del inside[at[-1]]
    else:
        inside[at[-1]] = [inside[at[-1]]] * luck.choice((0, 1, 300))
    raw = json.dumps(body).encode().replace(json.dumps(mark).encode(), luck.choice(RAW))
    return raw[: luck.randrange(len(raw))] if luck.random() < 0.05 else raw
