"""Refusals in the words of the API that was asked: a chat's `messages[2]` may be another one's `input[3]`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from plait.errors import RequestError


@contextmanager
def in_words_of(names: Mapping[str, str], places: Sequence[str]) -> Iterator[None]:
    """A RequestError from inside names the field that the client sent.

    `names`: what a chat's fields are called there; `places`: where each message of the chat came from.
    """
    try:
        yield
    except RequestError as error:
        param = _renamed(error.param or "", names, places)
        if error.param is None or param == error.param:
            raise
        text = str(error)
        if text.startswith(error.param):
            text = param + text.removeprefix(error.param)
        raise type(error)(text, param) from error


def _renamed(param: str, names: Mapping[str, str], places: Sequence[str]) -> str:
    head, bracket, rest = param.partition("[")
    number, closing, tail = rest.partition("]")
    if head == "messages" and closing and number.isdigit() and int(number) < len(places):
        place = places[int(number)]
        return place if tail.startswith(".role") else place + tail
    head, dot, rest = param.partition(".")
    stem, bracket, inner = head.partition("[")
    return names.get(stem, stem) + bracket + inner + dot + rest
