"""Our dotted names to a checkpoint's. A family is data: one table from ours to theirs.

A pattern like `layers.{i}.attn.{x}` matches one component per field; the last component of what was asked
(`.weight`, `.bias`) is carried over when the target is a plain name. First matching rule wins.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Derived:
    """A tensor made of others: fn(*sources, **fields), fields being the pattern's, as strings.

    `fn` receives what the checkpoint returned (a tensor, or a `Weight` of some format) and returns either.
    """

    fn: Callable[..., Any]
    sources: tuple[str, ...]


class UnknownName(KeyError):
    """No rule of the map speaks of this name: the family never has such a tensor."""


class NameMap:
    """Our name -> theirs. `ignored`: regular expressions of their tensors that nobody needs to use."""

    def __init__(self, *rules: Mapping[str, str | Derived], ignored: tuple[str, ...] = ()) -> None:
        self._rules = [(_compile(pattern), target) for table in rules for pattern, target in table.items()]
        self.ignored = re.compile("|".join(f"(?:{p})" for p in ignored)) if ignored else None

    def resolve(self, name: str) -> tuple[str | Derived, dict[str, str]]:
        """(their name or the recipe, the fields of the pattern). Raises UnknownName."""
        for pattern, target in self._rules:
            if match := pattern.fullmatch(name):
                found = match.groupdict()
                rest = found.pop("_rest")
                if isinstance(target, str):
                    return target.format(**found) + rest, found
                return Derived(target.fn, tuple(s.format(**found) for s in target.sources)), found
        raise UnknownName(name)


def _compile(pattern: str) -> re.Pattern[str]:
    body = re.sub(r"\\\{(\w+)\\\}", r"(?P<\1>[^.]+)", re.escape(pattern))
    return re.compile(rf"{body}(?P<_rest>(?:\.(?:weight|bias))?)")
