"""Samplers against the values that llama.cpp publishes in its own tests (tests/test-sampling.cpp).

Shares of tokens before and after a sampler. Left out are those out of Plait's ranges: penalties above 2 and
a min-p above 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from plait.request import SamplingParams
from plait.runner.host.chain import STAGES, Candidates, ChainRow

TENTHS = (0.1, 0.2, 0.3, 0.4)
FALLING = (0.4, 0.3, 0.2, 0.1)
FIFTHS, QUARTERS = (0.2,) * 5, (0.25,) * 4


def run_stage(
    name: str, shares: Sequence[float], past: Sequence[int] = (), **params: Any
) -> Mapping[int, float]:
    """The share of each token that a sampler leaves, of all that are left."""
    settings = SamplingParams(samplers=(name,), **{"temperature": 1.0, **params})
    row = ChainRow(settings, np.array(past, np.int64), 0, 7, 3)
    left = STAGES[name](Candidates(np.arange(len(shares)), np.log(np.array(shares, np.float64))), row)
    return dict(zip(left.ids.tolist(), left.probabilities().tolist(), strict=True))


@pytest.mark.parametrize(
    ("name", "more", "wanted"),
    [
        ("temperature", {"temperature": 1.0}, {0: 0.1, 1: 0.2, 2: 0.3, 3: 0.4}),
        ("top_k", {"top_k": 1}, {3: 1.0}),
        ("top_k", {"top_k": 3}, {3: 0.44444, 2: 0.33333, 1: 0.22222}),
        ("top_k", {"top_k": 4}, {3: 0.4, 2: 0.3, 1: 0.2, 0: 0.1}),
        ("top_k", {"top_k": 0}, {3: 0.4, 2: 0.3, 1: 0.2, 0: 0.1}),
        ("top_p", {"top_p": 0.0}, {3: 1.0}),
        ("top_p", {"top_p": 0.7}, {3: 0.571429, 2: 0.428571}),
        ("top_p", {"top_p": 0.8}, {3: 0.44444, 2: 0.33333, 1: 0.22222}),
        ("top_p", {"top_p": 1.0}, {3: 0.4, 2: 0.3, 1: 0.2, 0: 0.1}),
        ("min_p", {"min_p": 0.0}, {3: 0.4, 2: 0.3, 1: 0.2, 0: 0.1}),
        ("min_p", {"min_p": 0.24}, {3: 0.4, 2: 0.3, 1: 0.2, 0: 0.1}),
        ("min_p", {"min_p": 0.26}, {3: 0.4 / 0.9, 2: 0.3 / 0.9, 1: 0.2 / 0.9}),
        ("min_p", {"min_p": 0.49}, {3: 0.4 / 0.9, 2: 0.3 / 0.9, 1: 0.2 / 0.9}),
        ("min_p", {"min_p": 0.51}, {3: 0.4 / 0.7, 2: 0.3 / 0.7}),
        ("min_p", {"min_p": 0.74}, {3: 0.4 / 0.7, 2: 0.3 / 0.7}),
        ("min_p", {"min_p": 0.76}, {3: 1.0}),
        ("min_p", {"min_p": 1.0}, {3: 1.0}),
        ("top_n_sigma", {"top_n_sigma": 1.0}, {3: 0.571429, 2: 0.428571}),
        ("top_n_sigma", {"top_n_sigma": 0.0}, {3: 0.4, 2: 0.3, 1: 0.2, 0: 0.1}),
        ("top_n_sigma", {"top_n_sigma": 3.0}, {3: 0.4, 2: 0.3, 1: 0.2, 0: 0.1}),
    ],
)
def test_cuts_leave_the_published_shares(
    name: str, more: dict[str, Any], wanted: Mapping[int, float]
) -> None:
    assert run_stage(name, TENTHS, **more) == pytest.approx(wanted, abs=1e-5)


@pytest.mark.parametrize(
    ("threshold", "left"), [(0.09, {3}), (0.19, {2, 3}), (0.29, {1, 2, 3}), (0.39, {0, 1, 2, 3})]
)
def test_xtc_leaves_the_published_tokens(threshold: float, left: set[int]) -> None:
    assert run_stage("xtc", FALLING, xtc_probability=1.0, xtc_threshold=threshold).keys() == left


@pytest.mark.parametrize(
    ("shares", "left"), [((0.97, 0.01, 0.01, 0.01), {0}), ((0.4, 0.2, 0.2, 0.2), {1, 2, 3})]
)
def test_typical_p_leaves_the_published_tokens(shares: Sequence[float], left: set[int]) -> None:
    assert run_stage("typ_p", shares, typical_p=0.5).keys() == left


@pytest.mark.parametrize(
    ("past", "wanted"),
    [
        ((0,), (0.0, 0.25, 0.25, 0.25, 0.25)),
        ((0, 1, 2), (0.0, 0.0, 0.0, 0.5, 0.5)),
        ((0, 1, 2, 0, 0), (0.0, 0.0, 0.0, 0.5, 0.5)),
    ],
)
def test_a_repetition_penalty_leaves_the_published_shares(
    past: Sequence[int], wanted: Sequence[float]
) -> None:
    found = run_stage("penalties", FIFTHS, past, repetition_penalty=50.0)
    assert [found[i] for i in range(5)] == pytest.approx(wanted, abs=1e-5)


@pytest.mark.parametrize(
    ("shares", "past", "more", "wanted"),
    [
        (QUARTERS, (0, 1), {}, QUARTERS),
        (QUARTERS, (0, 1, 2, 0, 1), {}, (0.296923, 0.296923, 0.109232, 0.296923)),
        (FIFTHS, (0, 1, 3, 4, 0, 1), {"dry_breaker_ids": ((3,),)}, FIFTHS),
        (
            FIFTHS,
            (0, 1, 2, 0, 1),
            {"dry_multiplier": 2.0},
            (0.241818, 0.241818, 0.032727, 0.241818, 0.241818),
        ),
        (FIFTHS, (0, 1, 2, 3, 4, 0, 1), {"dry_allowed_length": 4}, FIFTHS),
    ],
)
def test_dry_leaves_the_published_shares(
    shares: Sequence[float], past: Sequence[int], more: dict[str, Any], wanted: Sequence[float]
) -> None:
    given = {"dry_multiplier": 1.0, "dry_base": 1.1, "dry_allowed_length": 2, **more}
    found = run_stage("dry", shares, past, dry_penalty_last_n=len(past), **given)
    assert [found[i] for i in range(len(shares))] == pytest.approx(wanted, abs=1e-5)
