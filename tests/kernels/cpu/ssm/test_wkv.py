"""RWKV-6's decays where they leave almost all of a state, or nothing: in the reference, and natively."""

from __future__ import annotations

import math

import pytest
import torch

from plait.kernels.cpu.runtime.executor import Executor
from plait.ops.registry import OpFacts
from plait.ops.wkv import wkv6_scan
from tests.kernels.wkv6_decays import DIM, HEADS, SLOW, given, largest_error

DECAYS = (SLOW, -30.0, -1.0, -1.1, 1.5, 88.5, math.inf)
CASES = [(decay, has_bonus) for decay in DECAYS for has_bonus in (True, False)]


@pytest.mark.parametrize(("decay", "has_bonus"), [*CASES, (-math.inf, True)])
def test_every_decay_gives_what_double_precision_gives(cpu: Executor, decay: float, has_bonus: bool) -> None:
    sizes = {"heads": HEADS, "dim": DIM, "key_dim": DIM}
    native, row = wkv6_scan.bind(OpFacts("cpu", torch.float32, sizes, cpu))
    assert row.variant == "native"
    x = given(decay, has_bonus=has_bonus)
    for scan in (wkv6_scan.reference, native):
        assert largest_error(scan, x) <= 1e-6


@pytest.mark.parametrize("has_bonus", [True, False])
def test_a_decay_that_is_no_number_gives_none(cpu: Executor, has_bonus: bool) -> None:
    sizes = {"heads": HEADS, "dim": DIM, "key_dim": DIM}
    native, _ = wkv6_scan.bind(OpFacts("cpu", torch.float32, sizes, cpu))
    for scan in (wkv6_scan.reference, native):
        assert math.isnan(largest_error(scan, given(math.nan, has_bonus=has_bonus)))
