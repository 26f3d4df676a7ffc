"""Errors in the words of the requested API: a chat's `messages[2]` may be another one's `input[3]`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from plait.errors import InvalidField, RequestError

# Fields of a chat that another API names otherwise, with the values that change nothing.
_SAYS_NOTHING: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "stop": ("", []),
    "stream_options": ({}, {"include_usage": True}, {"include_usage": False}),  # usage is always reported
    "logprobs": (False,),
    "top_logprobs": (0,),
    "response_format": ({"type": "text"},),
    "parallel_tool_calls": (True,),
    "return_token_ids": (False,),
    "timings_per_token": (False,),
    "return_progress": (False,),
    "reasoning_field": ("reasoning_content",),
    "thinking_token_budget": (-1,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
}


_PARAMETERS = re.compile(r"^(tools\[\d+\])\.function\.parameters")


def refuse_words_of_a_chat(body: Mapping[str, Any], words: frozenset[str], names: Mapping[str, str]) -> None:
    """Raises InvalidField for a field of a chat that this API does not read, unless it changes nothing.

    `words`: those fields; `names`: what they are called here.
    """
    for name in sorted(words & body.keys()):
        value = body[name]
        if value is not None and value not in _SAYS_NOTHING.get(name, ()):
            hint = f"send {names[name]}" if name in names else "leave it out"
            raise InvalidField(f"{name}: it is no field of this API; {hint}", name)


@contextmanager
def in_words_of(names: Mapping[str, str], places: Sequence[str]) -> Iterator[None]:
    """A RequestError from inside names the field that the client sent.

    `names`: what a chat's fields are called there; `places`: where each message of the chat came from.
    """
    try:
        yield
    except RequestError as error:
        param = _rename_param(error.param or "", names, places)
        if error.param is None or param == error.param:
            raise
        text = str(error)
        if text.startswith(error.param):
            text = param + text.removeprefix(error.param)
        raise error.reworded(text, param) from error


def _rename_param(param: str, names: Mapping[str, str], places: Sequence[str]) -> str:
    if (schema := names.get("parameters")) is not None:
        param = _PARAMETERS.sub(rf"\1.{schema}", param)
    if "response_format" in names:  # elsewhere the schema is in the format itself
        param = param.replace("response_format.json_schema.", "response_format.")
    head, bracket, rest = param.partition("[")
    number, closing, tail = rest.partition("]")
    if head == "messages" and closing and number.isdigit() and int(number) < len(places):
        place = places[int(number)]
        return place if tail.startswith(".role") else place + tail
    head, dot, rest = param.partition(".")
    stem, bracket, inner = head.partition("[")
    return names.get(stem, stem) + bracket + inner + dot + rest
