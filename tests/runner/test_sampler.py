from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from torch import Tensor

from plait.errors import EngineError
from plait.ops.sample import sample
from plait.ops.seed import choice_seed, uniform
from plait.request import SamplingParams
from plait.runner.host.sampler import FLOOR, best
from plait.runner.sampling.sampler import Sampler
from plait.schedule.plan import Sampled, SamplingBatch, SamplingRow

VOCAB = 50


FIELDS = ("position", "seed", "prompt_targets", "draft", "history", "prompt_len", "stop_token_ids")


def row(*, num_samples: int = 1, num_logits: int = 1, **options: Any) -> SamplingRow:
    """A greedy row; stop ids are forbidden for all of its samples unless `num_stopless` says less."""
    fields = {k: options.pop(k) for k in (*FIELDS, "num_stopless") if k in options}
    settings = dict(temperature=0.0, top_p=1.0, top_k=0) | options
    fields = dict(position=0, seed=0, num_stopless=num_samples) | fields
    return SamplingRow(SamplingParams(**settings), num_logits, num_samples, **fields)


def answer(logits: Tensor, *rows: SamplingRow, sampler: Sampler | None = None) -> list[Sampled]:
    return (sampler or Sampler(logits.shape[1])).sample(logits, SamplingBatch(rows))


def token(logits: Tensor, **options: Any) -> int:
    (sampled,) = answer(logits[None], row(**options))
    (token_id,) = sampled.token_ids
    return token_id


def random_logits(rows: int, seed: int = 0, vocab: int = VOCAB) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def kept(logits: list[float], *, temperature: float, top_k: int, top_p: float, min_p: float) -> list[float]:
    """The distribution a token is drawn from, by the definition, one token at a time."""
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    weight = {i: math.exp((logits[i] - max(logits)) / temperature) for i in order}
    left = order[:top_k] if top_k > 0 else order
    total, mass, nucleus = sum(weight[i] for i in left), 0.0, []
    for i in left:
        if nucleus and mass >= top_p * total and top_p < 1:
            break
        nucleus.append(i)
        mass += weight[i]
    left = [i for i in nucleus if weight[i] >= min_p]
    total = sum(weight[i] for i in left)
    return [weight[i] / total if i in left else 0.0 for i in range(len(logits))]


SETTINGS = [
    dict(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0),
    dict(temperature=0.7, top_k=40, top_p=0.9, min_p=0.0),
    dict(temperature=2.0, top_k=3, top_p=1.0, min_p=0.0),
    dict(temperature=1.5, top_k=-1, top_p=0.8, min_p=0.0),
    dict(temperature=1.0, top_k=0, top_p=1.0, min_p=0.1),
    dict(temperature=2.0, top_k=10, top_p=0.95, min_p=0.05),
    dict(temperature=1.0, top_k=0, top_p=0.0, min_p=0.0),
]


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("choice", ["auto", "reference"])
def test_draws_follow_the_distribution(setting: dict[str, Any], choice: str) -> None:
    vocab, draws = 20, 6000
    logits = random_logits(1, vocab=vocab) / 2
    expected = kept(logits[0].tolist(), **setting)
    sampler = Sampler(vocab, ops=choice)
    rows = [row(seed=5, position=i, **setting) for i in range(draws)]
    answers = answer(logits.expand(draws, -1).contiguous(), *rows, sampler=sampler)
    found = Counter(s.token_ids[0] for s in answers)
    for token_id, p in enumerate(expected):
        if p == 0:
            assert found[token_id] == 0
        else:
            assert abs(found[token_id] / draws - p) < 4.5 * math.sqrt(p * (1 - p) / draws) + 1e-9


@given(
    values=st.lists(st.sampled_from([-2.0, -1.0, 0.0, 0.5, 0.5, 3.0, -math.inf]), min_size=2, max_size=12),
    temperature=st.sampled_from([1e-6, 0.3, 1.0, 2.0]),
    top_k=st.integers(-1, 13),
    top_p=st.sampled_from([0.0, 0.3, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.2, 1.0]),
    u=st.floats(0, 1, exclude_max=True),
)
@settings(max_examples=300, deadline=None)
def test_the_fast_draw_is_the_reference(
    values: list[float], temperature: float, top_k: int, top_p: float, min_p: float, u: float
) -> None:
    if max(values) == -math.inf:
        values[0] = 0.0
    arguments = (
        torch.tensor([values]),
        *(torch.tensor([x], dtype=torch.float64) for x in (temperature,)),
        torch.tensor([top_k]),
        *(torch.tensor([x], dtype=torch.float64) for x in (top_p, min_p, u)),
    )
    fast = next(v for v in sample.variants if v.name == "candidates")
    chosen = fast.fn(*arguments).item()
    assert chosen == sample(*arguments).item()
    assert values[chosen] > -math.inf


