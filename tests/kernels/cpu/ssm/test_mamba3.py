"""Mamba3's scan: prompts cut anywhere, batches, threads, slots of others, recorded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from plait.errors import CannotRecord, ShapeMismatch
from plait.kernels.cpu.ssm.mamba3 import _mamba3_scan, _map_each_head, _norm_for_heads
from plait.kernels.load import executor
from plait.ops.linear import Linear
from plait.ops.mamba3 import mamba3_scan, norm_for_heads
from plait.ops.registry import OpFacts
from plait.quant.weight import Dense
from plait.runner.program import ViewsOnly

SLOTS = 5
SIZES = [(2, 5, 6), (3, 24, 40), (2, 16, 16)]  # heads, rows of one, columns
LENGTHS, OWN, HISTORY = [1, 1, 20, 4], [3, 1, 4, 2], [True, False, True, False]


class Layer:
    """Tokens, weights and all slots of one layer."""

    def __init__(self, tokens: int, heads: int, dim: int, size: int, turns: bool = True) -> None:
        wide = torch.randn(tokens, heads, dim + 2 * size + 3)
        x, b, c, _ = wide.split([dim, size, size, 3], -1)
        dt, blend = torch.rand(tokens, heads + 2)[:, 1:-1], torch.rand(tokens, heads)
        theta = torch.randn(tokens, heads, size // 2) if turns else None
        self.tokens = (x, dt, blend, theta, b.mul_(size**-0.5), c.mul_(size**-0.5))
        self.weights = -4 * torch.rand(heads), torch.randn(heads)
        shapes = ((heads, dim, size), (heads, size // 2), (heads, size), (heads, dim))
        self.slots: list[Tensor | None] = [torch.randn(SLOTS, *shape) for shape in shapes]
        if not turns:
            self.slots[1] = None

    def copied(self) -> list[Tensor | None]:
        return [None if m is None else m.clone() for m in self.slots]

    def args(self, slots: list[Tensor | None], first: int, last: int) -> list[Any]:
        x, dt, blend, theta, b, c = (None if m is None else m[first:last] for m in self.tokens)
        return [x, dt, blend, theta, self.weights[0], b, c, self.weights[1], *slots]


def where(lengths: list[int], slots: list[int], history: list[bool]) -> tuple[Any, ...]:
    return torch.tensor(slots), torch.tensor([0, *lengths]).cumsum(0), torch.tensor(history), 0


def same(a: list[Tensor | None], b: list[Tensor | None]) -> bool:
    return all(
        x is y or torch.equal(x, y) for x, y in zip(a, b, strict=True) if x is not None and y is not None
    )


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("turns", [True, False])
def test_scan_agrees_with_the_reference(cpu: Any, size: tuple[int, int, int], turns: bool) -> None:
    layer = Layer(26, *size, turns=turns)
    mine, theirs, at = layer.copied(), layer.copied(), where(LENGTHS, OWN, HISTORY)
    want = mamba3_scan(*layer.args(theirs, 0, 26), *at)
    got = _mamba3_scan(cpu, *layer.args(mine, 0, 26), *at)
    torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)
    for i in (0, 2, 3):
        torch.testing.assert_close(mine[i], theirs[i], rtol=2e-5, atol=2e-5)
    if mine[1] is not None and theirs[1] is not None:  # a full turn is none
        torch.testing.assert_close((mine[1] - theirs[1]).cos(), torch.ones_like(mine[1]))


@pytest.mark.parametrize("cut", [1, 3, 7])
def test_a_prompt_cut_anywhere_gives_the_same_bits(cpu: Any, cut: int) -> None:
    layer = Layer(23, 3, 24, 40)
    for m in layer.slots:
        assert m is not None
        m.fill_(torch.nan)
    whole, pieces = layer.copied(), layer.copied()
    want = _mamba3_scan(cpu, *layer.args(whole, 0, 23), *where([23], [2], [False]))
    got = []
    for first in range(0, 23, cut):
        last = min(first + cut, 23)
        at = where([last - first], [2], [first > 0])
        got.append(_mamba3_scan(cpu, *layer.args(pieces, first, last), *at))
    assert torch.equal(torch.cat(got), want)
    for a, b in zip(whole, pieces, strict=True):
        assert a is not None
        assert b is not None
        assert torch.equal(a[2], b[2])
        assert b[[0, 1, 3, 4]].isnan().all()


def test_batch_composition_and_threads_change_nothing(cpu: Any) -> None:
    layer, one, first = Layer(26, 3, 24, 40), executor(1), 0
    together, alone = layer.copied(), layer.copied()
    want = _mamba3_scan(cpu, *layer.args(together, 0, 26), *where(LENGTHS, OWN, HISTORY))
    assert one is not None
    for length, slot, history in zip(LENGTHS, OWN, HISTORY, strict=True):
        last = first + length
        got = _mamba3_scan(one, *layer.args(alone, first, last), *where([length], [slot], [history]))
        assert torch.equal(got, want[first:last])
        first = last
    one.close()
    assert same(together, alone)


def test_a_recorded_scan_serves_any_batch(cpu: Any) -> None:
    layer = Layer(64, 2, 16, 16)
    recorded = layer.copied()
    slots, starts = torch.zeros(8, dtype=torch.long), torch.zeros(9, dtype=torch.long)
    history = torch.zeros(8, dtype=torch.bool)
    with cpu.record(tokens=64, logits=65) as program:
        out = _mamba3_scan(cpu, *layer.args(recorded, 0, 64), slots, starts, history, 0)
    eager = layer.copied()
    for count in (1, 3, 4):
        rows, at = sum(LENGTHS[:count]), where(LENGTHS[:count], OWN[:count], HISTORY[:count])
        slots[:count], starts[: count + 1], history[:count] = at[:3]
        want = _mamba3_scan(cpu, *layer.args(eager, 0, rows), *at)
        cpu.run(program, tokens=rows, logits=1, seqs=count)
        assert torch.equal(out[:rows], want)
        assert same(recorded, eager)


def test_what_a_kernel_cannot_read_is_refused(cpu: Any) -> None:
    layer = Layer(3, 2, 8, 16)
    args, at = layer.args(layer.copied(), 0, 3), where([3], [1], [False])
    for i in (1, 3, 9):
        wrong = [*args[:i], args[i][..., :1], *args[i + 1 :]]
        with pytest.raises(ShapeMismatch):
            _mamba3_scan(cpu, *wrong, *at)


# ---- what is around the scan


@pytest.mark.parametrize(("groups", "heads", "n"), [(2, 2, 16), (1, 6, 100), (4, 8, 7), (2, 8, 128)])
def test_groups_are_normed_for_their_heads(cpu: Any, groups: int, heads: int, n: int) -> None:
    x = torch.randn(9, groups * n + 5)[:, 2:-3].unflatten(-1, (groups, n))
    weight, bias = torch.randn(n), torch.randn(heads, n)
    got = _norm_for_heads(cpu, x, weight, bias, 1e-5)
    want = norm_for_heads(x.double(), weight.double(), bias.double(), 1e-5).float()
    torch.testing.assert_close(got, want, rtol=2e-6, atol=2e-6)
    one = executor(1)
    assert one is not None
    alone = torch.cat([_norm_for_heads(one, row, weight, bias, 1e-5) for row in x.split(1)])
    one.close()
    assert torch.equal(got, alone)
    with cpu.record(tokens=9, logits=3) as program:
        later = _norm_for_heads(cpu, x, weight, bias, 1e-5)
    cpu.run(program, tokens=4, logits=1, seqs=1)
    assert torch.equal(later[:4], got[:4])


def test_groups_that_heads_cannot_share_are_refused(cpu: Any) -> None:
    x, weight = torch.randn(3, 2, 8), torch.ones(8)
    for wrong in (torch.ones(3, 8), torch.ones(4, 7), torch.ones(4, 16)[:, ::2]):
        with pytest.raises(ShapeMismatch):
            _norm_for_heads(cpu, x, weight, wrong, 1e-5)
    with pytest.raises(ShapeMismatch):
        _norm_for_heads(cpu, x[:, 0], weight, torch.ones(4, 8), 1e-5)


def shared_map(cpu: Any, n: int, m: int, bias: bool) -> Linear:
    def bind(op: Any, **sizes: Any) -> Any:
        return op.bind(OpFacts("cpu", torch.float32, sizes, cpu))[0]

    weight = Dense(torch.randn(m, n) / n**0.5)
    return Linear([weight], [torch.randn(m) if bias else None], bind, torch.float32)


@pytest.mark.parametrize(("n", "m"), [(64, 256), (4, 8), (17, 33)])
@pytest.mark.parametrize("bias", [True, False])
def test_heads_that_share_a_linear_layer_are_rows_of_it(cpu: Any, n: int, m: int, bias: bool) -> None:
    linear, apart = shared_map(cpu, n, m, bias), torch.randn(19, 3, n + 5)[..., 2:-3]
    dense = apart.contiguous()
    want = linear(dense)
    for x in (apart, dense):
        assert torch.equal(_map_each_head(cpu, x, linear), want)
        with cpu.record(tokens=19, logits=57) as program, ViewsOnly():
            later = _map_each_head(cpu, x, linear)
        later.fill_(torch.nan)
        cpu.run(program, tokens=4, logits=1, seqs=1)
        assert torch.equal(later[:4], want[:4])
        assert later[4:].isnan().all()


def test_a_weight_that_is_not_packed_cannot_be_recorded(cpu: Any) -> None:
    x, (n, m) = torch.randn(5, 2, 8), (8, 6)
    linear = Linear([Dense(torch.randn(m, n))], [None], lambda op, **_: op.reference, torch.float32)
    assert torch.equal(_map_each_head(cpu, x, linear), linear(x))
    with cpu.record(tokens=5, logits=6), pytest.raises(CannotRecord, match="not one packed weight"):
        _map_each_head(cpu, x, linear)
