"""Recipes that compute: what they make of a file's numbers is the same on every processor."""

from __future__ import annotations

import math

import torch

from plait.families.common.recipes import exp_rounded


def test_an_exponential_is_the_float32_that_is_nearest() -> None:
    x = torch.linspace(-20.0, 20.0, 4001)
    nearest = torch.tensor([math.exp(value) for value in x.tolist()], dtype=torch.float64).float()
    assert torch.equal(exp_rounded(x), nearest)
    assert exp_rounded(x.bfloat16()).dtype == torch.float32