@pytest.mark.parametrize("k", [1, 2, 5, 40, 62, 63, 1999])
def test_a_limit_takes_the_largest_with_the_lowest_ids_first(k: int) -> None:
    logits = (random_logits(1, seed=k, vocab=2000) * 2).round()[0]
    order = sorted(range(2000), key=lambda i: (-logits[i].item(), i))
    fast = next(v for v in sample.variants if v.name == "candidates")
    settings = torch.tensor([1e9]), torch.tensor([k]), torch.ones(1), torch.zeros(1)
    found = [fast.fn(logits[None], *settings, torch.tensor([(i + 0.5) / k])).item() for i in range(k)]
    assert found == order[:k]


@pytest.mark.parametrize("u", [0.0, 1.0 - 2.0**-53])
@pytest.mark.parametrize("setting", SETTINGS)
def test_the_ends_of_the_random_number_give_possible_tokens(
    cpu: Any, u: float, setting: dict[str, Any]
) -> None:
    logits = random_logits(1)
    logits[0, ::2] = -torch.inf
    columns = [torch.tensor([setting[k]]) for k in ("temperature", "top_k", "top_p", "min_p")]
    columns = [c if c.dtype == torch.int64 else c.double() for c in columns]
    for variant in (sample.reference, *(v.bind(cpu) for v in sample.variants)):
        chosen = variant(logits, *columns, torch.tensor([u], dtype=torch.float64)).item()
        assert kept(logits[0].tolist(), **setting)[chosen] > 0


def test_greedy_takes_the_largest_and_the_lowest_id_among_equals() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0, 1.0], [3.0, 3.0, 3.0, 3.0]])
    assert [s.token_ids[0] for s in answer(logits, row(), row())] == [1, 0]


def random_row(rng: random.Random) -> SamplingRow:
    history = tuple(rng.randrange(VOCAB) for _ in range(rng.randrange(1, 20)))
    num_logits = rng.randrange(1, 6)
    num_samples = rng.randrange(1, num_logits + 1)
    return row(
        temperature=rng.choice([0.0, 0.5, 1.0]),
        top_k=rng.choice([0, 3, 40, 1000]),
        top_p=rng.choice([0.5, 0.9, 1.0]),
        min_p=rng.choice([0.0, 0.05]),
        repetition_penalty=rng.choice([1.0, 1.3]),
        presence_penalty=rng.choice([0.0, 0.5]),
        frequency_penalty=rng.choice([0.0, -0.5]),
        logit_bias=rng.choice([{}, {3: 5.0, 7: -100.0}]),
        logprobs=rng.choice([None, 0, 5]),
        prompt_logprobs=3,
        seed=rng.randrange(1000),
        position=rng.randrange(1000),
        history=rng.choice([(), history]),
        prompt_len=rng.randrange(len(history) + 1),
        stop_token_ids=rng.choice([frozenset(), frozenset({0, 1})]),
        num_stopless=rng.randrange(num_samples + 1),
        num_logits=num_logits,
        num_samples=num_samples,
        draft=tuple(rng.randrange(VOCAB) for _ in range(num_samples - 1)),
        prompt_targets=history[: num_logits - num_samples],
    )


def singly(asked: SamplingRow, i: int) -> SamplingRow:
    """One of a row's samples, requested when the tokens before it are known."""
    return replace(
        asked,
        num_logits=1,
        num_samples=1,
        position=asked.position + i,
        prompt_targets=(),
        draft=(),
        history=(*asked.history, *asked.draft[:i]) if asked.history else (),
        num_stopless=int(i < asked.num_stopless),
    )


