"""Scans: prompts cut anywhere, batches, threads, slots of others, strided views, recorded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from plait.errors import ShapeMismatch
from plait.kernels.cpu.ssm.scan import LARGEST, _mamba1_scan, _mamba2_scan
from plait.kernels.load import executor
from plait.ops.registry import OpFacts
from plait.ops.ssm import mamba1_scan, mamba2_scan

SLOTS = 7
LENGTHS, OWN, HISTORY = [1, 1, 1, 40, 3, 17], [5, 1, 3, 2, 6, 4], [True, True, False, True, False, True]


class Layer(NamedTuple):
    """What a layer brings to its scan: tokens (x, dt, B, C), weights (A, D), the state of all slots."""

    x: Tensor
    dt: Tensor
    A: Tensor
    B: Tensor
    C: Tensor
    D: Tensor | None
    state: Tensor
    extra: tuple[Any, ...]  # what comes last

    def rows(self, first: int, last: int) -> Layer:
        x, dt, B, C = (m[first:last] for m in (self.x, self.dt, self.B, self.C))
        return self._replace(x=x, dt=dt, B=B, C=C)

    def kept(self) -> Layer:
        return self._replace(state=self.state.clone())

    def call(self, fn: Callable[..., Tensor], where: tuple[Tensor, ...], decodes: int = 0) -> Tensor:
        return fn(*self[:7], *where, decodes, *self.extra)


def cut(tokens: int, *widths: int) -> list[Tensor]:
    """Neighbours in rows of one buffer, with NaN around them."""
    wide = torch.full((tokens, sum(widths) + 5), torch.nan)
    wide[:, 2:-3] = torch.randn(tokens, sum(widths))
    return list(wide[:, 2:-3].split(widths, -1))


def mamba2(tokens: int, heads: int, dim: int, size: int, groups: int) -> Layer:
    x, B, C = cut(tokens, heads * dim, groups * size, groups * size)
    x, B, C = x.unflatten(-1, (heads, dim)), B.unflatten(-1, (groups, size)), C.unflatten(-1, (groups, size))
    dt, state = cut(tokens, heads, heads)[0].abs(), torch.randn(SLOTS, heads, dim, size)
    B.mul_(size**-0.5), C.mul_(size**-0.5)
    return Layer(x, dt, -4 * torch.rand(heads), B, C, torch.randn(heads), state, ())


def mamba1(tokens: int, inner: int, size: int, limit: float | None = None) -> Layer:
    (x, dt), (B, C) = cut(tokens, inner, inner), cut(tokens, size, size)
    dt.abs_(), B.mul_(size**-0.5), C.mul_(size**-0.5)
    A, state = -4 * torch.rand(inner, size), torch.randn(SLOTS, inner, size)
    return Layer(x, dt, A, B, C, torch.randn(inner), state, (limit,))


def where(lengths: list[int], slots: list[int], history: list[bool]) -> tuple[Tensor, Tensor, Tensor]:
    return torch.tensor(slots), torch.tensor([0, *lengths]).cumsum(0), torch.tensor(history)


def native(cpu: Any, layer: Layer) -> Callable[..., Tensor]:
    scan = _mamba2_scan if layer.x.dim() == 3 else _mamba1_scan
    return lambda *args: scan(cpu, *args)


LAYERS = [
    pytest.param(lambda tokens: mamba2(tokens, 4, 24, 40, 2), id="mamba2-odd"),
    pytest.param(lambda tokens: mamba2(tokens, 2, 70, 128, 1), id="mamba2-128"),
    pytest.param(lambda tokens: mamba2(tokens, 3, 5, 7, 3), id="mamba2-tiny"),
    pytest.param(lambda tokens: mamba1(tokens, 70, 16), id="mamba1"),
    pytest.param(lambda tokens: mamba1(tokens, 33, 21, 0.5), id="mamba1-limit"),
]
slowly = pytest.mark.slow


@pytest.mark.parametrize(
    "size", [7, 16, 64, *(pytest.param(n, marks=slowly) for n in (1, 17, 33, 100, 256, 330))]
)
@pytest.mark.parametrize("skips", [True, False])
def test_mamba2_of_any_state_size(cpu: Any, size: int, skips: bool) -> None:
    layer = mamba2(63, 4, 24, size, 2)
    layer = layer if skips else layer._replace(D=None)
    other, at = layer.kept(), where(LENGTHS, OWN, HISTORY)
    want, got = layer.call(mamba2_scan, at), other.call(native(cpu, other), at)
    torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(other.state, layer.state, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("size", [1, 16, 21])
@pytest.mark.parametrize("limit", [None, 0.25])
def test_mamba1_of_any_state_size(cpu: Any, size: int, limit: float | None) -> None:
    layer = mamba1(63, 70, size, limit)
    other, at = layer.kept(), where(LENGTHS, OWN, HISTORY)
    want, got = layer.call(mamba1_scan, at), other.call(native(cpu, other), at)
    torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(other.state, layer.state, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("make", LAYERS)
@pytest.mark.parametrize("size", [*(pytest.param(n, marks=pytest.mark.slow) for n in (1, 3)), 7, 16, 37])
def test_a_prompt_cut_anywhere_gives_the_same_bits(cpu: Any, make: Callable[[int], Layer], size: int) -> None:
    whole = make(61)
    whole.state.fill_(torch.nan)  # what the slot's last owner left, and other sequences
    pieces = whole.kept()
    want = whole.call(native(cpu, whole), where([61], [2], [False]))
    got = []
    for first in range(0, 61, size):
        piece = pieces.rows(first, min(first + size, 61))
        got.append(piece.call(native(cpu, piece), where([len(piece.x)], [2], [first > 0])))
    assert want.isfinite().all()
    assert torch.equal(torch.cat(got), want)
    assert torch.equal(pieces.state[2], whole.state[2])
    assert pieces.state[[0, 1, 3, 4, 5, 6]].isnan().all()


@pytest.mark.parametrize("make", LAYERS)
def test_batch_composition_and_threads_change_nothing(cpu: Any, make: Callable[[int], Layer]) -> None:
    together = make(63)
    alone, one = together.kept(), executor(1)
    assert one is not None
    want = together.call(native(cpu, together), where(LENGTHS, OWN, HISTORY), 2)
    first = 0
    for length, slot, history in zip(LENGTHS, OWN, HISTORY, strict=True):
        piece = alone.rows(first, first + length)
        got = piece.call(native(one, piece), where([length], [slot], [history]))
        assert torch.equal(got, want[first : first + length])
        first += length
    one.close()
    assert torch.equal(alone.state, together.state)


@pytest.mark.parametrize("make", LAYERS)
def test_a_recorded_scan_serves_any_batch(cpu: Any, make: Callable[[int], Layer]) -> None:
    layer = make(64)
    slots, starts = torch.zeros(8, dtype=torch.long), torch.zeros(9, dtype=torch.long)
    history = torch.zeros(8, dtype=torch.bool)
    with cpu.record(tokens=64, logits=65) as program:
        out = layer.call(native(cpu, layer), (slots, starts, history))
    for lengths in ([5], [1, 1, 9, 30], [1] * 6):
        count, rows = len(lengths), sum(lengths)
        at = where(lengths, OWN[:count], HISTORY[:count])
        slots[:count], starts[: count + 1], history[:count] = at
        other = layer.kept().rows(0, rows)
        want = other.call(native(cpu, other), at, 1)
        cpu.run(program, tokens=rows, logits=1, seqs=count)
        assert torch.equal(out[:rows], want)
        assert torch.equal(layer.state, other.state)


def test_a_number_that_is_none_stays_visible(cpu: Any) -> None:
    for layer in (mamba2(3, 2, 8, 16, 1), mamba1(3, 16, 8, 0.5)):
        layer.x[1].fill_(torch.nan)
        out = layer.call(native(cpu, layer), where([3], [1], [False]))
        assert out[0].isfinite().all()
        assert out[1:].isnan().all()


def test_what_a_kernel_cannot_read_is_refused(cpu: Any) -> None:
    layer, at = mamba2(3, 2, 8, 16, 1), where([3], [1], [False])
    for wrong in (
        layer._replace(dt=layer.dt[:, :1]),
        layer._replace(state=layer.state[:, :1]),
        layer._replace(A=layer.A.double()),
        layer._replace(B=layer.B[:, :, ::2]),
    ):
        with pytest.raises(ShapeMismatch):
            wrong.call(native(cpu, wrong), at)
    small = mamba1(3, 16, 8)
    with pytest.raises(ShapeMismatch, match="dt of that shape"):
        small._replace(dt=small.dt[:, :4]).call(native(cpu, small), at)
    _, row = mamba2_scan.bind(OpFacts("cpu", torch.float32, {"state": LARGEST + 1}, cpu))
    assert row.variant == "reference"
