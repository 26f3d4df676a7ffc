"""The short convolution: prompts cut anywhere, batches, threads, slots of others, recorded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from plait.errors import ShapeMismatch
from plait.kernels.cpu.ssm.conv import _causal_conv
from plait.kernels.load import executor
from plait.ops.conv import causal_conv

SLOTS = 7


def within(x: Tensor) -> Tensor:
    """x, as a view of something wider that is NaN around it."""
    wide = torch.full((x.shape[0], x.shape[1] + 9), torch.nan)
    wide[:, 3:-6] = x
    return wide[:, 3:-6]


def batch(lengths: list[int], slots: list[int], history: list[bool]) -> tuple[Tensor, Tensor, Tensor]:
    starts = torch.tensor([0, *lengths]).cumsum(0)
    return torch.tensor(slots), starts, torch.tensor(history)


def layer(channels: int, kernel: int) -> tuple[Tensor, Tensor]:
    return torch.randn(channels, kernel), torch.randn(channels)


@pytest.mark.parametrize("kernel", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("channels", [1, 15, 16, 40])
@pytest.mark.parametrize("activation", ["silu", None])
def test_conv_of_any_size(cpu: Any, kernel: int, channels: int, activation: str | None) -> None:
    weight, bias = layer(channels, kernel)
    where = batch([1, 2, 9, 1], [3, 1, 6, 2], [True, False, True, False])
    x, tail = torch.randn(13, channels), torch.randn(SLOTS, kernel - 1, channels)
    wanted = tail.clone()
    want = causal_conv(x, weight, bias, wanted, *where, activation)
    got = _causal_conv(cpu, within(x), weight, bias, tail, *where, activation)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert torch.equal(tail, wanted)


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_a_prompt_cut_anywhere_gives_the_same_bits(cpu: Any, size: int) -> None:
    weight, bias = layer(40, 4)
    x, whole, cut = (
        torch.randn(23, 40),
        torch.full((SLOTS, 3, 40), torch.nan),
        torch.full((SLOTS, 3, 40), torch.nan),
    )
    want = _causal_conv(cpu, x, weight, bias, whole, *batch([23], [2], [False]))
    got = [
        _causal_conv(cpu, piece, weight, bias, cut, *batch([len(piece)], [2], [i > 0]))
        for i, piece in enumerate(x.split(size))
    ]
    assert torch.equal(torch.cat(got), want)
    assert torch.equal(cut[2], whole[2])
    assert cut[[0, 1, 3, 4, 5, 6]].isnan().all()


def test_batch_composition_and_threads_change_nothing(cpu: Any) -> None:
    weight, bias = layer(130, 4)
    lengths, slots, history = [1, 1, 5, 17, 2], [5, 1, 3, 2, 6], [True, True, False, True, True]
    x, tail = torch.randn(26, 130), torch.randn(SLOTS, 3, 130)
    together, alone = tail.clone(), tail.clone()
    want = _causal_conv(cpu, x, weight, bias, together, *batch(lengths, slots, history))
    one = executor(1)
    assert one is not None
    for s, piece in enumerate(x.split(lengths)):
        where = batch([lengths[s]], [slots[s]], [history[s]])
        first = sum(lengths[:s])
        got = _causal_conv(one, piece, weight, bias, alone, *where)
        assert torch.equal(got, want[first : first + lengths[s]])
    one.close()
    assert torch.equal(alone, together)


def test_a_recorded_conv_serves_any_batch(cpu: Any) -> None:
    weight, bias = layer(24, 4)
    x, tail = torch.randn(64, 24), torch.randn(SLOTS, 3, 24)
    slots, starts, history = (
        torch.zeros(8, dtype=torch.long),
        torch.zeros(9, dtype=torch.long),
        torch.zeros(8) > 0,
    )
    with cpu.record(tokens=64, logits=65) as program:
        out = _causal_conv(cpu, x, weight, bias, tail, slots, starts, history)
    for lengths in ([5], [1, 1, 9], [1] * 6):
        count, rows = len(lengths), sum(lengths)
        where = batch(lengths, [6, 2, 4, 1, 3, 5][:count], [True, False, True, True, False, True][:count])
        slots[:count], starts[: count + 1], history[:count] = where
        other = tail.clone()
        want = _causal_conv(cpu, x[:rows], weight, bias, other, *where)
        cpu.run(program, tokens=rows, logits=1, seqs=count)
        assert torch.equal(out[:rows], want)
        assert torch.equal(tail, other)


def test_what_a_kernel_cannot_read_is_refused(cpu: Any) -> None:
    weight, bias = layer(8, 4)
    x, tail = torch.randn(3, 8), torch.randn(SLOTS, 3, 8)
    where = batch([3], [1], [False])
    with pytest.raises(ShapeMismatch, match="tail"):
        _causal_conv(cpu, x, weight, bias, tail[:, :2], *where)
    with pytest.raises(ShapeMismatch, match="bfloat16"):
        _causal_conv(cpu, x, weight, bias, tail.bfloat16(), *where)
    with pytest.raises(ShapeMismatch, match="weight"):
        _causal_conv(cpu, x, torch.randn(4, 8).T, bias, tail, *where)
    with pytest.raises(ShapeMismatch, match="query_start"):
        _causal_conv(cpu, x, weight, bias, tail, where[0], where[1].int(), where[2])
    with pytest.raises(ShapeMismatch, match="gelu"):
        _causal_conv(cpu, x, weight, bias, tail, *where, "gelu")