@pytest.mark.parametrize("choice", ["auto", "reference"])
@pytest.mark.parametrize("seed", range(30))
def test_samples_behind_a_draft_are_those_of_single_steps(cpu: Any, seed: int, choice: str) -> None:
    rng = random.Random(seed)
    rows = [random_row(rng) for _ in range(rng.randrange(1, 6))]
    logits = random_logits(sum(r.num_logits for r in rows), seed) / 2
    sampler = Sampler(VOCAB, banned=(2, 48, 49), ops=choice, executor=cpu)
    for sampled, asked, part in zip(
        answer(logits, *rows, sampler=sampler), rows, logits.split([r.num_logits for r in rows]), strict=True
    ):
        ids, scores = [], []
        for i in range(asked.num_samples):
            at = asked.num_logits - asked.num_samples + i
            (one,) = answer(part[at : at + 1], singly(asked, i), sampler=sampler)
            ids += one.token_ids
            scores += one.logprobs or ()
        assert sampled.token_ids == tuple(ids)
        assert sampled.logprobs == (tuple(scores) or None)
        assert len(sampled.prompt_logprobs) == len(asked.prompt_targets)


def test_a_draft_counts_for_penalties_only_behind_it() -> None:
    logits = torch.tensor([[0.0, 1.5, 1.0, 0.5]] * 3)
    asked = row(num_logits=3, num_samples=3, draft=(1, 2), history=(0,), prompt_len=1, presence_penalty=2.0)
    assert answer(logits, asked)[0].token_ids == (1, 2, 3)


def test_stop_ids_are_forbidden_for_the_first_samples_only() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0]] * 4)
    asked = row(num_logits=4, num_samples=4, draft=(1, 1, 1), stop_token_ids=frozenset({2}), num_stopless=2)
    assert answer(logits, asked)[0].token_ids == (1, 1, 2, 2)


def test_the_last_rows_are_sampled_and_the_first_are_scored() -> None:
    logits = torch.eye(5)[[4, 3, 2, 1]] * 9
    asked = row(num_logits=4, num_samples=2, draft=(2,), prompt_logprobs=0, prompt_targets=(4, 3), logprobs=0)
    (sampled,) = answer(logits, asked)
    assert sampled.token_ids == (2, 1)
    assert sampled.logprobs is not None
    assert [p.token_id for p in sampled.logprobs] == [2, 1]
    assert [p.token_id for p in sampled.prompt_logprobs] == [4, 3]
    assert min(p.logprob for p in (*sampled.logprobs, *sampled.prompt_logprobs)) > -0.01


@pytest.mark.parametrize("seed", range(20))
def test_a_row_alone_gives_what_it_gives_in_any_batch(seed: int) -> None:
    rng = random.Random(seed)
    rows = [random_row(rng) for _ in range(rng.randrange(2, 9))]
    logits = random_logits(sum(r.num_logits for r in rows), seed)
    sampler = Sampler(VOCAB, banned=(2, 48, 49))
    together = answer(logits, *rows, sampler=sampler)
    parts = logits.split([r.num_logits for r in rows])
    alone = [answer(part, r, sampler=sampler)[0] for part, r in zip(parts, rows, strict=True)]
    assert together == alone  # to the last bit
    assert not {2, 48, 49} & {t for s in together for t in s.token_ids}


@pytest.mark.parametrize("vocab", [1000, 4099])
def test_log_probabilities_have_the_same_bits_in_any_batch(vocab: int) -> None:
    logits = random_logits(70, vocab=vocab)
    targets = tuple(range(70))
    (whole,) = answer(logits, row(num_logits=70, num_samples=0, prompt_logprobs=2, prompt_targets=targets))
    pieces = [
        answer(
            logits[a:b],
            row(num_logits=b - a, num_samples=0, prompt_logprobs=2, prompt_targets=targets[a:b]),
        )[0].prompt_logprobs
        for a, b in ((0, 1), (1, 8), (8, 33), (33, 70))
    ]
    assert whole.token_ids == ()
    assert whole.prompt_logprobs == sum(pieces, ())


def test_logits_are_not_changed() -> None:
    logits = random_logits(1)
    before = logits.clone()
    answer(logits, row(logit_bias={1: 3.0}, history=(1, 2), repetition_penalty=2.0, prompt_len=1))
    assert torch.equal(logits, before)


