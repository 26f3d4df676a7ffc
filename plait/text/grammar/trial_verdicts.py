"""Verdicts on grammars that were tried out, and a cache of them."""

from __future__ import annotations

import hashlib
import sys
from collections import OrderedDict
from dataclasses import dataclass, replace

from plait.errors import BadGrammar, CapacityError
from plait.text.grammar.grammar import Grammar

_OVERHEAD = 512  # bytes of the objects around a text


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a grammar is good, and its form for the library, or what is wrong with it."""

    is_good: bool
    text: str


def apply_verdict(grammar: Grammar, verdict: Verdict) -> Grammar:
    """The grammar with its form. Raises BadGrammar if the verdict is a refusal."""
    if not verdict.is_good:
        raise BadGrammar(verdict.text, grammar.param)
    return replace(grammar, form=verdict.text)


def too_late(waited_s: float) -> CapacityError:
    """The error for a request with a grammar that did not get its turn in time."""
    return CapacityError(
        f"the grammar was not tried out within {waited_s:g} s, as others are before it; try again later"
    )


def digest(grammar: Grammar) -> bytes:
    """Equal for two grammars exactly when the library would compile the same from them."""
    parts = (grammar.kind, grammar.source, grammar.lead, grammar.instead, grammar.opening)
    style = (str(grammar.open_objects), str(grammar.space))
    found = hashlib.sha256()
    for part in parts + style:
        data = part.encode("utf-8", "surrogatepass")
        found.update(b"%d:" % len(data) + data)
    return found.digest()


class Verdicts:
    """The verdicts that were used last, as many as fit into `max_bytes`. Not thread-safe.

    One that takes more than an eighth is not kept: a few such would drop all others.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes, self._nbytes = max_bytes, 0
        self._kept: OrderedDict[bytes, Verdict] = OrderedDict()

    def get(self, key: bytes) -> Verdict | None:
        if key in self._kept:
            self._kept.move_to_end(key)
        return self._kept.get(key)

    def put(self, key: bytes, verdict: Verdict) -> None:
        if (old := self._kept.pop(key, None)) is not None:
            self._nbytes -= _nbytes(old)
        if _nbytes(verdict) > self._max_bytes // 8:
            return
        self._kept[key] = verdict
        self._nbytes += _nbytes(verdict)
        while self._nbytes > self._max_bytes:
            self._nbytes -= _nbytes(self._kept.popitem(last=False)[1])


def _nbytes(verdict: Verdict) -> int:
    return sys.getsizeof(verdict.text) + _OVERHEAD
