"""Scans against the recurrences of their papers, walked token by token in float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from plait.ops.mamba3 import mamba3_scan
from plait.ops.ssm import mamba1_scan, mamba2_scan
from plait.ops.ssm_exact import mamba2_exact, mamba3_exact

LENGTHS = (150, 70, 9, 1)
STEPS = [(100, 3, 0, 0), (1, 1, 2, 0), (40, 1, 1, 1), (1, 64, 6, 0), (1, 1, 0, 0), (7, 0, 0, 0)]


def mamba2_recurrence(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor) -> Tensor:
    """Dao & Gu 2024, one token at a time, one head at a time."""
    n, heads, dim = x.shape
    ratio, h, y = (
        heads // B.shape[1],
        torch.zeros(heads, dim, B.shape[2]).double(),
        torch.zeros(n, heads, dim),
    )
    for t in range(n):
        for i in range(heads):
            b, c, step = B[t, i // ratio].double(), C[t, i // ratio].double(), dt[t, i].double()
            h[i] = torch.exp(step * A[i]) * h[i] + step * x[t, i].double()[:, None] * b
            y[t, i] = (h[i] @ c + D[i] * x[t, i]).float()
    return y


def mamba1_recurrence(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, limit: float | None = None
) -> Tensor:
    h, y = torch.zeros(A.shape).double(), torch.zeros(x.shape)
    for t in range(len(x)):
        h = torch.exp(dt[t].double()[:, None] * A) * h + (dt[t] * x[t]).double()[:, None] * B[t]
        h = h if limit is None else h.clamp(-limit, limit)
        y[t] = (h @ C[t].double() + D * x[t]).float()
    return y


def mamba3_recurrence(
    x: Tensor, dt: Tensor, blend: Tensor, theta: Tensor | None, A: Tensor, B: Tensor, C: Tensor, D: Tensor
) -> Tensor:
    """S = α S + β x' ⊗ B' + γ x ⊗ B, with pairs of B and C as complex numbers turned by the running angle."""
    x, dt, blend, B, C = (m.double() for m in (x, dt, blend, B, C))
    if theta is not None:
        angle = (theta.double() * dt[..., None]).cumsum(0)
        turn = torch.polar(torch.ones_like(angle), angle)
        B, C = (
            torch.view_as_real(torch.view_as_complex(m.unflatten(-1, (-1, 2))) * turn).flatten(-2)
            for m in (B, C)
        )
    h, y = torch.zeros(*x.shape[1:], B.shape[-1]).double(), torch.zeros(x.shape)
    for t in range(len(x)):
        alpha = torch.exp(dt[t] * A)
        h = alpha[:, None, None] * h + (blend[t] * dt[t])[:, None, None] * x[t, :, :, None] * B[t, :, None]
        if t:
            beta = (1 - blend[t]) * dt[t] * alpha
            h = h + beta[:, None, None] * x[t - 1, :, :, None] * B[t - 1, :, None]
        y[t] = (torch.einsum("hpn,hn->hp", h, C[t]) + D[:, None] * x[t]).float()
    return y


@dataclass
class Ragged:
    """Sequences of LENGTHS that advance by STEPS, decodes first, in slots that hold garbage."""

    slots: Tensor = field(default_factory=lambda: torch.tensor([3, 1, 6, 2]))

    def batches(self) -> Iterator[tuple[list[tuple[int, slice]], tuple[Tensor, Tensor, Tensor, int]]]:
        done = [0] * len(LENGTHS)
        for step in STEPS:
            active = [s for s, n in enumerate(step) if n]
            decodes = [s for s in active if step[s] == 1 and done[s]]
            order = decodes + [s for s in active if s not in decodes]
            starts = torch.tensor([0, *(step[s] for s in order)]).cumsum(0)
            history = torch.tensor([done[s] > 0 for s in order])
            pieces = [(s, slice(done[s], done[s] + step[s])) for s in order]
            yield pieces, (self.slots[order], starts, history, len(decodes))
            done = [d + n for d, n in zip(done, step, strict=True)]
        assert tuple(done) == LENGTHS


def interleaved(inputs: list[list[Tensor]], scan: Callable[..., Tensor]) -> list[Tensor]:
    """scan(tensors of the batch, where) over the ragged steps; inputs: per sequence, the [n, …] arguments."""
    got: list[list[Tensor]] = [[] for _ in LENGTHS]
    for pieces, where in Ragged().batches():
        args = [torch.cat([inputs[s][a][rows] for s, rows in pieces]) for a in range(len(inputs[0]))]
        out = scan(args, where)
        sizes = [rows.stop - rows.start for _, rows in pieces]
        for (s, _), part in zip(pieces, out.split(sizes), strict=True):
            got[s].append(part)
    return [torch.cat(parts) for parts in got]


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("chunk", [1, 16, 256])
def test_mamba2_in_chunks_equals_the_recurrence(groups: int, chunk: int) -> None:
    heads, dim, size = 4, 5, 6
    A, D = -torch.tensor([0.1, 1.0, 4.0, 16.0]), torch.randn(heads)
    state = torch.full((8, heads, dim, size), math.nan)
    inputs = [
        [torch.randn(n, heads, dim), torch.rand(n, heads), *torch.randn(2, n, groups, size).unbind()]
        for n in LENGTHS
    ]
    got = interleaved(
        inputs, lambda a, where: mamba2_scan(a[0], a[1], A, a[2], a[3], D, state, *where, chunk)
    )
    for (x, dt, B, C), y in zip(inputs, got, strict=True):
        want = mamba2_recurrence(x, dt, A, B, C, D)
        torch.testing.assert_close(y, want, rtol=1e-5, atol=5e-5)
    assert state[[0, 4, 5, 7]].isnan().all(), "slots of others are not touched"


def test_mamba2_survives_decays_that_underflow() -> None:
    """exp of a running sum of -200 a token is 0, and the gap of two such sums must not become inf - inf."""
    x, B, C = torch.randn(90, 1, 2), torch.randn(90, 1, 3), torch.randn(90, 1, 3)
    dt, A, D = torch.full((90, 1), 2.0), torch.tensor([-100.0]), torch.zeros(1)
    where = (torch.tensor([0]), torch.tensor([0, 90]), torch.tensor([False]), 0)
    y = mamba2_scan(x, dt, A, B, C, D, torch.zeros(1, 1, 2, 3), *where)
    torch.testing.assert_close(y, mamba2_recurrence(x, dt, A, B, C, D), rtol=1e-5, atol=1e-5)


def test_mamba2_without_d_and_in_bfloat16() -> None:
    x, B, C = torch.randn(20, 2, 4), torch.randn(20, 1, 3), torch.randn(20, 1, 3)
    dt, A = torch.rand(20, 2), torch.tensor([-1.0, -2.0])
    where = (torch.tensor([0]), torch.tensor([0, 20]), torch.tensor([False]), 0)
    half = [m.bfloat16() for m in (x, B, C)]
    got = mamba2_scan(half[0], dt, A, half[1], half[2], None, torch.zeros(1, 2, 4, 3), *where)
    want = mamba2_recurrence(half[0].float(), dt, A, half[1].float(), half[2].float(), torch.zeros(2))
    assert got.dtype is torch.bfloat16
    torch.testing.assert_close(got.float(), want, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("limit", [None, 0.7])
def test_mamba1_in_chunks_equals_the_recurrence(limit: float | None) -> None:
    """With a limit the state would grow (A > 0); the clamp at every step is part of the model."""
    inner, size = 6, 4
    A = torch.rand(inner, size) * (1 if limit else -3)
    D, state = torch.randn(inner), torch.full((8, inner, size), math.nan)
    inputs = [
        [torch.randn(n, inner), torch.rand(n, inner), *torch.randn(2, n, size).unbind()] for n in LENGTHS
    ]
    got = interleaved(
        inputs, lambda a, where: mamba1_scan(a[0], a[1], A, a[2], a[3], D, state, *where, limit)
    )
    for (x, dt, B, C), y in zip(inputs, got, strict=True):
        want = mamba1_recurrence(x, dt, A, B, C, D, limit)
        torch.testing.assert_close(y, want, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("rotated", [True, False])
def test_mamba3_in_chunks_equals_the_recurrence(rotated: bool) -> None:
    heads, dim, size = 3, 4, 6
    A, D = -torch.tensor([0.1, 1.0, 8.0]), torch.randn(heads)
    shapes = [(dim, size), (size // 2,), (size,), (dim,)]
    memory: list[Tensor | None] = [torch.full((8, heads, *shape), math.nan) for shape in shapes]
    inputs = []
    for n in LENGTHS:
        B, C = torch.randn(2, n, heads, size).unbind()
        rates = torch.rand(2, n, heads).unbind()
        inputs.append([torch.randn(n, heads, dim), *rates, 3 * torch.randn(n, heads, size // 2), B, C])
    if not rotated:
        memory[1] = None

    def scan(a: list[Tensor], where: tuple[Tensor, Tensor, Tensor, int]) -> Tensor:
        return mamba3_scan(*a[:3], a[3] if rotated else None, A, a[4], a[5], D, *memory, *where)

    for args, y in zip(inputs, interleaved(inputs, scan), strict=True):
        x, dt, blend, theta, B, C = args
        want = mamba3_recurrence(x, dt, blend, theta if rotated else None, A, B, C, D)
        torch.testing.assert_close(y, want, rtol=1e-5, atol=1e-4)


def trainer_scan(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, size: int) -> Tensor:
    """The trainer's Mamba2 (one group) by its closed formulae, every index written out."""
    n, heads, _ = x.shape
    x, dt, A, B, C, D = (m.double() for m in (x, dt, A, B, C, D))
    chunks = -(-n // size)
    a = torch.zeros(chunks * size, heads).double()
    a[:n] = dt * A
    y = D[:, None] * x
    cum = a.view(chunks, size, heads).cumsum(1)
    for h in range(heads):
        ends = cum[:, -1]
        states = []
        for c in range(chunks):
            own = range(c * size, min(n, (c + 1) * size))
            weigh = [torch.exp(ends[c, h] - cum[c, s - c * size, h]) * dt[s, h] for s in own]
            states.append(sum(w * torch.outer(x[s, h], B[s, 0]) for w, s in zip(weigh, own, strict=True)))
        for t in range(n):
            c, at = divmod(t, size)
            u = sum(
                torch.exp(cum[c, at, h] - cum[c, s - c * size, h]) * dt[s, h] * x[s, h]
                for s in range(c * size, t + 1)
            )
            y[t, h] += C[t, 0].sum() * B[t, 0].sum() * u
            row = h * (chunks + 1) + c
            last, read = divmod(row, heads)
            start = sum(
                torch.exp(sum((ends[m, read] for m in range(j, last)), torch.tensor(0.0))) * states[j - 1]
                for j in range(1, last + 1)
            )
            if last:
                y[t, h] += torch.exp(cum[c, at, h]) * (start @ C[t, 0])
    return y.float()


@pytest.mark.parametrize("lens", [[6], [9, 1, 16]])
def test_exact_mamba2_equals_the_trainers_formulae(lens: list[int]) -> None:
    n = sum(lens)
    x, dt, B, C = torch.randn(n, 4, 3), torch.rand(n, 4), torch.randn(n, 1, 5), torch.randn(n, 1, 5)
    A, D, starts = -torch.rand(4), torch.randn(4), torch.tensor([0, *lens]).cumsum(0)
    got = mamba2_exact(x, dt, A, B, C, D, starts, 4)
    for a, b in pairwise(starts.tolist()):
        part = [m[a:b] for m in (x, dt, B, C)]
        want = trainer_scan(part[0], part[1], A, part[2], part[3], D, 4)
        torch.testing.assert_close(got[a:b], want, rtol=1e-5, atol=1e-5)


def test_exact_sequences_of_a_batch_do_not_touch_each_other() -> None:
    n, starts = 11, torch.tensor([0, 7, 11])
    x, dt, blend = torch.randn(n, 4, 3), torch.rand(n, 4), torch.rand(n, 4)
    B, C, theta = torch.randn(n, 4, 6), torch.randn(n, 4, 6), torch.randn(n, 4, 3)
    A, D = -torch.rand(4), torch.randn(4)
    both = mamba3_exact(x, dt, blend, theta, A, B, C, D, starts, 4)
    for rows in (slice(0, 7), slice(7, 11)):
        alone = torch.tensor([0, rows.stop - rows.start])
        parts = [m[rows] for m in (x, dt, blend, theta)]
        got = mamba3_exact(*parts, A, B[rows], C[rows], D, alone, 4)
        torch.testing.assert_close(got, both[rows])