@pytest.mark.parametrize("penalties", [(1.3, 0.0, 0.0), (1.0, 0.7, 0.0), (1.0, 0.0, 0.4), (0.8, -0.5, 1.1)])
def test_penalties_follow_their_formula(penalties: tuple[float, float, float]) -> None:
    repetition, presence, frequency = penalties
    prompt, output = [1, 2, 2, 3], [3, 3, 4, 49]
    logits = random_logits(1)[0]
    expected = logits.tolist()
    for i in {*prompt, *output}:
        expected[i] = expected[i] / repetition if expected[i] > 0 else expected[i] * repetition
    for i, n in Counter(output).items():
        expected[i] -= frequency * n + presence
    sampler = Sampler(VOCAB)
    options = dict(
        zip(("repetition_penalty", "presence_penalty", "frequency_penalty"), penalties, strict=True)
    )
    asked = row(history=(*prompt, *output), prompt_len=len(prompt), **options)
    edited = torch.from_numpy(sampler.host._edit_rows(logits[None].numpy(), [(asked, 0)]))
    torch.testing.assert_close(edited[0], torch.tensor(expected), rtol=1e-6, atol=1e-6)


def test_a_bias_moves_the_choice_and_not_the_log_probability() -> None:
    logits = random_logits(1)
    raw = logits.log_softmax(-1)[0]
    (sampled,) = answer(logits, row(logit_bias={7: 100.0}, logprobs=2))
    assert sampled.token_ids[0] == 7
    assert sampled.logprobs is not None
    assert sampled.logprobs[0].logprob == raw[7].item()
    assert sampled.logprobs[0].top[:2] == best(raw.numpy(), 2)
    assert sampled.logprobs[0].top[2:] == ((7, raw[7].item()),)


def test_minus_100_and_min_tokens_forbid() -> None:
    logits = torch.tensor([1.0, 2.0, 3.0, 0.0])
    assert token(logits, logit_bias={2: -100.0}) == 1
    assert token(logits, stop_token_ids=frozenset({2, 1, 99})) == 0


def test_a_greedy_choice_is_the_best_alternative_to_the_bit() -> None:
    logits = random_logits(8)
    for sampled in answer(logits, *[row(logprobs=3)] * 8):
        assert sampled.logprobs is not None
        assert sampled.logprobs[0].top[0] == (sampled.token_ids[0], sampled.logprobs[0].logprob)
        values = [p for _, p in sampled.logprobs[0].top]
        assert values == sorted(values, reverse=True)
        assert len(values) == 3


def test_without_alternatives_only_the_chosen_token_is_reported() -> None:
    (sampled,) = answer(random_logits(1), row(logprobs=0))
    assert sampled.logprobs is not None
    assert sampled.logprobs[0].top == ()
    (sampled,) = answer(random_logits(1), row())
    assert sampled.logprobs is None


def test_log_probabilities_stay_finite() -> None:
    logits = torch.tensor([[0.0, -torch.inf, -torch.inf]])
    (sampled,) = answer(
        logits.repeat(2, 1), row(num_logits=2, logprobs=3, prompt_logprobs=0, prompt_targets=(2,))
    )
    assert sampled.prompt_logprobs[0].logprob == FLOOR
    assert sampled.logprobs is not None
    assert sampled.logprobs[0].top == ((0, 0.0), (1, FLOOR), (2, FLOOR))


def test_equal_alternatives_are_ordered_by_id() -> None:
    values = torch.tensor([[1.0, 3.0, 2.0, 3.0, 2.0, 2.0], [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]])
    assert [best(row, 3) for row in values.numpy()] == [
        ((1, 3.0), (3, 3.0), (2, 2.0)),
        ((5, 5.0), (4, 4.0), (3, 3.0)),
    ]
    assert [i for i, _ in best(values[0].numpy(), 6)] == [1, 3, 2, 4, 5, 0]


@pytest.mark.parametrize("temperature", [0.0, 2.0])
@pytest.mark.parametrize("banned", [(0,), (49,), (0, 20, 47, 48, 49, 60, -1), range(1, 50)])
def test_a_banned_token_is_never_chosen_nor_an_alternative(temperature: float, banned: Any) -> None:
    logits = torch.zeros(64, VOCAB)
    logits[:, list({i for i in banned if 0 <= i < VOCAB})] = 5.0
    rows = [row(temperature=temperature, logprobs=20, position=i) for i in range(64)]
    for sampled in answer(logits, *rows, sampler=Sampler(VOCAB, banned=banned)):
        assert sampled.token_ids[0] not in set(banned)
        assert sampled.logprobs is not None
        assert not {i for i, _ in sampled.logprobs[0].top} & set(banned)
        assert sampled.logprobs[0].logprob == logits[0].log_softmax(-1)[sampled.token_ids[0]].item()


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_broken_logits_are_an_error_and_not_a_token(value: float, temperature: float) -> None:
    logits = random_logits(2)
    logits[1, 3] = value
    with pytest.raises(EngineError, match=r"largest logit of 1 of 2 tokens"):
        answer(logits, row(temperature=temperature), row(temperature=temperature))


