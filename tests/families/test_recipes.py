"""Recipes that compute: what they make of a file's numbers is the same on every processor."""

from __future__ import annotations

import math

import pytest
import torch

from plait.families.common.recipes import exp_rounded, scale_by
from plait.ops.blocks import random_weight
from plait.quant.weight import as_tensor


def test_an_exponential_is_the_float32_that_is_nearest() -> None:
    x = torch.linspace(-20.0, 20.0, 4001)
    nearest = torch.tensor([math.exp(value) for value in x.tolist()], dtype=torch.float64).float()
    assert torch.equal(exp_rounded(x), nearest)
    assert exp_rounded(x.bfloat16()).dtype == torch.float32


@pytest.mark.parametrize("kind", ["fp8_b128", "int4_g128+zeros"])
def test_rows_are_scaled_by_a_vector_of_the_file_in_their_storage(kind: str) -> None:
    weight, numbers = random_weight(kind, 64, 256), torch.randn(64)
    recipe = scale_by("numbers", lambda x: (3 * x).square(), 1 / 3, "x.weight")
    made = recipe.fn(weight, numbers)
    assert type(made) is type(weight)
    wanted = as_tensor(weight) * (3 * numbers).square()[:, None]
    assert torch.allclose(as_tensor(made), wanted, rtol=1e-5)
    assert torch.allclose(recipe.fn(torch.ones(64), numbers), (3 * numbers).square())
    assert recipe.back[1] is not None
    assert recipe.back[1].fn is not None
    assert torch.allclose((3 * recipe.back[1].fn(wanted)).square(), torch.ones(64))
