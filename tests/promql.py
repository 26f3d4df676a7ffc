"""A small part of PromQL, evaluated over one scrape: selectors, sum, max, min, rate and the like, `or`, `/`.

Whatever else an expression has raises ValueError. A counter's value counts as its rate: what is compared are
the label sets and which samples are added, and not times.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping

Labels = frozenset[tuple[str, str]]
Vector = dict[Labels, float]
Scrape = Collection[tuple[Mapping[str, str], float]]  # samples: labels with `__name__`, value
NAME = "__name__"
TOKEN = re.compile(r'\s*("[^"]*"|[A-Za-z_:][\w:]*|\d+(?:\.\d+)?[smh]?|=~|!=|!~|[(){}\[\],=/])')
OVER_TIME = {"rate", "increase", "last_over_time"}
SUMS: dict[str, Callable[[Iterable[float]], float]] = {"sum": sum, "max": max, "min": min}
MATCHES: dict[str, Callable[[str, str], bool]] = {
    "=": lambda value, given: value == given,
    "!=": lambda value, given: value != given,
    "=~": lambda value, given: re.fullmatch(given, value) is not None,
    "!~": lambda value, given: re.fullmatch(given, value) is None,
}


def evaluate(text: str, scrape: Scrape) -> Vector:
    """The instant vector of an expression. Raises ValueError for what is none."""
    return _Reader(text, scrape).whole()


def names_of(text: str) -> set[str]:
    """The metrics that an expression selects."""
    reader = _Reader(text, ())
    reader.whole()
    return reader.names


class _Reader:
    """Reads and evaluates in one pass, by recursive descent."""

    def __init__(self, text: str, scrape: Scrape) -> None:
        self._scrape, self._tokens = scrape, _cut(text)
        self.names: set[str] = set()

    def whole(self) -> Vector:
        found = self._either()
        if self._tokens != [""]:
            raise ValueError(f"what follows is no part of it: {self._tokens}")
        return found

    def _take(self, expected: str = "") -> str:
        if expected and self._tokens[0] != expected:
            raise ValueError(f"{expected!r} is missing before {self._tokens}")
        return self._tokens.pop(0)

    def _either(self) -> Vector:
        found = self._quotient()
        while self._tokens[0] == "or":
            self._take()
            there = {_unnamed(labels) for labels in found}
            found |= {k: v for k, v in self._quotient().items() if _unnamed(k) not in there}
        return found

    def _quotient(self) -> Vector:
        found = self._term()
        while self._tokens[0] == "/":
            self._take()
            below = self._term()
            found = {k: v / below[k] for k, v in found.items() if below.get(k)}
        return found

    def _term(self) -> Vector:
        word = self._tokens[0]
        if word == "(":
            return self._inside(self._either)
        if word in SUMS:
            return self._aggregate()
        if word in OVER_TIME:
            self._take()
            return _distinct((_unnamed(k), v) for k, v in self._inside(lambda: self._select(True)).items())
        if word == "histogram_quantile":
            self._take()
            return self._inside(self._quantile)
        return self._select(False)

    def _inside(self, read: Callable[[], Vector]) -> Vector:
        self._take("(")
        found = read()
        self._take(")")
        return found

    def _names(self) -> list[str]:
        self._take("(")
        found = [self._take()]
        while self._tokens[0] == ",":
            self._take()
            found.append(self._take())
        self._take(")")
        return found

    def _aggregate(self) -> Vector:
        total, kept = SUMS[self._take()], list[str]()
        if self._tokens[0] == "by":
            self._take()
            kept = self._names()
        groups: dict[Labels, list[float]] = {}
        for labels, value in self._inside(self._either).items():
            groups.setdefault(frozenset(pair for pair in labels if pair[0] in kept), []).append(value)
        return {labels: total(values) for labels, values in groups.items()}

    def _select(self, is_range: bool) -> Vector:
        name, conditions = self._take(), list[tuple[str, str, str]]()
        if not re.fullmatch(r"[A-Za-z_:][\w:]*", name):
            raise ValueError(f"{name!r} is no metric")
        self.names.add(name)
        if self._tokens[0] == "{":
            self._take()
            while self._tokens[0] != "}":
                conditions.append((self._take(), self._take(), self._take()[1:-1]))
                if self._tokens[0] != "}":
                    self._take(",")
            self._take()
        if is_range:
            self._take("[")
            if not re.fullmatch(r"\d+[smh]", self._take()):
                raise ValueError("a range has no duration")
            self._take("]")
        fits = [({NAME: name, **labels}, value) for labels, value in self._scrape if labels[NAME] == name]
        for label, operator, given in conditions:
            matches = MATCHES[operator]
            fits = [(labels, value) for labels, value in fits if matches(labels.get(label, ""), given)]
        return _distinct((frozenset(labels.items()), value) for labels, value in fits)

    def _quantile(self) -> Vector:
        share = float(self._take())
        self._take(",")
        histograms: dict[Labels, list[tuple[float, float]]] = {}
        for labels, value in self._either().items():
            (bound,) = (float(text) for label, text in labels if label == "le")
            rest = frozenset(pair for pair in labels if pair[0] != "le")
            histograms.setdefault(rest, []).append((bound, value))
        return {labels: _find_quantile(share, sorted(rows)) for labels, rows in histograms.items()}


def _cut(text: str) -> list[str]:
    tokens, at = [], 0
    while at < len(text.rstrip()):
        found = TOKEN.match(text, at)
        if found is None:
            raise ValueError(f"{text[at : at + 20]!r} is no part of this language")
        tokens.append(found[1])
        at = found.end()
    return [*tokens, ""]


def _unnamed(labels: Labels) -> Labels:
    return frozenset(pair for pair in labels if pair[0] != NAME)


def _distinct(samples: Iterable[tuple[Labels, float]]) -> Vector:
    """Raises ValueError for two samples with the same labels, as Prometheus fails."""
    found: Vector = {}
    for labels, value in samples:
        if labels in found:
            raise ValueError(f"two samples have the labels {dict(labels)}")
        found[labels] = value
    return found


def _find_quantile(share: float, rows: list[tuple[float, float]]) -> float:
    """Between the bounds of the bucket that has it; `rows`: bounds with the number up to each."""
    wanted, below, least = share * rows[-1][1], 0.0, 0.0
    for bound, count in rows:
        if count >= wanted and count > below:
            if bound == float("inf"):
                return least
            return least + (bound - least) * (wanted - below) / (count - below)
        below, least = count, bound
    return float("nan")
