"""Grammar masks over the vocabulary in the sampler, one for each sample."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from plait.errors import EngineError
from plait.request import SamplingParams
from plait.runner.sampling.sampler import Sampler
from plait.schedule.plan import Sampled, SamplingBatch, SamplingRow

VOCAB = 50


def mask(*ids: int) -> bytes:
    words = np.zeros((VOCAB + 31) // 32, "<u4")
    for i in ids:
        words[i // 32] |= np.uint32(1 << (i % 32))
    return words.tobytes()


def sampled(logits: Tensor, row: SamplingRow, banned: tuple[int, ...] = ()) -> Sampled:
    (answer,) = Sampler(VOCAB, banned=banned).sample(logits, SamplingBatch((row,)))
    return answer


def row(*masks: bytes, position: int = 0, num_stopless: int = 0, **params: float) -> SamplingRow:
    settings = SamplingParams(**{"temperature": 0.0, "top_p": 1.0, "top_k": 0, **params})  # type: ignore[arg-type]
    stops = frozenset({7})
    n = len(masks)
    return SamplingRow(
        settings, n, n, position, 3, stop_token_ids=stops, num_stopless=num_stopless, masks=masks
    )


@settings(deadline=None, max_examples=60)
@given(st.lists(st.sets(st.integers(0, VOCAB - 1), min_size=1), min_size=1, max_size=4), st.booleans())
def test_every_sample_is_one_that_its_own_mask_allows(allowed: list[set[int]], greedy: bool) -> None:
    logits = torch.randn(len(allowed), VOCAB, generator=torch.Generator().manual_seed(len(allowed)))
    before = logits.clone()
    found = sampled(logits, row(*(mask(*ids) for ids in allowed), temperature=0.0 if greedy else 1.0))
    assert all(token in ids for token, ids in zip(found.token_ids, allowed, strict=True))
    if greedy:
        best = [max(ids, key=lambda i, at=at: float(logits[at, i])) for at, ids in enumerate(allowed)]  # type: ignore[misc]
        assert list(found.token_ids) == best
    assert torch.equal(logits, before)


def test_neither_a_bias_nor_a_penalty_lifts_a_mask() -> None:
    logits = torch.zeros(1, VOCAB)
    asked = row(mask(4), logit_bias={9: 100.0}, presence_penalty=-2.0)  # type: ignore[arg-type]
    assert sampled(logits, asked).token_ids == (4,)


def test_log_probabilities_stay_those_of_the_model() -> None:
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(1))
    found = sampled(logits, row(mask(4, 5), logprobs=2))
    assert found.logprobs is not None
    assert found.logprobs[0].logprob == pytest.approx(float(logits.log_softmax(-1)[0, found.token_ids[0]]))


def test_a_token_that_stands_for_nothing_is_not_sampled_though_the_mask_has_it() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 5] = 9
    assert sampled(logits, row(mask(5, 6)), banned=(5,)).token_ids == (6,)


def test_what_must_not_stop_yet_goes_on_where_the_mask_lets_it() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 7] = 9
    assert sampled(logits, row(mask(7, 8), num_stopless=1)).token_ids == (8,)


def test_a_mask_of_the_end_alone_counts_more_than_min_tokens() -> None:
    assert sampled(torch.zeros(1, VOCAB), row(mask(7), num_stopless=1)).token_ids == (7,)


def test_a_mask_without_a_token_is_an_error_and_not_a_free_choice() -> None:
    with pytest.raises(EngineError, match="every token is forbidden"):
        sampled(torch.zeros(1, VOCAB), row(mask()))
