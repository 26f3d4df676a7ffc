"""The short convolution against torch's conv1d on whole sequences."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from plait.ops.conv import causal_conv
from plait.ops.norm import gated_rms_norm


def whole(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x: [n, C], from zeros."""
    channels, kernel = weight.shape
    out = F.conv1d(x.T[None], weight[:, None], bias, padding=kernel - 1, groups=channels)[0, :, : len(x)].T
    return F.silu(out)


@pytest.mark.parametrize("kernel", [2, 3, 4, 7])
@pytest.mark.parametrize("bias", [True, False])
def test_cut_sequences_of_a_ragged_batch_equal_whole_ones(kernel: int, bias: bool) -> None:
    """Three sequences advance by their own pieces, some shorter than the kernel, in slots full of garbage."""
    channels, lengths = 6, [13, 9, 5]
    weight, b = torch.randn(channels, kernel), torch.randn(channels) if bias else None
    xs = [torch.randn(n, channels) for n in lengths]
    tail = torch.full((7, kernel - 1, channels), math.nan)
    slots = torch.tensor([4, 2, 5])
    steps = [[5, 1, 2], [1, 1, 1], [1, 6, 2], [6, 1, 0]]
    done, got = [0, 0, 0], [[], [], []]
    for step in steps:
        active = [s for s in range(3) if step[s]]
        x = torch.cat([xs[s][done[s] : done[s] + step[s]] for s in active])
        starts = torch.tensor([0, *(step[s] for s in active)]).cumsum(0)
        history = torch.tensor([done[s] > 0 for s in active])
        out = causal_conv(x, weight, b, tail, slots[active], starts, history)
        for s, part in zip(active, out.split([step[s] for s in active]), strict=True):
            got[s].append(part)
            done[s] += step[s]
    assert done == lengths
    for x, parts in zip(xs, got, strict=True):
        torch.testing.assert_close(torch.cat(parts), whole(x, weight, b), rtol=0, atol=1e-5)
    assert tail[[0, 1, 3, 6]].isnan().all(), "slots of others are not touched"


def test_tail_is_the_last_raw_inputs() -> None:
    x, tail = torch.randn(6, 3), torch.full((2, 3, 3), math.nan)
    where = (torch.tensor([1]), torch.tensor([0, 6]), torch.tensor([False]))
    causal_conv(x, torch.randn(3, 4), None, tail, *where)
    assert torch.equal(tail[1], x[-3:])


def test_no_activation_gives_the_plain_sum() -> None:
    x, tail = torch.tensor([[1.0], [10.0]]), torch.zeros(1, 1, 1)
    where = (torch.tensor([0]), torch.tensor([0, 2]), torch.tensor([False]))
    out = causal_conv(x, torch.tensor([[2.0, 3.0]]), torch.tensor([0.5]), tail, *where, None)
    assert out.flatten().tolist() == [3.5, 32.5]


@pytest.mark.parametrize("before", [False, True])
def test_gated_norm_by_groups(before: bool) -> None:
    """Two groups: each half has its own root mean square."""
    x, z, w = torch.randn(5, 8), torch.randn(5, 8), torch.randn(8)
    gate = z / (1 + torch.exp(-z))
    h = x if before else x * gate
    halves = [p / (p.square().mean(-1, keepdim=True) + 1e-3).sqrt() for p in (h[:, :4], h[:, 4:])]
    want = torch.cat(halves, -1) * w * (gate if before else 1)
    torch.testing.assert_close(gated_rms_norm(x, z, w, 1e-3, 2, before), want)
    torch.testing.assert_close(gated_rms_norm(x, z, None), x * gate)
