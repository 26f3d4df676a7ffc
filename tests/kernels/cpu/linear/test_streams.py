"""One row reads weights in one stream or several, as its processor likes: the bits are the same."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from plait.kernels.cpu.linear.blocks import pack
from plait.kernels.cpu.linear.blocks_source import RUN, linear_kernel
from plait.kernels.cpu.linear.glu import JOINS
from plait.kernels.cpu.linear.layout import TILE, Layout
from plait.kernels.cpu.linear.packed import PackedWeight, multiply
from plait.kernels.load import load_kernels
from plait.ops.blocks import random_weight

load_kernels()
HALF = TILE * (2 * RUN + 5)  # outputs of gate and of up: on two threads more than a run, on one three of them


def packed_gate_and_up(cpu: Any, kind: str, n_in: int) -> PackedWeight:
    return pack(cpu, random_weight(kind, 2 * HALF, n_in), torch.float32)


def test_long_gate_and_up_have_the_bits_of_each_row_among_many(cpu: Any) -> None:
    """A row alone goes through runs of tiles of the gate, then of up; among others through pairs of them."""
    weight, x = packed_gate_and_up(cpu, "Q8_0", 64), torch.randn(4, 64)
    joined = multiply(cpu, x, weight, None, "int8", join=JOINS["silu"])
    for r in range(4):
        alone = multiply(cpu, x[r : r + 1], weight, None, "int8", join=JOINS["silu"])
        assert torch.equal(alone[0], joined[r])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "Q4_K", "Q6_K"])
def test_number_of_streams_changes_no_bit(cpu: Any, kind: str) -> None:
    weight, x = packed_gate_and_up(cpu, kind, 512), torch.randn(1, 512)
    assert isinstance(weight.layout, Layout)
    bias = torch.randn(2 * HALF)
    plain, joined = [], []
    for streams in (1, 3):
        one = replace(weight, kernel=linear_kernel(weight.layout, "", streams))
        plain.append(multiply(cpu, x, one, bias, "int8"))
        joined.append(multiply(cpu, x, one, bias, "int8", join=JOINS["silu"]))
    assert torch.equal(*plain)
    assert torch.equal(*joined)
