"""Each sampler of the chain against its plain formula, and the chain as a whole through the sampler."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from plait.ops.seed import uniform
from plait.request import SamplingParams
from plait.runner.host.chain import STAGES, XTC_SEED, Candidates, ChainRow, measure_repeats
from plait.runner.sampling.sampler import Sampler
from plait.sampling_fields import SAMPLERS
from plait.schedule.plan import SamplingBatch, SamplingRow

VOCAB = 40
SEEDS = range(8)


def row_of(past: Sequence[int] = (), *, prompt_len: int = 0, position: int = 3, **params: Any) -> ChainRow:
    return ChainRow(SamplingParams(**params), np.array(past, np.int64), prompt_len, 7, position)


def logits_of(seed: int, size: int = VOCAB) -> np.ndarray[Any, np.dtype[np.float64]]:
    return np.random.default_rng(seed).normal(size=size) * 3


def apply(name: str, logits: Any, row: ChainRow) -> dict[int, float]:
    """What a sampler leaves: logits by token."""
    left = STAGES[name](Candidates(np.arange(len(logits)), np.array(logits, np.float64)), row)
    return dict(zip(left.ids.tolist(), left.logits.tolist(), strict=True))


def softmax(logits: Sequence[float]) -> list[float]:
    weight = [math.exp(x - max(logits)) for x in logits]
    return [w / sum(weight) for w in weight]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("mass", [0.1, 0.5, 0.95])
def test_typical_p_keeps_what_is_nearest_to_the_entropy(seed: int, mass: float) -> None:
    logits = logits_of(seed)
    share = softmax(logits.tolist())
    entropy = -sum(p * math.log(p) for p in share)
    wanted, total = set(), 0.0
    for i in sorted(range(VOCAB), key=lambda i: abs(-math.log(share[i]) - entropy)):
        wanted.add(i)
        total += share[i]
        if total > mass:
            break
    assert apply("typ_p", logits, row_of(typical_p=mass)).keys() == wanted


@pytest.mark.parametrize("seed", SEEDS)
def test_top_n_sigma_keeps_logits_within_deviations_of_the_largest(seed: int) -> None:
    logits = logits_of(seed).tolist()
    mean = sum(logits) / VOCAB
    sigma = math.sqrt(sum((x - mean) ** 2 for x in logits) / VOCAB)
    wanted = {i for i, x in enumerate(logits) if x >= max(logits) - 1.5 * sigma}
    assert 0 < len(wanted) < VOCAB
    assert apply("top_n_sigma", logits, row_of(top_n_sigma=1.5)).keys() == wanted
    assert len(apply("top_n_sigma", logits, row_of(top_n_sigma=-1))) == VOCAB


@pytest.mark.parametrize("seed", SEEDS)
def test_dynamic_temperature_follows_the_relative_entropy(seed: int) -> None:
    logits = logits_of(seed).tolist()
    share = softmax(logits)
    relative = -sum(p * math.log(p) for p in share) / math.log(VOCAB)
    heat = 0.3 + (1.7 - 0.3) * relative**1.5
    found = apply("temperature", logits, row_of(temperature=1.0, dynatemp_range=0.7, dynatemp_exponent=1.5))
    assert [found[i] for i in range(VOCAB)] == pytest.approx([(x - max(logits)) / heat for x in logits])


@pytest.mark.parametrize(("factor", "curve"), [(0.3, 1.0), (1.5, 2.0), (0.2, 4.0)])
def test_smoothing_is_a_polynomial_of_the_distance_to_the_largest(factor: float, curve: float) -> None:
    logits = logits_of(1).tolist()
    k, s = (3 - curve) / 2, (curve - 1) / 2
    wanted = [
        max(logits) - k * factor * (x - max(logits)) ** 2 + s * factor * (x - max(logits)) ** 3
        for x in logits
    ]
    found = apply("smoothing", logits, row_of(smoothing_factor=factor, smoothing_curve=curve))
    assert [found[i] for i in range(VOCAB)] == pytest.approx(wanted)


@pytest.mark.parametrize("position", range(12))
def test_xtc_drops_all_likely_tokens_but_the_last_at_its_chance(position: int) -> None:
    logits = [3.0, 0.0, 3.5, 3.2, -1.0]
    share = softmax(logits)
    likely = [i for i in sorted(range(5), key=lambda i: -share[i]) if share[i] >= 0.1]
    assert likely == [2, 3, 0]
    row = row_of(position=position, xtc_probability=0.5, xtc_threshold=0.1)
    happens = uniform(7 ^ XTC_SEED, position) < 0.5
    assert apply("xtc", logits, row).keys() == ({0, 1, 4} if happens else set(range(5)))


@pytest.mark.parametrize("more", [{"xtc_threshold": 0.51}, {"xtc_threshold": 0.45}, {"xtc_probability": 0}])
def test_xtc_drops_nothing_where_fewer_than_two_are_likely(more: dict[str, float]) -> None:
    params = {"xtc_probability": 1.0, "xtc_threshold": 0.1, **more}
    assert len(apply("xtc", [3.0, 3.0, 0.0], row_of(**params))) == (
        2 if more == {"xtc_threshold": 0.45} else 3
    )


def plain_lengths(past: list[int], breakers: list[tuple[int, ...]]) -> dict[int, int]:
    """By definition: for each place, how many tokens before it are those behind the last breaker."""
    found: dict[int, int] = {}
    places = [(i + len(b), b) for b in breakers for i in range(len(past)) if tuple(past[i : i + len(b)]) == b]
    most = len(past) - max([end for end, _ in places], default=0)
    for at in range(1, len(past)):
        length = 0
        while length < min(at, most) and past[at - 1 - length] == past[-1 - length]:
            length += 1
        if length and (past[at],) not in breakers:
            found[past[at]] = max(found.get(past[at], 0), length)
    return found


@pytest.mark.parametrize("seed", range(40))
def test_dry_finds_the_longest_repetition_before_each_token(seed: int) -> None:
    rng = np.random.default_rng(seed)
    past = rng.integers(0, 4, 60)
    breakers: list[list[tuple[int, ...]]] = [[], [(3,)], [(2, 3)], [(0, 1, 1), (3,)]]
    for some in breakers:
        several = [words for words in some if len(words) > 1]
        single = {words[0] for words in some if len(words) == 1}
        assert measure_repeats(past, single, several) == plain_lengths(past.tolist(), some)


def test_dry_subtracts_a_power_of_the_repeated_length() -> None:
    past = [1, 2, 3, 4, 9, 8, 3, 5, 1, 2, 3]  # 4 followed 1 2 3, and 5 followed 3
    params: dict[str, Any] = {"dry_multiplier": 0.8, "dry_base": 1.75}
    found = apply("dry", [0.0] * 10, row_of(past, dry_allowed_length=2, **params))
    assert {i: x for i, x in found.items() if x} == {4: pytest.approx(-0.8 * 1.75)}
    found = apply("dry", [0.0] * 10, row_of(past, dry_allowed_length=1, **params))
    assert found[4] == pytest.approx(-0.8 * 1.75**2)
    assert found[5] == pytest.approx(-0.8)
    assert not any(apply("dry", [0.0] * 10, row_of(past, dry_penalty_last_n=5, **params)).values())
    broken = row_of(past, dry_breaker_ids=((2,),), **params)
    assert not any(apply("dry", [0.0] * 10, broken).values())


def test_dry_counts_a_passage_that_repeats_for_ever_in_bounded_time() -> None:
    found = apply("dry", [0.0, 0.0], row_of([1] * 20_000, dry_multiplier=1.0))
    assert found[0] == 0
    assert math.isfinite(found[1])
    assert found[1] < -1e30


def chosen(
    logits: Any, *, past: Sequence[int] = (), prompt_len: int = 0, position: int = 0, **params: Any
) -> int:
    """One token through the sampler."""
    settings = SamplingParams(**{"temperature": 0.0, "top_p": 1.0, "top_k": 0, **params})
    row = SamplingRow(
        settings,
        1,
        1,
        position,
        5,
        history=tuple(past) if settings.needs_history else (),
        prompt_len=prompt_len,
    )
    table = torch.tensor(np.array(logits, np.float32))[None]
    (answer,) = Sampler(len(logits)).sample(table, SamplingBatch((row,)))
    return answer.token_ids[0]


def test_no_token_is_chosen_but_one_that_is_allowed() -> None:
    logits = logits_of(0)
    for position in range(50):
        found = chosen(logits, position=position, temperature=2.0, allowed_token_ids=(3, 11, VOCAB + 5))
        assert found in (3, 11)
    assert chosen(logits, allowed_token_ids=(3, 11)) == max(3, 11, key=lambda i: logits[i])


def test_a_bad_word_ends_where_its_last_token_would_complete_it() -> None:
    logits = [0.0, 1.0, 2.0, 3.0]
    assert chosen(logits, bad_word_ids=((3,),)) == 2
    words = {"bad_word_ids": ((0, 1, 3), (0, 2, 3))}
    assert chosen(logits, past=(0, 1), **words) == 2
    assert chosen(logits, past=(1, 1), **words) == 3
    assert chosen(logits, past=(0, 1), prompt_len=1, **words) == 3  # of the output alone, as in vLLM
    assert chosen(logits, bad_word_ids=((0,), (1,), (2,), (3,))) == 3  # nothing would be left


@pytest.mark.parametrize("position", range(20))
def test_the_default_order_named_draws_what_an_unnamed_one_draws(position: int) -> None:
    past = (1, 2, 3, 3)
    plain: dict[str, Any] = {"temperature": 0.9, "top_k": 20, "top_p": 0.9, "min_p": 0.02}
    plain |= {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "presence_penalty": 0.2}
    given: dict[str, Any] = {"past": past, "prompt_len": 2, "position": position, **plain}
    assert chosen(logits_of(2), **given, samplers=SAMPLERS) == chosen(logits_of(2), **given)


def test_samplers_run_in_the_order_of_the_list_and_no_others_do() -> None:
    logits = [5.0, 4.9, 1.0, 0.0]
    given: dict[str, Any] = {"temperature": 2.0, "top_p": 0.95}
    hot = {chosen(logits, position=i, samplers=("temperature", "top_p"), **given) for i in range(200)}
    cold = {chosen(logits, position=i, samplers=("top_p", "temperature"), **given) for i in range(200)}
    free = {chosen(logits, position=i, samplers=("temperature",), **given) for i in range(200)}
    # By hand: at temperature 2 the first two have 0.90 of 1, and three 0.96; at 1 the first two have 0.99.
    assert hot == {0, 1, 2}
    assert cold == {0, 1}
    assert free == {0, 1, 2, 3}
    alone = {chosen(logits, position=i, samplers=("top_k",), temperature=0.0, top_k=1) for i in range(9)}
    assert alone == {0}


@pytest.mark.parametrize("name", ["xtc_probability", "typical_p", "dynatemp_range", "smoothing_factor"])
def test_a_row_s_token_is_a_function_of_the_row_alone(name: str) -> None:
    logits = torch.tensor(np.array([logits_of(i) for i in range(6)], np.float32))
    params = SamplingParams(**{"temperature": 1.0, "top_p": 1.0, "top_k": 0, name: 0.5})  # type: ignore[arg-type]
    plain = SamplingParams(temperature=1.0, top_p=1.0, top_k=0)
    rows = [SamplingRow((plain, params)[i % 2], 1, 1, i, 9) for i in range(6)]
    sampler = Sampler(VOCAB, banned=(3, 39))
    together = sampler.sample(logits, SamplingBatch(tuple(rows)))
    for i, one in enumerate(rows):
        assert sampler.sample(logits[i : i + 1], SamplingBatch((one,))) == [together[i]]


def test_samples_behind_a_draft_know_it() -> None:
    params = SamplingParams(temperature=0.0, bad_word_ids=((4, 5),), dry_multiplier=1.0)
    logits = torch.zeros(2, VOCAB)
    logits[:, 5] = 1
    row = SamplingRow(params, 2, 2, 3, 9, draft=(4,), history=(1, 2), prompt_len=1)
    (answer,) = Sampler(VOCAB).sample(logits, SamplingBatch((row,)))
    assert answer.token_ids == (5, 0)
