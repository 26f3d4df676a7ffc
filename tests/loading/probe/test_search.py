"""The search of a probe, on models that are functions: planted values are found, chance decides nothing."""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from plait.errors import UnsupportedModel
from plait.loading.probe.candidates import Quantity, Values
from plait.loading.probe.search import LONG, SHORT, Probed, Search, is_better, search

VOCAB = 50_000


def ways(key: str, *values: Any, is_long: bool = False) -> Quantity:
    return Quantity(key, tuple({key: value} for value in values), is_long)


def silent(text: str, done: int, total: int) -> None:
    """Ignores the progress."""


@dataclass
class Planted:
    """A model with a loss of 2 nats, and so much more for each key that is not as in `truth`.

    `costs`: nats for a wrong value. A token's loss is its own number, moved by chance in each model.
    """

    truth: Values
    quantities_: Sequence[Quantity]
    costs: Mapping[str, float] = field(default_factory=dict)
    noise: float = 0.0
    refused: Values = field(default_factory=dict)
    asked: list[tuple[dict[str, Any], int]] = field(default_factory=list)

    def quantities(self, values: Mapping[str, Any]) -> list[Quantity]:
        """What holds first, as a model's own candidates do it."""
        return [
            Quantity(
                q.name,
                tuple(sorted(q.options, key=lambda o: not all(values.get(k, o[k]) == o[k] for k in o))),
                q.is_long,
            )
            for q in self.quantities_
        ]

    def identity(self, values: Mapping[str, Any]) -> str:
        used = {key: value for key, value in values.items() if key in self.truth}
        return repr(sorted(used.items(), key=repr))

    def losses(self, values: Mapping[str, Any], tokens: int) -> list[float]:
        self.asked.append((dict(values), tokens))
        for key, value in self.refused.items():
            if values.get(key) == value:
                raise UnsupportedModel(f"{key} cannot be {value}")
        wrong = sum(self.costs.get(k, 3.0) for k, v in self.truth.items() if values.get(k, v) != v)
        draw, own = random.Random(1), random.Random(self.identity(values))
        return [draw.uniform(1, 3) + wrong + self.noise * own.gauss(0, 1) for _ in range(tokens - 1)]


HEADS, PAIRS = ways("head_dim", 128, 64, 32), ways("rope_interleave", False, True)
THETA = ways("rope_theta", 1e4, 1e5, 1e6, is_long=True)


def found(model: Planted, **options: Any) -> Probed:
    return search(model, VOCAB, silent, **options)


def test_what_is_planted_is_found() -> None:
    model = Planted({"head_dim": 64, "rope_interleave": True, "rope_theta": 1e5}, [HEADS, PAIRS, THETA])
    result = found(model)
    assert result.values == {"head_dim": 64, "rope_interleave": True, "rope_theta": 1e5}
    assert result.is_understood
    assert result.loss == pytest.approx(2.0, abs=0.2)
    assert result.choices["head_dim"].margin == pytest.approx(3.0)
    assert result.findings.source("head_dim") == "probed (margin 3 nats)"


def test_long_quantities_are_tried_on_more_tokens() -> None:
    model = Planted({"head_dim": 128, "rope_theta": 1e4}, [HEADS, THETA])
    found(model)
    assert {tokens for values, tokens in model.asked if "rope_theta" not in values} == {SHORT}
    assert {tokens for values, tokens in model.asked if "rope_theta" in values} == {LONG}


def test_of_a_shorter_text_it_is_reported_how_much_was_read() -> None:
    class Short(Planted):
        def losses(self, values: Mapping[str, Any], tokens: int) -> list[float]:
            return super().losses(values, tokens)[:69]

    result = found(Short({"head_dim": 64, "rope_theta": 1e4}, [HEADS, THETA]))
    assert {trial.tokens for trials in result.trials.values() for trial in trials} == {result.tokens} == {70}


def test_what_chance_prefers_does_not_move_the_likeliest() -> None:
    for seed in range(20):
        keys = [f"key{seed}.{n}" for n in range(3)]
        model = Planted(
            dict.fromkeys(keys, 0), [ways(key, 0, 1) for key in keys], dict.fromkeys(keys, 0.0), 0.02
        )
        values = found(model).values
        assert [values[key] for key in keys].count(1) <= 1  # two standard errors: one in forty goes beyond


