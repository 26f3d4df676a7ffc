"""Recurrent state that is kept behind single rows: the bits that a step which ended there would leave."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from plait.kernels.cpu.ssm.conv import _causal_conv
from plait.kernels.cpu.ssm.delta_rule import _gated_delta_scan
from plait.kernels.cpu.ssm.dynamic_conv import _head_conv
from plait.kernels.cpu.ssm.scan import _mamba2_scan
from plait.kernels.load import executor

LENGTHS, OWN, NUM_SLOTS = [1, 13, 5], [7, 2, 5], 10
# Of each token the slot that gets the state behind it: none of a decode, of a draft those before the last.
ROW_SLOTS = [*[0] * 10, 8, 9, 6, 0, 0, 3, 1, 4, 0]


def conv(cpu: Any, rows: slice, state: Tensor, at: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    torch.manual_seed(1)
    x, weight = torch.randn(19, 40), torch.randn(40, 4)
    return _causal_conv(cpu, x[rows], weight, None, state, *at)


def head_conv(cpu: Any, rows: slice, state: Tensor, at: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    torch.manual_seed(1)
    x, taps, fixed = torch.randn(19, 40), torch.randn(19, 2 * 4), torch.randn(4, 40)
    return _head_conv(cpu, x[rows], taps[rows], fixed, state, *at, 0.3)


def mamba2(cpu: Any, rows: slice, state: Tensor, at: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    torch.manual_seed(1)
    x, dt, A = torch.randn(19, 2, 24), torch.rand(19, 2), -torch.rand(2)
    B, C = torch.randn(19, 1, 64), torch.randn(19, 1, 64)
    positions = torch.arange(19)
    return _mamba2_scan(
        cpu, x[rows], dt[rows], A, B[rows], C[rows], None, state, *at, 0, positions=positions[rows]
    )


def delta(cpu: Any, rows: slice, state: Tensor, at: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    torch.manual_seed(1)
    q, k, v = (torch.randn(19, 2, n) for n in (24, 24, 64))
    step, A, beta = torch.rand(19, 2), -torch.rand(2), torch.rand(19, 2)
    positions = torch.arange(19)
    own = (q[rows], k[rows], v[rows], step[rows], A, beta[rows], state, *at, 0)
    return _gated_delta_scan(cpu, *own, positions=positions[rows])


KINDS = {
    "conv": (conv, (3, 40), torch.float32),
    "head-conv": (head_conv, (3, 40), torch.float32),
    "mamba2": (mamba2, (2, 24, 64), torch.float32),
    "mamba2-bf16": (mamba2, (2, 24, 64), torch.bfloat16),
    "delta": (delta, (2, 24, 64), torch.float32),
    "delta-bf16": (delta, (2, 24, 64), torch.bfloat16),
}


@pytest.mark.parametrize(("run", "shape", "dtype"), KINDS.values(), ids=KINDS.keys())
def test_state_behind_a_row_is_that_of_a_step_that_ended_there(
    run: Any, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    cpu = executor(2)
    assert cpu is not None
    before = torch.randn(NUM_SLOTS, *shape).to(dtype)
    state, plain = before.clone(), before.clone()
    starts, history = torch.tensor([0, *LENGTHS]).cumsum(0), torch.ones(3, dtype=torch.bool)
    at = torch.tensor(OWN), starts, history
    want = run(cpu, slice(0, 19), plain, at)
    with cpu.keep_rows(torch.tensor(ROW_SLOTS)) as kept:
        got = run(cpu, slice(0, 19), state, at)
    assert kept == {(state.data_ptr(), state.numel())}
    assert torch.equal(got, want)
    assert torch.equal(state[OWN], plain[OWN])
    for row, slot in enumerate(ROW_SLOTS):
        if not slot:
            continue
        one = int((starts[1:] <= row).sum())
        first, alone = int(starts[one]), before.clone()
        short = torch.tensor([OWN[one]]), torch.tensor([0, row + 1 - first]), history[:1]
        run(cpu, slice(first, row + 1), alone, short)
        assert torch.equal(state[slot], alone[OWN[one]]), (row, slot)
    cpu.close()
