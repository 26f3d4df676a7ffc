"""Perplexities of models that do not write token by token: of masked places, or none."""

from __future__ import annotations

import math

import pytest
import torch

from plait.convert.compare_quality import compare_logits, mask_places
from plait.spec.canvas import CanvasSpec, NoisyCanvasSpec

IDS = [3, 1, 2, 0, 3]
MASKS, NOISE = CanvasSpec(4, 9), NoisyCanvasSpec(4)


def likely(chosen: list[int], share: float) -> torch.Tensor:
    """Logits, [tokens, 4]: each row has one token with this share of all probability."""
    rows = torch.full((len(chosen), 4), (1 - share) / 3)
    return rows.scatter(1, torch.tensor(chosen).unsqueeze(1), share).log()


def test_every_other_token_is_masked_where_the_model_fills_masks() -> None:
    assert mask_places(IDS, MASKS) == [3, 9, 2, 9, 3]
    assert mask_places(IDS, NOISE) == mask_places(IDS, None) == IDS


def test_masked_places_are_scored_where_they_are() -> None:
    surer, less = likely(IDS, 0.5), likely(IDS, 0.25)
    found = compare_logits(surer, less, IDS, True, MASKS)
    assert found.before == pytest.approx(2)
    assert found.after == pytest.approx(4)
    assert found.kl_mean == pytest.approx(0.5 * math.log(2) + 0.5 * math.log((0.5 / 3) / 0.25))


def test_next_tokens_are_scored_where_the_model_writes_them_in_order() -> None:
    found = compare_logits(likely([*IDS[1:], 0], 0.5), likely([*IDS[1:], 0], 0.8), IDS, True)
    assert found.before == pytest.approx(2)
    assert found.after == pytest.approx(1.25)


def test_noise_and_random_ids_have_no_perplexity() -> None:
    some = likely(IDS, 0.5)
    for found in (compare_logits(some, some, IDS, True, NOISE), compare_logits(some, some, IDS, False)):
        assert (found.before, found.after, found.kl_mean) == (None, None, 0)
