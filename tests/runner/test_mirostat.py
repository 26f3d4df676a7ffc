"""Mirostat against llama.cpp's formulas, and its bound from step to step."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from plait.ops.seed import uniform
from plait.request import SamplingParams
from plait.runner.host.chain import Candidates, ChainRow
from plait.runner.host.mirostat import choose_by_surprise, count_by_zipf
from plait.runner.sampling.sampler import Sampler
from plait.schedule.plan import Sampled, SamplingBatch, SamplingRow

VOCAB = 120


def logits_of(seed: int) -> list[float]:
    found: list[float] = np.random.default_rng(seed).normal(size=VOCAB).tolist()
    return [3 * x for x in found]


def drawn(share: list[float], number: float) -> int:
    """A place of shares that need not sum to 1, by inverse transform sampling."""
    total, mass = sum(share), 0.0
    for place, p in enumerate(share):
        mass += p
        if number * total < mass:
            return place
    return len(share) - 1


def plain_mirostat(
    logits: list[float], version: int, mu: float, tau: float, eta: float, number: float
) -> Any:
    """llama.cpp's llama_sampler_mirostat_apply and llama_sampler_mirostat_v2_apply."""
    order = sorted(range(len(logits)), key=lambda i: -logits[i])
    weight = [math.exp(logits[i] - max(logits)) for i in order]
    share = [w / sum(weight) for w in weight]
    if version == 1:
        num = den = 0.0
        for i in range(min(100, len(share)) - 1):
            t = math.log((i + 2) / (i + 1))
            num += t * math.log(share[i] / share[i + 1])
            den += t * t
        s = num / den
        epsilon = s - 1
        k = (epsilon * 2**mu / (1 - len(share) ** -epsilon)) ** (1 / s)
        share = share[: max(int(k), 1)]
    else:
        share = [p for p in share if -math.log2(p) <= mu] or share[:1]
    place = drawn(share, number)
    surprise = -math.log2(share[place] / sum(share))
    return order[place], mu - eta * (surprise - tau)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("seed", range(8))
def test_tokens_and_bounds_are_those_of_the_formula(version: int, seed: int) -> None:
    params = SamplingParams(mirostat=version, mirostat_tau=3.0, mirostat_eta=0.3)
    mu, known = None, 6.0
    for position in range(20):
        logits = logits_of(100 * seed + position)
        row = ChainRow(params, np.array([], np.int64), 0, seed, position)
        left = Candidates(np.arange(VOCAB), np.array(logits))
        wanted = plain_mirostat(logits, version, known, 3.0, 0.3, uniform(seed, position))
        token, mu = choose_by_surprise(left, row, mu)
        assert (token, mu) == (wanted[0], pytest.approx(wanted[1]))
        known = wanted[1]


def test_the_surprise_comes_near_to_its_target() -> None:
    params, mu, total = SamplingParams(mirostat=2, mirostat_tau=2.0, mirostat_eta=0.2), None, 0.0
    logits = np.array(logits_of(3)) / 3
    for position in range(600):
        before = mu
        row = ChainRow(params, np.array([], np.int64), 0, 1, position)
        _, mu = choose_by_surprise(Candidates(np.arange(VOCAB), logits), row, mu)
        total += (4.0 if before is None else before) - mu
    assert total / 600 / 0.2 == pytest.approx(0.0, abs=0.05)  # the mean of surprise - τ


@pytest.mark.parametrize("share", [[1.0], [0.5, 0.5], [0.25] * 4, [1.0, 0.0, 0.0], [0.6, 0.3, 0.1]])
@pytest.mark.parametrize("mu", [-5.0, 0.0, 10.0, 1e9])
def test_a_count_is_in_range_for_any_distribution(share: list[float], mu: float) -> None:
    assert 1 <= count_by_zipf(share, mu) <= len(share)


def sampled(logits: torch.Tensor, row: SamplingRow) -> Sampled:
    (found,) = Sampler(VOCAB, banned=(7,)).sample(logits, SamplingBatch((row,)))
    return found


@pytest.mark.parametrize("version", [1, 2])
def test_samples_behind_a_draft_have_the_bounds_of_single_steps(version: int) -> None:
    params = SamplingParams(temperature=0.8, top_k=2, mirostat=version, samplers=("top_k", "temperature"))
    logits = torch.tensor([logits_of(i) for i in range(4)])
    together = sampled(logits, SamplingRow(params, 4, 4, 9, 5, draft=(1, 2, 3)))
    mu: float | None = None
    for i in range(4):
        one = sampled(logits[i : i + 1], SamplingRow(params, 1, 1, 9 + i, 5, mirostat_mu=mu))
        assert one.token_ids == together.token_ids[i : i + 1]
        assert one.mirostat_mu == together.mirostat_mu[i : i + 1]
        mu = one.mirostat_mu[0]
    assert sampled(logits, SamplingRow(SamplingParams(temperature=1.0), 4, 4, 9, 5)).mirostat_mu == ()
