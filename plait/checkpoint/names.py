"""Our dotted names to a checkpoint's. A family is data: one table from ours to theirs.

A pattern like `layers.{i}.attn.{x}` matches one component per field. The last component of the requested name
(`.weight`, `.bias`) is carried over when the target is a plain name. First matching rule wins. A target that
is a tuple lists alternatives, the ways in which one model is stored: the first that is there is meant.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from plait.errors import ShapeMismatch
from plait.quant.weight import Weight


@dataclass(frozen=True, slots=True)
class Back:
    """How a source of a `Derived` is written from our tensors: the way back, for `plait convert`.

    fn: undoes the recipe's arithmetic on our numbers in float32. None: they stay as they are.
    at, of: which part of the source's rows this tensor is, of how many.
    stack: how many of these the source holds one after the other, counted by the field {e}. 0: all that
    there are.
    join: makes one tensor of all `of` parts, whole and in float32, where rows one after another do not.
    """

    fn: Callable[[Any], Any] | None = None
    at: int = 0
    of: int = 1
    stack: int | None = None
    join: Callable[..., Any] | None = None


@dataclass(frozen=True, slots=True)
class Derived:
    """A tensor made of others: fn(*sources, **fields), fields being the pattern's, as strings.

    `fn` receives what the checkpoint returned (a tensor, or a `Weight` of some format) and returns either.
    `back`: for each source the way back, None if others of ours make that source; empty where no recipe has
    written it. `is_joined`: it has the rows of all sources, one behind the other; a rank reads its own.
    `is_product`: sources are multiplied with each other, so no adapter of one of them is one of the result.
    """

    fn: Callable[..., Any]
    sources: tuple[str, ...]
    back: tuple[Back | None, ...] = ()
    is_joined: bool = False
    is_product: bool = False


Source = str | Derived
Targets = tuple[Source, ...]
Rules = Mapping[str, Source | Targets]
_ENDS = (".weight", ".bias")


def sources_of(source: Source) -> tuple[str, ...]:
    """Their tensors that one of ours is made of."""
    return source.sources if isinstance(source, Derived) else (source,)


def make_derived(
    source: Derived, stored: Sequence[Tensor | Weight], fields: Mapping[str, str], ours: str
) -> Tensor | Weight:
    """What a recipe makes of `stored`, its sources. Raises ShapeMismatch, with the name of `ours`."""
    try:
        made: Tensor | Weight = source.fn(*stored, **fields)
        return made
    except (RuntimeError, IndexError, ValueError, TypeError) as error:  # of shapes that no recipe expects
        shapes = ", ".join(f"{s} {list(w.shape)}" for s, w in zip(source.sources, stored, strict=True))
        told = " ".join(str(error).split())[:160]
        raise ShapeMismatch(
            f"{ours} cannot be made of {shapes}: the file and the config do not agree ({told})"
        ) from error


class UnknownName(KeyError):
    """No rule of the name map has this name: the family never has such a tensor."""


class NameMap:
    """Our name -> theirs. `ignored`: regular expressions of their tensors that may stay unused.

    `beside`: of those that may, too, because they see or hear and the model is one of text.
    """

    def __init__(self, *rules: Rules, ignored: tuple[str, ...] = (), beside: tuple[str, ...] = ()) -> None:
        # Names without fields are looked up: there may be one for each of thousands of layers or experts.
        self._whole: dict[str, tuple[int, Targets]] = {}
        self._patterns: list[tuple[int, re.Pattern[str], Targets]] = []
        for n, (ours, target) in enumerate(item for table in rules for item in table.items()):
            targets = target if isinstance(target, tuple) else (target,)
            if "{" in ours:
                self._patterns.append((n, _compile(ours), targets))
            else:
                self._whole.setdefault(ours, (n, targets))
        self.ignored, self.beside = _join((*ignored, *beside)), _join(beside)

    def is_beside(self, name: str) -> bool:
        """Whether a tensor of theirs belongs to what sees or hears."""
        return self.beside is not None and self.beside.search(name) is not None

    def resolve(self, name: str, present: Container[str] | None = None) -> tuple[Source, dict[str, str]]:
        """(their name or the recipe, the fields of the pattern). Raises UnknownName.

        `present`: their names; decides between alternatives. When it has none of them, the first is named.
        Models that were saved without a head (transformers' AutoModel) have names without `model.` before.
        """
        targets, found, rest = self._find(name)
        sources = [_fill(target, found, rest) for target in targets]
        ways = [*sources, *map(_strip_model, sources)]
        there = (s for s in ways if present is not None and _is_there(s, present))
        return next(there, sources[0]), found

    def _find(self, name: str) -> tuple[Targets, dict[str, str], str]:
        """(targets, fields, what is carried over) of the first rule that matches. Raises UnknownName."""
        ends = [(name, ""), *((name.removesuffix(end), end) for end in _ENDS if name.endswith(end))]
        whole = [(*self._whole[start], end) for start, end in ends if start in self._whole]
        n, targets, rest = min(whole, key=lambda rule: rule[0], default=(None, (), ""))
        for order, pattern, others in self._patterns:
            if n is not None and order > n:
                break
            if match := pattern.fullmatch(name):
                found = match.groupdict()
                return others, found, found.pop("_rest")
        if n is None:
            raise UnknownName(name)
        return targets, {}, rest


def _join(patterns: tuple[str, ...]) -> re.Pattern[str] | None:
    return re.compile("|".join(f"(?:{p})" for p in patterns)) if patterns else None


def _fill(target: Source, fields: dict[str, str], rest: str) -> Source:
    if isinstance(target, str):
        return target.format(**fields) + rest
    return replace(target, sources=tuple(s.format(**fields) for s in target.sources))


def _strip_model(source: Source) -> Source:
    if isinstance(source, str):
        return source.removeprefix("model.")
    return replace(source, sources=tuple(s.removeprefix("model.") for s in source.sources))


def _is_there(source: Source, present: Container[str]) -> bool:
    return all(s in present for s in sources_of(source))


def _compile(pattern: str) -> re.Pattern[str]:
    body = re.sub(r"\\\{(\w+)\\\}", r"(?P<\1>[^.]+)", re.escape(pattern))
    return re.compile(rf"{body}(?P<_rest>(?:\.(?:weight|bias))?)")
