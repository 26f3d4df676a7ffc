"""Mirostat 1 and 2 (Basu et al. 2021): each token's surprise is held near τ by a bound μ that follows it.

μ is the only state of a sampler. It goes into the sampler with a row and comes out with the answer. It is
kept with the sequence and reported with its events, so a preempted or resumed reply has the same tokens.
"""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np

from plait.ops.seed import uniform
from plait.runner.host.chain import Candidates, ChainRow, draw

MOST_BITS = 1000.0  # of μ in 2^μ: beyond it every token is let through
ESTIMATED_FROM = 100  # the likeliest tokens that version 1 fits Zipf's exponent to


def choose_by_surprise(left: Candidates, row: ChainRow, mu: float | None) -> tuple[int, float]:
    """One of the candidates, and the next μ. mu: after the token before; None: this is the first one."""
    params, left = row.params, left.sort_down()
    bound = 2 * params.mirostat_tau if mu is None else mu
    share = left.probabilities()
    if params.mirostat == 1:
        left = left.first(count_by_zipf(share.tolist(), bound))
    else:
        left = left.first(int(np.count_nonzero(-np.log2(np.maximum(share, 1e-300)) <= bound)))
    token = draw(left, uniform(row.seed, row.position))
    chance = float(left.probabilities()[np.flatnonzero(left.ids == token)[0]])
    surprise = -math.log2(max(chance, 1e-300))
    return token, bound - params.mirostat_eta * (surprise - params.mirostat_tau)


def count_by_zipf(share: list[float], mu: float) -> int:
    """How many of the likeliest tokens have an expected surprise of μ bits, for probabilities that fall by
    Zipf's law. Its exponent s is fitted; ε = s - 1; k = (ε 2^μ / (1 - n^-ε))^(1/s)."""
    size, top = len(share), share[:ESTIMATED_FROM]
    ratios = [math.log((i + 2) / (i + 1)) for i in range(len(top) - 1)]
    falls = [math.log(a / b) if b > 0 else MOST_BITS for a, b in pairwise(top)]
    s = sum(t * b for t, b in zip(ratios, falls, strict=True)) / sum(t * t for t in ratios) if ratios else 0.0
    if s < 1e-9:  # all are alike
        return size
    epsilon = s - 1
    # ε / (1 - n^-ε) is 1 / ln n where ε is 0.
    scale = 1 / math.log(size) if abs(epsilon) < 1e-9 else epsilon / -math.expm1(-epsilon * math.log(size))
    bits = (min(mu, MOST_BITS) * math.log(2) + math.log(scale)) / s
    return size if bits >= math.log(size) else max(int(math.exp(bits)), 1)