def test_of_two_that_fit_alike_the_likelier_is_taken() -> None:
    model = Planted({"top_k": 2}, [ways("top_k", 1, 2, 4, 8)], {"top_k": 0.5})

    class Alike(Planted):
        def losses(self, values: Mapping[str, Any], tokens: int) -> list[float]:
            losses = super().losses({**values, "top_k": 2} if values.get("top_k") == 4 else values, tokens)
            return [loss - (0.01 * (n % 5) - 0.019) * (values["top_k"] == 4) for n, loss in enumerate(losses)]

    alike = Alike(model.truth, model.quantities_, model.costs)
    result = found(alike)
    assert result.values == {"top_k": 2}
    assert not result.choices["top_k"].is_sure
    assert result.findings.source("top_k") == "probed (no other is better beyond chance)"


def test_a_small_difference_that_is_the_same_everywhere_is_believed() -> None:
    model = Planted({"rope_theta": 1e5}, [THETA], {"rope_theta": 0.05}, noise=0.05)
    assert found(model).values == {"rope_theta": 1e5}


def test_one_that_hides_another_is_tried_again() -> None:
    """A second value counts for nothing until the first is right."""

    class Hidden(Planted):
        def losses(self, values: Mapping[str, Any], tokens: int) -> list[float]:
            lost = [5.0] * (tokens - 1)
            right = values.get("second") == 1
            return lost if not right else super().losses(values, tokens)

    model = Hidden({"first": 1, "second": 1}, [ways("first", 0, 1), ways("second", 0, 1)], {"first": 1.0})
    result = found(model)
    assert result.values == {"first": 1, "second": 1}


def test_what_cannot_be_is_reported_and_left_out() -> None:
    model = Planted({"head_dim": 64}, [HEADS], refused={"head_dim": 32})
    result = found(model)
    (refused,) = [trial for trial in result.trials["head_dim"] if trial.error]
    assert (refused.values, refused.loss) == ({"head_dim": 32}, None)
    assert result.values["head_dim"] == 64


def test_a_model_that_cannot_run_at_all_says_so() -> None:
    with pytest.raises(UnsupportedModel, match="head_dim cannot be 128"):
        found(Planted({"head_dim": 64}, [HEADS], refused={"head_dim": 128}))


def test_what_nothing_depends_on_is_not_decided() -> None:
    model = Planted({"head_dim": 64}, [HEADS, ways("norm_topk_prob", True, False)])
    result = found(model)
    assert "norm_topk_prob" not in result.values
    assert [trial.loss for trial in result.trials["norm_topk_prob"]] == [
        result.trials["head_dim"][0].loss
    ] * 2


def test_no_model_is_run_twice() -> None:
    model = Planted({"head_dim": 64, "rope_interleave": True}, [HEADS, PAIRS])
    result = found(model)
    seen = [(model.identity(values), tokens) for values, tokens in model.asked]
    assert len(seen) == len(set(seen)) == result.passes


def test_passes_are_bounded_and_the_best_so_far_holds(caplog: pytest.LogCaptureFixture) -> None:
    model = Planted({"head_dim": 64, "rope_theta": 1e5}, [HEADS, THETA])
    with caplog.at_level(logging.WARNING, "plait"):
        result = found(model, most=6)
    assert len(model.asked) == result.passes == 5  # the last is known by then
    assert not result.is_whole
    assert result.values["head_dim"] == 64
    assert "stopped after 5 passes" in caplog.text


def test_a_text_that_the_model_does_not_understand_is_reported_loudly() -> None:
    model = Planted({"head_dim": 96}, [HEADS], {"head_dim": 8.0})
    result = found(model)
    assert not result.is_understood
    assert "more than 7.0" in result.verdict
    assert "--probe-text" in result.verdict


def test_a_small_vocabulary_is_held_to_less() -> None:
    model = Planted({"head_dim": 96}, [HEADS], {"head_dim": 3.0})
    assert not search(model, 256, silent).is_understood  # knowing nothing costs 5.5 nats
    assert search(model, VOCAB, silent).is_understood


def test_a_model_that_overflows_is_the_worst_and_no_fault() -> None:
    class Overflowing(Planted):
        def losses(self, values: Mapping[str, Any], tokens: int) -> list[float]:
            losses = super().losses(values, tokens)
            return [float("nan")] * len(losses) if values.get("head_dim") == 32 else losses

    assert found(Overflowing({"head_dim": 64}, [HEADS])).values["head_dim"] == 64


def test_progress_is_shown() -> None:
    told: list[tuple[str, int, int]] = []
    model = Planted({"head_dim": 128}, [HEADS])
    Search(model, lambda *row: told.append(row), 10).run()
    assert told == [("probing", n, 10) for n in range(3)]


def test_better_means_beyond_chance() -> None:
    flat = [2.0] * 100
    assert is_better([1.9] * 100, flat)
    assert not is_better(flat, flat)
    assert not is_better([2.0 + (-1) ** n * 0.5 - 0.01 for n in range(100)], flat)
