"""Search the values that no config and no shape shows: those under which a text has the lowest loss.

One quantity at a time, in the order of `loading.probe.candidates`, and all of them once more if something
changed. The weights are packed once: a candidate is another spec around them. `cache` keeps the result.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Protocol

from plait.errors import PlaitError
from plait.loading.probe.cache import Findings
from plait.loading.probe.candidates import Quantity, Values

log = logging.getLogger("plait")
TEXT = Path(__file__).with_suffix(".txt")  # English and Python
SHORT, LONG = 128, 256  # tokens of it
LEAST = 64  # of any text: over fewer, chance and difference look alike
ROUNDS, MOST = 3, 80  # through all quantities, as long as something changes; forward passes in all
MOST_LOSS = 7.0  # nats per token; beyond, the model does not understand the text, or we the model
OF_UNIFORM = 0.85  # the same, for small vocabularies: this part of what knowing nothing costs
SURE = 2.0  # standard errors by which another value must be better than the likely one
Losses = Sequence[float]  # of each token but the first, in nats


class Scorer(Protocol):
    """A model under some values of its config. All raise PlaitError for impossible values.

    `identity`: equal for values that make the same model.
    """

    def quantities(self, values: Mapping[str, object]) -> list[Quantity]: ...
    def identity(self, values: Mapping[str, object]) -> str: ...
    def losses(self, values: Mapping[str, object], tokens: int) -> Losses: ...


@dataclass(frozen=True, slots=True)
class Trial:
    """One option tried: its loss in nats per token, or why it is impossible."""

    quantity: str
    values: Mapping[str, Any]
    tokens: int
    loss: float | None = None
    error: str = ""
    is_chosen: bool = False


@dataclass(frozen=True, slots=True)
class ProbeDecision:
    """What was decided. `margin`: nats by which the next best option is worse; `is_sure`: beyond chance."""

    values: Mapping[str, Any]
    margin: float
    is_sure: bool


class Exhausted(Exception):
    """Raised when the search has used all its forward passes."""


@dataclass(slots=True)
class Search:
    """Coordinate-wise: `run` once, then read the rest. `most`: passes that may be made."""

    scorer: Scorer
    report: Callable[[str, int, int], None]
    most: int = MOST
    values: dict[str, Any] = field(default_factory=dict)
    choices: dict[str, ProbeDecision] = field(default_factory=dict)
    trials: dict[str, list[Trial]] = field(default_factory=dict)
    passes: int = 0
    is_whole: bool = True
    _known: dict[str, Losses] = field(default_factory=dict)

    def run(self) -> None:
        """Try everything; again if something changed. Raises PlaitError if the model as it is cannot run."""
        try:
            for _ in range(ROUNDS):
                self.choices, self.trials = {}, {}
                if not self._round():
                    break
        except Exhausted:
            self.is_whole = False
            log.warning("the probe stopped after %d passes, before it had tried everything", self.passes)

    def _round(self) -> bool:
        tried, changed = set[str](), False
        while (quantity := self._next(tried)) is not None:
            tried.add(quantity.name)
            changed |= self._decide(quantity)
        return changed

    def _next(self, tried: set[str]) -> Quantity | None:
        """The next open quantity: another architecture, for example, leaves other things open."""
        return next((q for q in self.scorer.quantities(self.values) if q.name not in tried), None)

    def _decide(self, quantity: Quantity) -> bool:
        """Try all options and take the best. True if it is not what held before."""
        tokens = LONG if quantity.is_long else SHORT
        held, others = quantity.options[0], quantity.options[1:]
        likely = self.losses({**self.values, **held}, tokens)
        tokens_read = len(likely) + 1  # a text may be shorter
        trials, found = [Trial(quantity.name, held, tokens_read, fmean(likely))], {0: likely}
        for number, option in enumerate(others, 1):
            try:
                losses = self.losses({**self.values, **option}, tokens)
            except PlaitError as error:
                trials.append(Trial(quantity.name, option, tokens_read, error=str(error)))
                continue
            trials.append(Trial(quantity.name, option, tokens_read, fmean(losses)))
            if losses is not likely:  # else nothing depends on it
                found[number] = losses
        best = likeliest(found)
        if best and not self._is_confirmed(quantity.options[best], held):
            best = 0
        rest = {n: losses for n, losses in found.items() if n != best}
        trials[best] = replace(trials[best], is_chosen=True)
        self.trials[quantity.name] = trials
        if rest:
            self._choose(quantity, best, found[best], rest[min(rest, key=lambda n: fmean(rest[n]))])
        return bool(best)

    def _is_confirmed(self, option: Values, held: Values) -> bool:
        """Whether an option is better than the current value on the whole text, too."""
        one, other = (self.losses({**self.values, **values}, LONG) for values in (option, held))
        return is_better(one, other)

    def _choose(self, quantity: Quantity, best: int, losses: Losses, next_best: Losses) -> None:
        option, margin = quantity.options[best], fmean(next_best) - fmean(losses)
        self.choices[quantity.name] = ProbeDecision(option, margin, is_better(losses, next_best))
        self.values |= option

    def losses(self, values: Mapping[str, object], tokens: int) -> Losses:
        """The losses of a model, which is run for them once. Raises Exhausted, and what the scorer does."""
        key = f"{tokens} {self.scorer.identity(values)}"
        if key not in self._known:
            if self.passes >= self.most:
                raise Exhausted
            self.report("probing", self.passes, self.most)
            losses = self.scorer.losses(values, tokens)
            self.passes += 1
            self._known[key] = [loss if math.isfinite(loss) else 1e9 for loss in losses]
        return self._known[key]


def likeliest(found: Mapping[int, Losses]) -> int:
    """The first, in the order of options, that the one with the lowest loss does not beat beyond chance."""
    best = min(found, key=lambda n: fmean(found[n]))
    return next(n for n in sorted(found) if n == best or not is_better(found[best], found[n]))


def is_better(losses: Losses, others: Losses) -> bool:
    """Whether one is better on the same tokens by more than chance would have it."""
    gains = [other - loss for loss, other in zip(losses, others, strict=True)]
    error = stdev(gains) / math.sqrt(len(gains)) if len(gains) > 1 else 0.0
    return fmean(gains) > SURE * error and fmean(gains) > 0


@dataclass(frozen=True, slots=True)
class Probed:
    """The result of a probe. `loss`: of the whole text, with the chosen values; `limit`: the most allowed."""

    trials: Mapping[str, Sequence[Trial]]
    choices: Mapping[str, ProbeDecision]
    values: Mapping[str, Any]
    loss: float
    limit: float
    tokens: int
    passes: int
    is_whole: bool

    @property
    def is_understood(self) -> bool:
        return self.loss <= self.limit

    @property
    def findings(self) -> Findings:
        """The findings to keep: each key with its margin, 0 if it is within chance."""
        sure = {name: c.margin if c.is_sure else 0.0 for name, c in self.choices.items()}
        margins = {key: sure[name] for name, c in self.choices.items() for key in c.values}
        values = {key: value for key, value in self.values.items() if key in margins}
        return Findings(values, margins, self.loss, self.tokens)

    @property
    def verdict(self) -> str:
        """One sentence: the model understands the text, or a warning that it does not."""
        told = f"{self.loss:.2f} nats per token on {self.tokens} tokens, after {self.passes} passes"
        if self.is_understood:
            return told
        return (
            f"the best loss is {told}: more than {self.limit:.1f}, so this model is not understood, or "
            "it does not know the language of the text (--probe-text FILE gives another); nothing is changed"
        )


def search(
    scorer: Scorer, vocab_size: int, report: Callable[[str, int, int], None], most: int = MOST
) -> Probed:
    """Find the best values and say how good they are. Raises PlaitError if the model cannot run at all."""
    tried = Search(scorer, report, most - 1)
    tried.run()
    tried.most = most  # one was left for this
    losses = tried.losses(tried.values, LONG)
    limit = min(MOST_LOSS, OF_UNIFORM * math.log(max(vocab_size, 2)))
    return Probed(
        tried.trials,
        tried.choices,
        tried.values,
        fmean(losses),
        limit,
        len(losses) + 1,
        tried.passes,
        tried.is_whole,
    )