def test_too_few_rows_of_logits_are_an_error() -> None:
    with pytest.raises(EngineError, match=r"1 rows of logits, and 2 are requested"):
        answer(random_logits(1), row(num_logits=2))


def test_no_rows_give_no_answers() -> None:
    assert answer(torch.empty(0, VOCAB)) == []


def test_a_vocabulary_without_tokens_is_refused() -> None:
    with pytest.raises(EngineError, match=r"all 3 tokens"):
        Sampler(3, banned=range(3))


def test_random_numbers_are_even_and_differ_by_seed_and_position() -> None:
    numbers = [uniform(seed, position) for seed in range(-50, 50) for position in range(100)]
    assert len(set(numbers)) == len(numbers)
    assert all(0 <= x < 1 for x in numbers)
    counts = Counter(int(x * 20) for x in numbers)
    assert sum((n - 500) ** 2 / 500 for n in counts.values()) < 43.8  # chi squared, 19 degrees, p = 0.001
    pairs = list(itertools.pairwise(numbers))
    assert abs(sum((a - 0.5) * (b - 0.5) for a, b in pairs) / len(pairs)) < 0.004  # neighbours: 4.8 sigma


@pytest.mark.parametrize("seed", [0, -1, 2**63 - 1, -(2**63)])
def test_every_choice_has_a_seed_of_its_own(seed: int) -> None:
    seeds = [choice_seed(seed, i) for i in range(128)]
    assert seeds[0] == seed
    assert len({uniform(s, 0) for s in seeds}) == 128


@pytest.mark.parametrize("seed", range(20))
def test_an_executor_changes_no_answer(cpu: Any, seed: int) -> None:
    rng = random.Random(seed)
    rows = [random_row(rng) for _ in range(rng.randrange(1, 9))]
    logits = random_logits(sum(r.num_logits for r in rows), seed)
    native, reference = (
        Sampler(VOCAB, banned=(2, 48, 49), ops=choice, executor=cpu) for choice in ("auto", "reference")
    )
    assert [b.variant for b in native.bindings] == ["native"] * 2
    assert answer(logits, *rows, sampler=native) == answer(logits, *rows, sampler=reference)
    parts = zip(logits.split([r.num_logits for r in rows]), rows, strict=True)
    assert answer(logits, *rows, sampler=native) == [answer(x, r, sampler=native)[0] for x, r in parts]


@pytest.mark.parametrize("seed", range(40))
def test_to_know_the_largest_logits_changes_no_answer(seed: int) -> None:
    rng = random.Random(seed)
    plain = [
        row(temperature=t, top_k=k, logprobs=n) for t, k, n in ((0.0, 0, None), (0.9, 5, None), (0.0, 0, 2))
    ]
    rows = [rng.choice(plain) for _ in range(rng.randrange(5))]
    rows += [random_row(rng)] * rng.randrange(2)
    logits = random_logits(sum(r.num_logits for r in rows), seed)
    logits[:, 49] += 9.0  # banned
    sampler = Sampler(VOCAB, banned=(48, 49))
    assert sampler.plain_largest is not None
    # A program has capacity for more rows.
    ids, values = sampler.plain_largest(torch.cat([logits, random_logits(2)]))
    known = sampler.host.sample(logits.numpy(), SamplingBatch(tuple(rows)), (ids.numpy(), values.numpy()))
    assert known == answer(logits, *rows, sampler=sampler)


def test_the_largest_logit_is_no_help_where_every_row_is_edited() -> None:
    assert Sampler(VOCAB, banned=(2,)).plain_largest is None


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_executor_finds_broken_logits(cpu: Any, value: float, temperature: float) -> None:
    logits = random_logits(2)
    logits[1] = value
    with pytest.raises(EngineError, match=rf"computed {value} as the largest logit of 1 of 2 tokens"):
        answer(logits, *[row(temperature=temperature)] * 2, sampler=Sampler(VOCAB, executor=cpu))


def test_a_seed_repeats_and_another_differs() -> None:
    logits = random_logits(1)[0] / 3
    first = [token(logits, temperature=1.0, seed=1, position=i) for i in range(30)]
    assert first == [token(logits, temperature=1.0, seed=1, position=i) for i in range(30)]
    assert first != [token(logits, temperature=1.0, seed=2, position=i) for i in range(30)]
